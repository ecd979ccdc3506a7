from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel import Channel, CreditPool, Server, Simulator

Steps = Generator[Any, Any, Any]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_no_server_is_ever_more_than_fully_busy(jobs: list[tuple[int, int]]) -> None:
    simulator = Simulator()
    server = Server(simulator)

    def worker(start: int, duration: int) -> Steps:
        yield start
        yield server.occupy(duration)

    for start, duration in jobs:
        simulator.process(worker(start, duration))
    instant = 0
    while simulator._living:
        instant += 3
        simulator.run(instant)
        assert 0 <= server.busy <= simulator.now

    assert server.busy == sum(duration for _, duration in jobs)


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


def test_credits_come_back_to_those_who_wait_first() -> None:
    simulator, order = Simulator(), []
    credits_ = CreditPool(simulator, 2, "slots")

    def worker(name: str) -> Steps:
        yield credits_.spend()
        order.append((simulator.now, name))
        yield 10
        credits_.give_back()

    for name in "abcd":
        simulator.process(worker(name))
    simulator.run()

    assert order == [(0, "a"), (0, "b"), (10, "c"), (10, "d")]
    assert credits_.free == 2


def test_credits_that_nobody_spent_cannot_be_given_back() -> None:
    credits_ = CreditPool(Simulator(), 2, "slots")

    with pytest.raises(LocalProtocolError, match="more credits than it has given"):
        credits_.give_back()


def test_a_channel_keeps_things_in_their_order_for_those_who_come_late_or_wait() -> None:
    simulator = Simulator()
    seen: list[Any] = []
    channel = Channel(simulator, "pipe")

    def writer() -> Steps:
        for number in range(4):
            channel.put(number)
            yield 10 if number else 0

    def reader() -> Steps:
        for _ in range(4):
            number = yield channel.get()
            seen.append((simulator.now, number))

    simulator.process(writer())
    simulator.process(reader())
    simulator.run()

    assert seen == [(0, 0), (0, 1), (10, 2), (20, 3)]
    assert str(channel) == "pipe (0 in it)"
