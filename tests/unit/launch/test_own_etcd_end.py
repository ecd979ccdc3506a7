"""For how long a member of the run's own etcd goes on serving when its run is over."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from time import monotonic

import pytest

from rankwise.base.keys import Put, Transaction
from rankwise.base.units import SECOND, Duration
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.core.rendezvous.records import RunKeys
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.in_process import MemoryStore
from rankwise.launch.cluster.agent_runner import AgentRunner
from rankwise.launch.cluster.own_etcd_end import RegisteredNodes

KEYS = RunKeys("run")
LONG = Duration(3600 * SECOND)
PATIENCE_S = 60.0


class Nodes:
    """The nodes of a run, two members of whose etcd are elsewhere."""

    def __init__(self, stack: ExitStack) -> None:
        shared = MemoryStore(SystemClock())
        self._store = stack.enter_context(shared.connect())
        self.peers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        self.places = [peer.getsockname() for peer in self.peers]
        self.write(KEYS.done_note("a"), KEYS.call_records_note("a"))
        self._registered = RegisteredNodes(shared.connect(), KEYS)
        self._pool = stack.enter_context(ThreadPoolExecutor(1))
        self._stack = stack

    def write(self, *keys: str) -> None:
        self._store.commit(Transaction(puts=tuple(Put(key, b"") for key in keys)))

    def delete(self, key: str) -> None:
        self._store.commit(Transaction(deletes=(key,)))

    def wait(self, patience: Duration = LONG) -> "Future[None]":
        """Wait until this machine's member is not needed any more."""
        nodes = self._stack.enter_context(self._registered)
        return self._pool.submit(nodes.wait_until_none, self.places, patience)

    def accepted(self) -> list[socket.socket]:
        """The connections to both members, when they have been made."""
        return [self._stack.enter_context(peer.accept()[0]) for peer in self.peers]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


def test_a_member_is_needed_until_the_last_node_has_left(nodes: Nodes) -> None:
    nodes.write(KEYS.node("a"), KEYS.node("b"))
    waiting = nodes.wait()
    nodes.accepted()

    nodes.delete(KEYS.node("a"))
    assert not waiting.done()
    nodes.delete(KEYS.node("b"))

    waiting.result(PATIENCE_S)


def test_one_member_alone_is_of_no_use_though_a_node_is_registered(nodes: Nodes) -> None:
    nodes.write(KEYS.node("a"))
    waiting = nodes.wait()

    for peer, connection in zip(nodes.peers, nodes.accepted(), strict=True):
        assert not waiting.done()
        peer.close()
        connection.close()

    waiting.result(PATIENCE_S)


def test_a_member_that_only_hangs_up_is_not_gone(nodes: Nodes) -> None:
    nodes.write(KEYS.node("a"))
    waiting = nodes.wait()

    for connection in nodes.accepted():
        connection.close()
    nodes.accepted()

    assert not waiting.done()
    nodes.delete(KEYS.node("a"))
    waiting.result(PATIENCE_S)


def test_nobody_is_waited_for_longer_than_asked(nodes: Nodes) -> None:
    nodes.write(KEYS.node("a"))
    began = monotonic()

    nodes.wait(Duration(SECOND // 20)).result(PATIENCE_S)

    assert monotonic() - began >= 0.05


def test_agent_that_has_not_begun_can_take_its_etcd_down_again() -> None:
    """So it does when a setting of the store is refused: the refusal is what the user reads."""
    runner = object.__new__(AgentRunner)
    runner._agent = Agent(spec_alone(GangSpec(size=1), RestartPolicy()))  # all that is made then

    assert not runner._is_over()
