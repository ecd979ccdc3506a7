"""The programs that ship: right numbers, honest bounds, small sizes."""

import inspect
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException
from rankwise.sim.benches import NAMES, all_collectives, ccl_allreduce
from rankwise.sim.benches.checking import CheckFailed, check_close
from rankwise.sim.benches.programs import shipped_program, summaries
from rankwise.sim.benches.session import BenchSettings, simulate
from rankwise.sim.ccl.configuration import SHIPPED
from rankwise.sim.reporting.results import BenchResult

SMALL = {
    "gemm": {"m": "70", "n": "64", "k": "40", "tile": "32"},
    "softmax": {"rows": "9", "columns": "100"},
    "attention": {"heads": "1", "length": "40", "width": "16", "block": "32"},
    "memory_bandwidth": {"elements": "20000", "block": "1024"},
    "tp_mlp": {"tokens": "8", "hidden": "32", "inner": "64"},
    "ccl_allreduce": {"elements": "4096"},
    "all_collectives": {"elements": "512"},
}

ONE_CUBE = {"sip.cubes.shape": "[1, 1]"}
"""A device of 8 PEs: what holds for each of them takes less time to find out."""


def measured(name: str, *, has_data: bool = True, **fields: str) -> list[BenchResult]:
    settings = BenchSettings(program=name, fields={**SMALL[name], **fields}, has_data=has_data)
    return simulate(settings).results


@pytest.mark.parametrize("name", NAMES)
def test_every_bench_is_right_and_never_faster_than_its_bound(name: str) -> None:
    results = measured(name)

    assert results
    for result in results:
        assert result.bench == name
        assert result.is_checked
        assert result.time_ps > 0
        assert 0 < result.ratio <= 1
        assert bool(result.held_back_by) == (result.ratio < 0.9)


@pytest.mark.parametrize(("fields", "cause"), [
    ({"n_slots": "1", "slot_size": "256", "elements": "65536"}, "credits"),
    ({"pe.math.elements_per_cycle.f16": "1", "elements": "65536"}, "math"),
    ({"pe.dma.setup_ns": "3000", "elements": "4096"}, "DMA"),
    ({"n_lanes": "8", "sip.cubes.shape": "[1, 1]", "elements": "65536"}, "links"),
    ({"sip.cubes.shape": "[1, 1]", "pe.tcm.latency_ns": "900", "elements": "256"},
     "ways inside devices"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_collective_names_what_holds_it_back(fields: dict[str, str], cause: str) -> None:
    (result,) = measured("ccl_allreduce", has_data=False, **fields)

    assert result.ratio < 0.9
    assert result.held_back_by == cause


def test_a_product_with_a_wave_that_leaves_most_pes_idle_names_the_tail() -> None:
    fields = {"m": "576", "n": "64", "k": "2048", "tile": "64", **ONE_CUBE}

    (result,) = simulate(BenchSettings(program="gemm", fields=fields, has_data=False)).results

    assert result.ratio < 0.9
    assert result.held_back_by == "wave tail"


def test_a_large_ring_on_a_fast_switch_reaches_its_bound() -> None:
    settings = BenchSettings(
        program="ccl_allreduce", topology="switch8", fields={"elements": str(1 << 21)},
        has_data=False,
    )  # fmt: skip

    (result,) = simulate(settings).results

    assert result.ratio > 0.9
    assert not result.held_back_by


@pytest.mark.parametrize("name", ["gemm", "ccl_allreduce", "tp_mlp"])
def test_time_is_the_same_without_numbers(name: str) -> None:
    with_numbers, without = measured(name), measured(name, has_data=False)

    assert [each.time_ps for each in without] == [each.time_ps for each in with_numbers]
    assert not any(each.is_checked for each in without)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_product_is_right_in_every_float_type(dtype: str) -> None:
    (result,) = measured("gemm", dtype=dtype)

    assert dtype in result.case


def test_every_shipped_algorithm_with_data_is_among_the_collectives() -> None:
    names = {result.case.partition(",")[0] for result in measured("all_collectives")}

    # The machine has no switch.
    without = {
        "ring_allreduce_tcm", "dissemination_barrier", "point_to_point", "nvls_allreduce",
    }  # fmt: skip
    assert names == set(SHIPPED) - without


def test_a_large_ring_comes_near_its_bound() -> None:
    (result,) = measured("ccl_allreduce", elements=str(1 << 18), has_data=False)

    assert result.bound == "alpha-beta"
    assert result.ratio > 0.9


def test_a_product_comes_near_its_bound_with_tiles_that_nobody_has_chosen() -> None:
    fields = {"m": "512", "n": "512", "k": "1024", **ONE_CUBE}

    (result,) = simulate(BenchSettings(program="gemm", fields=fields, has_data=False)).results

    assert result.bound == "compute"
    assert result.ratio > 0.85


def test_a_product_that_the_memory_holds_back_is_told_so() -> None:
    fields = {"m": "512", "n": "512", "k": "512", "cube.hbm.bandwidth_GBps": "5"}

    (result,) = simulate(BenchSettings(program="gemm", fields=fields, has_data=False)).results

    assert result.bound == "tile loads"
    assert 0.7 < result.ratio <= 1


def test_tiles_that_do_not_fit_into_scratch_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gemm: tiles of 256 x 256 do not fit into the 64"):
        simulate(BenchSettings(program="gemm", fields={"tile": "256", "pe.tcm.capacity_KiB": "64"}))


def test_memory_bandwidth_comes_near_the_memory_of_a_device() -> None:
    results = measured("memory_bandwidth", elements=str(1 << 18), has_data=False, **ONE_CUBE)

    assert all(result.bound == "memory" for result in results)
    assert all(result.ratio > 0.7 for result in results)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("softmax", {"rows": "64", "columns": "1024"}), ("attention", {"heads": "1"})],
)
def test_exponentials_are_what_holds_a_fast_machine_back(name: str, fields: dict[str, str]) -> None:
    fast = {"pe.gemm.flops_per_cycle.f16": "16384", "cube.hbm.bandwidth_GBps": "500", **ONE_CUBE}

    (result,) = simulate(BenchSettings(program=name, fields=fields | fast, has_data=False)).results

    assert result.bound == "math"
    assert 0.2 < result.ratio <= 1


def test_the_blocks_of_many_ranks_are_smaller_unless_their_size_is_given() -> None:
    program, fields = "all_collectives", {"only": "tree_broadcast"}

    (few,) = simulate(BenchSettings(program=program, fields=fields)).results
    (many,) = simulate(BenchSettings(program=program, fields=fields, topology="pod64")).results

    assert "4 ranks x 8192" in few.case
    assert "64 ranks x 128" in many.case


def test_run_is_one_spawn_of_the_worker_that_the_module_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    spawning = SimpleNamespace(spawn=lambda *args, **options: calls.append((args, options)))
    torch = SimpleNamespace(multiprocessing=spawning, spec={"system": {"sips": {"count": 7}}})

    def other_worker(rank: int, world_size: int, torch: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(ccl_allreduce, "worker", other_worker)
    ccl_allreduce.run(torch)

    assert calls == [((other_worker,), {"args": (7, torch), "nprocs": 7})]


def test_the_configuration_of_collectives_may_set_the_world_size() -> None:
    seen = []
    context = RuntimeContext(GraphEngine("default"), ccl={"defaults": {"world_size": 3}})
    with context as torch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ccl_allreduce, "worker", lambda rank, size, _torch: seen.append((rank, size)))
        ccl_allreduce.run(torch)

    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_with_wrong_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        all_collectives._PROGRAMS,
        "broadcast",
        lambda torch, _rank, _name, elements, dtype: (
            torch.zeros(elements, dtype=dtype),
            np.ones(elements),
        ),
    )

    with pytest.raises(SpawnException, match="tree_broadcast, rank 0: 512 of 512") as failed:
        measured("all_collectives", only="tree_broadcast")

    assert isinstance(failed.value.errors[0], CheckFailed)


def test_a_check_names_the_worst_element() -> None:
    actual = np.array([[1.0, 2.0], [3.0, 4.5]])

    with pytest.raises(CheckFailed, match=r"1 of 4 .* at \(1, 1\), is 4.5, expected 4"):
        check_close("it", actual, np.array([[1.0, 2.0], [3.0, 4.0]]), tolerance=1e-3)


def test_not_a_number_is_never_close() -> None:
    with pytest.raises(CheckFailed, match="1 of 2"):
        check_close("it", np.array([1.0, np.nan]), np.array([1.0, 1.0]), tolerance=1.0)


@pytest.mark.parametrize("name", ["gemm", "softmax", "attention", "memory_bandwidth"])
def test_a_bench_of_one_device_also_runs_in_every_rank_on_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = import_module(f"rankwise.sim.benches.{name}")
    small = shipped_program(name).parameters.read(SMALL[name])
    monkeypatch.setattr(bench, "run", partial(bench.run, **small))

    with RuntimeContext(GraphEngine("default", enable_data=False), ccl={}) as torch:
        torch.multiprocessing.spawn(bench.worker, args=(2, torch), nprocs=2)

    kernels = [each for each in torch.engine.op_log if each.kind == "KernelLaunch"]
    assert {each.place for each in kernels} == {"sip0", "sip1"}


@pytest.mark.parametrize("name", ["tp_mlp", "ccl_allreduce", "all_collectives"])
def test_a_bench_of_many_ranks_has_a_worker_that_a_program_may_spawn_by_itself(name: str) -> None:
    bench = import_module(f"rankwise.sim.benches.{name}")

    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        torch.multiprocessing.spawn(bench.worker, args=(4, torch), nprocs=4)

    kinds = {each.kind for each in torch.engine.op_log}
    assert "all_reduce" in kinds


@pytest.mark.parametrize("name", NAMES)
def test_workers_are_called_as_those_of_every_program(name: str) -> None:
    worker = import_module(f"rankwise.sim.benches.{name}").worker

    first, *rest = list(inspect.signature(worker).parameters.values())[2:]

    assert list(inspect.signature(worker).parameters)[:2] == ["rank", "world_size"]
    assert first.name == "torch"
    assert all(each.default is not inspect.Parameter.empty for each in rest)


def test_every_bench_says_what_it_is() -> None:
    assert [name for name, _ in summaries()] == list(NAMES)
    assert all(summary.endswith((".", "numpy's")) for _, summary in summaries())


def test_an_unknown_bench_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ConfigError, match="did you mean gemm"):
        shipped_program("gem")


@pytest.mark.parametrize(("name", "fields", "cause"), [
    ("memory_bandwidth", {"elements": "2048", "block": "256",
                          "system.host.command_ns": "20000"}, "launch"),
    ("memory_bandwidth", {"elements": "32768", "pe.dma.setup_ns": "3000"}, "DMA"),
    ("gemm", {"m": "256", "n": "256", "k": "256", "tile": "32",
              "cube.hbm.bandwidth_GBps": "20"}, "HBM"),
    ("gemm", {"m": "256", "n": "256", "k": "256", "tile": "32", "pe.dma.setup_ns": "3000"}, "DMA"),
])  # fmt: skip
def test_a_kernel_names_what_holds_it_back(name: str, fields: dict[str, str], cause: str) -> None:
    result = simulate(
        BenchSettings(program=name, fields=fields | ONE_CUBE, has_data=False)
    ).results[0]

    assert result.ratio < 0.9
    assert result.held_back_by == cause
