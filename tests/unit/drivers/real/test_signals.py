"""Signals arrive as bytes and leave no trace."""

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from rankwise.drivers.real.signals import SignalPipe, deliver_to_self


@pytest.fixture(autouse=True)
def _handlers_are_as_before() -> Iterator[None]:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in watched]
    yield
    assert [signal.getsignal(signum) for signum in watched] == before


def wait_readable(fd: int) -> None:
    assert select.select([fd], [], [], 10)[0], "no signal arrived"


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


def test_outside_the_main_thread_nothing_is_touched() -> None:
    active: list[bool] = []

    def look() -> None:
        with SignalPipe([signal.SIGTERM]) as pipe:
            active.append(pipe.is_active)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert active == [False]


def test_a_delivered_interrupt_is_a_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        deliver_to_self(signal.SIGINT)
