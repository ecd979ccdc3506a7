"""Signals to be passed on while the process of a rank is not known yet."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting import wire
from rankwise.drivers.real.hosting.connection import Connection, GuardianConnection
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.logs.pump import StreamPump
from rankwise.drivers.real.logs.tail import Tail
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.worker_link import CallPlan, WorkerPlan, WorkerStream

pytestmark = pytest.mark.system

SIGUSR1 = 10
CATCHES = "trap 'echo caught; kill $!; exit' USR1; echo up; sleep 60 >/dev/null & wait"


class ShellPlanner:
    """Plans ranks that the test makes itself."""

    def plan(self, _local_rank: int, _attempt: int) -> WorkerPlan:
        order = {"env": {}, "argv": ["sh"]}
        return WorkerPlan(order=order, descriptors={}, stream_count=2, reports=False, returns=False)

    def make_pumps(
        self, _local_rank: int, stdout_fd: int, stderr_fd: int
    ) -> tuple[WorkerStream, WorkerStream]:
        stdout, stderr = (
            WorkerStream(StreamPump(fd, (tail,)), tail)
            for fd, tail in ((stdout_fd, Tail()), (stderr_fd, Tail()))
        )
        return stdout, stderr

    def call_again(self, local_rank: int, attempt: int) -> CallPlan:
        raise NotImplementedError

    def on_worker_over(self, local_rank: int) -> None:
        pass


class HostedGang:
    """A host whose guardian is this test, which answers when it likes."""

    def __init__(self, stack: ExitStack) -> None:
        ours, self.guardian = socket.socketpair()
        stack.enter_context(self.guardian)
        clock = SystemClock()
        self.reactor = stack.enter_context(Reactor(clock))
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        console = Console(stdout_fd=null, stderr_fd=null, say=lambda _: None)
        stack.callback(console.close)
        connection = Connection("guardian", ours)
        stack.callback(connection.close)
        self.told: list[tuple[list[int], list[int]]] = []
        self.facts: list[Any] = []
        self.host = RealProcessHost(
            reactor=self.reactor,
            clock=clock,
            guardian=cast("GuardianConnection", connection),
            spawner=connection,
            planner=ShellPlanner(),
            flow=LogFlow(self.reactor, console, clock),
            deliver=self.facts.append,
            last_progress=clock.now,
            on_hang=lambda _: None,
            on_calls=lambda: None,
            on_ledger_off=lambda _: None,
            on_recorded=lambda *_: None,
            on_preload_failure=lambda *_: None,
            abandon_spawns=lambda: None,
            renew_spawner=lambda: None,
        )
        stack.callback(self.host.close)
        connection.workers = connection.listener = self.host
        connection.watch(self.reactor)

    def answer(self, *message: Any) -> None:
        """Let the host hear from its guardian."""
        wire.send(self.guardian, message)
        count = len(self.facts)
        while len(self.facts) == count:
            self.reactor.run_once()

    def pass_on(self) -> None:
        self.host.pass_on(SIGUSR1, lambda *ranks: self.told.append(ranks))


@pytest.fixture
def gang() -> Iterator[HostedGang]:
    with ExitStack() as stack:
        yield HostedGang(stack)


@contextmanager
def rank(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun its program."""
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_signal_waits_until_each_process_is_known(gang: HostedGang) -> None:
    with rank(CATCHES) as first, rank("echo up; exec sleep 60") as second:
        gang.host.spawn(0, attempt=0)
        gang.host.spawn(1, attempt=0)
        gang.answer("spawned", 2, second.pid)
        gang.pass_on()
        assert gang.told == []

        gang.answer("spawned", 1, first.pid)

        assert gang.told == [([0], [1])]
        assert first.communicate()[0] == "caught\n"


def test_signal_does_not_wait_for_a_process_that_could_not_be_made(gang: HostedGang) -> None:
    gang.host.spawn(0, attempt=0)
    gang.pass_on()
    gang.pass_on()
    assert gang.told == []

    gang.answer("refused", 1, "no memory")

    assert gang.told == [([], []), ([], [])]


@pytest.mark.parametrize("is_swept", [True, False])
def test_signal_is_told_of_if_the_gang_ends_meanwhile(gang: HostedGang, *, is_swept: bool) -> None:
    gang.host.spawn(0, attempt=0)
    gang.pass_on()
    if is_swept:
        gang.host.sweep(attempt=0)
        gang.answer("swept", 2, [], {})
    else:
        gang.guardian.close()
        while not gang.told:
            gang.reactor.run_once()

    assert gang.told == [([], [])]
