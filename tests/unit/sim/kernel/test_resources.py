from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel import Channel, CreditPool, Resource, Server, Simulator

Steps = Generator[Any, Any, Any]


def test_places_go_to_those_who_asked_first() -> None:
    simulator, order = Simulator(), []
    place = Resource(simulator, 1, "place")

    def worker(name: str) -> Steps:
        yield place.acquire()
        order.append((simulator.now, name))
        yield 10
        place.release()

    for name in "abc":
        simulator.process(worker(name))
    simulator.run()

    assert order == [(0, "a"), (10, "b"), (20, "c")]
    assert place.busy == 30
    assert place.in_use == 0


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12),
)
def test_no_resource_is_ever_more_than_fully_busy(
    capacity: int, jobs: list[tuple[int, int]]
) -> None:
    simulator = Simulator()
    resource, server = Resource(simulator, capacity), Server(simulator)

    def worker(start: int, duration: int) -> Steps:
        yield start
        yield resource.acquire()
        assert resource.in_use <= capacity
        yield duration
        resource.release()
        yield server.occupy(duration)

    for start, duration in jobs:
        simulator.process(worker(start, duration))
    instant = 0
    while simulator._living:
        instant += 3
        simulator.run(instant)
        assert 0 <= resource.busy <= capacity * simulator.now
        assert 0 <= server.busy <= simulator.now

    assert resource.busy == server.busy == sum(duration for _, duration in jobs)


def test_a_server_works_off_in_order_and_is_busy_only_while_it_works() -> None:
    simulator = Simulator()
    server = Server(simulator, "engine")

    assert server.occupy(10) == 10
    assert server.occupy(5) == 15
    simulator.run(12)
    assert server.busy == 12
    simulator.run(20)
    assert server.busy == 15
    assert server.occupy(4) == 4


def test_credits_come_back_to_those_who_wait_first_even_if_others_want_less() -> None:
    simulator, order = Simulator(), []
    credits_ = CreditPool(simulator, 4, "slots")

    def worker(name: str, count: int) -> Steps:
        yield credits_.spend(count)
        order.append((simulator.now, name))
        yield 10
        credits_.give_back(count)

    for name, count in (("a", 3), ("b", 4), ("c", 1)):
        simulator.process(worker(name, count))
    simulator.run()

    assert order == [(0, "a"), (10, "b"), (20, "c")]
    assert credits_.free == 4


def test_credits_that_nobody_spent_cannot_be_given_back() -> None:
    credits_ = CreditPool(Simulator(), 2, "slots")

    with pytest.raises(LocalProtocolError, match="more credits than it has given"):
        credits_.give_back()
    with pytest.raises(LocalProtocolError, match="can never be had"):
        credits_.spend(3)


def test_a_full_channel_holds_up_its_writer_and_keeps_the_order() -> None:
    simulator = Simulator()
    seen: list[Any] = []
    channel = Channel(simulator, 2, "pipe")

    def writer() -> Steps:
        for number in range(5):
            yield channel.put(number)
            seen.append((simulator.now, "put", number))

    def reader() -> Steps:
        for _ in range(5):
            yield 10
            number = yield channel.get()
            seen.append((simulator.now, "got", number))

    simulator.process(writer())
    simulator.process(reader())
    simulator.run()

    assert [entry for entry in seen if entry[1] == "got"] == [
        (10 * (number + 1), "got", number) for number in range(5)
    ]
    assert [at for at, what, _ in seen if what == "put"] == [0, 0, 10, 20, 30]


def test_releasing_what_was_not_acquired_is_an_error() -> None:
    with pytest.raises(LocalProtocolError, match="more often than acquired"):
        Resource(Simulator(), 1, "place").release()


def test_a_request_can_be_withdrawn_before_and_after_it_is_granted() -> None:
    simulator = Simulator()
    place = Resource(simulator, 1)
    first, second, third = place.acquire(), place.acquire(), place.acquire()

    place.withdraw(second)
    place.withdraw(first)

    assert third.is_done
    assert not second.is_done
