"""`autotune` and `heuristics`: choosing a kernel's compile-time parameters.

How fast a configuration is emulated says nothing about an accelerator, and a choice by wall clock
would differ from run to run. On a simulated machine, configurations are tried in virtual time, and
the fastest is taken. Elsewhere the first that compiles and runs is taken, unless the
caller gives a model (`prune_configs_by["perf_model"]`) or a stopwatch (`do_bench`) to choose by. A
configuration whose `static_assert` fails, or that is out of bounds of what the language allows, is
passed over as one that did not compile.

Hooks run when they do in Triton. A configuration's `pre_hook` runs before each of its launches and
trials. `reset_to_zero`, `restore_value`, `pre_hook` and `post_hook` of `autotune` repair what
trials do to the caller's arrays: they surround the trials of a stopwatch, and after a choice among
several configurations what is to be reset is reset, once. Trials in virtual time see no values, and
have nothing to repair.
"""

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TextIO

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.sim.triton.debug import StaticAssertion
from rankwise.sim.triton.execution import KernelTypeError, KernelValueError
from rankwise.sim.triton.jit import JITFunction, KernelInterface
from rankwise.sim.triton.launch_arguments import HOST_MACHINE

_DOES_NOT_COMPILE = (StaticAssertion, KernelTypeError, KernelValueError)
_PARTS = (1, 4, None)
"""On how many processing elements a configuration is tried, one after the other; None is all."""
_SILENT_S = 5.0


class Trial(NamedTuple):
    """How long a trial has taken, in virtual time, and whether it was one of the whole grid."""

    time: int
    is_whole: bool


@dataclass(eq=False, repr=False)
class Config:
    """A choice of compile-time parameters, and of options for a compiler."""

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    pre_hook: Callable[[dict[str, Any]], Any] | None = None
    ir_override: str | None = None

    def __post_init__(self) -> None:
        self.kwargs = dict(self.kwargs)

    def all_kwargs(self) -> dict[str, Any]:
        """Parameters and options together."""
        options = {
            "num_warps": self.num_warps, "num_ctas": self.num_ctas,
            "num_stages": self.num_stages, "maxnreg": self.maxnreg,
        }  # fmt: skip
        return {**self.kwargs, **{name: each for name, each in options.items() if each is not None}}

    def _key(self) -> tuple[Any, ...]:
        return tuple(self.all_kwargs().items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.all_kwargs().items())


class Progress:
    """Lines about a choice that takes long: after five seconds, and whenever that has doubled."""

    def __init__(
        self,
        kernel: str,
        configs: int,
        clock: Callable[[], float] = time.monotonic,
        out: TextIO | None = None,
    ) -> None:
        self._kernel, self._configs, self._clock, self._out = kernel, configs, clock, out
        self._begun = clock()
        self._next_s = _SILENT_S
        self._tried: set[int] = set()
        self._whole = 0

    def tried(self, config: int, *, is_whole: bool) -> None:
        """Note a trial."""
        self._tried.add(config)
        self._whole += is_whole
        passed = self._clock() - self._begun
        if passed < self._next_s:
            return
        while self._next_s <= passed:
            self._next_s *= 2
        whole = f", {self._whole} on the whole grid" if self._whole else ""
        print(
            f"autotune of kernel {self._kernel}: {len(self._tried)} of {self._configs} "
            f"configurations tried{whole}, for {passed:.0f} s",
            file=self._out or sys.stderr,
            flush=True,
        )


class Autotuner(KernelInterface):
    """A kernel with configurations to choose from.

    Its parameters and attributes are named as Triton's: libraries derive tuners of their own.
    """

    def __init__(
        self,
        fn: Any,
        arg_names: Sequence[str],
        configs: Sequence[Config],
        key: Sequence[str],
        reset_to_zero: Iterable[str] | None,
        restore_value: Iterable[str] | None,
        pre_hook: Callable[..., Any] | None = None,
        post_hook: Callable[..., Any] | None = None,
        prune_configs_by: Mapping[str, Any] | None = None,
        warmup: int | None = None,
        rep: int | None = None,
        use_cuda_graph: bool = False,
        do_bench: Callable[..., Any] | None = None,
        cache_results: bool = False,
    ) -> None:
        del warmup, rep, use_cuda_graph, cache_results  # how a stopwatch is to be used
        pruning = prune_configs_by or {}
        self.fn = fn
        self.configs = list(configs) or [Config({})]
        self.keys = list(key)
        self.arg_names: list[str] = list(arg_names)
        self.cache: dict[tuple[Any, ...], Config] = {}
        self.best_config: Config | None = None
        self.nargs: dict[str, Any] = {}
        self.reset_to_zero = list(reset_to_zero or ())
        self.restore_value = list(restore_value or ())
        self.user_defined_pre_hook = pre_hook is not None
        self.user_defined_post_hook = post_hook is not None
        self.pre_hook = pre_hook or self._reset
        self.post_hook = post_hook
        self.perf_model = pruning.get("perf_model")
        self.early_config_prune = pruning.get("early_config_prune")
        self._do_bench = do_bench
        self.__name__ = getattr(fn, "__name__", "kernel")

    @property
    def base_fn(self) -> JITFunction:
        """The kernel itself."""
        fn = self.fn
        while not isinstance(fn, JITFunction):
            fn = fn.fn
        return fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from another kernel."""
        return self.fn(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch with the configuration chosen for these arguments; choose one if there is none."""
        machine = None if warmup else HOST_MACHINE.get()
        if machine is not None:  # which chooses a configuration by trials on its devices
            return machine.launch(self, grid, *args, **kwargs)
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = self._key_of({**self.nargs, **kwargs})
        chosen = self.cache.get(key)
        if chosen is None and len(self.configs) == 1:
            chosen = self.configs[0]
        if chosen is not None or warmup:
            chosen = chosen or self.prune_configs(kwargs)[0]
            self.best_config = chosen
            return self._launch(chosen, args, grid, kwargs, warmup=warmup)
        complaints: list[tuple[Config, Exception]] = []
        for config in self.candidates(args, grid, kwargs):
            self.pre_hook(self.parameters(config, kwargs), reset_only=True)
            try:
                result = self._launch(config, args, grid, kwargs, warmup=False)
            except _DOES_NOT_COMPILE as error:
                complaints.append((config, error))
                continue
            self.cache[key] = self.best_config = config
            return result
        raise self._none_runs(complaints)

    def _key_of(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        key = [given[name] for name in self.keys if name in given]
        key += [str(each.dtype) for each in given.values() if hasattr(each, "dtype")]
        return tuple(key)

    def fastest(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        machine: Hashable,
        time_of: Callable[[Config, int | None], Trial],
    ) -> Config:
        """The configuration that takes least time on a machine; of equal ones the first.

        The tensors that the caller wants to be reset are reset after a choice.

        Args:
            args: the launch's arguments.
            kwargs: those that are given by name.
            machine: what the choice is kept under, besides the values of `key`.
            time_of: tries a configuration, on so many processing elements or all (None). A model of
                the caller's makes it unnecessary.
        """
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = (machine, *self._key_of({**self.nargs, **kwargs}))
        found = self.cache.get(key)
        if found is None and len(self.configs) == 1:
            found = self.configs[0]
        if found is None:
            configs = self._by_model(self.prune_configs(kwargs), kwargs)
            if self.perf_model is not None or len(configs) == 1:
                found = configs[0]
            else:
                found = self._fastest_of(configs, time_of)
            self.cache[key] = found
            self.pre_hook(self.parameters(found, kwargs), reset_only=True)
        self.best_config = found
        return found

    def _fastest_of(
        self, configs: list[Config], time_of: Callable[[Config, int | None], Trial]
    ) -> Config:
        """The fastest configuration, by as few trials of the whole grid as that takes.

        A part of the grid takes no longer than the whole, where it has the machine for itself. So
        its time is a bound: the configuration with the lowest one is tried on more of the grid,
        until it is one that has been tried on all of it.
        """
        bounds = [(0, at, 0) for at in range(len(configs))]
        heapify(bounds)
        complaints: list[tuple[Config, Exception]] = []
        progress = Progress(self.__name__, len(configs))
        while bounds:
            bound, at, stage = heappop(bounds)
            if stage == len(_PARTS):
                return configs[at]
            is_whole = False
            try:
                took, is_whole = time_of(configs[at], _PARTS[stage])
            except _DOES_NOT_COMPILE as error:
                complaints.append((configs[at], error))
            else:
                # Of equal ones the first is taken: the index is the second key.
                if is_whole:
                    heappush(bounds, (took, at, len(_PARTS)))
                else:
                    heappush(bounds, (max(bound, took), at, stage + 1))
            progress.tried(at, is_whole=is_whole)
        raise self._none_runs(complaints)

    def _none_runs(self, complaints: list[tuple[Config, Exception]]) -> Exception:
        if len(complaints) == 1:
            return complaints[0][1]
        return ConfigError(
            f"none of the {len(complaints)} configurations of kernel {self.__name__} runs: "
            + "; ".join(f"({config}): {error}" for config, error in complaints[:4])
        )

    def _by_model(self, configs: list[Config], kwargs: Mapping[str, Any]) -> list[Config]:
        """Configurations by the time that the caller's model foretells; as they are without one."""
        model = self.perf_model
        if model is None:
            return configs
        return sorted(
            configs,
            key=lambda config: float(model(**{**self.nargs, **kwargs, **config.all_kwargs()})),
        )

    def prune_configs(self, kwargs: Mapping[str, Any]) -> list[Config]:
        """The configurations that `early_config_prune` leaves."""
        configs = self.configs
        early = self.early_config_prune
        if early is not None:
            configs = list(early(configs, self.nargs, **kwargs))
            if not configs:
                raise ConfigError(f"early_config_prune left no configuration of {self.__name__}")
        return configs

    def candidates(self, args: Any, grid: Any, kwargs: Mapping[str, Any]) -> list[Config]:
        """Configurations in the order in which they are to be tried, the best first."""
        configs = self._by_model(self.prune_configs(kwargs), kwargs)
        if self._do_bench is not None and len(configs) > 1:
            times = [self._time_of(config, args, grid, kwargs) for config in configs]
            configs = [configs[at] for at in sorted(range(len(configs)), key=times.__getitem__)]
        return configs

    def _time_of(self, config: Config, args: Any, grid: Any, kwargs: Mapping[str, Any]) -> float:
        """What the caller's stopwatch says; arrays that are to be kept have their values back."""
        assert self._do_bench is not None
        given = self.parameters(config, kwargs)
        kept = [(each, _copy_of(each)) for each in _present(given, self.restore_value)]

        def trial() -> None:
            self.pre_hook(given)
            try:
                self._launch(config, args, grid, kwargs, warmup=False)
            except Exception as error:
                self._after_trial(given, error)
                raise
            self._after_trial(given, None)

        try:
            took = self._do_bench(trial, quantiles=(0.5, 0.2, 0.8))
        except _DOES_NOT_COMPILE:
            return float("inf")
        finally:
            for array, before in kept:
                _overwrite(array, before)
        return float(took[0] if isinstance(took, (list, tuple)) else took)

    def _bench(self, *args: Any, config: Config, **kwargs: Any) -> list[float]:
        """What a trial takes, for tuners derived from this one: virtual time, or nothing."""
        machine = HOST_MACHINE.get()
        start = 0 if machine is None else machine.now
        grid = kwargs.pop("grid", (1,))
        kwargs.pop("warmup", None)
        try:
            if machine is None:
                self._launch(config, args, grid, kwargs, warmup=False)
            else:
                machine.launch(self.fn, grid, *args, **kwargs, **config.all_kwargs())
        except _DOES_NOT_COMPILE:
            return [float("inf")] * 3
        return [0.0 if machine is None else (machine.now - start) / 1e9] * 3

    def _after_trial(self, given: dict[str, Any], error: Exception | None) -> None:
        if self.post_hook is not None:
            self.post_hook(given, exception=error)

    def parameters(self, config: Config, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All that a launch with a configuration gives to the kernel, by name: what hooks see."""
        clash = sorted(set(config.all_kwargs()) & set(kwargs))
        if clash:
            raise ConfigError(
                f"kernel {self.__name__} is autotuned over {', '.join(clash)}, and got it as well",
                hint="leave it out of the launch, or out of the configurations",
            )
        return {**self.nargs, **kwargs, **config.all_kwargs()}

    def _launch(
        self, config: Config, args: Any, grid: Any, kwargs: Mapping[str, Any], *, warmup: bool
    ) -> Any:
        given = self.parameters(config, kwargs)
        if config.pre_hook is not None and not warmup:
            config.pre_hook(given)
        return self.fn.run(*args, grid=grid, warmup=warmup, **kwargs, **config.all_kwargs())

    def _reset(self, given: Mapping[str, Any], *, reset_only: bool = False) -> None:
        del reset_only  # what is to be restored is kept for as long as a stopwatch runs
        for each in _present(given, self.reset_to_zero):
            _overwrite(each, 0)


def _present(given: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """The arrays of these names; a kernel may do without one, and is given None for it."""
    return [given[name] for name in names if given[name] is not None]


def _copy_of(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else np.array(array)


def _overwrite(array: Any, values: Any) -> None:
    """Set the values of a numpy array or of a tensor, also of a type that numpy has not."""
    if not hasattr(array, "zero_"):
        array[...] = values
    elif isinstance(values, int):
        array.zero_()
    else:
        array.copy_(values)


class Heuristics(KernelInterface):
    """A kernel some of whose parameters follow from the others."""

    def __init__(
        self,
        fn: Any,
        arg_names: Sequence[str],
        values: Mapping[str, Callable[[dict[str, Any]], Any]],
    ) -> None:
        self.fn = fn
        self.values = dict(values)
        self.arg_names: list[str] = list(arg_names)
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from another kernel."""
        return self.fn(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch, with the parameters that follow from the arguments filled in."""
        kwargs |= self.calculated(args, kwargs)
        return self.fn.run(*args, grid=grid, warmup=warmup, **kwargs)

    def calculated(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that follow from the arguments."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        for name, rule in self.values.items():
            given[name] = rule(given)
        return {name: given[name] for name in self.values}


def autotune(
    configs: Sequence[Config],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Iterable[str] | None = None,
    restore_value: Iterable[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
) -> Callable[[Any], Autotuner]:
    """Choose a kernel's parameters among configurations, anew for each value of `key`."""
    del warmup, rep, use_cuda_graph, cache_results  # how a stopwatch is to be used

    def decorator(fn: Any) -> Autotuner:
        return Autotuner(
            fn,
            fn.arg_names,
            configs,
            key,
            reset_to_zero,
            restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            prune_configs_by=prune_configs_by,
            do_bench=do_bench,
        )

    return decorator


def heuristics(
    values: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> Callable[[Any], Heuristics]:
    """Calculate some of a kernel's parameters from the others."""
    return lambda fn: Heuristics(fn, fn.arg_names, values)
