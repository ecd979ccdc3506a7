"""Signals arrive as bytes and leave no trace."""

import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Self

import pytest
from leftovers import open_files

from rankwise.drivers.real import signals
from rankwise.drivers.real.signals import SignalPipe


@pytest.fixture(autouse=True)
def _handlers_are_as_before() -> Iterator[None]:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in watched]
    yield
    assert [signal.getsignal(signum) for signum in watched] == before


def wait_readable(fd: int) -> None:
    assert select.select([fd], [], [], 60)[0], "no signal arrived"


def test_a_signal_arrives_in_the_pipe_and_does_nothing_else() -> None:
    with SignalPipe([signal.SIGTERM]) as pipe:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_readable(pipe.fileno())

        assert pipe.take() == [signal.SIGTERM]
        assert pipe.take() == []


def test_an_ignored_signal_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe([signal.SIGHUP]) as pipe:
            os.kill(os.getpid(), signal.SIGHUP)

            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert pipe.take() == []
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_somebody_elses_signal_is_passed_on_to_the_previous_owner() -> None:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    previous_fd = signal.set_wakeup_fd(write_fd)
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with SignalPipe([signal.SIGTERM]) as pipe:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_readable(pipe.fileno())

            assert pipe.take() == []
        assert os.read(read_fd, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(write_fd) == write_fd
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.set_wakeup_fd(previous_fd)
        os.close(read_fd)
        os.close(write_fd)


def test_an_interrupt_may_come_at_any_moment_of_coming_and_going() -> None:
    """An interrupt before every line that is run, one after another, until there is none left."""
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in watched]
    files_before = open_files()
    raised = set()
    for line in itertools.count():
        interrupt = InterruptAtLine(line)
        is_raised = False
        try:
            sys.settrace(interrupt)
            with SignalPipe(watched):
                pass
        except KeyboardInterrupt:
            is_raised = True
        finally:
            sys.settrace(None)
        raised.add(is_raised)

        assert [signal.getsignal(signum) for signum in watched] == before, line
        assert signal.set_wakeup_fd(-1) == -1, line
        assert open_files() <= files_before, line
        if interrupt.lines_left >= 0:
            break
    assert raised == {False, True}


class InterruptAtLine:
    """A trace function that interrupts this process before a line of `signals.py` is run."""

    def __init__(self, lines: int) -> None:
        self.lines_left = lines

    def __call__(self, frame: FrameType, event: str, _: object) -> Self | None:
        if frame.f_code.co_filename != signals.__file__:
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == -1:
                signal.raise_signal(signal.SIGINT)
        return self


def test_a_signal_at_any_moment_of_going_is_told_or_handled() -> None:
    heard: list[str] = []
    moments_left = 0
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("by its handler"))

    def raise_at(frame: FrameType, event: str, _: object) -> None:
        nonlocal moments_left
        if frame.f_code.co_filename == signals.__file__ and event in ("call", "c_return"):
            moments_left -= 1
            if moments_left == -1:
                signal.raise_signal(signal.SIGUSR1)

    try:
        for moment in itertools.count():
            moments_left, pipe = moment, SignalPipe([signal.SIGUSR1])
            heard.clear()
            with pipe:
                sys.setprofile(raise_at)
            sys.setprofile(None)
            if moments_left >= 0:
                break
            assert heard or pipe.late == [signal.SIGUSR1], f"at moment {moment}"
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert moment > 5


def test_outside_the_main_thread_nothing_is_touched() -> None:
    active: list[bool] = []

    def look() -> None:
        with SignalPipe([signal.SIGTERM]) as pipe:
            active.append(pipe.is_active)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert active == [False]


def test_where_nobody_reads_the_pipe_a_signal_can_be_answered_all_the_same() -> None:
    answered: list[int] = []
    with SignalPipe([signal.SIGTERM]) as pipe:
        pipe.on_arrival = answered.append
        signal.raise_signal(signal.SIGTERM)

    assert answered == [signal.SIGTERM]
    assert pipe.late == [signal.SIGTERM]
