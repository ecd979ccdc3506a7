"""The host's side: arguments, grids, jit, autotune, heuristics, testing."""

import inspect
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.runtime.host_tensors import launches_on
from rankwise.sim.triton.tools.tensor_descriptor import TensorDescriptor

SCALE = tl.constexpr(3)


@triton.jit
def scale_kernel(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n, other=0) * SCALE, mask=i < n)


def test_a_global_constexpr_is_read_anew_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)

    scale_kernel[(1,)](x, out, 8, B=8)
    first = out.copy()
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(5))
    scale_kernel[1](x, out, 8, 8)

    np.testing.assert_array_equal(first, x * 3)
    np.testing.assert_array_equal(out, x * 5)


def test_torch_tensors_are_used_in_place_and_strided_ones_by_their_strides() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    column = base[:, 2]

    @triton.jit
    def kernel(x: Any, stride: Any, B: tl.constexpr) -> None:
        at = x + tl.arange(0, B) * stride
        tl.store(at, -tl.load(at))

    kernel[(1,)](column, column.stride(0), B=8)

    assert torch.equal(base[:, 2], -torch.arange(2, 66, 8).float())
    assert base[0, 1] == 1


def test_any_array_with_an_interface_will_do() -> None:
    array = np.arange(8, dtype=np.int32)
    foreign = SimpleNamespace(__array_interface__=array.__array_interface__, keeps=array)

    scale_kernel[(1,)](foreign, foreign, 8, B=8)

    np.testing.assert_array_equal(array, np.arange(8) * 3)


def test_a_tuple_of_arrays_arrives_as_a_tuple_of_pointers() -> None:
    @triton.jit
    def kernel(parts: Any, o: Any, B: tl.constexpr) -> None:
        i = tl.arange(0, B)
        total = tl.zeros((B,), tl.float32)
        for part in tl.static_range(len(parts)):
            total += tl.load(parts[part] + i)
        tl.store(o + i, total)

    out = np.zeros(4, np.float32)

    kernel[(1,)]((np.ones(4, np.float32), np.full(4, 2, np.float32)), out, B=4)

    np.testing.assert_array_equal(out, 3)


def test_a_configuration_that_does_not_compile_is_passed_over() -> None:
    tried: list[int] = []

    @triton.autotune(
        configs=[triton.Config({"B": size}, num_warps=2) for size in (64, 16, 8)], key=["n"]
    )
    @triton.jit
    def kernel(o: Any, n: Any, B: tl.constexpr) -> None:
        tl.static_assert(B <= 16, "too large for this device")
        i = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(o + i, B, mask=i < n)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        tried.append(meta["B"])
        return (triton.cdiv(30, meta["B"]),)

    out = np.zeros(30, np.int32)
    kernel[grid](out, 30)
    kernel[grid](out, 30)

    assert (out == 16).all()
    assert tried == [64, 16, 16]
    assert kernel.best_config is not None
    assert kernel.best_config.kwargs == {"B": 16}


def test_when_no_configuration_compiles_all_complaints_are_shown() -> None:
    @triton.autotune(configs=[triton.Config({"B": 1}), triton.Config({"B": 2})], key=[])
    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.static_assert(B > 2, f"B is {B}")

    with pytest.raises(ConfigError, match=r"none of the 2 configurations .*B is 1.*B is 2"):
        kernel[(1,)](np.zeros(1))


def test_configurations_are_pruned_and_ordered_by_a_model() -> None:
    @triton.autotune(
        configs=[triton.Config({"B": size}) for size in (2, 4, 8, 16)],
        key=["n"],
        prune_configs_by={
            "early_config_prune": lambda configs, _nargs, **_kw: [
                config for config in configs if config.kwargs["B"] > 2
            ],
            "perf_model": lambda **meta: abs(meta["B"] - meta["n"]),
        },
    )
    @triton.jit
    def kernel(o: Any, n: Any, B: tl.constexpr) -> None:
        tl.store(o, B)

    out = np.zeros(1, np.int32)

    kernel[(1,)](out, 9)

    assert out[0] == 8


def test_a_stopwatch_of_the_callers_own_decides_and_leaves_kept_arrays_as_they_were() -> None:
    def stopwatch(launch: Any, **_options: Any) -> float:
        launch()
        return -float(out[0])

    @triton.autotune(
        configs=[triton.Config({"B": size}) for size in (1, 3, 2)],
        key=[],
        restore_value=["o"],
        do_bench=stopwatch,
    )
    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.store(o, tl.load(o) + B)

    out = np.full(1, 10, np.int32)

    kernel[(1,)](out)

    assert out[0] == 13


def test_warmup_of_an_autotuned_kernel_runs_no_hook() -> None:
    @triton.autotune(
        configs=[triton.Config({"B": 1}, pre_hook=lambda given: given["o"].fill(0))], key=[]
    )
    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.store(o, B)

    out = np.full(1, 10, np.int32)

    kernel.warmup(out, grid=(1,))

    assert out[0] == 10


def test_a_bfloat16_tensor_has_its_values_back_after_a_stopwatch() -> None:
    torch = pytest.importorskip("torch")

    def stopwatch(launch: Any, **_options: Any) -> float:
        launch()
        return 1.0

    @triton.autotune(
        configs=[triton.Config({"B": 1}), triton.Config({"B": 2})],
        key=[],
        restore_value=["o"],
        do_bench=stopwatch,
    )
    @triton.jit
    def kernel(o: Any, B: tl.constexpr) -> None:
        tl.store(o, tl.load(o) + B)

    out = torch.full((1,), 10, dtype=torch.bfloat16)

    kernel[(1,)](out)

    assert out.item() == 11


def test_heuristics_see_the_arguments_and_autotuned_parameters() -> None:
    @triton.autotune(configs=[triton.Config({"B": 16})], key=[])
    @triton.heuristics({"EVEN": lambda args: args["n"] % args["B"] == 0})
    @triton.jit
    def kernel(o: Any, n: Any, B: tl.constexpr, EVEN: tl.constexpr) -> None:
        if EVEN:
            tl.store(o, 1)
        else:
            tl.store(o, 2)

    out = np.zeros(1, np.int32)

    kernel[(1,)](out, 32)
    even = out[0]
    kernel[(1,)](out, 33)

    assert (even, out[0]) == (1, 2)


def test_warmup_runs_nothing_and_gives_what_an_occupancy_is_calculated_from() -> None:
    out = np.zeros(8, np.int32)

    compiled = scale_kernel.warmup(out, out, 8, B=8, num_warps=8, grid=(1,))
    compiled._init_handles()

    assert compiled.n_regs > 0
    assert 0 < compiled.metadata.shared < 1 << 16  # programs divide by it
    assert not out.any()


def test_an_empty_grid_runs_nothing() -> None:
    scale_kernel[(0,)](np.zeros(1), np.zeros(1), 1, B=1)


@pytest.mark.parametrize("grid", [(1, 1, 1, 1), (-1,)])
def test_a_grid_that_is_none_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid"):
        scale_kernel[grid](np.zeros(1), np.zeros(1), 1, B=1)


def test_figures_of_the_host_side() -> None:
    assert [triton.next_power_of_2(n) for n in (0, 1, 2, 3, 1000)] == [1, 1, 2, 4, 1024]
    assert triton.cdiv(7, 3) == 3
    active = triton.runtime.driver.active
    device = active.get_active_torch_device()
    assert active.utils.get_device_properties(device)["multiprocessor_count"] > 0


def test_a_report_measures_every_point_on_every_line() -> None:
    benchmark = triton.testing.Benchmark(
        x_names=["size"], x_vals=[1, 2], line_arg="by", line_vals=[10, 100],
        line_names=["ten", "hundred"], plot_name="products", args={},
    )  # fmt: skip

    @triton.testing.perf_report(benchmark)
    def measure(size: int, by: int) -> int:
        return size * by

    assert measure.run(print_data=False) == [[(1, 10, 100), (2, 20, 200)]]


def test_prints_go_to_the_console_with_their_program(capsys: pytest.CaptureFixture[str]) -> None:
    @triton.jit
    def kernel(o: Any) -> None:
        tl.static_print("compiling for", tl.int32)
        tl.device_print("half is", tl.program_id(0) // 2)

    kernel[(2,)](np.zeros(1))

    assert capsys.readouterr().out.splitlines() == [
        "compiling for int32", "pid (0, 0, 0) half is 0", "pid (1, 0, 0) half is 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("cast", "input, dtype, fp_downcast_rounding, bitcast"),
        ("broadcast", "input, other"),
        ("broadcast_to", "input, shape"),
        ("expand_dims", "input, axis"),
        ("permute", "input, dims"),
        ("trans", "input, dims"),
        ("reshape", "input, shape, can_reorder"),
        ("view", "input, shape"),
        ("ravel", "x, can_reorder"),
        ("join", "a, b"),
        ("interleave", "a, b"),
        ("split", "a"),
        ("flip", "x, dim"),
        ("gather", "src, index, axis"),
        ("where", "condition, x, y"),
    ],
)
def test_parameters_have_tritons_names(name: str, parameters: str) -> None:
    assert ", ".join(inspect.signature(getattr(tl, name)).parameters) == parameters


def test_kernels_may_give_arguments_by_tritons_names() -> None:
    @triton.jit
    def kernel(o: Any, n: Any) -> None:
        i = tl.cast(input=tl.arange(0, 8), dtype=tl.int64)
        low, high = tl.split(a=tl.join(a=i, b=i + n))
        tl.store(o + i, tl.where(condition=i < 4, x=low, y=high))

    out = np.zeros(8, np.int64)

    kernel[1,](out, 100)

    assert out.tolist() == [0, 1, 2, 3, 104, 105, 106, 107]


def test_the_device_is_called_as_torch_calls_it() -> None:
    torch = pytest.importorskip("torch")

    target = triton.runtime.driver.active.get_current_target()

    assert torch.device(target.backend) == triton.runtime.driver.active.get_active_torch_device()


def test_what_libraries_use_of_tritons_inner_modules_is_there() -> None:
    @triton.jit
    def kernel(o: Any, first: tl.constexpr = tl.core.CONSTEXPR_0) -> None:
        halvings: tl.constexpr = tl.standard._log2(8)
        i = tl.core.arange(first, 8)
        tl.store(o + i, i.to(tl.core.get_int_dtype(bitwidth=16, signed=True)) + halvings)

    out = np.zeros(8, np.int16)

    kernel[1,](out)

    assert out.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert tl.core.get_int_dtype(8, signed=False) is tl.uint8


class Described:
    """A library's own class around a tensor: it has an address, a type, a shape and strides."""

    def __init__(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._array = array
        self.dtype = array.dtype.name
        self.shape = shape
        self._strides = strides

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return self._strides


def test_a_class_with_an_address_a_shape_and_strides_is_an_argument() -> None:
    @triton.jit
    def kernel(x: Any, o: Any) -> None:
        i = tl.arange(0, 4)
        tl.store(o + i, tl.load(x + i * 3))

    source, out = np.arange(12, dtype=np.float32), np.zeros(4, np.float32)

    kernel[(1,)](Described(source, (4,), (3,)), Described(out, (4,), (1,)))

    assert out.tolist() == [0, 3, 6, 9]


def test_a_class_of_memory_may_repeat_an_axis_and_know_of_no_storage_offset() -> None:
    x, out = np.arange(4, dtype=np.float32), np.zeros((2, 4), np.float32)
    repeated = Described(x, (2, 4), (0, 1))
    repeated.untyped_storage = lambda: x  # type: ignore[attr-defined]

    copy_by_strides[(1,)](repeated, out, 0, 1, M=2, N=4)

    np.testing.assert_array_equal(out, [x, x])


@triton.jit
def copy_by_strides(x: Any, o: Any, s0: Any, s1: Any, M: tl.constexpr, N: tl.constexpr) -> None:
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tl.store(o + i * N + j, tl.load(x + i * s0 + j * s1))


@pytest.mark.parametrize("on_machine", [False, True])
def test_negative_strides_lead_back_from_where_the_array_begins(*, on_machine: bool) -> None:
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    out = np.zeros((4, 4), np.float32)
    with ExitStack() as stack:
        if on_machine:
            context = stack.enter_context(RuntimeContext(GraphEngine("default")))
            stack.enter_context(launches_on(context))
        for view in (base[5:1:-1, 6:2:-1], base[1:5, ::-2], base[:4, 2:6], base.T[7:3:-1, 1:5]):
            strides = [step // 4 for step in view.strides]

            copy_by_strides[(1,)](view, out, *strides, M=4, N=4)

            np.testing.assert_array_equal(out, view)
    with pytest.raises(triton.OutOfBounds, match="element -1"):
        copy_by_strides[(1,)](base[3::-1], out, -8, -1, M=4, N=4)


def test_parameters_are_told_to_who_wraps_a_kernel() -> None:
    @triton.jit(do_not_specialize=["n"])
    def kernel(x: Any, n: Any, BLOCK: tl.constexpr) -> None:
        pass

    assert [(each.num, each.name) for each in kernel.params] == [(0, "x"), (1, "n"), (2, "BLOCK")]
    assert [each.is_constexpr for each in kernel.params] == [False, False, True]
    assert [each.do_not_specialize for each in kernel.params] == [False, True, False]
    assert not any(each.has_default for each in kernel.params)


def test_a_tuner_derived_from_triton_measures_a_configuration_by_the_name_it_has_there() -> None:
    @triton.jit
    def kernel(x: Any, BLOCK: tl.constexpr) -> None:
        tl.static_assert(BLOCK > 1)
        tl.store(x + tl.arange(0, BLOCK), 1)

    configs = [triton.Config({"BLOCK": size}) for size in (1, 4)]
    tuner = triton.autotune(configs, key=[])(kernel)

    out = np.zeros(4)
    tuner.nargs = {"x": out}

    assert [tuner._bench(out, config=each, grid=(1,))[0] for each in configs] == [
        float("inf"),
        0.0,
    ]
    assert tuner.prune_configs({}) == configs


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (((8, 30), (30, 1), np.float16, "zero"), "stride of 60 bytes: it must be a multiple of 16"),
        (((8, 8), (8, 1), np.int32, "nan"), "padding='nan' is for floats, not int32"),
        (((8, 8), (16, 2), np.float32, "zero"), "has stride 2: it must be 1"),
        (((8, 0), (8, 1), np.float32, "zero"), "no axis of length 0"),
        (((8, 8), (8, 1), np.float32, "one"), "padding='one': it is 'zero' or 'nan'"),
    ],
)
def test_a_descriptor_that_hardware_does_not_take_is_refused(given: Any, words: str) -> None:
    shape, strides, kind, padding = given

    with pytest.raises(AssertionError, match=words):  # as Triton says it
        TensorDescriptor(np.zeros((8, 32), kind), shape, strides, [8, 8], padding=padding)


def test_a_descriptor_of_a_base_between_16_bytes_is_refused() -> None:
    torch = pytest.importorskip("torch")
    between = torch.zeros(33 * 8)[1:257].view(32, 8)

    with pytest.raises(AssertionError, match="the base of a TensorDescriptor is at 0x"):
        TensorDescriptor.from_tensor(between, [8, 8])
