"""SIGTERM to agents whose endpoint has a name that no name server tells."""

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from nodes_in_namespaces import Network, needs_namespaces
from running import WITHIN_S, Running, write_program

pytestmark = [pytest.mark.system, needs_namespaces]

NO_SUCH_NAME = b"\x81\x83"
"""The flags of an answer that says so."""
WITH_OTHER_SERVERS = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


class Silence:
    """A name server that hears every question, and answers those alone that it is told to."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        network = Network(stack)
        self._node = network.add_node()
        self._stack = stack
        self._program = write_program(folder, "raise SystemExit(3)\n")
        self._servers = folder / "resolv.conf"
        # For longer than a test waits, also on a slow machine: the C library else asks for 10 s.
        self._servers.write_text(f"nameserver {network.address}\noptions timeout:30\n")
        self._socket = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._socket.bind((network.address, 53))
        self._socket.settimeout(60)

    def start(self, backend: str, *more: str) -> Running:
        meeting = ("--rdzv-backend", backend, "--rdzv-endpoint", "store.example.org:29400")
        return self.start_with("--nnodes", "2", *meeting, "--rdzv-id", "run", *more)

    def start_with(self, *options: str) -> Running:
        words = (sys.executable, "-m", "rankwise", "run", *options, str(self._program))
        mounted = ("unshare", "-m", "sh", "-c", WITH_OTHER_SERVERS, str(self._servers), *words)
        agent = Running("ip", "netns", "exec", self._node.name, *mounted)
        return self._stack.enter_context(agent)

    def receive_question(self) -> None:
        question, _ = self._socket.recvfrom(512)
        assert b"example" in question

    def deny_once(self) -> None:
        """Answer one look-up, which asks for addresses of both families: there is no such name."""
        for _ in range(2):
            question, asker = self._socket.recvfrom(512)
            self._socket.sendto(question[:2] + NO_SUCH_NAME + question[4:], asker)


@pytest.fixture
def silence(tmp_path: Path) -> Iterator[Silence]:
    with ExitStack() as stack:
        yield Silence(tmp_path, stack)


@pytest.mark.parametrize("backend", ["embedded", "etcd", "static"])
def test_sigterm_is_answered_while_a_name_is_looked_up_first(
    silence: Silence, backend: str
) -> None:
    agent = silence.start(backend)
    silence.receive_question()

    agent.signal(signal.SIGTERM)
    done = agent.finish(WITHIN_S)

    assert done.code == 143
    assert "rankwise: stopped by SIGTERM" in done.stderr


def test_sigterm_is_answered_while_the_name_of_this_node_is_looked_up(silence: Silence) -> None:
    agent = silence.start("embedded", "--local-addr", "node.example.org")
    silence.receive_question()

    agent.signal(signal.SIGTERM)
    done = agent.finish(WITHIN_S)

    assert done.code == 143
    assert "rankwise: stopped by SIGTERM" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_answered_while_the_name_of_the_master_is_looked_up(
    silence: Silence, signum: signal.Signals
) -> None:
    agent = silence.start_with("--master-addr", "master.example.org")
    silence.receive_question()

    agent.signal(signum)

    assert agent.finish(WITHIN_S).code == 128 + signum


@pytest.mark.parametrize("backend", ["embedded", "etcd"])
def test_sigterm_is_answered_while_a_store_is_looked_up(silence: Silence, backend: str) -> None:
    agent = silence.start(backend)
    silence.deny_once()  # or it would ask for long before it comes to the store
    agent.wait_for("waiting for the store: no answer within 2 s", stream="stderr")

    agent.signal(signal.SIGTERM)
    done = agent.finish(WITHIN_S)

    assert done.code == 143
    assert "rankwise: SIGTERM: this node leaves" in done.stderr
