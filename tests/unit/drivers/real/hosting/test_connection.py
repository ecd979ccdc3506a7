"""The agent's side of a connection never waits for the other side."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leftovers import open_files

from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting.connection import Connection
from rankwise.drivers.real.hosting.wire import FrameReader, encode
from rankwise.drivers.real.reactor import Reactor, ReactorTimer

WORKERS = 64
PADDING = ["x" * 100_000]


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    with Reactor(SystemClock()) as reactor:
        yield reactor


def spawn_all(connection: Connection) -> None:
    """Order workers, each with a pipe that holds its number; close our ends of the pipes."""
    for worker in range(WORKERS):
        read_fd, write_fd = os.pipe()
        os.write(write_fd, b"%d" % worker)
        os.close(write_fd)
        connection.spawn(worker, {"argv": PADDING, "env": {}, "fds": [0]}, [read_fd])
        os.close(read_fd)


def test_orders_that_nobody_reads_are_kept_with_their_descriptors_and_sent_later(
    reactor: Reactor,
) -> None:
    files_before = open_files()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)  # noqa: FBT003  # the standard library's signature
        connection = Connection("fork server", ours)

        spawn_all(connection)
        connection.signal(7, 15, group=True)
        assert len(open_files() - files_before) > 2 + WORKERS // 2, "most of them wait"

        connection.watch(reactor)
        reader = FrameReader()
        heard: list[tuple[object, ...]] = []
        deadline = after(SystemClock().now(), Duration(10 * SECOND))
        while len(heard) <= WORKERS + 1:
            assert SystemClock().now() < deadline
            reactor.run_once(SystemClock().now())
            for message, fds in reader.receive(theirs):
                heard.append((*message[:2], *(os.read(fd, 10) for fd in fds)))
                for fd in fds:
                    os.close(fd)
        connection.close()

    orders = [("spawn", worker, b"%d" % worker) for worker in range(WORKERS)]
    assert heard == [("environment", {}), *orders, ("signal", 7)]
    assert open_files() <= files_before


def environments_sent(wanted: list[dict[str, str]]) -> list[tuple[object, ...]]:
    """Order a worker for each of these environments; return what is sent about environments."""
    ours, theirs = socket.socketpair()
    connection = Connection("guardian", ours)
    with theirs:
        for worker, environment in enumerate(wanted):
            connection.spawn(worker, {"env": environment}, [])
        connection.close()
        reader = FrameReader()
        messages: list[tuple[Any, ...]] = []
        while not reader.ended:
            messages += [message for message, _ in reader.receive(theirs)]
    return [
        message if message[0] == "environment" else ("worker", message[2]["env"])
        for message in messages
    ]


def test_what_workers_have_in_common_is_sent_once() -> None:
    common = {"A": "1", "B": "2", "C": "3", "D": "4"}

    sent = environments_sent([{**common, "RANK": "0"}, {**common, "RANK": "1"}, common])

    assert sent == [
        ("environment", {**common, "RANK": "0"}),
        ("worker", {}),
        ("worker", {"RANK": "1"}),
        ("worker", {"RANK": None}),
    ]


@given(st.lists(st.dictionaries(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("01")), max_size=20))
def test_every_worker_gets_its_own_environment(wanted: list[dict[str, str]]) -> None:
    common: dict[str, str | None] = {"STRANGER": "!"}  # what the other side has by itself
    got = []
    for kind, variables in environments_sent(wanted):
        assert isinstance(variables, dict)
        if kind == "environment":
            common = dict(variables)
        else:
            changed = {**common, **variables}
            got.append({name: value for name, value in changed.items() if value is not None})

    assert got == wanted


def test_closing_forgets_what_nobody_has_read(reactor: Reactor) -> None:
    files_before = open_files()
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection("fork server", ours)
        connection.watch(reactor)
        spawn_all(connection)

        connection.close()

    assert open_files() <= files_before


def test_orders_to_somebody_who_has_died_are_dropped() -> None:
    files_before = open_files()
    ours, theirs = socket.socketpair()
    theirs.close()
    connection = Connection("fork server", ours)

    spawn_all(connection)
    connection.close()

    assert open_files() <= files_before


class WaitsForTheOther:
    """Hears that one worker has ended, and waits for the answer about another one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.has_waited_in_vain = False

    def on_exited(self, *_: object) -> None:
        self._connection.wait_until(lambda: not self._connection.unanswered, Duration(10 * SECOND))
        self.has_waited_in_vain = bool(self._connection.unanswered)

    def on_spawned(self, *_: object) -> None:
        pass

    on_refused = on_swept = on_ready = on_lost = on_spawned


def test_an_answer_that_came_with_another_message_is_heard_by_who_waits_there() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection("fork server", ours)
        connection.workers = connection.listener = listener = WaitsForTheOther(connection)
        connection.spawn(2, {"argv": [], "env": {}, "fds": []}, [])
        theirs.sendall(encode(("exited", 1, 0, 0)) + encode(("spawned", 2, 77)))

        connection.on_readable()

        assert not listener.has_waited_in_vain
        connection.close()


class ReactorWithTimers(Reactor):
    """Its timers are fired by the test."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.timers: list[ReactorTimer] = []

    def call_at(self, instant: Instant, callback: Callable[[], object]) -> ReactorTimer:
        self.timers.append(ReactorTimer(instant, callback))
        return self.timers[-1]


@pytest.mark.parametrize(
    ("late", "is_given_up"), [(Duration(0), True), (Duration(5 * SECOND), False)]
)
def test_who_was_stopped_itself_gives_the_other_side_time_anew(
    late: Duration, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    ours, theirs = socket.socketpair()
    with theirs, ReactorWithTimers() as reactor:
        connection = Connection("fork server", ours)
        connection.workers = connection.listener = WaitsForTheOther(connection)
        connection.on_silent = told.append
        connection.watch(reactor)
        connection.spawn(2, {"argv": [], "env": {}, "fds": []}, [])
        theirs.sendall(encode(("ready", 1, {})))
        connection.on_readable()
        (timer,) = reactor.timers

        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic_ns", lambda: timer.instant + late)
            timer.fire()

        assert bool(told) == is_given_up
        assert len(reactor.timers) == (1 if is_given_up else 2)
        connection.close()
