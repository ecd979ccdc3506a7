"""The names that programs, tools and tests of users rely on, leading underscores included."""

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext, triton
from rankwise.sim.benches import NAMES
from rankwise.sim.ccl.configuration import SHIPPED
from rankwise.sim.hardware.topology import PRESETS, load_topology

MODULES = {
    "rankwise.sim": [
        "GraphEngine", "RuntimeContext", "DeviceSelector", "DPPolicy", "load_topology", "Deadlock",
        "SpawnException",
    ],
    "rankwise.sim.runtime.context": ["RuntimeContext"],
    "rankwise.sim.runtime.tensor": ["Tensor", "_HOST_READ_BARRIERS"],
    "rankwise.sim.runtime.distributed": ["Distributed"],
    "rankwise.sim.runtime.multiprocessing": ["SpawnException", "_drain_pending"],
    "rankwise.sim.triton.kernel_runner": ["KernelRunner"],
    "rankwise.sim.parallel": [
        "initialize_model_parallel", "destroy_model_parallel",
        "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
        "get_tensor_model_parallel_group", "get_data_parallel_rank",
        "get_data_parallel_world_size", "get_data_parallel_group", "ColumnParallelLinear",
        "RowParallelLinear", "VocabParallelEmbedding", "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
    ],
    "rankwise.sim.benches.ccl_allreduce": ["worker", "run"],
}  # fmt: skip

KERNEL_SIDE = [
    "program_id",
    "num_programs",
    "arange",
    "constexpr",
    "load",
    "store",
    "zeros",
    "full",
    "where",
    "sum",
    "max",
    "min",
    "argmax",
    "argmin",
    "maximum",
    "minimum",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "abs",
    "cos",
    "sin",
    "floor",
    "dot",
    "trans",
    "permute",
    "reshape",
    "broadcast_to",
    "join",
    "split",
    "cumsum",
    "associative_scan",
    "reduce",
    "rand",
    "cdiv",
    "range",
    "static_range",
    "assume",
    "static_assert",
    "static_print",
    "device_print",
    "multiple_of",
    "max_contiguous",
    "debug_barrier",
    "atomic_add",
    "atomic_max",
    "atomic_cas",
    "atomic_xchg",
    "make_block_ptr",
    "advance",
    "make_tensor_descriptor",
    "cast",
    "zeros_like",
    "clamp",
    "fdiv",
    "device_assert",
    "philox",
    "pointer_type",
    "tensor",
    "dtype",
    "send",
    "recv",
    "int1",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8e5",
    "float8e4nv",
]

CONTEXT = [
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "tensor",
    "from_numpy",
    "launch",
    "synchronize",
    "wait",
    "Stream",
    "Event",
    "distributed",
    "multiprocessing",
    "_completed",
    "_pending_worker_waits",
]

COLLECTIVES = [
    "init_process_group",
    "get_rank",
    "get_world_size",
    "new_group",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "barrier",
    "send",
    "recv",
    "_rank_by_greenlet",
]


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MODULES.items() for name in names]
)
def test_a_name_is_where_it_is_promised(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_the_package_lists_what_it_imports_lazily() -> None:
    package = import_module("rankwise.sim")

    assert set(MODULES["rankwise.sim"]) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


@pytest.mark.parametrize("name", KERNEL_SIDE)
def test_a_kernel_finds_the_languages_names(name: str) -> None:
    assert hasattr(tl, name)


@pytest.mark.parametrize(
    "name", ["jit", "autotune", "heuristics", "Config", "cdiv", "next_power_of_2", "set_allocator"]
)
def test_a_host_program_finds_tritons_names(name: str) -> None:
    assert callable(getattr(triton, name))


def test_a_context_has_what_programs_call_torch_for() -> None:
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        assert [name for name in CONTEXT if not hasattr(torch, name)] == []
        assert [name for name in COLLECTIVES if not hasattr(torch.distributed, name)] == []
        assert torch._pending_worker_waits == []
        assert list(inspect.signature(torch.wait).parameters) == ["handle", "_meta"]


def test_a_context_takes_what_its_users_give_by_name() -> None:
    engine = GraphEngine("default")
    selector = import_module("rankwise.sim").DeviceSelector("all")

    context = RuntimeContext(
        engine=engine, target_device=selector, correlation_id="mine", spec=engine.topology.spec
    )

    assert context.spec["system"]["sips"]["count"] == 4
    assert context.correlation_id == "mine"


def test_a_kernel_runner_is_called_with_these_arguments() -> None:
    runner = import_module("rankwise.sim.triton.kernel_runner").KernelRunner

    assert list(inspect.signature(runner.run).parameters) == [
        "self", "env", "kernel_fn", "kernel_args", "num_programs",
    ]  # fmt: skip
    assert inspect.isgeneratorfunction(runner.run)


@pytest.mark.torch
def test_spawn_has_the_signature_of_torch() -> None:
    torch_spawn = pytest.importorskip("torch.multiprocessing").spawn
    context = RuntimeContext(GraphEngine("default"), ccl={})

    ours = inspect.signature(context.multiprocessing.spawn).parameters.values()
    theirs = inspect.signature(torch_spawn).parameters.values()

    positional = [each for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [(each.name, each.default) for each in positional] == [
        (each.name, each.default) for each in theirs
    ]


def test_every_algorithm_is_a_module_of_its_own_with_its_order_documented() -> None:
    modules = {import_module(f"rankwise.sim.ccl.algorithms.{name}") for name in SHIPPED.values()}

    assert len(modules) == len(set(SHIPPED.values()))
    for module in modules:
        assert callable(module.program)
        reduces = module.COLLECTIVE in {"all_reduce", "reduce", "reduce_scatter"}
        assert not reduces or "order" in (module.__doc__ or "").lower(), module.__name__


def test_the_benches_are_those_that_are_promised() -> None:
    assert set(NAMES) == {
        "ccl_allreduce", "gemm", "softmax", "attention", "tp_mlp", "memory_bandwidth",
        "all_collectives",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "sips", "graph", "cubes", "pes"),
    [
        ("default", 4, "ring_1d", 4, 8),
        ("torus16", 16, "torus_2d", 4, 8),
        ("pod64", 64, "torus_2d", 16, 8),
        ("switch8", 8, "switch", None, None),
    ],
)
def test_a_preset_is_the_machine_that_it_is_called(
    preset: str, sips: int, graph: str, cubes: int | None, pes: int | None
) -> None:
    machine = load_topology(preset).machine

    assert (machine.system.sips.count, machine.system.sips.graph) == (sips, graph)
    assert cubes is None or (machine.sip.cubes.count, machine.cube.pes.count) == (cubes, pes)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_where_its_numbers_come_from(preset: str) -> None:
    module = import_module("rankwise.sim.hardware.topology")
    assert module.__file__ is not None
    text = (Path(module.__file__).parent / "presets" / f"{preset}.yaml").read_text()

    comment = [line for line in text.splitlines() if line.startswith("#")]

    assert "where the numbers come from" in " ".join(comment).lower()


def test_importing_the_simulator_imports_no_torch() -> None:
    code = "import sys, rankwise.sim.benches.session; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
