"""The fork server of a tree: forked once by a worker process, and the parent of all its children.

It has one thread and the program's memory as it was in `init()`, so children can be forked from it
at any time, successors of dead ones included, with the same closures. It makes and reaps them as
guardian and fork server of a gang do theirs (`hosting.spawn_loop`), is a child subreaper as well,
and kills all its descendants when the worker process ends or closes the orders. If it is stopped,
an order continues it, and so does the end of the worker process.

Only what it has to say goes another way than theirs: into the completion pipe, in order with the
words of its children. `ENDED` has the exit code, minus the signal; `NOT_STARTED` comes when the
reason is in the child's report file. A child cannot be reaped before it is dead, so its own last
words are in the pipe by then.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rankwise.drivers.real.hosting.descendants import kill_descendants
from rankwise.drivers.real.hosting.prctl import adopt_orphans, continue_with_parent_s_end
from rankwise.drivers.real.hosting.spawn_loop import SpawnLoop
from rankwise.drivers.real.interrupts import gate_here
from rankwise.drivers.real.tree.pipe_protocol import ENDED, NOT_STARTED, completion
from rankwise.drivers.real.tree.reports import ReportFile, report_of_refusal

_SWEEP_PATIENCE_NS = 5_000_000_000


class CompletionWriter:
    """Puts what becomes of children into the completion pipe, at once."""

    is_empty = True
    """Whether nothing is left to be written."""

    def __init__(self, done_fd: int, reports: Sequence[ReportFile]) -> None:
        self._done_fd = done_fd
        self._reports = reports

    def add(self, message: tuple[Any, ...]) -> None:
        """Write a word."""
        match message:
            case ("exited", int(child), int(code), _):
                os.write(self._done_fd, completion(ENDED, child, code))
            case ("refused", int(child), str(reason)):
                self._reports[child].append(child, report_of_refusal(reason))
                os.write(self._done_fd, completion(NOT_STARTED, child))
            case _:
                pass  # that it was made: it says itself when it is ready

    def flush(self, control: object) -> None:
        """Do nothing: nothing is kept."""


def serve_tree(
    orders: socket.socket,
    completions: CompletionWriter,
    become_child: Callable[[int], int],
    unneeded_fds: Sequence[int],
) -> NoReturn:
    """Be the fork server until the worker process ends; in each child, be that.

    Args:
        orders: our end of the socket to the worker process.
        completions: for what becomes of children.
        become_child: the whole life of a child, by number; returns its exit code.
        unneeded_fds: the worker process's descriptors that have no use here.
    """
    code = 1
    try:
        _settle_in(unneeded_fds)
        loop = SpawnLoop(orders, become=lambda _: _begin_child(loop), replies=completions)
        order = loop.run()
        if order is not None:
            # Nothing in here may reach the frames below: they belong to the caller of `init()`.
            _live_as_child(become_child, order["child"])
        code = 0
    finally:
        try:
            kill_descendants(_SWEEP_PATIENCE_NS)
        finally:
            os._exit(code)


def _settle_in(unneeded_fds: Sequence[int]) -> None:
    os.setsid()
    adopt_orphans()
    continue_with_parent_s_end()
    _forget_handlers()
    for fd in unneeded_fds:
        os.close(fd)
    # Old objects stay as they are: the collector would write to every page of it.
    gc.freeze()


def _forget_handlers() -> None:
    """Leave the program's signal handlers behind."""
    gate_here().forget()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _begin_child(loop: SpawnLoop) -> None:
    loop.leave()
    # As in an interpreter that has just started; but Ctrl-C is the worker process's.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _live_as_child(become_child: Callable[[int], int], child: int) -> NoReturn:
    code = 1
    try:
        code = become_child(child)
    finally:
        try:
            flush_output()
        finally:
            os._exit(code)


def flush_output() -> None:
    """Write what `print` has kept; `os._exit` would drop it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone
            if stream is not None:
                stream.flush()
