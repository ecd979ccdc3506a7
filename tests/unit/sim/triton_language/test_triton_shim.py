"""`import triton` finds the emulator, for libraries and scripts as they are."""

import builtins
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.runtime.context import RuntimeContext
from rankwise.sim.runtime.host_tensors import launches_on
from rankwise.sim.triton import installed
from rankwise.sim.triton import language as tl


@pytest.fixture
def triton() -> Iterator[object]:
    with installed():
        yield importlib.import_module("triton")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton.language.extra.libdevice", "rsqrt"),
        ("triton.testing", "do_bench"),
        ("triton", "jit"),
    ],
)
def test_a_module_can_be_made_from_its_spec(triton: Any, module: str, name: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None

    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)

    assert getattr(made, name) is getattr(import_module(module), name)
    assert Path(str(made.__file__)).exists()


def test_a_module_can_be_loaded_anew(triton: Any) -> None:
    language = import_module("triton.language")
    vars(language)["added_later"] = 1

    again = importlib.reload(language)

    assert again is language
    assert again.sum is tl.sum


def test_metadata_has_the_version_while_it_is_installed(triton: Any) -> None:
    assert importlib.metadata.version("triton") == triton.__version__
    assert importlib.metadata.version("Triton") == triton.__version__
    assert importlib.metadata.metadata("triton")["Name"] == "triton"


def increment(triton: Any) -> Any:
    @triton.jit
    def kernel(x_ptr: Any, out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)

    return kernel


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton", "jit"),
        ("triton", "constexpr_function"),
        ("triton.language", "load"),
        ("triton.language.core", "tensor"),
        ("triton.language.extra", "libdevice"),
        ("triton.language.extra.cuda.libdevice", "tanh"),
        ("triton.language.math", "rsqrt"),
        ("triton.runtime", "driver"),
        ("triton.runtime.autotuner", "Autotuner"),
        ("triton.runtime.driver", "driver"),
        ("triton.runtime.errors", "OutOfResources"),
        ("triton.runtime.jit", "JITFunction"),
        ("triton.compiler.compiler", "CompiledKernel"),
        ("triton.testing", "do_bench"),
        ("triton.tools.tensor_descriptor", "TensorDescriptor"),
    ],
)
def test_names_are_where_libraries_import_them_from(triton: Any, module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_driver_is_an_object_of_the_package_and_of_its_module(triton: Any) -> None:
    module = importlib.import_module("triton.runtime.driver")

    assert triton.runtime.driver is module.driver
    assert triton.runtime.driver.active.get_current_device() == 0


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("triton.experimental.gluon.language.nvidia", r"gluon's nvidia is not emulated: gluon"),
        ("triton.runtime.cache", r"triton\.runtime\.cache is not emulated: .*no binaries"),
        ("triton.compiler.code_generator", r"code_generator is not emulated: .*no compiler"),
        ("triton.backends.nvidia.driver", r"triton\.backends\.nvidia is not emulated"),
        ("triton.nonsense", r"'triton\.nonsense': rankwise emulates"),
    ],
)
def test_modules_that_are_not_emulated_are_refused_by_name(
    triton: Any, module: str, reason: str
) -> None:
    with pytest.raises(ModuleNotFoundError, match=reason):
        importlib.import_module(module)


@pytest.mark.parametrize("module", ["triton.ops", "triton.runtime.cache", "triton.nonsense"])
def test_modules_that_are_not_emulated_are_not_found(triton: Any, module: str) -> None:
    assert importlib.util.find_spec(module) is None


def test_the_loader_tells_sources_and_packages(triton: Any) -> None:
    loader = triton.__spec__.loader

    assert loader.is_package("triton.language")
    assert loader.get_source("triton.testing") == inspect.getsource(triton.testing)
    assert "def do_bench" in inspect.getsource(triton.testing)


def test_names_that_are_not_emulated_are_refused_with_the_reason(triton: Any) -> None:
    with pytest.raises(ImportError, match=r"triton\.compiler\.ASTSource .*no compiler"):
        exec("from triton.compiler import ASTSource")
    with pytest.raises(ImportError, match=r"tl\.core\.builtin .*jit function"):
        exec("from triton.language.core import builtin")
    with pytest.raises(AttributeError, match=r"triton\.knobs\.cache .*no cache"):
        _ = importlib.import_module("triton.knobs").cache
    assert not hasattr(triton.compiler, "ASTSource")


def test_gluons_modules_can_be_imported_and_hold_nothing(triton: Any) -> None:
    exec("from triton.experimental import gluon\nfrom triton.experimental.gluon import language")
    names: dict[str, Any] = {}
    exec("from triton.language.core import _aggregate as aggregate", names)

    for statement in ("gluon.jit", "gluon.language.arange"):
        with pytest.raises(ImportError, match=r"gluon's \w+ is not emulated: gluon divides blocks"):
            eval(statement, {"gluon": triton.experimental.gluon})
    with pytest.raises(ImportError, match="gluon's BlockedLayout is not emulated"):
        exec("from triton.experimental.gluon.language import BlockedLayout")
    for name in ("__wrapped__", "jit"):  # as pickle looks through all modules
        assert not hasattr(triton.experimental.gluon, name)
    with pytest.raises(NotImplementedError, match=r"class str: aggregates .*passes tuples"):
        names["aggregate"](str)


def test_libraries_find_one_driver_that_is_active_and_rates_that_are_refused_when_asked(
    triton: Any,
) -> None:
    names: dict[str, Any] = {}
    exec("from triton.backends import backends", names)
    exec("from triton.testing import get_max_simd_tflops, get_max_tensorcore_tflops, nvsmi", names)

    assert [each.driver.is_active() for each in names["backends"].values()] == [True]
    for rate in ("get_max_simd_tflops", "get_max_tensorcore_tflops"):
        with pytest.raises(NotImplementedError, match="know NVIDIA's devices alone"):
            names[rate](tl.float32, 1_000)
    with pytest.raises(NotImplementedError, match="calls NVIDIA's tools"):
        names["nvsmi"](["clocks.max.sm"])


def test_everything_is_as_before_afterwards() -> None:
    own_import = builtins.__import__
    finders, modules = list(sys.meta_path), set(sys.modules)

    with installed():
        assert "triton" in sys.modules

    assert set(sys.modules) == modules
    assert sys.meta_path == finders
    assert builtins.__import__ is own_import


def test_a_real_triton_comes_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("triton")
    monkeypatch.setitem(sys.modules, "triton", real)

    with installed():
        assert importlib.import_module("triton") is not real

    assert sys.modules["triton"] is real


def test_a_tuner_derived_from_tritons_is_made_as_tritons(triton: Any) -> None:
    class Cached(triton.runtime.autotuner.Autotuner):  # type: ignore[misc]
        def __init__(self, fn: Any, arg_names: Any, configs: Any, *rest: Any, **more: Any) -> None:
            super().__init__(fn, arg_names, configs, *rest, **more)

    configs = [triton.Config({"BLOCK": 4})]
    kernel = Cached(increment(triton), ["x_ptr", "out_ptr", "n", "BLOCK"], configs, ["n"], None,
                    None, warmup=25, rep=100)  # fmt: skip
    out = np.zeros(6)
    kernel[(2,)](np.arange(6.0), out, 6)

    assert out.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_warmed_up_kernel_is_launched_without_its_compile_time_arguments(triton: Any) -> None:
    x, out = np.arange(6.0), np.zeros(6)
    compiled = increment(triton).warmup(x, out, 6, BLOCK=8, grid=(1,))

    compiled[(1,)](x, out, 6)

    assert out.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_function_of_constants_takes_them_wrapped_or_plain(triton: Any) -> None:
    @triton.constexpr_function
    def halved(n: Any) -> Any:
        return n // 2

    assert halved(6) == halved(tl.constexpr(6)) == 3


@pytest.fixture
def context() -> Iterator[RuntimeContext]:
    with RuntimeContext(GraphEngine("default")) as context, launches_on(context):
        yield context


def test_a_launch_with_arrays_of_the_host_takes_simulated_time(triton: Any, context: Any) -> None:
    x, out = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    increment(triton)[(4,)](x, out, 1000, BLOCK=256)
    first = context.now
    increment(triton)[(4,)](out, out, 1000, BLOCK=256)

    assert (out == x + 2).all()
    assert 0 < first < context.now < 3 * first


def test_arguments_that_share_memory_share_it_on_the_machine(triton: Any, context: Any) -> None:
    x = np.zeros(16)
    view = x[4:12]

    increment(triton)[(1,)](x, view, 8, BLOCK=8)

    assert x.tolist() == [0] * 4 + [1] * 8 + [0] * 4


def test_memory_is_given_back_after_each_launch(triton: Any, context: Any) -> None:
    x = np.zeros(1 << 20, np.float32)
    kernel = increment(triton)
    for _ in range(3):
        kernel[(1,)](x, x, 4, BLOCK=4)

    assert x[:5].tolist() == [3, 3, 3, 3, 0]
    memory = context.engine.machine.sip(0).cube(0).hbm(0)
    assert context.engine.space(0).used(memory) == 0


def test_hooks_of_tuning_see_the_arrays_themselves(triton: Any, context: Any) -> None:
    out = np.full(4, 7.0)

    def clear(given: Any) -> None:
        given["out_ptr"][...] = 0

    @triton.autotune([triton.Config({"BLOCK": n}, pre_hook=clear) for n in (2, 4)], key=["n"])
    @triton.jit
    def add_one(out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.atomic_add(out_ptr + offsets, 1.0)

    add_one[lambda meta: (triton.cdiv(4, meta["BLOCK"]),)](out, 4)

    assert out.tolist() == [1, 1, 1, 1]


def test_a_stopwatch_tells_virtual_time_on_a_machine(triton: Any, context: Any) -> None:
    x = np.zeros(64, np.float32)
    kernel = increment(triton)
    once = triton.testing.do_bench(lambda: kernel[(1,)](x, x, 64, BLOCK=64))
    again = triton.testing.do_bench(lambda: kernel[(1,)](x, x, 64, BLOCK=64))

    assert once == again > 0


def test_a_repeated_axis_does_not_bound_what_a_kernel_reads(triton: Any) -> None:
    """A kernel that is given `expand`ed tensors goes along the axis with strides of its own."""
    torch = pytest.importorskip("torch")

    @triton.jit
    def kernel(x_ptr: Any, out_ptr: Any) -> None:
        i = tl.arange(0, 4)
        tl.store(out_ptr + i, tl.load(x_ptr + i))

    table, out = torch.arange(4.0), torch.zeros(4)

    kernel[(1,)](table[:1].expand(4), out)

    assert out.tolist() == table.tolist()


def test_launches_of_wrapped_kernels_take_time_on_the_machine(triton: Any) -> None:
    """Libraries derive classes from Triton's that choose, and call the kernel's `run`."""
    kernel = increment(triton)

    class Entry(triton.KernelInterface):  # type: ignore[misc]
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return kernel.run(*args, **kwargs)

    x, out = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    with RuntimeContext(GraphEngine("default")) as context, launches_on(context):
        before = context.now
        Entry()[(2,)](x, out, 8, BLOCK=4)
        took = context.now - before

    assert out.tolist() == (x + 1).tolist()
    assert took > 0


def test_what_launches_nothing_has_no_time_on_the_machine(triton: Any, context: Any) -> None:
    x = np.arange(8, dtype=np.float32)

    assert np.isnan(triton.testing.do_bench(lambda: x + 1))
    assert triton.testing.do_bench(lambda: increment(triton)[(2,)](x, x, 8, BLOCK=4)) > 0


def sums_of_tables(triton: Any) -> Any:
    @triton.jit
    def kernel(tables_ptr: Any, sizes_ptr: Any, out_ptr: Any, BLOCK: tl.constexpr) -> None:
        row = tl.program_id(0)
        size = tl.load(sizes_ptr + row)
        table = tl.load(tables_ptr + row).to(tl.pointer_type(tl.float32))
        i = tl.arange(0, BLOCK)
        tl.store(table + i, 2 * tl.load(table + i, mask=i < size), mask=i < size)
        tl.store(out_ptr + row, tl.sum(tl.load(table + i, mask=i < size, other=0.0)))

    return kernel


@pytest.mark.parametrize("topology", ["default", "pod64"])
def test_tensors_whose_addresses_lie_in_memory_are_on_the_machine_for_a_launch(
    triton: Any, topology: str
) -> None:
    torch = pytest.importorskip("torch")
    tables = [torch.arange(float(size)) for size in (700, 3, 64)]
    addresses = torch.tensor([table.data_ptr() for table in tables])
    sizes = torch.tensor([len(table) for table in tables], dtype=torch.int32)
    out = torch.zeros(3)
    expected = [2 * table for table in tables]

    with RuntimeContext(GraphEngine(topology)) as context, launches_on(context):
        sums_of_tables(triton)[(3,)](addresses, sizes, out, BLOCK=1024)
        left = context.engine.space(0).mappings()
        took = context.now

    for table, doubled in zip(tables, expected, strict=True):
        assert table.tolist() == doubled.tolist()
    assert out.tolist() == [each.sum().item() for each in expected]
    assert took > 0
    assert left == []


def test_configurations_are_tried_for_tensors_whose_addresses_lie_in_memory(triton: Any) -> None:
    torch = pytest.importorskip("torch")
    table = torch.arange(64.0)
    out = torch.zeros(1)
    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 4096})]
    kernel = triton.autotune(configs, key=[])(sums_of_tables(triton))

    with RuntimeContext(GraphEngine("default")) as context, launches_on(context):
        arguments = torch.tensor([table.data_ptr()]), torch.tensor([64], dtype=torch.int32), out
        kernel[(1,)](*arguments)

    assert out.item() == 2 * sum(range(64))
    assert kernel.best_config.kwargs["BLOCK"] in {64, 4096}


def test_numbers_of_four_bits_are_the_nearest_and_packed_two_by_two(triton: Any) -> None:
    torch = pytest.importorskip("torch")
    MXFP4Tensor = import_module("triton.tools.mxfp").MXFP4Tensor  # a class

    every = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor([0.25, 0.75, 1.25, 2.5, 5.0, -0.3, -100.0, float("nan"), 3.49])
    near = MXFP4Tensor(data=values)

    assert near.to(torch.float32).tolist() == [0, 1, 1, 2, 4, -0.5, -6, 6, 3]
    exact = MXFP4Tensor(data=torch.tensor([*every, *(-each for each in every[1:])]))
    assert exact.data.tolist() == [*range(8), *range(9, 16)]
    for axis, shape in ((0, (5, 4)), (1, (5, 4)), (1, (4, 5))):
        drawn = MXFP4Tensor(size=shape).random()
        packed = drawn.to_packed_tensor(axis)
        sizes = list(shape)
        sizes[axis] = (sizes[axis] + 1) // 2
        assert list(packed.shape) == sizes
        assert (drawn.unpack_packed_tensor(packed, axis, shape) == drawn.data).all()
    assert exact.to_packed_tensor(0)[1] == 3 << 4 | 2
    with pytest.raises(IndexError, match="axis 2 of a tensor that has 1"):
        exact.to_packed_tensor(2)
    with pytest.raises(TypeError, match=r"torch\.float32 only"):
        exact.to(torch.float16)


def test_scales_are_powers_of_two(triton: Any) -> None:
    torch = pytest.importorskip("torch")
    MXScaleTensor = import_module("triton.tools.mxfp").MXScaleTensor  # a class

    scales = MXScaleTensor(data=torch.tensor([1.0, 1.99, 2.0, 0.3, 2.0**-126, -1.0, float("inf")]))
    drawn = MXScaleTensor(size=1000).random(low=0.25, high=4.0)

    assert scales.data.tolist() == [127, 127, 128, 125, 1, 255, 255]
    assert scales.to(torch.float32).tolist()[:5] == [1, 1, 2, 0.25, 2.0**-126]
    assert scales.to(torch.float32)[5:].isnan().all()
    assert sorted(set(drawn.to(torch.float32).tolist())) == [0.25, 0.5, 1, 2, 4]
    with pytest.raises(ValueError, match=r"low is 4\.0, more than high"):
        MXScaleTensor(size=1).random(low=4.0, high=1.0)
