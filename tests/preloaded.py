"""`rankwise` in processes that have imported modules already, such as torch.

Importing takes longer than what many tests look at. One process imports, and forks for each
command. Tests of how a run starts, or of what it imports, take `running.run`.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from running import PATIENCE_S, Finished, Running

from rankwise.cli.start import start

MESSAGE_BYTES_MAX = 1 << 17
TORCH = (
    "torch._dynamo",
    "torch.distributed._symmetric_memory",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
"""What the tests' programs of torch import."""


class Preloaded:
    """A process that has imported some modules, from which commands are forked."""

    def __init__(self, *modules: str) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()  # it ends by that
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()

    def run(
        self,
        *words: str | Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run `rankwise` with these words to its end."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            files = (stdout.fileno(), stderr.fileno())
            pid = self._fork(words, files, environment, cwd)
            try:
                code = int(self._connection.recv(MESSAGE_BYTES_MAX))
            except BaseException:
                os.killpg(pid, 9)
                raise
            told = []
            for stream in (stdout, stderr):
                stream.seek(0)
                told.append(stream.read().decode(errors="replace"))
        return Finished(code, *told)

    def start(self, *words: str | Path) -> Running:
        """Start `rankwise` with these words; nothing else may run until it has ended."""
        with ExitStack() as stack:
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
            streams = [os.fdopen(reading, "rb") for reading, _ in pipes]
            for _, writing in pipes:
                stack.callback(os.close, writing)
            pid = self._fork(words, tuple(writing for _, writing in pipes), None, None)
        return Running(process=_Forked(pid, self._connection, *streams))

    def _fork(
        self,
        words: Sequence[str | Path],
        files: Sequence[int],
        environment: Mapping[str, str] | None,
        cwd: Path | None,
    ) -> int:
        order = {
            "words": [str(word) for word in words],
            "environment": {**os.environ, **(environment or {})},
            "cwd": str(cwd or Path.cwd()),
        }
        socket.send_fds(self._connection, [json.dumps(order).encode()], files)
        return int(self._connection.recv(MESSAGE_BYTES_MAX))


class _Forked:
    """A command of which its parent tells how it has ended."""

    def __init__(
        self, pid: int, parent: socket.socket, stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._parent = parent

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(9)

    def wait(self, timeout: float | None = None) -> int:
        self._parent.settimeout(timeout or PATIENCE_S)
        self.returncode = int(self._parent.recv(MESSAGE_BYTES_MAX))
        return self.returncode


def serve(connection: socket.socket) -> None:
    """Fork for each order, one after the other, until nobody is there to give one."""
    while True:
        message, files, *_ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            become(json.loads(message), files)
        for fd in files:
            os.close(fd)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Be `python -m rankwise`."""
    os.setpgid(0, 0)
    for fd, number in zip(files, (1, 2), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    sys.path[0] = order["cwd"]
    sys.argv = ["rankwise", *order["words"]]
    start()


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
