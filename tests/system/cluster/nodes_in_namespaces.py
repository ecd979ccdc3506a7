"""Nodes of their own: network namespaces on one bridge, so that links can be cut."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from running import Running


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces here: root, with iproute2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rwprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    bridge = ["ip", "link", "add", name, "type", "bridge"]
    if subprocess.run(bridge, capture_output=True, check=False).returncode != 0:
        return False
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    return True


needs_namespaces = pytest.mark.skipif(
    not may_make_namespaces(), reason="network namespaces need root and iproute2"
)


class Network:
    """A bridge in our own namespace, which has an address, and nodes that are plugged into it."""

    def __init__(self, stack: ExitStack) -> None:
        # One network per process and purpose; several test runs at once do not meet.
        self._id = f"rw{os.getpid() % 100_000}"
        self._prefix = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._stack = stack
        self.address = f"{self._prefix}.1"
        _ip("link", "add", self._id, "type", "bridge")
        stack.callback(_ip, "link", "del", self._id)
        _ip("address", "add", f"{self.address}/24", "dev", self._id)
        _ip("link", "set", self._id, "up")
        self._count = 0

    def add_node(self) -> "Node":
        self._count += 1
        name = f"{self._id}n{self._count}"
        return Node(name, f"{self._prefix}.{self._count + 1}", self._id, self._stack)


class Node:
    """A namespace with one interface, whose cable can be pulled out."""

    def __init__(self, name: str, address: str, bridge: str, stack: ExitStack) -> None:
        self.name = name
        self.address = address
        self._port = f"{name}v"
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", self._port, "type", "veth", "peer", "eth0", "netns", name)
        # With the namespace it would vanish some time later, and the next test needs its name.
        stack.callback(_ip, "link", "del", self._port)
        _ip("link", "set", self._port, "master", bridge, "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def start(self, *words: str | Path, environment: Mapping[str, str] | None = None) -> Running:
        """Start `rankwise` with these words on this node."""
        program = (sys.executable, "-m", "rankwise", *map(str, words))
        return Running("ip", "netns", "exec", self.name, *program, environment=environment)

    def pull_out(self) -> None:
        _ip("link", "set", self._port, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self._port, "up")

    def lose(self) -> None:
        """Cut its power: no packet leaves it any more, not even that a connection is closed."""
        self.pull_out()
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):  # it went with one of those before it
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def network() -> Iterator[Network]:
    """A network that is gone afterwards."""
    with ExitStack() as stack:
        yield Network(stack)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
