"""Ranks of `spawn` have clocks of their own: closed forms of programs whose ranks differ."""

from collections.abc import Callable
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext

STEPS = 150
SIZE = 1 << 13

Program = Callable[[int, Any, Any, list[Any]], object]


def busy(a: Any, n: Any, width: tl.constexpr) -> None:
    i = tl.arange(0, width)
    x = tl.load(a + i[:, None] * width + i[None, :])
    s = tl.zeros((width, width), tl.float32)
    for _ in range(n):
        s = tl.dot(x, x, s)
    tl.store(a + i[:, None] * width + i[None, :], s.to(tl.float16))


def times_of(program: Program, ranks: int, buffers: int = 8) -> list[int]:
    """By rank, the picoseconds from a common barrier to its end."""
    ends = [0] * ranks

    def body(rank: int, torch: Any) -> None:
        a = torch.empty((64, 64), dtype="f16")
        x = [torch.empty(SIZE, dtype="f16") for _ in range(buffers)]
        torch.distributed.barrier()
        start = torch.now
        program(rank, torch, a, x)
        ends[rank] = torch.now - start

    with RuntimeContext(engine=GraphEngine("default", enable_data=False), ccl={}) as torch:
        torch.multiprocessing.spawn(body, args=(torch,), nprocs=ranks)
    return ends


def compute(torch: Any, a: Any, steps: int = STEPS) -> None:
    torch.launch(busy, 1, a, steps, width=64)


@pytest.fixture(scope="module")
def kernel_time() -> int:
    """How long one kernel of `STEPS` takes."""
    return times_of(lambda _rank, torch, a, _x: compute(torch, a), 1)[0]


@pytest.fixture(scope="module")
def message_time() -> int:
    """How long a message between neighbours takes its receiver."""

    def program(rank: int, torch: Any, _a: Any, x: list[Any]) -> None:
        if rank:
            torch.distributed.recv(x[0], 0)
        else:
            torch.distributed.send(x[0], 1)

    return times_of(program, 2)[1]


def test_uneven_ranks_each_take_as_long_as_their_own_kernels(kernel_time: int) -> None:
    def program(rank: int, torch: Any, a: Any, _x: list[Any]) -> None:
        for _ in range(5):
            compute(torch, a, STEPS // 10 if rank else STEPS)

    long, short = times_of(program, 2)

    (alone,) = times_of(lambda _rank, torch, a, x: program(1, torch, a, x), 1)
    assert long == pytest.approx(5 * kernel_time, rel=0.03)
    assert short == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_takes_microbatches_plus_stages_minus_one(
    count: int, stages: int, kernel_time: int, message_time: int
) -> None:
    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        sent = []
        for each in x[:count]:
            if rank:
                torch.distributed.recv(each, rank - 1)
            compute(torch, a)
            if rank < stages - 1:
                sent.append(torch.distributed.isend(each, rank + 1))
        for work in sent:
            work.wait()

    ends = times_of(program, stages)

    expected = (count + stages - 1) * kernel_time + (stages - 1) * message_time
    assert max(ends) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("count", [4, 8])
def test_1f1b_takes_microbatches_plus_stages_minus_one_of_both_passes(
    count: int, kernel_time: int, message_time: int
) -> None:
    """Backward takes as long as forward; messages that wait for nobody are under computing."""
    stages = 4

    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        dist, sent = torch.distributed, []

        def forward(number: int) -> None:
            if rank:
                dist.recv(x[number % 8], rank - 1)
            compute(torch, a)
            if rank < stages - 1:
                sent.append(dist.isend(x[number % 8], rank + 1))

        def backward(number: int) -> None:
            if rank < stages - 1:
                dist.recv(x[number % 8], rank + 1)
            compute(torch, a)
            if rank:
                sent.append(dist.isend(x[number % 8], rank - 1))

        ahead = min(stages - 1 - rank, count)
        for number in range(ahead):
            forward(number)
        for number in range(count - ahead):
            forward(ahead + number)
            backward(number)
        for number in range(count - ahead, count):
            backward(number)
        for work in sent:
            work.wait()

    ends = times_of(program, stages)

    # The longest chain: down to the last stage and back, and the microbatches in between there.
    # In the steady state a stage waits for one message there and back in each of its turns.
    least = 2 * (count + stages - 1) * kernel_time + 2 * (stages - 1) * message_time
    assert max(ends) == pytest.approx(least, rel=0.03)


def test_straggler_of_20_percent_delays_each_step_by_20_percent(kernel_time: int) -> None:
    steps, ranks = 5, 4

    def program(slow: int | None) -> Program:
        def steps_of(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
            for _ in range(steps):
                compute(torch, a, STEPS * 6 // 5 if rank == slow else STEPS)
                torch.distributed.all_reduce(x[0])

        return steps_of

    even, uneven = max(times_of(program(None), ranks)), max(times_of(program(2), ranks))

    assert uneven - even == pytest.approx(steps * kernel_time / 5, rel=0.03)


def test_data_parallel_step_begins_its_all_reduce_when_the_slow_rank_has_computed(
    kernel_time: int,
) -> None:
    def exchange(_rank: int, torch: Any, _a: Any, x: list[Any]) -> None:
        torch.distributed.all_reduce(x[0])

    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        compute(torch, a, 3 * STEPS if rank == 1 else STEPS)
        compute(torch, a)
        exchange(rank, torch, a, x)
        compute(torch, a)

    ends = times_of(program, 4)

    reduce_time = max(times_of(exchange, 4))
    assert max(ends) == pytest.approx(5 * kernel_time + reduce_time, rel=0.03)
    assert min(ends) == pytest.approx(max(ends), rel=0.03)


def test_rank_that_only_communicates_is_not_held_up_by_ranks_that_compute(
    kernel_time: int, message_time: int
) -> None:
    """Ranks 0 and 1 exchange messages while ranks 2 and 3 compute."""
    count = 5

    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        for _ in range(count):
            if rank >= 2:
                compute(torch, a, 3 * STEPS)
            elif rank:
                torch.distributed.recv(x[0], 0)
            else:
                torch.distributed.send(x[0], 1)

    ends = times_of(program, 4)

    assert ends[1] == pytest.approx(count * message_time, rel=0.03)
    assert ends[2] == ends[3] == pytest.approx(5 * times_of_three(kernel_time), rel=0.03)


def test_two_groups_each_wait_for_the_slow_rank_of_their_own() -> None:
    """{0, 1} and {2, 3} compute and all-reduce side by side; rank 1 and rank 2 are slow."""
    steps = {0: STEPS, 1: 4 * STEPS, 2: 5 * STEPS, 3: STEPS}

    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        for _ in range(2):
            compute(torch, a, steps[rank])
            torch.distributed.all_reduce(x[0], group=groups[rank // 2])

    def exchange(_rank: int, torch: Any, _a: Any, x: list[Any]) -> None:
        torch.distributed.all_reduce(x[0])

    ends = times_of(program, 4)

    reduce_time = max(times_of(exchange, 2))
    for first, slow in ((0, 1), (2, 2)):
        (slowest,) = times_of(lambda _r, torch, a, _x, n=steps[slow]: compute(torch, a, n), 1)
        group = ends[first : first + 2]
        assert group == pytest.approx([2 * (slowest + reduce_time)] * 2, rel=0.03)


def test_ring_exchange_goes_at_the_pace_of_its_straggler(
    kernel_time: int, message_time: int
) -> None:
    steps = 4

    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        distributed = torch.distributed
        for _ in range(steps):
            compute(torch, a, STEPS * 6 // 5 if rank == 1 else STEPS)
            sent = distributed.isend(x[0], (rank + 1) % 4)
            distributed.recv(x[1], (rank - 1) % 4)
            sent.wait()

    ends = times_of(program, 4)

    # Two messages are waited for: the others are under the computing of the straggler.
    assert max(ends) == pytest.approx(steps * 1.2 * kernel_time + 2 * message_time, rel=0.03)


def times_of_three(kernel_time: int) -> int:
    """How long a kernel of three times the steps takes: its loads and its start count once."""
    (three,) = times_of(lambda _rank, torch, a, _x: compute(torch, a, 3 * STEPS), 1)
    assert three == pytest.approx(3 * kernel_time, rel=0.03)
    return three


def test_ranks_resume_in_the_order_of_instants_and_at_one_instant_in_that_of_ranks() -> None:
    order: list[tuple[int, int]] = []

    def program(rank: int, torch: Any, a: Any, _x: list[Any]) -> None:
        for _ in range(3):
            compute(torch, a, (60, 10, 60, 10)[rank])
            order.append((torch.now, rank))

    times_of(program, 4)

    assert order == sorted(order)
    assert [rank for _, rank in order[:6]] == [1, 3, 1, 3, 1, 3]
    assert [rank for _, rank in order[6:]] == [0, 2, 0, 2, 0, 2]


def test_host_read_in_a_rank_waits_for_its_own_device_alone(kernel_time: int) -> None:
    def program(rank: int, torch: Any, a: Any, x: list[Any]) -> None:
        if rank:
            compute(torch, a)
        else:
            x[1].copy_(x[0])  # a barrier for its source

    first, second = times_of(program, 2)

    assert second == pytest.approx(kernel_time, rel=0.03)
    assert first < kernel_time / 10
