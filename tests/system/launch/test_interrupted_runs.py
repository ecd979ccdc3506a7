"""A signal handler that raises ends a run wherever it comes, and leaves nothing behind."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from interrupting import DRIVERS, interrupt_often
from leftovers import open_files
from running import WITHIN_S

import rankwise

OURS = str(Path(rankwise.__file__).parent)
MOMENTS = 24


class TimeIsUp(Exception):
    """What a time-out by alarm raises."""


@pytest.fixture(autouse=True)
def _handler_that_raises() -> Iterator[None]:
    def raise_it(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, raise_it)
    yield
    signal.signal(signal.SIGALRM, before)


class AlarmAt:
    """A profile function that sends a signal at the n-th moment at which Python looks for it."""

    def __init__(self, moment: int = sys.maxsize, signum: signal.Signals = signal.SIGALRM) -> None:
        self.moment = moment
        self.signum = signum
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        self.count += 1
        if self.count == self.moment:
            signal.raise_signal(self.signum)


def do(action: Callable[[], object], alarm: AlarmAt) -> None:
    sys.setprofile(alarm)
    try:
        action()
    finally:
        sys.setprofile(None)


def what_is_ours() -> set[object]:
    """The children of this process, and its open descriptors."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {*children, *open_files()}


def start_and_end_a_server() -> None:
    with rankwise.ForkServer():
        pass


def run_two_ranks() -> None:
    assert rankwise.run(rankwise.rank, nprocs=2) == [0, 1]


@pytest.mark.parametrize("action", [run_two_ranks, start_and_end_a_server])
def test_an_alarm_at_any_moment_leaves_neither_process_nor_descriptor(
    action: Callable[[], None],
) -> None:
    action()
    before = what_is_ours()
    whole = AlarmAt()
    do(action, whole)
    raised = 0

    for part in range(MOMENTS):
        try:
            do(action, AlarmAt(1 + whole.count * part // MOMENTS))
        except TimeIsUp:
            raised += 1
        assert what_is_ours() <= before, f"after moment {part} of {MOMENTS}"

    assert raised > MOMENTS // 2
    action()


@pytest.mark.parametrize("signum", [signal.SIGALRM, signal.SIGINT])
def test_an_interrupted_run_on_a_warm_server_leaves_the_next_run_on_it_alone(
    signum: signal.Signals,
) -> None:
    def run() -> None:
        assert rankwise.run(os.getppid, nprocs=2, server=server) == [server_pid] * 2

    with rankwise.ForkServer() as server:
        (server_pid,) = rankwise.run(os.getppid, nprocs=1, server=server)
        whole = AlarmAt()
        do(run, whole)

        for part in range(MOMENTS):
            with suppress(TimeIsUp, KeyboardInterrupt):
                do(run, AlarmAt(1 + whole.count * part // MOMENTS, signum))
            run()


@pytest.mark.parametrize("driver", DRIVERS)
def test_runs_that_are_interrupted_at_random_end_at_once_and_leave_nothing(driver: str) -> None:
    findings = interrupt_often(driver, count=8)

    assert len(findings.waits) == 8
    assert findings.left == []
    assert max(findings.waits) < WITHIN_S
