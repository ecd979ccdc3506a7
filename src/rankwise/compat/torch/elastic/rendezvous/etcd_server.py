"""A lone etcd server for tests and for one machine: started on free ports, gone when stopped.

It is etcd v3 that the backends `etcd` and `etcd-v2` talk to here. The server dies with this
process; `stop` removes its data too.
"""

import atexit
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, TextIO

from rankwise.base.errors import LocalProtocolError
from rankwise.compat.torch.elastic.rendezvous.etcd_client import Client
from rankwise.compat.torch.elastic.utils.api import get_socket_with_port

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
READY = b"serving client traffic"
KEPT_LINES = 20

logger = logging.getLogger(__name__)


class EtcdServerFailed(RuntimeError):
    """The server has ended instead of coming up."""


class EtcdServer:
    """An etcd server of its own.

    Its program is what TORCHELASTIC_ETCD_BINARY_PATH names, `bin/etcd` beside this module, `etcd`
    in PATH, or the one that belongs to this Python's environment.

    Args:
        data_dir: where it keeps its data; by default a directory that `stop` removes.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._host = "localhost"
        self._port = -1
        self._binary = _find_binary()
        self._base_data_dir = data_dir or tempfile.mkdtemp(prefix="torchelastic_etcd_data")
        self._process: subprocess.Popen[bytes] | None = None

    def get_port(self) -> int:
        """Where it listens for clients; -1 before it is started."""
        return self._port

    def get_host(self) -> str:
        """`localhost`."""
        return self._host

    def get_endpoint(self) -> str:
        """`HOST:PORT`, for `rdzv_endpoint`."""
        return f"{self._host}:{self._port}"

    def get_client(self) -> Client:
        """A client of it, for `EtcdRendezvousBackend` and `EtcdStore`; the caller closes it."""
        return Client(self._host, self._port)

    def start(
        self, timeout: float = 60, num_retries: int = 3, stderr: int | TextIO | None = None
    ) -> None:
        """Start it; when this returns it takes requests.

        Args:
            timeout: seconds that an attempt may take.
            num_retries: how many attempts there are, each on other ports.
            stderr: where its log goes, as `subprocess` has it; None shows nothing.

        Raises:
            LocalProtocolError: it has been started already.
            FileNotFoundError: there is no program.
            TimeoutError: it was not ready in time.
            EtcdServerFailed: it has ended; it is a RuntimeError.
        """
        if self._process is not None:
            raise LocalProtocolError("the etcd server runs already", hint="call stop() first")
        for attempt in range(num_retries):
            try:
                self._start(os.path.join(self._base_data_dir, str(attempt)), timeout, stderr)
            except FileNotFoundError:
                raise
            except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
                stop_etcd(self._process)
                self._process = None
                logger.warning("etcd could not be started: %s", error)
                if attempt == num_retries - 1:
                    shutil.rmtree(self._base_data_dir, ignore_errors=True)
                    raise
            else:
                atexit.register(self.stop)
                return

    def stop(self) -> None:
        """End it, and remove its data. Harmless the second time."""
        process, self._process = self._process, None
        stop_etcd(process, self._base_data_dir)
        atexit.unregister(self.stop)

    def _start(self, data_dir: str, timeout: float, stderr: int | TextIO | None) -> None:
        os.makedirs(data_dir, exist_ok=True)
        with find_free_port() as clients, find_free_port() as peers:
            self._port, peer_port = clients.getsockname()[1], peers.getsockname()[1]
        client_url, peer_url = f"http://{self._host}:{self._port}", f"http://localhost:{peer_port}"
        # fmt: off
        command = [
            self._binary, "--data-dir", data_dir, "--logger", "zap",
            "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
            "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url,
            "--initial-cluster", f"default={peer_url}",
        ]
        # fmt: on
        if shutil.which("setpriv"):
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE)
        log = _Log(self._process, stderr)
        if not log.said_ready.wait(timeout):
            raise TimeoutError(f"etcd at {self.get_endpoint()} was not ready within {timeout:g} s")
        if not log.is_ready:
            raise EtcdServerFailed(
                f"etcd has ended with exit code {self._process.wait()}: {log.last_words()}"
            )


class _Log:
    """Reads what the server says, all its life long, and knows when it is ready."""

    def __init__(self, process: "subprocess.Popen[bytes]", copy_to: int | TextIO | None) -> None:
        assert process.stderr is not None, "started with a pipe"
        self._stream = process.stderr
        self._copy_to = copy_to
        self._lines: list[bytes] = []
        self.is_ready = False
        self.said_ready = threading.Event()
        threading.Thread(target=self._read, name="rankwise-etcd-log", daemon=True).start()

    def last_words(self) -> str:
        """The last of its lines."""
        return b"".join(self._lines).decode(errors="replace").strip()

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                self._lines = [*self._lines[1 - KEPT_LINES :], line]
                _copy(line, self._copy_to)
                if READY in line:
                    self.is_ready = True
                    self.said_ready.set()
        self.said_ready.set()


def _copy(line: bytes, target: int | TextIO | None) -> None:
    if isinstance(target, int):
        if target >= 0:  # less are subprocess's constants: there is no reader
            os.write(target, line)
    elif target is not None:
        target.write(line.decode(errors="replace"))


def find_free_port() -> socket.socket:
    """Listen on a free port; close the socket right before the port is used."""
    return get_socket_with_port()


def stop_etcd(subprocess: Any, data_dir: str | None = None) -> None:
    """End a server, a `Popen` or None, and remove its data."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        subprocess.wait()
    if data_dir is not None:
        shutil.rmtree(data_dir, ignore_errors=True)


def _find_binary() -> str:
    beside = os.path.join(os.path.dirname(__file__), "bin", "etcd")
    for path in (os.environ.get(BINARY_VARIABLE), beside):
        if path is not None and os.path.isfile(path):
            return path
    return shutil.which("etcd") or shutil.which("etcd", path=f"{sys.prefix}/etcd/usr/bin") or "etcd"
