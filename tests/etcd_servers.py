"""Real etcd servers for tests: one or three members, to be stopped, killed and started again.

A member's ports are such that the kernel gives them to nobody; should somebody else ask for one
before etcd does, the cluster is started anew on others. Nothing is polled: a member is up when it
says so in its log, which is kept beside its data and named when something goes wrong.
"""

import atexit
import contextlib
import functools
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, stop_child

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster.etcd_program import check_version, etcd_version

PATIENCE_S = 60.0
ATTEMPTS = 5


@functools.cache
def find_etcd() -> str | None:
    """The program, from PATH or where tools/setup has unpacked it, if its version is accepted."""
    for path in (None, f"{sys.prefix}/etcd/usr/bin"):
        program = shutil.which("etcd", path=path)
        if program is not None:
            with contextlib.suppress(ConfigError):
                check_version(etcd_version(program))
                return program
    return None


needs_etcd = pytest.mark.skipif(
    find_etcd() is None,
    reason="there is no etcd: install it, or let tools/setup test unpack Debian's",
)

FIRST_PORT = 10_000


class AddressTaken(Exception):
    """Somebody else has bound a port that was free a moment ago."""


class EtcdMember:
    """One server, which keeps its data and its ports when it is started again."""

    def __init__(self, name: str, folder: Path, tls_arguments: list[str], host: str) -> None:
        self.host = host
        self.name = name
        self.log_path = folder / f"{name}.log"
        self.client_port, self.peer_port = free_ports(2)
        self._data = folder / name
        self._tls_arguments = tls_arguments
        self._scheme = "https" if tls_arguments else "http"
        self._process: subprocess.Popen[str] | None = None
        self._is_serving = threading.Event()
        self._has_ended = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def endpoint(self) -> tuple[str, int]:
        return self.host, self.client_port

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, cluster: str, *extra: str) -> None:
        program = find_etcd()
        assert program is not None
        client_url = f"{self._scheme}://{self.host}:{self.client_port}"
        command = [
            *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),
            program,
            *("--name", self.name, "--data-dir", str(self._data), "--logger", "zap"),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", self.peer_url, "--initial-cluster", cluster),
            *("--initial-advertise-peer-urls", self.peer_url),
            *self._tls_arguments,
            *extra,
        ]
        self._is_serving.clear()
        self._has_ended.clear()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read_log, args=[self._process], daemon=True)
        self._reader.start()

    def wait_serving(self) -> None:
        assert self._is_serving.wait(PATIENCE_S), f"etcd is not up: see {self.log_path}"
        if self._has_ended.is_set():
            log = self.log_path.read_text()
            if "address already in use" in log:
                raise AddressTaken(str(self.client_port))
            raise AssertionError(f"etcd has ended, see {self.log_path}:\n{log[-2000:]}")

    def stop(self) -> None:
        """Let it stand still, as if its machine had hung."""
        assert self._process is not None
        stop_child(self._process)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word, as the loss of its machine would."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        assert self._reader is not None
        self._reader.join()
        assert process.stdout is not None
        process.stdout.close()

    def _read_log(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with self.log_path.open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if "serving client traffic" in line:
                    self._is_serving.set()
        self._has_ended.set()
        self._is_serving.set()


class EtcdCluster:
    """One or three members that know each other."""

    def __init__(
        self,
        folder: Path,
        size: int = 1,
        *,
        tls_arguments: list[str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.members = [
            EtcdMember(f"member{number}", folder, tls_arguments or [], host)
            for number in range(size)
        ]
        self._initial = ",".join(f"{one.name}={one.peer_url}" for one in self.members)

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        return tuple(member.endpoint for member in self.members)

    def start(self, *extra: str) -> None:
        for member in self.members:
            member.start(self._initial, *extra)
        for member in self.members:
            member.wait_serving()

    def heal(self) -> None:
        """Start again whoever was killed."""
        dead = [member for member in self.members if not member.is_running]
        for member in dead:
            member.start(self._initial)
        for member in dead:
            member.wait_serving()

    def kill(self) -> None:
        for member in self.members:
            member.kill()


@contextlib.contextmanager
def etcd_cluster(
    folder: Path,
    size: int = 1,
    *,
    tls_arguments: list[str] | None = None,
    extra: tuple[str, ...] = (),
    host: str = "127.0.0.1",
) -> Iterator[EtcdCluster]:
    """A cluster that is up, whose clients reach it at `host`."""
    for attempt in range(ATTEMPTS):
        place = folder / f"etcd-{attempt}"
        place.mkdir()
        cluster = EtcdCluster(place, size, tls_arguments=tls_arguments, host=host)
        try:
            cluster.start(*extra)
        except AddressTaken:
            cluster.kill()
            continue
        except BaseException:
            cluster.kill()
            raise
        try:
            yield cluster
        finally:
            cluster.kill()
        return
    pytest.fail(f"etcd found its ports taken {ATTEMPTS} times")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different, and that nobody gets without asking for them.

    Between a test's look and its program's bind, the kernel may give a port of its own range to any
    connection. So these lie beneath that range, and a name tells other tests that they are taken.
    """
    own_first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(FIRST_PORT, own_first)
        with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
            name = on_failure.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0rankwise-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("", port))
            on_failure.pop_all()
            atexit.register(name.close)  # it is held until then
            ports.append(port)
    return ports


def members_of(agent: Running) -> list[int]:
    """The etcds that an agent runs."""
    children = Path(f"/proc/{agent.pid}/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]


def first_member(agents: list[Running]) -> Running:
    """The agent whose machine has the first of the endpoints."""
    for agent in agents:
        for pid in members_of(agent):
            if b"--name\0m0\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return agent
    raise AssertionError("nobody runs the first member")
