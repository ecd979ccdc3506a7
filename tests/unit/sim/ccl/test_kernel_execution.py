"""Algorithms as kernels: which form runs, and that nobody can tell them apart by the results."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException
from rankwise.sim.benches import ccl_allreduce
from rankwise.sim.ccl.algorithms import ring_allreduce
from rankwise.sim.kernel import main_greenlet
from rankwise.sim.triton.kernel_runner import KernelRunner

SAMPLE: dict[str, Any] = {
    "defaults": {
        "algorithm": "ring_allreduce_tcm", "buffer_kind": "tcm", "backpressure": "sleep",
        "n_slots": 4, "slot_size": 4096, "vc_chunk_size": 256, "ipcq_credit_size_bytes": 16,
    },
    "algorithms": {
        "ring_allreduce_tcm": {
            "module": "rankwise.sim.ccl.algorithms.ring_allreduce", "topology": "ring_1d",
            "buffer_kind": "tcm", "n_elem": 8,
        }
    },
}  # fmt: skip
"""The sample of the contract."""


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What `KernelRunner.run` ran: the kernel's name, and the parent when it had first yielded."""
    runs: list[tuple[str, Any]] = []
    actual = KernelRunner.run

    def run(self: KernelRunner, env: Any, kernel_fn: Any, *args: Any) -> Any:
        steps = actual(self, env, kernel_fn, *args)
        first = next(steps)
        runs.append((getattr(kernel_fn, "__name__", "?"), self._parent))
        yield first
        yield from steps

    monkeypatch.setattr(KernelRunner, "run", run)
    return runs


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> str:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return name


def reduced(
    algorithm: str,
    *,
    ranks: int,
    elements: int,
    dtype: str = "f16",
    op: str = "SUM",
    preset: str = "default",
    has_data: bool = True,
    **queues: Any,
) -> tuple[int, list[bytes]]:
    """How long an all-reduce by an algorithm took, and every rank's result."""
    results: list[bytes] = []

    def worker(rank: int, torch: Any) -> None:
        values = (np.arange(elements) * 7919 % 251 - 100.0 + 3 * rank) / 8
        if has_data and dtype in {"f16", "f32"} and elements > 2:
            values[1], values[2] = np.nan if rank == 1 else 1, -0.0
        dist = torch.distributed
        x = torch.tensor(values, dtype=dtype) if has_data else torch.empty(elements, dtype=dtype)
        dist.all_reduce(x, op=dist.ReduceOp[op], algorithm=algorithm)
        if has_data:
            results.append(x.numpy().tobytes())

    algorithms = {algorithm: {"module": algorithm, **queues}}
    engine = GraphEngine(preset, enable_data=has_data)
    with RuntimeContext(engine, ccl={"algorithms": algorithms}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
    parts = [each for each in engine.op_log if each.kind == "all_reduce"]
    assert len(parts) == ranks
    return max(each.end for each in parts) - min(each.start for each in parts), results


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The ring as data alone, and as a kernel alone."""
    common = {"COLLECTIVE": "all_reduce"}
    return (
        module_of(monkeypatch, "ring_as_data", **common, program=ring_allreduce.program),
        module_of(monkeypatch, "ring_as_kernel", **common, kernel=ring_allreduce.kernel),
    )


def test_the_sample_configuration_runs_kernels_that_are_children_of_the_main_greenlet(
    spied: list[tuple[str, Any]],
) -> None:
    with RuntimeContext(GraphEngine("default"), ccl=SAMPLE) as torch:
        ccl_allreduce.run(torch)

    assert spied == [("kernel", main_greenlet())] * 4


CASES = (
    ("default", 4, 1), ("default", 4, 7), ("default", 4, 1_000), ("default", 4, 65_536),
    ("default", 2, 65_536), ("default", 3, 50_000), ("default", 1, 100), ("default", 16, 3_001),
    ("switch8", 8, 20_000), ("torus16", 13, 5_000),
)  # fmt: skip


@pytest.mark.parametrize(("preset", "ranks", "elements"), CASES)
def test_both_forms_of_the_ring_give_the_same_bits_and_take_as_long(
    preset: str, ranks: int, elements: int, forms: tuple[str, str]
) -> None:
    data, kernel = (
        reduced(form, preset=preset, ranks=ranks, elements=elements, n_lanes=2) for form in forms
    )

    assert kernel[1] == data[1]
    assert kernel[0] == pytest.approx(data[0], rel=0.02)


@pytest.mark.parametrize("queues", [
    {"n_slots": 1}, {"n_slots": 4, "slot_size": 512}, {"slot_size": 1000, "vc_chunk_size": 8},
    {"n_slots": 4, "slot_size": 512, "n_lanes": 3},
    {"buffer_kind": "hbm"}, {"backpressure": "spin", "n_slots": 2, "slot_size": 256},
], ids=str)  # fmt: skip
def test_both_forms_agree_however_the_queues_are_laid_out(
    queues: dict[str, Any], forms: tuple[str, str]
) -> None:
    data, kernel = (
        reduced(form, ranks=4, elements=6_000, **{"n_lanes": 2, **queues}) for form in forms
    )

    assert kernel[1] == data[1]
    # Short slots count: with 4 of 512 bytes, kernels take 2.05 % less.
    assert kernel[0] == pytest.approx(data[0], rel=0.025)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "f8e4", "i8", "i32", "u16"])
def test_both_forms_combine_to_the_same_bits(dtype: str, op: str, forms: tuple[str, str]) -> None:
    if op == "AVG" and dtype[0] != "f" and dtype != "bf16":
        pytest.skip("an average of integers is not defined")
    data, kernel = (
        reduced(form, ranks=3, elements=50, dtype=dtype, op=op, n_lanes=1) for form in forms
    )

    assert kernel[1] == data[1]


def test_a_kernel_takes_as_long_without_data(forms: tuple[str, str]) -> None:
    with_data = reduced(forms[1], ranks=4, elements=5_000)
    without = reduced(forms[1], ranks=4, elements=5_000, has_data=False)

    assert without[0] == with_data[0]


@pytest.mark.parametrize(("elements", "expected"), [(65_536, 4), (1 << 20, 0)])
def test_a_module_with_both_forms_is_a_kernel_while_the_run_is_small(
    elements: int, expected: int, spied: list[tuple[str, Any]]
) -> None:
    reduced(ring_allreduce.__name__, ranks=4, elements=elements, has_data=False)

    assert len(spied) == expected


def star(workspace: Any, elements: tl.constexpr, rank: Any, size: tl.constexpr, root: Any) -> None:
    """A broadcast of a few elements; all by the first lane."""
    if tl.program_id(0) == 0:
        places = tl.arange(0, 64)
        inside = places < elements
        if rank == root:
            block = tl.load(workspace + places, mask=inside)
            for peer in tl.static_range(size):
                if peer != rank:
                    tl.send(peer, block, mask=inside)
        else:
            block = tl.recv(root, (64,), workspace.dtype.element_ty)
            tl.store(workspace + places, block, mask=inside)


def broadcast_by(kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every rank has after a broadcast from rank 2 by a module of the user's."""
    name = module_of(monkeypatch, "users_broadcast", COLLECTIVE="broadcast", kernel=kernel)
    results: list[Any] = []

    def worker(rank: int, torch: Any) -> None:
        x = torch.full((40,), rank, dtype="f32")
        torch.distributed.broadcast(x, src=2)
        results.append(x.numpy())

    ccl = {"algorithms": {"star": {"module": name}}, "collectives": {"broadcast": "star"}}
    with RuntimeContext(GraphEngine("default"), ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4)
    return results


def test_a_users_own_kernel_carries_out_a_collective(
    monkeypatch: pytest.MonkeyPatch, spied: list[tuple[str, Any]]
) -> None:
    results = broadcast_by(star, monkeypatch)

    np.testing.assert_array_equal(results, np.full((4, 40), 2.0))
    assert spied == [("star", main_greenlet())] * 4


def sends_to_all(rank: Any, size: tl.constexpr) -> None:
    for peer in tl.static_range(size):
        if peer != rank:
            tl.send(peer, tl.full((16,), 1.0, tl.float32))


def waits_for_the_root(rank: Any, root: Any) -> None:
    if rank != root:
        tl.recv(root, (16,), tl.float32)


def sends_to_itself(rank: Any) -> None:
    tl.send(rank, tl.full((16,), 1.0, tl.float32))


@pytest.mark.parametrize(("kernel", "told"), [
    (sends_to_all, r"algorithm star: its kernel has sent data that no rank received: 1 slot "),
    (waits_for_the_root, r"rank 0 lane 0: waits_for_the_root on .*_kernel_execution.py:\d+"),
    (sends_to_itself, r"0 is not a peer: expected a rank from 0 to 3 other than 0"),
])  # fmt: skip
def test_a_kernel_whose_messages_do_not_fit_is_told(
    kernel: Callable[..., None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpawnException, match=told):
        broadcast_by(kernel, monkeypatch)


def test_a_kernel_that_wants_what_nobody_gives_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(workspace: Any, neighbour: Any) -> None:
        raise NotImplementedError

    name = module_of(monkeypatch, "wants_more", COLLECTIVE="all_reduce", kernel=kernel)

    told = r"a parameter 'neighbour' that gets no value; expected some of workspace, "
    with pytest.raises(ConfigError, match=told):
        RuntimeContext(GraphEngine("default"), ccl={"algorithms": {"mine": {"module": name}}})


def test_a_module_without_either_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = module_of(monkeypatch, "empty_module", COLLECTIVE="all_reduce")

    with pytest.raises(ConfigError, match=r"no function program.* and no kernel"):
        RuntimeContext(GraphEngine("default"), ccl={"algorithms": {"mine": {"module": name}}})
