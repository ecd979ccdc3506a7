"""`rankwise` in processes that have imported torch already, for tests of what programs of torch do.

Importing torch takes longer than what most of these look at. One process imports, and forks for
each command. Tests of how a run starts, or of what it imports, take `running.run`.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from running import PATIENCE_S, Finished

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
        order = {
            "words": [str(word) for word in words],
            "environment": {**os.environ, **(environment or {})},
            "cwd": str(cwd or Path.cwd()),
        }
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            files = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._connection, [json.dumps(order).encode()], files)
            pid = int(self._connection.recv(MESSAGE_BYTES_MAX))
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
