"""`ctx.distributed`: every collective, on tensors, through the simulated chips."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException

DTYPES = ("f16", "bf16", "f32", "i8", "i32")


@pytest.fixture
def ctx(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeContext]:
    monkeypatch.chdir(tmp_path)
    with RuntimeContext(engine=GraphEngine("default")) as context:
        yield context


def run_ranks(ctx: RuntimeContext, size: int, worker: Callable[[int], object]) -> list[Any]:
    """What the worker returns on every rank."""
    returned: dict[int, Any] = {}

    def noting(rank: int) -> None:
        returned[rank] = worker(rank)

    ctx.multiprocessing.spawn(noting, nprocs=size)
    return [returned[rank] for rank in range(size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_every_collective_gives_what_numpy_gives(
    ctx: RuntimeContext, size: int, dtype: str
) -> None:
    dist, length = ctx.distributed, 5

    def values(rank: int, count: int) -> Any:
        return (np.arange(count) + rank) % 4

    def worker(rank: int) -> None:
        blocks = np.concatenate([values(rank, size * length)])
        everyone = [values(other, size * length) for other in range(size)]
        summed = np.sum(everyone, axis=0)

        reduced = ctx.tensor(blocks, dtype)
        dist.all_reduce(reduced)
        np.testing.assert_array_equal(reduced.numpy(), summed)

        gathered = ctx.empty((size, length), dtype=dtype)
        dist.all_gather(gathered, ctx.tensor(values(rank, length), dtype))
        expected = [values(other, length) for other in range(size)]
        np.testing.assert_array_equal(gathered.numpy(), expected)

        scattered = ctx.empty(length, dtype=dtype)
        dist.reduce_scatter(scattered, ctx.tensor(blocks, dtype))
        mine = slice(rank * length, (rank + 1) * length)
        np.testing.assert_array_equal(scattered.numpy(), summed[mine])

        exchanged = ctx.empty((size, length), dtype=dtype)
        dist.all_to_all(exchanged, ctx.tensor(blocks, dtype))
        np.testing.assert_array_equal(exchanged.numpy(), [each[mine] for each in everyone])

        root = size - 1
        sent = ctx.tensor(values(rank, length), dtype)
        dist.broadcast(sent, src=root)
        np.testing.assert_array_equal(sent.numpy(), values(root, length))

        largest = ctx.tensor(values(rank, length), dtype)
        dist.reduce(largest, dst=root, op=dist.ReduceOp.MAX)
        if rank == root:
            np.testing.assert_array_equal(largest.numpy(), np.max(expected, axis=0))
        else:
            np.testing.assert_array_equal(largest.numpy(), values(rank, length))
        dist.barrier()

    run_ranks(ctx, size, worker)


def test_lists_of_tensors_serve_as_well_as_one(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> Any:
        parts = [ctx.empty(2) for _ in range(3)]
        ctx.distributed.all_gather(parts, ctx.full(2, rank))
        total = ctx.empty(2)
        ctx.distributed.reduce_scatter(total, parts, op=ReduceOp.AVG)
        return [part.tolist() for part in parts], total.tolist()

    for rank, (parts, total) in enumerate(run_ranks(ctx, 3, worker)):
        assert parts == [[0, 0], [1, 1], [2, 2]]
        assert total == [rank, rank]


@pytest.mark.parametrize("root", [0, 2])
def test_gather_and_scatter_give_the_blocks_of_all_to_the_root_and_back(
    ctx: RuntimeContext, root: int
) -> None:
    found: dict[int, tuple[list[list[float]], list[float]]] = {}

    def program(rank: int) -> None:
        one = ctx.tensor([float(rank), float(10 * rank)])
        blocks = [ctx.zeros(2) for _ in range(4)] if rank == root else None
        ctx.distributed.gather(one, blocks, dst=root)
        gathered = [each.numpy().tolist() for each in blocks or ()]
        back = ctx.zeros(2)
        ctx.distributed.scatter(back, blocks, src=root)
        found[rank] = gathered, back.numpy().tolist()

    ctx.multiprocessing.spawn(program, nprocs=4)

    own = [[float(rank), float(10 * rank)] for rank in range(4)]
    assert found == {rank: (own if rank == root else [], own[rank]) for rank in range(4)}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("gather", "rank 1 gives a gather_list, which rank 0 alone has, the root"),
        ("scatter", "rank 1 gives a scatter_list, which rank 0 alone has, the root"),
    ],
)
def test_only_the_root_has_blocks(ctx: RuntimeContext, what: str, told: str) -> None:
    def program(_rank: int) -> None:
        getattr(ctx.distributed, what)(ctx.zeros(2), [ctx.zeros(2) for _ in range(4)])

    with pytest.raises(SpawnException, match=told):
        ctx.multiprocessing.spawn(program, nprocs=4)


def test_the_algorithm_can_be_named_and_gives_the_same_sum(ctx: RuntimeContext) -> None:
    names = [
        "ring_allreduce", "tree_allreduce", "recursive_doubling_allreduce",
        "halving_doubling_allreduce", "direct_allreduce", "hierarchical_allreduce",
    ]  # fmt: skip

    def worker(rank: int) -> list[Any]:
        results = []
        for name in names:
            tensor = ctx.full(10, 2.0**rank)
            ctx.distributed.all_reduce(tensor, algorithm=name)
            results.append(tensor.numpy())
        return results

    for results in run_ranks(ctx, 8, worker):
        np.testing.assert_array_equal(results, np.full((len(names), 10), 255))


def test_messages_go_from_rank_to_rank_in_order(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> Any:
        box = ctx.empty(3)
        if rank == 0:
            ctx.distributed.send(ctx.full(3, 7), dst=1)
            ctx.distributed.isend(ctx.full(3, 8), dst=1).wait()
            return None
        assert ctx.distributed.recv(box, src=0) == 0
        first = box.tolist()
        work = ctx.distributed.irecv(box, src=0)
        work.wait()
        assert work.is_completed()
        return first, box.tolist()

    assert run_ranks(ctx, 2, worker)[1] == ([7, 7, 7], [8, 8, 8])


def test_two_ranks_can_exchange_messages_both_ways_at_once(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> Any:
        mine, theirs = ctx.full(1 << 16, rank), ctx.empty(1 << 16)
        start = ctx.now
        works = [
            ctx.distributed.isend(mine, dst=1 - rank),
            ctx.distributed.irecv(theirs, src=1 - rank),
        ]
        for work in works:
            work.wait()
        return ctx.now - start, theirs[0]

    (duration, one), (_, other) = run_ranks(ctx, 2, worker)
    assert (one, other) == (1, 0)
    # 256 KiB at 50 GB/s take 5.2 us; one after the other they would take twice as long.
    assert duration < 8_000_000


def test_an_asynchronous_collective_runs_while_the_rank_goes_on(ctx: RuntimeContext) -> None:
    def timed(is_async: bool) -> int:
        def worker(_rank: int) -> int:
            large, other = ctx.ones(1 << 18), ctx.empty(1 << 18)
            start = ctx.now
            work = ctx.distributed.all_reduce(large, async_op=is_async)
            with ctx.stream(ctx.Stream()):
                other.copy_(np.ones(1 << 18, np.float32))
            if work is not None:
                work.wait()
            assert large[0] == 4.0
            return ctx.now - start

        return int(run_ranks(ctx, 4, worker)[0])

    assert timed(is_async=True) < 0.8 * timed(is_async=False)


def test_groups_hold_collectives_among_themselves(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> Any:
        dist = ctx.distributed
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = even if rank % 2 == 0 else odd
        tensor = ctx.full(4, rank)
        dist.all_reduce(tensor, group=mine)
        return tensor[0], mine.rank(), mine.size(), dist.get_rank(even)

    assert run_ranks(ctx, 4, worker) == [
        (2, 0, 2, 0), (4, 0, 2, -1), (2, 1, 2, 1), (4, 1, 2, -1),
    ]  # fmt: skip


def test_one_rank_alone_is_a_world_of_its_own(ctx: RuntimeContext) -> None:
    tensor = ctx.full(4, 3.0)

    ctx.distributed.all_reduce(tensor)
    ctx.distributed.barrier()

    assert tensor.tolist() == [3.0] * 4
    assert ctx._pending_collective_waits == []


def test_the_sum_of_a_narrow_type_is_rounded_as_its_algorithm_says(ctx: RuntimeContext) -> None:
    values = [1.0, 2.0**-9, 2.0**-9, 2.0**-9]  # in bf16, 1 + 2**-9 is 1

    def worker(rank: int) -> Any:
        stepwise, at_once = (ctx.full(4, values[rank], dtype="bf16") for _ in range(2))
        ctx.distributed.all_reduce(stepwise, algorithm="ring_allreduce")
        ctx.distributed.all_reduce(at_once, algorithm="direct_allreduce")
        return stepwise.tolist(), at_once.tolist()

    stepwise, at_once = run_ranks(ctx, 4, worker)[0]
    # Part p begins at rank p: part 0 loses the small ones one by one, part 1 adds them first.
    assert stepwise[0] == 1.0
    assert stepwise[1] == 1.0078125
    assert at_once == [1.0078125] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda dist, x: dist.all_gather(x, x), r"has 8, but there is room for 4"),
        (lambda dist, x: dist.reduce_scatter(x, x.reshape(4)), r"has 2, but there is room for 4"),
        (lambda dist, x: dist.broadcast(x, src=5), r"root 5 is not a member"),
        (lambda dist, x: dist.send(x, dst=9), r"cannot exchange messages with rank 9"),
        (lambda dist, x: dist.recv(x), r"recv needs src"),
        (lambda dist, _x: dist.new_group([0, 0]), r"no rank, or one twice"),
        (lambda dist, _x: dist.init_process_group(world_size=7), r"world_size=7, but it is 2"),
    ],
)
def test_calls_that_make_no_sense_are_refused_at_once(
    ctx: RuntimeContext, call: Any, message: str
) -> None:
    with pytest.raises(SpawnException, match=message) as caught:
        ctx.multiprocessing.spawn(lambda _rank: call(ctx.distributed, ctx.ones(4)), nprocs=2)

    assert isinstance(caught.value.errors[0], LocalProtocolError)


def test_an_unknown_algorithm_is_refused_where_it_is_named(ctx: RuntimeContext) -> None:
    with pytest.raises(SpawnException, match="no collective algorithm is called 'star'") as caught:
        ctx.multiprocessing.spawn(
            lambda _rank: ctx.distributed.all_reduce(ctx.ones(4), algorithm="star"), nprocs=2
        )

    assert isinstance(caught.value.errors[0], ConfigError)


def test_buffers_that_do_not_fit_are_refused_before_anything_runs() -> None:
    configuration = {"defaults": {"slot_size": 1 << 17, "algorithm": "direct_allreduce"}}
    with RuntimeContext(engine=GraphEngine("default"), ccl=configuration) as ctx:
        with pytest.raises(SpawnException, match="the buffer is too small: 3 queues"):
            ctx.multiprocessing.spawn(lambda _: ctx.distributed.all_reduce(ctx.ones(4)), nprocs=4)

        assert not any(each.kind == "all_reduce" for each in ctx.engine.op_log)


def test_a_ring_on_a_torus_snakes_through_the_grid() -> None:
    entry = {"topology": "torus_2d"}
    configuration = {"algorithms": {"ring_allreduce_tcm": entry}}
    with RuntimeContext(engine=GraphEngine("torus16"), ccl=configuration) as ctx:

        def worker(rank: int) -> None:
            tensor = ctx.full(160, rank)
            ctx.distributed.all_reduce(tensor)
            assert tensor[7] == 120

        ctx.multiprocessing.spawn(worker, nprocs=16)
        between = [
            link.name
            for link in ctx.engine.machine.links
            if link.name.startswith("sip") and "->sip" in link.name and link.bytes_carried > 160
        ]

    assert "sip3->sip7" in between
    assert "sip3->sip0" not in between


def test_without_data_collectives_take_the_same_time() -> None:
    times = []
    for enable_data in (True, False):
        with RuntimeContext(engine=GraphEngine("default", enable_data), ccl={}) as ctx:
            run_ranks(ctx, 4, lambda _rank: ctx.distributed.all_reduce(ctx.ones(10_000)))
            times.append(ctx.now)

    assert times[0] == times[1]


def test_streams_overlap_and_events_order_them(ctx: RuntimeContext) -> None:
    side = ctx.Stream()
    start, end = ctx.Event(), ctx.Event()
    data = np.ones(1 << 16, np.float32)
    one, other = ctx.empty(1 << 16), ctx.empty(1 << 16)

    start.record()
    with ctx.stream(side):
        one.copy_(data)
        end.record()
    side.synchronize()

    assert start.elapsed_time(end) > 0.005
    assert end.query()
    ctx.default_stream().wait_event(end)
    other.copy_(one)
    assert other[5] == 1.0
