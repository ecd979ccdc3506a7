"""The loop of a child: take a word, do it, tell it.

The child counts the task words that it has begun and done where the worker process can read it when
the child is dead. Promises of the counts (see `core.tree.machine`):

- a success may be counted and told later, together with others: it is not lost if the child dies;
- a failure and a return are told first and counted then: a reader of the count finds the word.

A child that has lost what it cannot go on without says so with the failure that this has caused,
takes no more words, and comes to its end.

Successes are told late only while more words are known to follow whose callables were quick the
last time. So a quick task's end never waits for a slow one, unless that one surprises us.

A task may fork. The copy ends where the task does: the pipes, the counts and the place in
communicators are the child's, and two that take words from one pipe would ruin the tree.
"""

import os
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from rankwise.drivers.real.tree.arena import FRAME_BYTES, Arena
from rankwise.drivers.real.tree.fork_server import flush_output
from rankwise.drivers.real.tree.pipe_protocol import (
    AHEAD,
    COMMAND,
    COUNTER_SHIFT,
    FAILED,
    FIELD_BITS,
    FIELD_MASK,
    HAS_FRAME,
    LEFT_IN_FILE,
    MORE,
    NO_TASK,
    PROGRAM,
    PROGRAM_ENDED,
    PROGRAM_FAILED,
    READY,
    REFUSED,
    RELEASE,
    RETURNED,
    VALUE_SHIFT,
    WORD_BYTES,
    completion,
    pack_word,
    unpack_word,
)
from rankwise.drivers.real.tree.reports import (
    ANSWER,
    EXIT_REPORT,
    ReportFile,
    report_of,
    report_of_left,
)
from rankwise.drivers.real.tree.requests import RequestServer

QUICK_NS = 20_000
CUT_OFF = 125
"""The exit code of a child whose task has closed its pipes."""
_DEFERRED_MAX = 16


class Role(Protocol):
    """What a child is."""

    def start(self) -> None:
        """Come up; whatever is raised here is why the worker could not be initialised."""
        ...

    def run(self, callable_: int, frame: memoryview | None) -> bytes | None:
        """Do a task; returns what is left in its frame."""
        ...

    def failed(self, error: BaseException) -> None:
        """Note that a task has raised, before the worker process does."""
        ...

    def loss(self) -> str:
        """What it has lost and cannot go on without, in words that follow its name; or nothing."""
        ...

    def command(self, body: bytes) -> bytes:
        """Do what a command wants; returns the answer."""
        ...

    def program(self, number: int) -> None:
        """Run a recorded program."""
        ...

    def finish(self) -> bytes:
        """Close the child; returns the report for the worker process."""
        ...


class ChildEnds:
    """A child's ends of everything that it shares with the worker process."""

    def __init__(
        self, index: int, arena: Arena, task_fd: int, done_fd: int, reports: ReportFile
    ) -> None:
        self.index = index
        self.arena = arena
        self.task_fd = task_fd
        self.done_fd = done_fd
        self.reports = reports


def live(role: Role, ends: ChildEnds) -> int:
    """A child's whole life; returns its exit code."""
    index = ends.index
    try:
        role.start()
    except BaseException as error:  # noqa: BLE001  # told, and then this process ends
        _write_down(ends, index, error)
        os.write(ends.done_fd, completion(REFUSED, index))
        return 1
    try:
        serve(role, ends)
        left = role.finish()
    except _CutOff:
        return CUT_OFF
    except BaseException as error:  # noqa: BLE001  # close() raises it
        _write_down(ends, EXIT_REPORT, error)
        return 1
    if left:
        ends.reports.append(EXIT_REPORT, report_of_left(left))
    return 0


class _CutOff(Exception):  # told by the exit code, as there is no other way left
    """A task has closed the pipes by which this child is told what to do, and tells."""


def serve(role: Role, ends: ChildEnds) -> None:
    """Take words until one says that this is the end, or the role has lost what it needs."""
    try:
        _serve(role, ends)
    except OSError as error:
        # Whatever a task or command raises is told, so this comes from a pipe of ours.
        counters = memoryview(ends.arena.memory)[ends.arena.layout.counter(ends.index) :][:16]
        begun, done = counters.cast("Q")
        if done == begun and begun:
            # Or it would seem to have completed.
            counters.cast("Q")[1] = begun - 1
        raise _CutOff from error


def _serve(role: Role, ends: ChildEnds) -> None:
    # Everything is bound to a name of its own: this loop is what a small task costs.
    read, write, now, run = os.read, os.write, time.monotonic_ns, role.run
    task_fd, done_fd, index = ends.task_fd, ends.done_fd, ends.index
    layout = ends.arena.layout
    memory = memoryview(ends.arena.memory)
    requests = RequestServer(
        index, memory[layout.command(index) :][:FRAME_BYTES], done_fd, ends.reports, role.command
    )
    write(done_fd, completion(READY, index))
    counters = memory[layout.counter(index) : layout.counter(index) + 16].cast("Q")
    frames = layout.frames
    quick: set[int] = set()
    deferred: list[int] = []
    begun = epoch = 0
    copies: list[int] = []
    """The worker that this process is, if it was forked in a task: looking here is cheap."""
    os.register_at_fork(after_in_child=lambda: copies.append(os.getpid()))

    def tell_deferred() -> None:
        if len(deferred) == 1:
            write(done_fd, pack_word(deferred[0]))
        else:
            write(done_fd, b"".join(map(pack_word, deferred)))
        deferred.clear()

    while True:
        taken = read(task_fd, WORD_BYTES)
        if not taken:
            return
        (word,) = unpack_word(taken)
        slot = word & FIELD_MASK
        callable_ = word >> FIELD_BITS & FIELD_MASK
        if word & NO_TASK:
            if deferred:
                tell_deferred()
            if word & RELEASE:
                return
            if word & COMMAND:
                requests.serve(slot)
            elif word & PROGRAM:
                _run_program(role, ends, slot)
            continue
        if word & AHEAD and word >> COUNTER_SHIFT != epoch & 255:
            if deferred:
                tell_deferred()
            write(done_fd, completion(RETURNED, slot))
            epoch += 1
            begun += 1
            counters[0] = begun
            counters[1] = begun
            continue
        if deferred and callable_ not in quick:
            tell_deferred()
        begun += 1
        counters[0] = begun
        began = now() if word & MORE else 0
        try:
            if word & HAS_FRAME:
                place = frames + slot * FRAME_BYTES
                left = run(callable_, memory[place : place + FRAME_BYTES])
                if left is not None:
                    slot |= _leave(ends, slot, left, memory[place : place + FRAME_BYTES])
            else:
                left = run(callable_, None)
        except BaseException as error:  # noqa: BLE001  # the worker process raises it
            if copies:
                _end_copy(error)
            raised_at = now()  # before others can know of it, and raise for it
            if deferred:
                tell_deferred()
            role.failed(error)
            loss = role.loss()
            _write_down(ends, slot, error, loss, raised_at)
            write(done_fd, completion(FAILED, slot))
            epoch += 1
            counters[1] = begun
            if loss:
                return
            continue
        if copies:
            _end_copy(None)
        counters[1] = begun
        deferred.append(slot)
        if word & MORE:
            if now() - began < QUICK_NS:
                quick.add(callable_)
                if len(deferred) < _DEFERRED_MAX:
                    continue
            else:
                quick.discard(callable_)
        tell_deferred()


def _write_down(
    ends: ChildEnds,
    subject: int,
    error: BaseException,
    loss: str = "",
    raised_at: int | None = None,
) -> None:
    """Tell the worker process of an exception, and the user where that is impossible."""
    try:
        ends.reports.append(subject, report_of(error, loss, raised_at))
    except OSError as trouble:
        with suppress(OSError):  # then there is no reader
            sys.stderr.write(f"A report could not be written: {trouble.strerror}. It was:\n")
            traceback.print_exception(error)
            flush_output()


def _end_copy(error: BaseException | None) -> NoReturn:
    """End a process that a task has forked, as Python ends one at the end of its program."""
    code: Any = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        flush_output()
    finally:
        os._exit(code & 255)


def _leave(ends: ChildEnds, slot: int, left: bytes, frame: memoryview) -> int:
    """Put down what a task leaves; the value for its word, in its place."""
    if len(left) > FRAME_BYTES:
        ends.reports.append(slot, report_of_left(left))
        return LEFT_IN_FILE << VALUE_SHIFT
    frame[: len(left)] = left
    return len(left) << VALUE_SHIFT


def _run_program(role: Role, ends: ChildEnds, number: int) -> None:
    kind = PROGRAM_ENDED
    try:
        role.program(number)
    except BaseException as error:  # noqa: BLE001  # the worker process raises it
        _write_down(ends, ANSWER, error)
        kind = PROGRAM_FAILED
    os.write(ends.done_fd, completion(kind, ends.index))
