"""The two sides of every differential test: torch's package, and ours with the same names."""

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]

TORCH = "torch.distributed"
RANKWISE = "rankwise.compat.torch"

SIDES = [
    pytest.param(
        TORCH,
        marks=[
            pytest.mark.torch,
            # It leaves log files open.
            pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ],
        id="torch",
    ),
    pytest.param(RANKWISE, id="rankwise"),
]


def load_from(side: str, module: str) -> ModuleType:
    """Import a module of `elastic` from one side; skip the test if there is no torch."""
    if side == TORCH:
        pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of while it is imported
        return importlib.import_module(f"{side}.elastic.{module}")
