"""Handlers run at once while the gate is open, and wait while it is shut."""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from rankwise.drivers.real.interrupts import (
    HandlerGate,
    came_from_handler,
    gate_here,
    without_handlers,
    write_to_reader,
)

PATIENCE_S = 60


class Asked(Exception):
    """What the handler raises."""


def ask(_signum: int, _frame: FrameType | None) -> None:
    raise Asked


@pytest.fixture
def gate() -> Iterator[HandlerGate]:
    before = signal.signal(signal.SIGUSR1, ask)
    yield gate_here()
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def shut_and_asked(gate: HandlerGate) -> Iterator[None]:
    """A block with the gate shut, at whose end the handler raises."""
    raised = False
    try:
        with gate.used():
            yield
    except Asked:
        raised = True
    assert raised


def raised_in_shut_block(gate: HandlerGate) -> list[str]:
    """What happens around a signal inside of a block: it goes on, and raises at its end."""
    seen: list[str] = []
    with shut_and_asked(gate):
        signal.raise_signal(signal.SIGUSR1)
        seen.append("went on")
    return seen


def test_a_handler_waits_until_the_gate_is_open_again(gate: HandlerGate) -> None:
    assert raised_in_shut_block(gate) == ["went on"]
    assert signal.getsignal(signal.SIGUSR1) is ask


def test_a_handler_runs_at_once_while_the_gate_is_open_for_the_users_code(
    gate: HandlerGate,
) -> None:
    with gate.used():
        gate.is_shut = False
        try:
            with pytest.raises(Asked):
                signal.raise_signal(signal.SIGUSR1)
        finally:
            gate.is_shut = True


def test_a_handler_that_was_installed_meanwhile_waits_at_the_next_shutting(
    gate: HandlerGate,
) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    gate.acquire(gate)
    try:
        signal.signal(signal.SIGUSR1, ask)

        assert raised_in_shut_block(gate) == ["went on"]
    finally:
        gate.release(gate)


def test_a_handler_that_is_due_wakes_the_wait_that_is_going_on(gate: HandlerGate) -> None:
    woken: list[str] = []
    with shut_and_asked(gate):
        gate.waker = lambda: woken.append("woken")
        signal.raise_signal(signal.SIGUSR1)
        gate.waker = None
        assert woken == ["woken"]


def test_where_nobody_can_be_woken_the_handler_runs_at_once(gate: HandlerGate) -> None:
    def cannot() -> None:
        raise OSError

    with gate.used():
        gate.waker = cannot
        with pytest.raises(Asked):
            signal.raise_signal(signal.SIGUSR1)
        gate.waker = None


def test_patient_waits_are_not_woken_and_hear_of_handlers_afterwards(gate: HandlerGate) -> None:
    with shut_and_asked(gate):
        with gate.patience():
            gate.waker = pytest.fail
            signal.raise_signal(signal.SIGUSR1)
            gate.waker = None
            assert not gate.due
        assert list(gate.due) == [signal.SIGUSR1]


def test_several_signals_of_one_kind_are_one(gate: HandlerGate) -> None:
    with shut_and_asked(gate):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert not gate.due


def test_the_programs_handlers_are_back_when_the_last_user_has_gone(gate: HandlerGate) -> None:
    gate.acquire("second")
    with gate.used():
        assert signal.getsignal(signal.SIGUSR1) is not ask
    assert signal.getsignal(signal.SIGUSR1) is not ask
    gate.release("second")
    assert signal.getsignal(signal.SIGUSR1) is ask


def test_what_the_program_installs_meanwhile_stays(gate: HandlerGate) -> None:
    def other(_signum: int, _frame: FrameType | None) -> None:
        """Never called."""

    with gate.used():
        signal.signal(signal.SIGUSR1, other)

    assert signal.getsignal(signal.SIGUSR1) is other


def test_in_other_threads_no_handler_is_touched(gate: HandlerGate) -> None:
    seen: list[object] = []

    def look() -> None:
        with gate_here().used():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(PATIENCE_S)

    assert seen == [ask]
    assert not gate.is_shut


def test_a_fork_of_a_process_at_a_shut_gate_begins_anew(gate: HandlerGate) -> None:
    with gate.used():
        pid = os.fork()
        if pid == 0:
            gate.forget()
            os._exit(signal.getsignal(signal.SIGUSR1) is not ask or gate.is_shut)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_a_handler_raises_is_known_from_what_the_code_raised(gate: HandlerGate) -> None:
    with gate.handlers_replaced(), pytest.raises(Asked) as caught:
        signal.raise_signal(signal.SIGUSR1)

    assert came_from_handler(caught.value)
    assert not came_from_handler(Asked())
    assert signal.getsignal(signal.SIGUSR1) is ask


@pytest.mark.parametrize("moment", ["the beginning", "the middle", "the end"])
def test_a_handler_runs_when_what_nobody_hears_has_returned(moment: str, gate: HandlerGate) -> None:
    ended: list[str] = []

    @without_handlers
    def on_end(_: object) -> None:
        if moment == "the middle":
            signal.raise_signal(signal.SIGUSR1)
        ended.append("whole")

    def raise_signal(frame: FrameType, event: str, _: object) -> None:
        wanted = {"the beginning": "call", "the end": "return"}
        if frame.f_code is on_end.__code__ and event == wanted.get(moment):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    def end_it() -> None:
        sys.setprofile(raise_signal)
        try:
            things.clear()
        finally:
            sys.setprofile(None)
        threading.Event().wait(PATIENCE_S)

    things = [Asked()]
    reference = weakref.ref(things[0], on_end)
    with gate.handlers_replaced(), pytest.raises(Asked):
        end_it()

    assert reference() is None
    assert ended == ["whole"]


def test_words_reach_the_reader_of_a_pipe_that_has_no_other_writer() -> None:
    read, write = os.pipe()
    os.close(write)
    write_to_reader(read, b"word")
    assert os.read(read, 10) == b"word"
    assert os.read(read, 10) == b""
    os.close(read)
