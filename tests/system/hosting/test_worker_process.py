"""The agent's own hold on processes that somebody else has made."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rankwise.drivers.real.worker_process import Ends, WorkerProcess

pytestmark = pytest.mark.system


class Sleeper:
    """A process that ends when it is told to, and our hold on it."""

    def __init__(self, stack: ExitStack) -> None:
        self._parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.enter_context(self._parent)
        stack.callback(self._parent.kill)
        self.held = WorkerProcess(self._parent.pid)
        stack.callback(self.held.close)

    def end(self) -> None:
        self._parent.send_signal(signal.SIGKILL)
        self._parent.wait()


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    with ExitStack() as stack:
        yield [Sleeper(stack) for _ in range(3)]


@pytest.fixture
def ends(sleepers: list[Sleeper]) -> Iterator[Ends[int]]:
    ends = Ends[int]()
    for number, sleeper in enumerate(sleepers):
        ends.watch(sleeper.held, number)
    yield ends
    ends.close()


def test_each_end_is_told_once(ends: Ends[int], sleepers: list[Sleeper]) -> None:
    assert ends.take() == []

    sleepers[1].end()
    assert ends.take() == [1]
    assert ends.take() == []

    sleepers[0].end()
    sleepers[2].end()
    assert sorted(ends.take()) == [0, 2]
    assert ends.take() == []


def test_who_was_let_go_of_is_not_told_of(ends: Ends[int], sleepers: list[Sleeper]) -> None:
    ends.forget(sleepers[0].held)
    sleepers[1].end()
    assert ends.take() == [1]

    ends.forget(sleepers[1].held)  # twice is once
    sleepers[0].end()
    assert ends.take() == []


def test_the_number_of_a_descriptor_may_be_anothers_next(
    ends: Ends[int], sleepers: list[Sleeper]
) -> None:
    ends.forget(sleepers[0].held)
    sleepers[0].held.close()
    with ExitStack() as stack:
        later = Sleeper(stack)
        ends.watch(later.held, 7)
        sleepers[0].end()
        assert ends.take() == []
        later.end()
        assert ends.take() == [7]


def test_nothing_is_told_after_the_end(ends: Ends[int], sleepers: list[Sleeper]) -> None:
    ends.close()
    sleepers[0].end()

    assert ends.take() == []
