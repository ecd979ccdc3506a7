"""`spawn`: turns, root causes, how the others end, and what stuck ranks are told."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, Deadlock, LocalProtocolError
from rankwise.base.failure import ExitStatus, FailureCause
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException, load_topology
from rankwise.sim.hardware import MemoryExhausted, Run
from rankwise.sim.runtime.multiprocessing import RanksStuck


@pytest.fixture
def ctx(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeContext]:
    monkeypatch.chdir(tmp_path)
    with RuntimeContext(engine=GraphEngine(load_topology("default"))) as context:
        yield context


def lasting(ctx: RuntimeContext, what: Any, sip: int = 0) -> Any:
    """A command that waits for some picoseconds or for an event, and does nothing else."""

    def start(_env: Any) -> Any:
        yield what

    return ctx.engine.submit(Run(sip=sip, start=start))


def assert_is_clean(ctx: RuntimeContext) -> None:
    assert ctx._pending_worker_waits == []
    assert ctx._pending_collective_waits == []
    assert ctx.distributed._rank_by_greenlet == {}
    assert ctx.distributed.get_world_size() == 1


def test_the_function_is_called_once_per_rank_with_its_arguments(ctx: RuntimeContext) -> None:
    calls: list[tuple[Any, ...]] = []

    ctx.multiprocessing.spawn(lambda *args: calls.append(args), args=("a", 2), nprocs=3)

    assert calls == [(0, "a", 2), (1, "a", 2), (2, "a", 2)]


def test_a_rank_knows_its_number_and_that_of_all(ctx: RuntimeContext) -> None:
    seen: list[tuple[int, int, int]] = []

    def worker(rank: int) -> None:
        dist = ctx.distributed
        dist.init_process_group(backend="anything", world_size=3, rank=rank)
        seen.append((rank, dist.get_rank(), dist.get_world_size()))

    ctx.multiprocessing.spawn(worker, nprocs=3)

    assert seen == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert_is_clean(ctx)


def test_ranks_take_turns_from_wait_to_wait(ctx: RuntimeContext) -> None:
    order: list[str] = []

    def worker(rank: int) -> None:
        for step in range(3):
            order.append(f"{rank}.{step}")
            ctx.wait(lasting(ctx, 10, rank))

    ctx.multiprocessing.spawn(worker, nprocs=2)

    assert order == ["0.0", "1.0", "0.1", "1.1", "0.2", "1.2"]


def test_all_ranks_submit_before_any_time_passes(ctx: RuntimeContext) -> None:
    instants: list[int] = []

    def worker(rank: int) -> None:
        instants.append(ctx.now)
        ctx.wait(lasting(ctx, 1000, rank))

    ctx.multiprocessing.spawn(worker, nprocs=4)

    assert len(set(instants)) == 1
    assert ctx.now == instants[0] + 1000 + 500_000  # in parallel, plus what a command costs


def test_a_schedule_seed_permutes_the_order_in_the_same_way_each_time(ctx: RuntimeContext) -> None:
    def order_with(seed: int | None) -> list[int]:
        order: list[int] = []
        ctx.multiprocessing.spawn(order.append, nprocs=4, schedule_seed=seed)
        return order

    assert order_with(None) == [0, 1, 2, 3]
    assert order_with(5) == order_with(5)
    assert any(order_with(seed) != [0, 1, 2, 3] for seed in range(4))


def test_joining_later_runs_the_ranks_then(ctx: RuntimeContext) -> None:
    ran: list[int] = []

    later = ctx.multiprocessing.spawn(ran.append, nprocs=2, join=False)

    assert ran == []
    assert later is not None
    assert later.join()
    assert ran == [0, 1]
    later.join()
    assert ran == [0, 1]


def test_a_rank_that_raises_is_the_only_one_that_is_told(ctx: RuntimeContext) -> None:
    endings: list[str] = []

    def worker(rank: int) -> None:
        tensor = ctx.ones(4)
        if rank == 1:
            raise ValueError("the disk is on fire")
        try:
            ctx.distributed.all_reduce(tensor)
        except SystemExit:
            endings.append(f"rank {rank} left")
            raise
        finally:
            endings.append(f"rank {rank} cleaned up")

    with pytest.raises(SpawnException, match="rank 1: ValueError: the disk is on fire") as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], ValueError)
    assert caught.value.__cause__ is caught.value.errors[1]
    assert endings == [f"rank {rank} {how}" for rank in (0, 2) for how in ("left", "cleaned up")]
    assert_is_clean(ctx)


def test_an_exception_that_cannot_be_printed_is_told_by_its_class(ctx: RuntimeContext) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def worker(rank: int) -> None:
        raise Mute

    with pytest.raises(SpawnException, match="Mute: <its text cannot be had: RuntimeError>"):
        ctx.multiprocessing.spawn(worker, nprocs=1)


def test_ranks_that_raise_at_one_instant_are_all_root_causes(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        ctx.wait(lasting(ctx, 10, rank))
        if rank != 1:
            raise RuntimeError(rank)
        ctx.zeros(4)

    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    assert list(caught.value.errors) == [0, 2]


def test_the_failure_that_explains_the_others_comes_first_as_it_does_of_processes(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        ctx.wait(lasting(ctx, 10, rank))
        if rank == 0:
            raise ConnectionResetError("connection reset by peer")
        if rank == 1:
            sys.exit(3)
        ctx.distributed.barrier()

    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    exited, raised, told_to_stop = caught.value.failures
    assert (exited.rank, exited.cause, exited.exit) == (1, FailureCause.EXITED, ExitStatus(3))
    assert (raised.rank, raised.cause, raised.at) == (0, FailureCause.RAISED, exited.at)
    assert (told_to_stop.rank, told_to_stop.cause) == (2, FailureCause.STOPPED)
    assert raised.error is not None
    assert (raised.error.type, raised.error.message) == (
        "ConnectionResetError",
        "connection reset by peer",
    )
    assert "in worker" in raised.error.traceback
    assert caught.value.__cause__ is caught.value.errors[1]
    assert str(caught.value).index("rank 1") < str(caught.value).index("rank 0")
    assert list(caught.value.errors) == [0, 1]


def test_of_ranks_that_are_stuck_those_that_are_out_of_step_come_first(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        if rank != 1:
            ctx.distributed.barrier()

    with pytest.raises(RanksStuck) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    culprit, *waiting = caught.value.failures
    assert (culprit.rank, culprit.cause) == (1, FailureCause.OUT_OF_STEP)
    assert culprit.detail == str(caught.value).splitlines()[0]
    assert [(each.rank, each.cause) for each in waiting] == [
        (0, FailureCause.STOPPED),
        (2, FailureCause.STOPPED),
    ]
    assert waiting[0].waits_for.startswith("rank 1 to call barrier #1")
    assert waiting[0].stacks.endswith(" in worker\n")


def test_of_a_call_that_nobody_waited_for_those_that_never_came_are_to_blame(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        if rank == 0:
            ctx.distributed.all_reduce(ctx.ones(4), async_op=True)

    with pytest.raises(RanksStuck, match="never took place") as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    assert [(each.rank, each.cause) for each in caught.value.failures] == [
        (1, FailureCause.OUT_OF_STEP),
        (2, FailureCause.OUT_OF_STEP),
    ]


def test_a_failed_command_is_the_failure_of_the_rank_that_waits_for_it(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        ctx.zeros((1 << 40) if rank == 2 else 4)

    ctx.engine.enable_data = False  # or the host would need as much memory
    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    assert list(caught.value.errors) == [2]
    assert isinstance(caught.value.errors[2], MemoryExhausted)
    assert_is_clean(ctx)


def test_a_sibling_that_waits_again_while_it_is_ended_is_ended_all_the_same(
    ctx: RuntimeContext,
) -> None:
    tries: list[str] = []

    def worker(rank: int) -> None:
        if rank == 0:
            raise ValueError("first")
        try:
            ctx.distributed.barrier()
        finally:
            try:
                ctx.zeros(4)
            finally:
                tries.append("ended")

    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert list(caught.value.errors) == [0]
    assert tries == ["ended"]
    assert_is_clean(ctx)


def test_leaving_with_a_code_is_a_failure_and_without_one_is_not(ctx: RuntimeContext) -> None:
    ctx.multiprocessing.spawn(lambda _rank: sys.exit(0), nprocs=2)
    ctx.multiprocessing.spawn(lambda _rank: sys.exit(256), nprocs=2)  # the system takes eight bits

    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(sys.exit, nprocs=2)

    assert list(caught.value.errors) == [1]


def test_an_interrupt_ends_the_ranks_and_goes_on_to_the_caller(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        ctx.distributed.barrier()

    with pytest.raises(KeyboardInterrupt):
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert_is_clean(ctx)


def test_ranks_that_make_different_groups_are_told(ctx: RuntimeContext) -> None:
    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(lambda rank: ctx.distributed.new_group([rank]), nprocs=2)

    assert "rank 1 makes group 0 of ranks [1], another rank made it of [0]" in str(caught.value)
    assert list(caught.value.errors) == [1]


def test_ranks_in_different_collectives_are_told_what_everyone_called(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        for _ in range(4):
            ctx.distributed.barrier()
        tensor = ctx.ones(4, dtype="f16")
        if rank == 0:
            ctx.distributed.all_reduce(tensor)
        else:
            ctx.distributed.broadcast(tensor, src=0)

    with pytest.raises(RanksStuck) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    text = str(caught.value)
    assert text.startswith(
        "call #5: ranks 0 and 1 disagree: rank 0 called all_reduce of (4,) f16 ("
    )
    assert ", rank 1 called broadcast of (4,) f16 (test_simulated_spawn.py:" in text
    assert "rank 0 is in all_reduce #5 of (4,) f16, at " in text
    assert "rank 1 is in broadcast #5 of (4,) f16, at " in text
    assert __file__ in text
    assert isinstance(caught.value, Deadlock)
    assert sorted(caught.value.stacks) == [0, 1]
    assert "in worker" in caught.value.stacks[1]
    assert [each.who for each in caught.value.waiting] == ["rank 0", "rank 1"]
    assert_is_clean(ctx)


def test_ranks_with_different_shapes_do_not_meet(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        ctx.distributed.all_reduce(ctx.ones(4 + rank))

    with pytest.raises(RanksStuck, match=r"all_reduce #1 of \(5,\) f32"):
        ctx.multiprocessing.spawn(worker, nprocs=2)


def test_a_rank_that_left_early_is_named(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        ctx.distributed.barrier()
        if rank == 1:
            return
        ctx.distributed.all_reduce(ctx.ones(4, dtype="f16"))

    with pytest.raises(RanksStuck) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=3)

    text = str(caught.value)
    assert text.startswith("rank 1 was done after barrier #1 (test_simulated_spawn.py:")
    assert "rank 0 is in all_reduce #2 of (4,) f16" in text
    assert "rank 1 has returned after barrier #1" in text
    assert_is_clean(ctx)


def test_ranks_that_wait_for_each_others_messages_are_reported(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        ctx.distributed.recv(ctx.zeros(4), src=1 - rank)

    with pytest.raises(RanksStuck) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert "rank 0 is in recv #1 of (4,) f32 from rank 1, at " in str(caught.value)


def test_a_deadlock_on_the_machine_names_the_ranks_too(ctx: RuntimeContext) -> None:
    def worker(rank: int) -> None:
        never = ctx.engine.simulator.future("what never comes")
        ctx.wait(lasting(ctx, never, rank))

    with pytest.raises(Deadlock) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert "rank 0 is waiting for a command" in str(caught.value)
    assert "what never comes" in str(caught.value)
    assert_is_clean(ctx)


def test_after_a_failure_ranks_can_be_spawned_again(ctx: RuntimeContext) -> None:
    def failing(rank: int) -> None:
        ctx.distributed.all_reduce(ctx.ones(4))
        if rank == 0:
            raise ValueError
        ctx.distributed.all_reduce(ctx.ones(4))

    with pytest.raises(SpawnException):
        ctx.multiprocessing.spawn(failing, nprocs=2)
    sums: list[Any] = []

    def working(_rank: int) -> None:
        tensor = ctx.ones(4)
        ctx.distributed.all_reduce(tensor)
        sums.append(tensor[0])

    ctx.multiprocessing.spawn(working, nprocs=2)

    assert sums == [2.0, 2.0]


def test_ranks_cannot_have_ranks(ctx: RuntimeContext) -> None:
    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(
            lambda _rank: ctx.multiprocessing.spawn(lambda _inner: None), nprocs=1
        )

    assert isinstance(caught.value.errors[0], LocalProtocolError)


def test_more_ranks_than_cubes_are_refused_before_any_runs(ctx: RuntimeContext) -> None:
    ran: list[int] = []

    with pytest.raises(ConfigError, match="17 ranks do not fit on 4 SIPs with 4 cubes each"):
        ctx.multiprocessing.spawn(ran.append, nprocs=17)

    assert ran == []


def test_more_ranks_than_sips_share_their_cubes(ctx: RuntimeContext) -> None:
    devices: list[Any] = []

    def worker(_rank: int) -> None:
        devices.append((ctx.device.sip, ctx.device.cubes))
        tensor = ctx.ones(100)
        ctx.distributed.all_reduce(tensor)
        assert tensor[99] == 6.0

    ctx.multiprocessing.spawn(worker, nprocs=6)

    assert devices == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3)), (2, (0, 1)), (2, (2, 3))]


def test_a_thousand_ranks_of_deferred_waits_are_drained_in_order(ctx: RuntimeContext) -> None:
    ended: list[int] = []

    def worker(rank: int) -> None:
        ctx.wait(lasting(ctx, rank + 1, rank % 4))
        ended.append(rank)

    ctx.multiprocessing.spawn(worker, nprocs=16)

    assert ended == list(range(16))


PROGRAM = """
from rankwise.sim import GraphEngine, RuntimeContext
with RuntimeContext(engine=GraphEngine("default"), ccl={}) as ctx:
    def worker(rank):
        x = ctx.randn((7, 5), dtype="f16")
        ctx.distributed.all_reduce(x)
        y = ctx.empty((3 * 7, 5), dtype="f16")
        ctx.distributed.all_gather(y, x)
        print(rank, y.numpy().tobytes().hex(), ctx.now)
    ctx.multiprocessing.spawn(worker, nprocs=3)
    print(ctx.engine.op_log.encode().decode())
"""


@pytest.mark.system
def test_a_run_and_its_repetition_are_the_same_to_the_byte_under_different_hash_seeds() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]

    assert outputs[0] == outputs[1]
    assert b"all_reduce" in outputs[0]


def test_random_values_differ_by_rank_and_repeat_by_seed(ctx: RuntimeContext) -> None:
    def draw() -> list[Any]:
        drawn: list[Any] = []
        ctx.manual_seed(3)
        ctx.multiprocessing.spawn(lambda _rank: drawn.append(ctx.rand(3).numpy()), nprocs=2)
        return drawn

    first, second = draw(), draw()

    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, second)


def waits_for_ever(flag: Any) -> None:
    while tl.atomic_cas(flag, 1, 2) != 1:
        pass


def test_the_end_of_a_context_does_not_tell_a_deadlock_again() -> None:
    context = RuntimeContext(GraphEngine("default"), ccl={})

    with context as ctx, pytest.raises(Deadlock, match="waits for memory to change"):
        ctx.launch(waits_for_ever, 1, ctx.zeros(1, dtype="i32"))


def test_the_end_of_a_context_does_not_wait_for_what_failed_ranks_have_left() -> None:
    def worker(rank: int, ctx: RuntimeContext) -> None:
        flag = ctx.zeros(1, dtype="i32")
        if rank == 1:
            raise ValueError("the one that was to set the flag")
        ctx.launch(waits_for_ever, 1, flag)

    context = RuntimeContext(GraphEngine("default"), ccl={})

    with context as ctx, pytest.raises(SpawnException, match="rank 1: ValueError"):
        ctx.multiprocessing.spawn(worker, args=(ctx,), nprocs=2)


def test_the_end_of_a_context_tells_a_deadlock_that_nobody_was_told() -> None:
    ctx = RuntimeContext(GraphEngine("default"), ccl={})

    with pytest.raises(Deadlock, match="waits for memory to change"), ctx, ctx.stream(ctx.Stream()):
        ctx.launch(waits_for_ever, 1, ctx.zeros(1, dtype="i32"))


def test_a_collective_that_was_begun_and_that_others_never_called_is_told(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        if rank == 0:
            ctx.distributed.all_reduce(ctx.ones(4), async_op=True)

    with pytest.raises(RanksStuck) as stuck:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert str(stuck.value).startswith(
        "all_reduce #1 of (4,) f32 of rank 0 never took place: rank 1 did not call it\n"
        "  rank 0 has returned after all_reduce #1 of (4,) f32; "
        "rank 1 has returned without calling any collective"
    )
    assert_is_clean(ctx)
