"""Where nodes meet in the cluster's benchmarks: servers in processes of their own, and a meter.

Each is a context manager that yields the port on which it serves, on 127.0.0.1.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from measuring import PROGRAMS, environment, scratch_directory

PATIENCE = 60.0
HOST = "127.0.0.1"
ETCD = shutil.which("etcd") or shutil.which("etcd", path=f"{sys.prefix}/etcd/usr/bin")
"""From PATH or from where tools/setup has unpacked it; None if there is none."""


@contextmanager
def etcd() -> Iterator[int]:
    """One member of etcd, with its data in the directory for temporary files."""
    assert ETCD is not None, "asked of a machine that has etcd"
    with scratch_directory() as directory:
        port, peer_port = free_ports(2)
        url, peer_url = f"http://{HOST}:{port}", f"http://{HOST}:{peer_port}"
        command = [
            *(ETCD, "--data-dir", str(directory / "data"), "--logger", "zap"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"default={peer_url}"),
        ]
        log = directory / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            wait_listening(process, port)
            yield port
        finally:
            process.kill()
            process.wait()


@contextmanager
def server(kind: str) -> Iterator[int]:
    """A server of `programs/serving.py`: `embedded`, or `tcpstore`, torch's."""
    with _program("serving.py", kind) as (port, _):
        yield port


class Meter:
    """Counts the bytes that pass through a proxy, in both directions."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port = port
        self._process = process

    def take(self) -> int:
        """How many bytes have passed since it was asked last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def meter(target_port: int) -> Iterator[Meter]:
    """A proxy in front of a server."""
    with _program("metering.py", str(target_port)) as (port, process):
        yield Meter(port, process)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_listening(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait until a server accepts connections; coarse, since no figure depends on it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"{process.args!r} does not listen on port {port}")


@contextmanager
def _program(name: str, *words: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A program that first prints its port and ends at the end of its input."""
    command: Sequence[str] = [sys.executable, str(PROGRAMS / name), *words]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
        finally:
            process.kill()
