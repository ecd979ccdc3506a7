"""Work that is dealt to processes, as many at a time as there are cores.

Each has a pipe to this process, on which items go out and outcomes come back. **A worker dies**
(memory exhausted, a crash): its pipe ends, the item that it had is told as lost, and another one
takes its place. **This process dies**: the kernel kills the workers. **Interrupted**: they are
killed immediately; they themselves never see an interrupt, since they are a process group of their
own. A worker knows nothing of the caller's `__main__`: scripts need no guard, notebooks work.
"""

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from multiprocessing.connection import Connection, Pipe, wait
from signal import SIGKILL
from typing import IO, Any, NoReturn, cast

from rankwise.base.failure import ExitStatus
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.hosting.prctl import die_with_parent

_SERVE = (
    "import sys; sys.path[:] = {path!r}; from rankwise.simranks.run.cores import serve; "
    "serve({descriptor}, {parent}, {work!r})"
)
_FORK = (
    "import sys; sys.path[:] = {path!r}; from rankwise.simranks.run.cores import fork_commands; "
    "fork_commands({descriptor}, {parent}, {modules!r})"
)
_ORDER_BYTES, _ANSWER_BYTES = 1 << 17, 64
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
    waiting = sorted(items, reverse=True)  # taken from the end, so the first item comes first
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
    commands: Mapping[int, Sequence[str]],
    take: Callable[[int, int, str], None],
    modules: Sequence[str] = (),
) -> None:
    """Run command lines of rankwise, each in a process of its own.

    Args:
        commands: their words behind `rankwise`, by number.
        take: gets the number of a command, its exit code and the end of what it wrote to stderr.
        modules: what the processes import once, before they are forked for each command.
    """
    waiting = sorted(commands, reverse=True)
    busy: dict[int, tuple[_CommandForker, int]] = {}
    with ExitStack() as stack:

        def give(forker: _CommandForker | None = None) -> None:
            if waiting:
                own = forker or stack.enter_context(_forker(modules))
                number = waiting.pop()
                own.start(commands[number])
                busy[own.descriptor] = (own, number)

        for _ in range(min(len(commands), usable_cpu_count())):
            give()
        while busy:
            for ready in cast("list[int]", wait(list(busy))):
                forker, number = busy.pop(ready)
                code, tail = forker.end()
                take(number, code, tail)
                give(forker if forker.is_alive else None)


def command_line(words: Sequence[str]) -> list[str]:
    """What starts a command of rankwise in a process that the kernel kills with this one."""
    return [
        sys.executable, "-c", _COMMAND.format(parent=os.getpid(), words=["rankwise", *words])
    ]  # fmt: skip


class _CommandForker:
    """A process that imports modules, and forks itself for each command line."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output: IO[bytes] | None = None
        with theirs:
            code = _FORK.format(
                path=sys.path, descriptor=theirs.fileno(), parent=os.getpid(), modules=[*modules]
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        self.descriptor = self._socket.fileno()
        self.is_alive = True

    def start(self, words: Sequence[str]) -> None:
        """Begin a command line; `descriptor` is readable when it has ended."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # `end` and `close` close it
        with suppress(OSError):  # it is dead: `end` tells
            socket.send_fds(self._socket, [json.dumps([*words]).encode()], [self._output.fileno()])

    def end(self) -> tuple[int, str]:
        """The exit code of the command, and the end of what it has written to stderr."""
        assert self._output is not None, "a command was started"
        try:
            answer = self._socket.recv(_ANSWER_BYTES)
        except ConnectionResetError:
            answer = b""
        with self._output as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - 16_384))
            tail = output.read().decode(errors="replace")
        self.is_alive = bool(answer)
        return int(answer or self.process.wait()), tail

    def close(self) -> None:
        """End it; the kernel kills a command that it has under way."""
        self.process.kill()
        self.process.wait()
        self._socket.close()
        if self._output is not None:
            self._output.close()


@contextmanager
def _forker(modules: Sequence[str]) -> Iterator[_CommandForker]:
    forker = _CommandForker(modules)
    try:
        yield forker
    finally:
        forker.close()


def fork_commands(descriptor: int, parent: int, modules: Sequence[str]) -> None:
    """What runs in such a process."""
    die_with_parent(parent)
    for module in modules:
        with suppress(ImportError):  # the command says it better
            importlib.import_module(module)
    with socket.socket(fileno=descriptor) as orders:
        while True:
            message, files, *_ = socket.recv_fds(orders, _ORDER_BYTES, 1)
            if not message:
                return
            own = os.getpid()
            if (pid := os.fork()) == 0:
                orders.close()
                _be_command(json.loads(message), files[0], own)
            os.close(files[0])
            _, status = os.waitpid(pid, 0)
            orders.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be_command(words: list[str], stderr: int, parent: int) -> NoReturn:
    os.setpgid(0, 0)
    die_with_parent(parent)
    os.dup2(stderr, 2)
    os.close(stderr)
    tempfile.tempdir = None
    sys.argv = ["rankwise", *words]
    runpy.run_module("rankwise", run_name="__main__", alter_sys=True)
    sys.exit()
