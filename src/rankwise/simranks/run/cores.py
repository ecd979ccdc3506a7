"""Work that is dealt to processes, as many at a time as there are cores.

Each has a pipe to this process, on which items go out and outcomes come back. **A worker dies**
(memory exhausted, a crash): its pipe ends, the item that it had is told as lost, and another one
takes its place. **This process dies**: the kernel kills the workers. **Interrupted**: they are
killed immediately; they themselves never see an interrupt, since they are a process group of their
own. A worker knows nothing of the caller's `__main__`: scripts need no guard, notebooks work.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from multiprocessing.connection import Connection, Pipe, wait
from signal import SIGKILL
from typing import Any, cast

from rankwise.base.failure import ExitStatus
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.hosting.prctl import die_with_parent

_SERVE = (
    "import sys; sys.path[:] = {path!r}; from rankwise.simranks.run.cores import serve; "
    "serve({descriptor}, {parent}, {work!r})"
)
_COMMAND = (
    "import sys, runpy; from rankwise.drivers.real.hosting.prctl import die_with_parent; "
    "die_with_parent({parent}); sys.argv = {words!r}; "
    "runpy.run_module('rankwise', run_name='__main__', alter_sys=True)"
)


def deal(
    work: str,
    items: Mapping[int, Any],
    take: Callable[[int, Any], None],
    lose: Callable[[int, str], None],
) -> None:
    """Have processes do all items.

    Args:
        work: the name of a function, `package.module:function`, of one item.
        items: what can be pickled, by number.
        take: gets the number of an item and its outcome, as soon as it is there.
        lose: gets the number of an item whose process has died, and how.
    """
    waiting = sorted(items, reverse=True)
    busy: dict[Connection, tuple[_CoreWorker, int]] = {}
    with ExitStack() as stack:

        def give(worker: _CoreWorker | None = None) -> None:
            if waiting:
                own = worker or stack.enter_context(_worker(work))
                number = waiting.pop()
                with suppress(OSError):  # it is dead: its pipe will tell
                    own.connection.send(items[number])
                busy[own.connection] = (own, number)

        for _ in range(min(len(items), usable_cpu_count())):
            give()
        while busy:
            for ready in cast("list[Connection]", wait(list(busy))):
                worker, number = busy.pop(ready)
                try:
                    outcome = ready.recv()
                except (EOFError, ConnectionResetError):
                    lose(number, worker.tell_death())
                    give()
                else:
                    # Before it gets another one: what cannot be kept ends the sweep.
                    take(number, outcome)
                    give(worker)


class _CoreWorker:
    """A process, and our end of its pipe."""

    def __init__(self, work: str) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            code = _SERVE.format(
                path=sys.path, descriptor=theirs.fileno(), parent=os.getpid(), work=work
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip

    def tell_death(self) -> str:
        """Say how it came to its end."""
        return _death(self.process.wait())


def _death(code: int) -> str:
    status = ExitStatus(code)
    is_killed = status.signal_number == SIGKILL
    return f"its process {status.in_words}{', perhaps because memory ran out' * is_killed}"


@contextmanager
def _worker(work: str) -> Iterator[_CoreWorker]:
    worker = _CoreWorker(work)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        worker.connection.close()


def serve(descriptor: int, parent: int, work: str) -> None:
    """What runs in a worker."""
    die_with_parent(parent)
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    connection = Connection(descriptor)
    with redirect_stdout(sys.stderr), suppress(EOFError):  # standard output is for the results
        while True:
            connection.send(function(connection.recv()))


def run_commands(
    commands: Mapping[int, Sequence[str]], take: Callable[[int, int, str], None]
) -> None:
    """Run command lines of rankwise, each in a process of its own.

    Args:
        commands: their words behind `rankwise`, by number.
        take: gets the number of a command, its exit code and the end of what it wrote to stderr.
    """
    waiting = sorted(commands, reverse=True)
    busy: dict[int, tuple[_CommandProcess, int]] = {}
    with ExitStack() as stack:

        def start() -> None:
            if waiting:
                number = waiting.pop()
                command = stack.enter_context(_command(commands[number]))
                busy[command.pidfd] = (command, number)

        for _ in range(min(len(commands), usable_cpu_count())):
            start()
        while busy:
            for ready in cast("list[int]", wait(list(busy))):
                command, number = busy.pop(ready)
                take(number, command.process.wait(), command.tail())
                start()


def command_line(words: Sequence[str]) -> list[str]:
    """What starts a command of rankwise in a process that the kernel kills with this one."""
    return [
        sys.executable, "-c", _COMMAND.format(parent=os.getpid(), words=["rankwise", *words])
    ]  # fmt: skip


class _CommandProcess:
    """A process that runs one command line."""

    def __init__(self, words: Sequence[str], stack: ExitStack) -> None:
        self._output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # `stack` closes it
        self.process = subprocess.Popen(
            command_line(words),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._output,
            process_group=0,
        )  # fmt: skip
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.pidfd = os.pidfd_open(self.process.pid)
        stack.callback(os.close, self.pidfd)

    def tail(self) -> str:
        """The end of what it has written to stderr."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 16_384))
        return self._output.read().decode(errors="replace")


@contextmanager
def _command(words: Sequence[str]) -> Iterator[_CommandProcess]:
    with ExitStack() as stack:
        yield _CommandProcess(words, stack)
