"""Settings of torch that a process has once, and each simulated rank must have for itself.

Few programs make any, and most of those on all ranks alike. So nothing is moved at a hand-over
until some rank makes one, and then only where two ranks differ.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch import _C, _tensor_str, _weights_only_unpickler
from torch.backends import ContextProp

from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld, running_rank

_KEY = "settings of torch"
set_num_threads = torch.set_num_threads
"""torch's own: what it sets is of no rank."""
_set_precision = torch.set_float32_matmul_precision
_set_cudnn_tf32, _set_fp32 = _C._set_cudnn_allow_tf32, _C._set_fp32_precision_setter  # noqa: SLF001  # the same


class _RestorableSetting(NamedTuple):
    """A setting: which functions make it, what it is, and how to make it that again."""

    setters: tuple[tuple[Any, str], ...]
    get: Callable[[], Any]
    put: Callable[[Any], None]


def _by(owner: Any, *names: str) -> tuple[tuple[Any, str], ...]:
    return tuple((owner, name) for name in names)


def _determinism() -> tuple[bool, bool]:
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), is_warning


def _be_deterministic(wanted: tuple[bool, bool]) -> None:
    mode, warn_only = wanted
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)  # noqa: SLF001  # as torch does


def _print_options() -> dict[str, Any]:
    return copy.copy(vars(_tensor_str.PRINT_OPTS))


def _print_like(options: Mapping[str, Any]) -> None:
    vars(_tensor_str.PRINT_OPTS).update(options)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_set_anomaly = torch.set_anomaly_enabled


def _look_for_anomalies(wanted: tuple[bool, bool]) -> None:
    _set_anomaly(*wanted)


_WITH_FP32 = (
    ("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip


def _precision() -> tuple[Any, ...]:
    """How exactly float32 is computed: torch has two sets of functions for it, which overlap."""
    told: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older functions tell that there are newer ones
        for older in (torch.get_float32_matmul_precision, _C._get_cudnn_allow_tf32):  # noqa: SLF001  # the same
            told.append(None)
            with suppress(RuntimeError):  # the two sets disagree
                told[-1] = older()
        return *told, *(_C._get_fp32_precision_getter(*each) for each in _WITH_FP32)  # noqa: SLF001  # the same


def _compute_with(precision: tuple[Any, ...]) -> None:
    matmul, cudnn, *newer = precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same
        if matmul is not None:
            _set_precision(matmul)
        if cudnn is not None:
            _set_cudnn_tf32(cudnn)
        for (backend, operation), each in zip(_WITH_FP32, newer, strict=True):
            _set_fp32(backend, operation, each)


def _flag(name: str, getter: str = "") -> _RestorableSetting:
    """A setting that C++ keeps; some consist of several values."""
    put = getattr(_C, f"_set_{name}")

    def put_again(value: Any) -> None:
        if isinstance(value, tuple):
            put(*value)
        else:
            put(value)

    return _RestorableSetting(
        _by(_C, f"_set_{name}"), getattr(_C, getter or f"_get_{name}"), put_again
    )


def _safe_globals() -> Any:
    return _weights_only_unpickler._marked_safe_globals_set  # noqa: SLF001  # the same


def _deem_safe(names: Any) -> None:
    _weights_only_unpickler._marked_safe_globals_set = names  # noqa: SLF001  # the same


_SETTINGS = (
    _RestorableSetting(
        _by(torch, "use_deterministic_algorithms", "set_deterministic_debug_mode"),
        _determinism,
        _be_deterministic,
    ),
    _RestorableSetting(_by(torch, "set_printoptions"), _print_options, _print_like),
    _RestorableSetting(_by(torch, "set_num_threads"), torch.get_num_threads, set_num_threads),
    _RestorableSetting(
        (
            *_by(torch, "set_float32_matmul_precision"),
            *_by(_C, "_set_cublas_allow_tf32", "_set_cudnn_allow_tf32"),
            *_by(_C, "_set_fp32_precision_setter"),
        ),
        _precision,
        _compute_with,
    ),
    _RestorableSetting(_by(torch, "set_anomaly_enabled"), _anomaly, _look_for_anomalies),
    _RestorableSetting(
        _by(
            _weights_only_unpickler,
            "_add_safe_globals", "_clear_safe_globals", "_remove_safe_globals",
        ),
        _safe_globals,
        _deem_safe,
    ),
    *(
        _flag(name)
        for name in (
            "cublas_allow_bf16_reduced_precision_reduction",
            "cublas_allow_fp16_reduced_precision_reduction",
            "cublas_allow_fp16_accumulation", "cudnn_benchmark", "cudnn_deterministic",
            "cudnn_enabled", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_deterministic",
            "mkldnn_enabled", "nnpack_enabled", "warnAlways",
        )
    ),
    *(
        _flag(f"sdp_use_{name}", f"_get_{name}_sdp_enabled")
        for name in ("cudnn", "flash", "math", "mem_efficient", "overrideable")
    ),
)  # fmt: skip


_HOOKS = (
    *(
        (modules, f"_global_{name}")
        for name in (
            "backward_hooks", "backward_pre_hooks", "buffer_registration_hooks", "forward_hooks",
            "forward_hooks_always_called", "forward_hooks_with_kwargs", "forward_pre_hooks",
            "module_registration_hooks", "parameter_registration_hooks",
        )
    ),
    *((optimizers, f"_global_optimizer_{name}_hooks") for name in ("pre", "post")),
)  # fmt: skip
"""Where torch keeps the hooks of all modules, and of all optimisers."""


class PerRankSettings:
    """Moves what ranks have set, from the first time that one sets something."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._home: dict[_RestorableSetting, Any] = {}
        self._present: dict[_RestorableSetting, Any] = {}
        self._stack = ExitStack()
        noting: dict[Any, Any] = {}
        for setting in _SETTINGS:
            for owner, name in setting.setters:
                original = getattr(owner, name)
                noting[original] = self._noting(setting, original)
                self._replace(owner, name, noting[original])
        for backend in (torch.backends.cudnn, torch.backends.mkldnn):
            for each in vars(type(backend)).values():
                if isinstance(each, ContextProp) and each.setter in noting:
                    self._replace(each, "setter", noting[each.setter])
        for owner, name in _HOOKS:
            self._replace(owner, name, _Hooks(self, getattr(owner, name)))

    def close(self) -> None:
        """Give torch back its functions, and what was set."""
        self._stack.close()
        for setting, home in self._home.items():
            setting.put(home)

    def move_in(self, rank: Rank) -> None:
        """Let a rank find what it has set, and otherwise what the process had."""
        mine = rank.own_state.get(_KEY, self._home)
        for setting, home in self._home.items():
            wanted = mine.get(setting, home)
            if wanted != self._present[setting]:
                setting.put(wanted)
                self._present[setting] = wanted

    def move_out(self, rank: Rank) -> None:
        """What it sets is noted at once."""

    @contextmanager
    def changing(self, setting: _RestorableSetting) -> Iterator[None]:
        """Change a setting: note what it was, and what it is for this rank."""
        rank = running_rank()
        if rank is None:
            yield
            return
        if setting not in self._home:
            is_first = not self._home
            self._home[setting] = self._present[setting] = setting.get()
            if is_first:
                self._world.own_state.add(self)
        yield
        mine = rank.own_state.setdefault(_KEY, {})
        mine[setting] = self._present[setting] = setting.get()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _noting(
        self, setting: _RestorableSetting, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.changing(setting):
                return original(*args, **kwargs)

        call.__name__, call.__doc__ = original.__name__, original.__doc__
        return call


class _Hooks(OrderedDict[Any, Any]):
    """Hooks of one kind, which torch calls for whatever is trained in the process."""

    def __init__(self, settings: PerRankSettings, hooks: Mapping[Any, Any]) -> None:
        super().__init__()
        self._settings = settings
        self._setting = _RestorableSetting((), lambda: dict(self), self._be)
        self._be(hooks)

    def __setitem__(self, key: Any, hook: Any) -> None:
        with self._settings.changing(self._setting):
            super().__setitem__(key, hook)

    def __delitem__(self, key: Any) -> None:
        with self._settings.changing(self._setting):
            super().__delitem__(key)

    def _be(self, hooks: Mapping[Any, Any]) -> None:
        self.clear()
        for key, hook in hooks.items():
            super().__setitem__(key, hook)
