"""Waiting inside a rank, the rule that everything else rests on."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent, greenlet

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, LocalProtocolError, TimeLimit
from rankwise.sim import DPPolicy, GraphEngine, RuntimeContext, load_topology
from rankwise.sim.hardware import MemoryExhausted, MemoryWrite, MmuMap, Run
from rankwise.sim.runtime.multiprocessing import _drain_pending
from rankwise.sim.runtime.tensor import _HOST_READ_BARRIERS, Tensor
from rankwise.sim.triton.kernel_runner import KernelRunner

SAID_IN_TERMS_OF_NUMPY = {"__array__", "__bool__", "__float__", "__int__", "item", "tolist"}


@pytest.fixture
def ctx(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeContext]:
    monkeypatch.chdir(tmp_path)
    with RuntimeContext(engine=GraphEngine(load_topology("default"))) as context:
        yield context


def lasting(ctx: RuntimeContext, picoseconds: int, sip: int = 0) -> Any:
    """A command that takes some time, and nothing else."""

    def start(_env: Any) -> Any:
        yield picoseconds

    return ctx.engine.submit(Run(sip=sip, start=start))


def engine_waits(ctx: RuntimeContext, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The handles that the engine is asked to wait for, from now on."""
    asked: list[Any] = []
    wait = ctx.engine.wait

    def noting(handle: Any) -> Any:
        asked.append(handle)
        return wait(handle)

    monkeypatch.setattr(ctx.engine, "wait", noting)
    return asked


def test_waiting_outside_of_ranks_runs_the_simulation(ctx: RuntimeContext) -> None:
    handle = lasting(ctx, 1000)

    ctx.wait(handle)

    assert handle.is_done
    assert handle in ctx._completed
    assert ctx._pending_worker_waits == []


def test_waiting_for_what_is_complete_does_not_ask_the_engine_again(
    ctx: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = lasting(ctx, 1000)
    asked = engine_waits(ctx, monkeypatch)

    ctx.wait(handle)
    ctx.wait(handle, _meta={"anything": 1})

    assert asked == [handle]


def test_a_wait_in_a_rank_is_deferred_and_switches_to_the_parent(ctx: RuntimeContext) -> None:
    handle = lasting(ctx, 1000)
    seen: list[bool] = []

    def rank() -> None:
        ctx.wait(handle)
        seen.append(handle in ctx._completed)

    worker = greenlet(rank)
    worker.switch()

    assert ctx._pending_worker_waits == [handle]
    assert not handle.is_done
    assert seen == []
    _drain_pending(ctx)
    worker.switch()
    assert worker.dead
    assert seen == [True]
    assert ctx._pending_worker_waits == []


def test_a_rank_that_waits_for_what_is_complete_goes_straight_on(ctx: RuntimeContext) -> None:
    handle = lasting(ctx, 10)
    ctx.wait(handle)

    worker = greenlet(ctx.wait)
    worker.switch(handle)

    assert worker.dead


def test_a_rank_that_is_woken_without_a_drain_sees_its_wait_through_itself(
    ctx: RuntimeContext,
) -> None:
    handle = lasting(ctx, 1000)
    worker = greenlet(ctx.wait)
    worker.switch(handle)

    worker.switch()

    assert worker.dead
    assert handle.is_done
    assert handle in ctx._completed
    assert ctx._pending_worker_waits == []


def test_whoever_takes_a_wait_off_the_list_has_seen_to_it(ctx: RuntimeContext) -> None:
    handle = lasting(ctx, 1000)
    worker = greenlet(ctx.wait)
    worker.switch(handle)

    ctx.engine.wait(ctx._pending_worker_waits.pop())
    worker.switch()

    assert worker.dead
    assert handle in ctx._completed


def test_draining_goes_on_until_both_lists_are_empty(ctx: RuntimeContext) -> None:
    first, second, third = (lasting(ctx, length) for length in (10, 20, 30))
    ctx._pending_worker_waits += [first, second]
    ctx._pending_collective_waits.append(third)

    def add_another(_env: Any) -> Any:
        yield 1
        ctx._pending_worker_waits.append(late)

    late = lasting(ctx, 5)
    # Not before the deferred waits have been drained, but while the collectives are.
    adding = Run(sip=1, start=add_another, after=(first, second))
    ctx._pending_collective_waits.append(ctx.engine.submit(adding))

    _drain_pending(ctx)

    assert ctx._pending_worker_waits == []
    assert ctx._pending_collective_waits == []
    assert {first, second, third, late} <= ctx._completed


def test_what_a_command_failed_with_is_raised_in_the_rank_that_waits(ctx: RuntimeContext) -> None:
    caught: list[BaseException] = []

    def rank() -> None:
        try:
            ctx.wait(ctx.engine.submit(MmuMap(sip=0, address=4096, size=1 << 60)))
        except MemoryExhausted as error:
            caught.append(error)

    worker = greenlet(rank)
    worker.switch()
    _drain_pending(ctx)
    worker.switch()

    assert len(caught) == 1


def test_a_limit_that_is_over_ends_the_wait_and_is_no_failure_of_the_command(
    ctx: RuntimeContext,
) -> None:
    def start(_env: Any) -> Any:
        yield 10
        raise TimeLimit("the time is over")

    handle = ctx.engine.submit(Run(sip=0, start=start))

    with pytest.raises(TimeLimit, match="the time is over"):
        ctx.wait(handle)
    assert not handle.is_done
    assert handle not in ctx._completed


def test_making_a_tensor_maps_it_and_then_writes_it(
    ctx: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    wait = ctx.wait

    def noting(handle: Any, **more: Any) -> None:
        waited.append(type(handle.command).__name__)
        wait(handle, **more)

    monkeypatch.setattr(ctx, "wait", noting)

    ctx.zeros((2, 3), dtype="f16")

    assert waited == [MmuMap.__name__, MemoryWrite.__name__]


def test_launching_waits_through_the_context(
    ctx: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    wait = ctx.wait

    def noting(handle: Any) -> None:
        waited.append(handle)
        wait(handle)

    monkeypatch.setattr(ctx, "wait", noting)

    def kernel(x: Any) -> None:  # a kernel takes an array
        pass

    handle = ctx.launch(kernel, 1, ctx.zeros(4))

    assert waited[-1] is handle
    assert handle.is_done


def test_memory_that_was_zeroed_reads_as_zero_with_and_without_a_copy(ctx: RuntimeContext) -> None:
    untouched = ctx.zeros((5, 7), dtype="bf16")
    unwritten = ctx.empty((5, 7), dtype="i32")
    copied = ctx.zeros(3).copy_([1.0, 2.0, 3.0])

    np.testing.assert_array_equal(untouched.numpy(), np.zeros((5, 7)))
    np.testing.assert_array_equal(unwritten.numpy(), np.zeros((5, 7)))
    np.testing.assert_array_equal(copied.numpy(), [1, 2, 3])


@pytest.mark.parametrize("read", sorted(_HOST_READ_BARRIERS | SAID_IN_TERMS_OF_NUMPY))
def test_a_host_read_drains_deferred_waits_but_no_collectives(
    ctx: RuntimeContext, read: str
) -> None:
    tensor = ctx.ones(1)
    deferred, collective = lasting(ctx, 1000), lasting(ctx, 10**9)
    ctx._pending_worker_waits.append(deferred)
    ctx._pending_collective_waits.append(collective)

    member = getattr(tensor, read)  # the property reads at once
    if read != "data":
        member(*([0] if read == "__getitem__" else []))

    assert deferred in ctx._completed
    assert ctx._pending_worker_waits == []
    assert collective not in ctx._completed
    ctx._pending_collective_waits.clear()


def test_the_registry_of_host_reads_is_closed() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Tensor)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    readers = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "_fetch"
    }

    assert readers == _HOST_READ_BARRIERS
    assert all(hasattr(Tensor, name) for name in _HOST_READ_BARRIERS)
    uses_memory_read = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == "MemoryRead"
    }
    assert uses_memory_read == {"_fetch"}


def test_copying_into_a_tensor_drains_nothing(
    ctx: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ctx.zeros(4)
    deferred = lasting(ctx, 10**12, sip=1)
    ctx._pending_worker_waits.append(deferred)

    target.copy_(np.ones(4))

    assert not deferred.is_done
    assert ctx._pending_worker_waits == [deferred]


def test_copying_from_a_tensor_is_a_barrier_for_it(ctx: RuntimeContext) -> None:
    source, target = ctx.ones(4), ctx.zeros(4)
    deferred = lasting(ctx, 1000)
    ctx._pending_worker_waits.append(deferred)

    target.copy_(source)

    assert deferred in ctx._completed
    np.testing.assert_array_equal(target.numpy(), np.ones(4))


def test_host_read_in_a_rank_does_not_wait_for_other_devices(ctx: RuntimeContext) -> None:
    seen: list[Any] = []

    def worker(rank: int) -> None:
        tensor = ctx.full(3, rank)
        if rank == 0:
            ctx.wait(lasting(ctx, 10**9))
        else:
            own, others = lasting(ctx, 10**6, sip=1), list(ctx._pending_worker_waits)
            values = tensor.numpy()
            seen.append((values.tolist(), [handle.is_done for handle in (own, *others)]))

    ctx.multiprocessing.spawn(worker, nprocs=2)

    assert seen == [([1.0, 1.0, 1.0], [True, False])]


def test_a_host_read_in_a_rank_does_not_wait_for_a_collective_of_others(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        tensor = ctx.full(3, rank + 1)
        if rank == 0:
            ctx.distributed.all_reduce(tensor)
        else:
            assert tensor.numpy().tolist() == [2.0, 2.0, 2.0]
            tensor.copy_(tensor.numpy() * 10)
            ctx.distributed.all_reduce(tensor)
        assert tensor.numpy().tolist() == [21.0, 21.0, 21.0]

    ctx.multiprocessing.spawn(worker, nprocs=2)


def test_a_kernel_is_never_the_child_of_the_rank_that_launched_it(ctx: RuntimeContext) -> None:
    parents: list[Any] = []

    def kernel(x: Any) -> None:  # a kernel takes an array
        parents.append(getcurrent().parent)

    def worker(_rank: int) -> None:
        ctx.launch(kernel, 3, ctx.zeros(4))

    ctx.multiprocessing.spawn(worker, nprocs=2)

    assert parents == [getcurrent()] * 6


def test_the_runner_knows_its_parent_when_it_first_yields(ctx: RuntimeContext) -> None:
    main = getcurrent()
    runner = KernelRunner()
    found: list[Any] = []

    def first_step() -> None:
        steps = runner.run(None, lambda: None, (), 1)  # type: ignore[arg-type]
        next(steps)
        found.append(runner._parent)

    greenlet(first_step).switch()

    assert found == [main]


def test_an_engine_without_data_has_no_values_to_read() -> None:
    with RuntimeContext(engine=GraphEngine("default", enable_data=False), ccl={}) as ctx:
        tensor = ctx.zeros((1024, 1024), dtype="f16", name="weights")

        with pytest.raises(LocalProtocolError, match="weights has no values"):
            tensor.numpy()
        assert "without data" in repr(tensor)
        assert ctx.now > 0


def test_a_tensor_that_was_freed_is_not_used_again(ctx: RuntimeContext) -> None:
    tensor = ctx.ones(4, name="old")
    space, memory = ctx.engine.space(0), ctx.engine.machine.sip(0).cube(0).hbm(0)
    assert space.used(memory) == 16

    tensor.free()
    ctx.synchronize()

    assert space.used(memory) == 0
    with pytest.raises(LocalProtocolError, match="old was used after it was freed"):
        tensor.numpy()


def test_policies_put_tensors_where_they_say(ctx: RuntimeContext) -> None:
    space, sip = ctx.engine.space(0), ctx.engine.machine.sip(0)

    policy = DPPolicy(cube="row", pe="column", num_cubes=2, num_pes=2)
    tensor = ctx.zeros((4, 8), dtype="f32", dp=policy)

    stretches = [(memory.name, size) for memory, size in space.stretches(tensor.address, 128)]
    first, second = sip.cube(0), sip.cube(1)
    row = [(first.hbm(0).name, 16), (first.hbm(1).name, 16)]
    other = [(second.hbm(0).name, 16), (second.hbm(1).name, 16)]
    assert stretches == row * 2 + other * 2
    values = np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(tensor.copy_(values).numpy(), values)


def test_replicas_take_up_memory_everywhere(ctx: RuntimeContext) -> None:
    policy = DPPolicy(cube="replicate", pe="replicate", num_cubes=4, num_pes=8)

    ctx.zeros((4, 4), dtype="f32", dp=policy)

    space, sip = ctx.engine.space(0), ctx.engine.machine.sip(0)
    for cube in range(4):
        for pe in range(8):
            assert space.used(sip.cube(cube).hbm(pe)) == 64


def test_a_tensor_of_another_device_is_copied_before_the_host_sees_the_target(
    ctx: RuntimeContext,
) -> None:
    shared: list[Tensor] = []

    def worker(rank: int) -> None:
        shared.append(ctx.full(1 << 16, 5 * rank))
        ctx.distributed.barrier()
        if rank == 1:
            shared[0].copy_(shared[1])
        else:
            assert shared[0][0] in {0.0, 5.0}
            ctx.wait(lasting(ctx, 10**9))
            assert shared[0][1] == 5.0

    ctx.multiprocessing.spawn(worker, nprocs=2)


def test_host_reads_of_several_ranks_take_place_at_the_same_time(ctx: RuntimeContext) -> None:
    def duration(size: int) -> int:
        took: list[int] = []

        def worker(_rank: int) -> None:
            tensor = ctx.ones(1 << 16)
            start = ctx.now
            tensor.numpy()
            took.append(ctx.now - start)

        ctx.multiprocessing.spawn(worker, nprocs=size)
        return max(took)

    assert duration(4) == duration(1)


@pytest.mark.parametrize("spelling", ["f16", "float16", np.float16, tl.float16, "torch.float16"])
def test_a_type_is_known_by_all_its_names(ctx: RuntimeContext, spelling: Any) -> None:
    assert ctx.zeros(2, dtype=spelling).dtype == "f16"


def test_torchs_own_types_are_known_too(ctx: RuntimeContext) -> None:
    torch = pytest.importorskip("torch")

    assert ctx.zeros(2, dtype=torch.bfloat16).dtype == "bf16"
    with pytest.raises(ConfigError, match=r"there is no dtype torch\.complex64"):
        ctx.zeros(2, dtype=torch.complex64)
