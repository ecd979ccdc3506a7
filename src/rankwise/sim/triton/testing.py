"""`triton.testing`: timing of emulated kernels, and tables over parameters.

The times are those of the emulation, in real milliseconds; on a simulated machine they are virtual.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rankwise.sim.triton.host import HOST_MACHINE, HostMachine


def do_bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Any = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """How long a function takes, in milliseconds; called once first, then for about `rep` ms.

    Where launches go to a simulated machine, it is the virtual time of one more call.
    """
    del warmup, grad_to_none
    fn()
    machine = HOST_MACHINE.get()
    times: list[float] = []
    while not times or (machine is None and sum(times) < rep and len(times) < 1000):
        start = _picoseconds(machine)
        fn()
        times.append((_picoseconds(machine) - start) / 1e9)
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


do_bench_cudagraph = do_bench


class Benchmark:
    """What to measure over which parameters."""

    def __init__(
        self,
        x_names: list[str],
        x_vals: list[Any],
        line_arg: str,
        line_vals: list[Any],
        line_names: list[str],
        plot_name: str,
        args: dict[str, Any],
        xlabel: str = "",
        ylabel: str = "",
        **_appearance: Any,
    ) -> None:
        self.x_names = x_names
        self.x_vals = x_vals
        self.line_arg = line_arg
        self.line_vals = line_vals
        self.line_names = line_names
        self.plot_name = plot_name
        self.args = args
        self.xlabel = xlabel
        self.ylabel = ylabel


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


def assert_close(x: Any, y: Any, atol: float = 1e-2, rtol: float = 1e-2, err_msg: str = "") -> None:
    """Compare two arrays."""
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=rtol, err_msg=err_msg)
