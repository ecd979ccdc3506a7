"""The reactor: descriptors, timers and posted calls in one thread."""

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from rankwise.base.units import DURATION_MAX, MILLISECOND, SECOND, Duration, Instant, after
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import Reactor

SOON = Duration(60 * SECOND)
"""No test waits this long: it is the deadline after which something is wrong."""


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def reactor(clock: SystemClock) -> Iterator[Reactor]:
    with Reactor(clock) as reactor:
        yield reactor


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_a_readable_descriptor_calls_back(reactor: Reactor, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    heard: list[bytes] = []
    reactor.watch_readable(read_fd, lambda: heard.append(os.read(read_fd, 10)))
    os.write(write_fd, b"now")

    reactor.run_once()

    assert heard == [b"now"]


def test_an_unwatched_descriptor_is_left_alone(
    reactor: Reactor, clock: SystemClock, pipe: tuple[int, int]
) -> None:
    read_fd, write_fd = pipe
    reactor.watch_readable(read_fd, lambda: pytest.fail("nobody wants to know"))
    reactor.unwatch_readable(read_fd)
    os.write(write_fd, b"now")

    reactor.run_once(clock.now())


def test_a_callback_may_unwatch_another_one_that_is_ready_too(reactor: Reactor) -> None:
    pipes = [os.pipe(), os.pipe()]
    called: list[int] = []

    def silence_the_other(me: int) -> None:
        called.append(me)
        reactor.unwatch_readable(pipes[1 - me][0])

    for index, (read_fd, write_fd) in enumerate(pipes):
        reactor.watch_readable(read_fd, partial(silence_the_other, index))
        os.write(write_fd, b"x")

    reactor.run_once()

    assert len(called) == 1
    for fds in pipes:
        for fd in fds:
            os.close(fd)


def test_reading_and_writing_of_one_descriptor_are_watched_apart(
    reactor: Reactor, clock: SystemClock, pipe: tuple[int, int]
) -> None:
    _, write_fd = pipe
    called: list[str] = []
    reactor.watch_writable(write_fd, lambda: called.append("writable"))

    reactor.run_once(after(clock.now(), SOON))
    reactor.unwatch_writable(write_fd)
    reactor.run_once(clock.now())

    assert called == ["writable"]


def test_timers_fire_in_the_order_of_their_instants_and_never_early(
    reactor: Reactor, clock: SystemClock
) -> None:
    start = clock.now()
    fired: list[tuple[str, Instant]] = []
    reactor.call_at(
        after(start, Duration(8 * MILLISECOND)), lambda: fired.append(("b", clock.now()))
    )
    reactor.call_at(
        after(start, Duration(4 * MILLISECOND)), lambda: fired.append(("a", clock.now()))
    )

    while len(fired) < 2:
        reactor.run_once(after(start, SOON))

    assert [name for name, _ in fired] == ["a", "b"]
    assert fired[0][1] >= start + 4 * MILLISECOND
    assert fired[1][1] >= start + 8 * MILLISECOND


def test_a_cancelled_timer_does_not_fire(reactor: Reactor, clock: SystemClock) -> None:
    timer = reactor.call_at(clock.now(), lambda: pytest.fail("it was cancelled"))

    timer.cancel()

    reactor.run_once(clock.now())


def test_a_deadline_ends_the_wait(reactor: Reactor, clock: SystemClock) -> None:
    deadline = after(clock.now(), Duration(3 * MILLISECOND))

    reactor.run_once(deadline)

    assert clock.now() >= deadline


def test_another_thread_wakes_the_reactor_by_posting(reactor: Reactor) -> None:
    ran_in: list[int] = []
    thread = threading.Thread(
        target=lambda: reactor.post(lambda: ran_in.append(threading.get_ident()))
    )
    thread.start()

    reactor.run_once()

    thread.join()
    assert ran_in == [threading.get_ident()]


def test_posting_more_often_than_a_pipe_holds_loses_no_call(reactor: Reactor) -> None:
    count = 100_000
    called: list[int] = []
    for number in range(count):
        reactor.post(partial(called.append, number))

    while len(called) < count:
        reactor.run_once()

    assert called == list(range(count))


def test_posting_after_the_end_is_harmless(clock: SystemClock) -> None:
    with Reactor(clock) as reactor:
        pass

    reactor.post(lambda: pytest.fail("there is nobody left to call"))


def test_posting_after_the_end_writes_into_nobodys_file(clock: SystemClock) -> None:
    with Reactor(clock) as reactor:
        pass
    # They get the numbers that the reactor's own descriptors had.
    pairs = [socket.socketpair() for _ in range(8)]

    reactor.post(lambda: pytest.fail("there is nobody left to call"))

    for end in itertools.chain(*pairs):
        end.setblocking(False)  # noqa: FBT003  # the standard library's signature
        with pytest.raises(BlockingIOError):
            end.recv(1)
    for end in itertools.chain(*pairs):
        end.close()


def test_a_deadline_in_ten_years_can_be_waited_for(
    reactor: Reactor, clock: SystemClock, pipe: tuple[int, int]
) -> None:
    read_fd, write_fd = pipe
    heard: list[bytes] = []
    reactor.watch_readable(read_fd, lambda: heard.append(os.read(read_fd, 10)))
    reactor.call_at(after(clock.now(), DURATION_MAX), lambda: pytest.fail("too early"))
    os.write(write_fd, b"now")

    reactor.run_once(after(clock.now(), DURATION_MAX))

    assert heard == [b"now"]


def test_postponed_timers_fire_later_and_in_the_same_order(
    reactor: Reactor, clock: SystemClock
) -> None:
    began, fired = clock.now(), list[str]()
    reactor.call_at(after(began, Duration(2)), partial(fired.append, "second"))
    reactor.call_at(after(began, Duration(1)), partial(fired.append, "first"))

    reactor.postpone(Duration(30 * MILLISECOND))
    reactor.run_once(began)
    assert fired == []

    reactor.run_once()
    reactor.run_once(clock.now())
    assert fired == ["first", "second"]
    assert clock.now() >= after(began, Duration(30 * MILLISECOND))
