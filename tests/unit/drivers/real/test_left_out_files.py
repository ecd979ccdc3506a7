"""Files that tracebacks of ranks leave out are named by path: each of them must exist."""

from pathlib import Path

import pytest

from rankwise.drivers.real.worker import bootstrap
from rankwise.simranks.world import first_import
from rankwise.simranks.world.collective_groups import CollectiveGroup


@pytest.mark.parametrize("path", [*bootstrap._ENTERING, *bootstrap._CARRYING_OUT])
def test_file_that_tracebacks_leave_out_exists(path: str) -> None:
    assert Path(path).exists()


def test_tracebacks_leave_out_what_stands_for_imports_of_simulated_ranks() -> None:
    assert first_import.__file__ in bootstrap._ENTERING


def test_errors_of_collectives_end_at_the_call_of_simulated_ranks() -> None:
    assert CollectiveGroup.wait.__code__.co_filename.startswith(bootstrap._CARRYING_OUT)
