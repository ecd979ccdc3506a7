"""`triton.testing`: timing of emulated kernels, and tables over parameters.

Times are real milliseconds of the emulation, or virtual ones on a simulated machine.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankwise.sim.triton.execution import Unsupported
from rankwise.sim.triton.launch_arguments import HOST_MACHINE, HostMachine
from rankwise.sim.triton.refusals import refusing
from rankwise.sim.triton.runtime import driver


def do_bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Any = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """How long a function takes, in milliseconds; called once first, then for about `rep` ms.

    Where launches go to a simulated machine, it is the virtual time of one more call; NaN if that
    launched nothing there, as torch's own operations do.
    """
    del warmup, grad_to_none
    fn()
    machine = HOST_MACHINE.get()
    times: list[float] = []
    while not times or (machine is None and sum(times) < rep and len(times) < 1000):
        start = _picoseconds(machine)
        fn()
        took = _picoseconds(machine) - start
        # Scripts divide by it: what launched nothing on the machine has no time there.
        times.append(took / 1e9 if took or machine is None else math.nan)
    if quantiles is not None:
        found = [float(value) for value in np.quantile(times, list(quantiles))]
        return found[0] if len(found) == 1 else found
    if return_mode == "all":
        return times
    summaries: dict[str, Callable[[list[float]], Any]] = {
        "mean": np.mean, "median": np.median, "min": np.min, "max": np.max,
    }  # fmt: skip
    return float(summaries[return_mode](times))


def _picoseconds(machine: HostMachine | None) -> int:
    return time.perf_counter_ns() * 1000 if machine is None else machine.now


def do_bench_cudagraph(
    fn: Callable[[], Any],
    rep: int = 20,
    grad_to_none: Any = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """How long a function takes, in milliseconds; as `do_bench`, since there are no graphs."""
    return do_bench(
        fn, rep=rep, grad_to_none=grad_to_none, quantiles=quantiles, return_mode=return_mode
    )


do_bench_proton = do_bench
do_bench_cudagraph_proton = do_bench_cudagraph


def get_dram_gbps(device: Any = None) -> float:
    """The bandwidth of the memory that programs are told they have, in GB/s."""
    properties = driver.active.utils.get_device_properties(device)
    return float(properties["mem_clock_rate"] * properties["mem_bus_width"] * 2 / 1e6 / 8)


def get_max_simd_tflops(dtype: Any, clock_rate: Any, device: Any = None) -> float:
    """Refuse: the rates of NVIDIA's devices. Models of time import it, and may never call it."""
    del dtype, clock_rate, device
    raise Unsupported(
        "get_max_simd_tflops and get_max_tensorcore_tflops know NVIDIA's devices alone",
        hint="a machine's rate is in its topology",
    )


def get_max_tensorcore_tflops(dtype: Any, clock_rate: Any, device: Any = None) -> float:
    """Refuse, as `get_max_simd_tflops` does."""
    return get_max_simd_tflops(dtype, clock_rate, device)


def nvsmi(attrs: Any) -> Any:
    """Refuse: figures that NVIDIA's tool gives, also for models of time."""
    raise Unsupported(f"nvsmi({attrs!r}) calls NVIDIA's tools, and there is no such device")


__getattr__ = refusing(
    "triton.testing",
    dict.fromkeys(
        ("cuda_memcheck", "cuda_graph_without_gc", "set_gpu_clock"),
        "it calls NVIDIA's tools",
    ),
)


@dataclass
class Benchmark:
    """What to measure over which parameters; what says how a plot looks is kept and not used."""

    x_names: list[str]
    x_vals: list[Any]
    line_arg: str
    line_vals: list[Any]
    line_names: list[str]
    plot_name: str
    args: dict[str, Any]
    xlabel: str = ""
    ylabel: str = ""
    x_log: bool = False
    y_log: bool = False
    styles: Any = None


class Mark:
    """A function with benchmarks to run it over."""

    def __init__(self, fn: Callable[..., Any], benchmarks: Any) -> None:
        self.fn = fn
        self.benchmarks = benchmarks

    def run(
        self, show_plots: bool = False, print_data: bool = False, **kwargs: Any
    ) -> list[list[tuple[Any, ...]]]:
        """Measure; the rows of each table, first the parameters, then a figure for each line."""
        del show_plots
        kwargs.pop("save_path", None)
        several = isinstance(self.benchmarks, (list, tuple))
        tables = []
        for bench in self.benchmarks if several else [self.benchmarks]:
            rows = []
            for point in bench.x_vals:
                values = point if isinstance(point, (list, tuple)) else [point] * len(bench.x_names)
                parameters = dict(zip(bench.x_names, values, strict=True))
                figures = []
                for line in bench.line_vals:
                    got = self.fn(**parameters, **{bench.line_arg: line}, **bench.args, **kwargs)
                    figures.append(got[0] if isinstance(got, (list, tuple)) else got)
                rows.append((*values, *figures))
            tables.append(rows)
            if print_data:
                print(  # noqa: T201 (asked for)
                    f"{bench.plot_name}:", *bench.x_names, *bench.line_names
                )
                for row in rows:
                    print(*row)  # noqa: T201
        return tables


def perf_report(benchmarks: Any) -> Callable[[Callable[..., Any]], Mark]:
    """Mark a function for being measured over parameters."""
    return lambda fn: Mark(fn, benchmarks)


def assert_close(
    x: Any, y: Any, atol: float | None = None, rtol: float | None = None, err_msg: str = ""
) -> None:
    """Compare two arrays, to a hundredth unless told otherwise; NaN equals NaN."""
    np.testing.assert_allclose(
        _as_numpy(x),
        _as_numpy(y),
        atol=1e-2 if atol is None else atol,
        rtol=1e-2 if rtol is None else rtol,
        err_msg=err_msg,
    )


def _as_numpy(array: Any) -> Any:
    """An array of any library; torch's narrow floats, which numpy has not, as float32."""
    if not hasattr(array, "detach"):
        return np.asarray(array)
    array = array.detach().cpu()
    is_narrow = array.is_floating_point() and array.element_size() < np.float32().itemsize
    return (array.float() if is_narrow else array).numpy()
