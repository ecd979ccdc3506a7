"""Runs each differential test on torch's side and on ours."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from elastic_sides import SIDES, TORCH, Load, load_from


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> str:
    """Where the names come from: what a user writes before `.elastic`."""
    name: str = request.param
    return name


@pytest.fixture
def load(side: str) -> Load:
    """Import a module of `elastic` from the side under test."""
    return lambda module: load_from(side, module)


@pytest.fixture(autouse=True)
def _torch_changes_this_process_for_one_test_only() -> Iterator[None]:
    """Put back what torch's launcher leaves changed: variables, handlers, the thread's name."""
    environment = dict(os.environ)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    handlers |= {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGQUIT)}
    name = threading.current_thread().name
    yield
    threading.current_thread().name = name
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def _system_tests_leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    """Hold only our own side to it: torch leaves its helpers running and directories lying."""
    callspec = getattr(request.node, "callspec", None)
    is_torchs = callspec is not None and TORCH in callspec.params.values()
    if request.node.get_closest_marker("system") and not is_torchs:
        request.getfixturevalue("no_leftovers")
