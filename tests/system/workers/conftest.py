"""Trees are forked, and a process with threads is not.

Some tests leave threads behind that never end (torch keeps a timer, for one), so what forks trees
comes before all others, the examples of the documentation included.
"""

import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = Path(__file__).parents[3] / "docs" / "workers.md"
PATIENCE_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=comes_later)  # a sort that leaves all else as it was


def comes_later(item: pytest.Item) -> bool:
    return item.path != EXAMPLES and HERE not in item.path.parents


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests_have_ended() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE_S)
