"""What `torch.autocast("cuda")` casts, for tensors that torch finds on the CPU (`dispatch.yaml`).

torch has a list of operators for each kind of device: CUDA computes norms, softmax and exponentials
in f32, and the CPU in the lower type. So results, and with them the memory of activations, differ.
Here the operators of CUDA's lists get kernels for autocast on the CPU, and those that only the
CPU's lists have lose theirs.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_any, tree_map

_KEY = "AutocastCPU"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001  # no public way
_Excluded = torch._C._ExcludeDispatchKeyGuard  # noqa: SLF001  # the same
_registrations = torch._C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001  # the same
_PREFIX = "aten::"
_KEPT = frozenset({"cat", "stack", "index_copy"})
"""The CPU's lists have them, to widen types, as these operators do by themselves on CUDA."""


def cast_as_cuda(table: Mapping[str, Any]) -> Callable[[], None]:
    """Have autocast compute by CUDA's lists; returns what undoes it."""
    own = {name.removeprefix(_PREFIX) for name in _registrations(_KEY)}
    of_cuda = {name for names in table.values() for name in names}
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels that are replaced
        _fill(library, table, own, of_cuda)

    def undo() -> None:
        library._destroy()  # noqa: SLF001  # no public way

    return undo


def _fill(library: Library, table: Mapping[str, Any], own: set[str], of_cuda: set[str]) -> None:
    for name in table["lower"]:
        if name not in own:
            _implement(library, name, partial(_cast, _as_lower))
    for name in table["f32"]:
        if name not in own:
            _implement(library, name, partial(_cast, _as_f32))
    for name in (*table["f32_dtype"], *table["f32_norm"]):
        if name not in own:
            _implement(library, name, _computed_in_f32)
    for name in table["promoted"]:
        if name not in own:
            _implement(library, name, _promoted)
    for name in table["refused"]:
        _implement(library, name, _refused)
    for name in sorted(own - of_cuda - _KEPT):
        library.impl(name, fallthrough_kernel, _KEY, allow_override=True)


def eligible(value: Any) -> bool:
    """Whether autocast changes the type of a value."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    )


def lowered(value: Any) -> Any:
    """A tensor in the type of the autocast that is on; itself if none is, or if it has it."""
    if not torch.is_autocast_enabled("cpu") or not eligible(value):
        return value
    return value.to(torch.get_autocast_dtype("cpu"))


def widened(value: Any) -> Any:
    """A tensor in f32 where an autocast is on."""
    return value.float() if torch.is_autocast_enabled("cpu") and eligible(value) else value


def _implement(library: Library, name: str, kernel: Callable[..., Any]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Excluded(_AUTOCAST):
            return kernel(operator, args, kwargs)

    library.impl(name, call, _KEY, allow_override=True)


def _cast(cast: Callable[[Any], Any], operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*tree_map(cast, args), **tree_map(cast, kwargs))


def _as_lower(value: Any) -> Any:
    return value.to(torch.get_autocast_dtype("cpu")) if eligible(value) else value


def _as_f32(value: Any) -> Any:
    return value.float() if eligible(value) else value


def _computed_in_f32(operator: Any, args: Any, kwargs: Any) -> Any:
    """Have the result in f32 by the argument `dtype`, if the caller gives none."""
    if not eligible(args[0]) or kwargs.get("dtype") is not None:
        return operator(*args, **kwargs)
    arguments = operator._schema.arguments  # noqa: SLF001  # no public way
    place = next((at for at, each in enumerate(arguments) if each.name == "dtype"), None)
    if place is None:  # `norm`, whose other overloads have it
        return operator(args[0].float(), *args[1:], **kwargs)
    if place < len(args):
        if args[place] is not None:
            return operator(*args, **kwargs)
        args = args[:place]  # nothing but `dtype` and keywords is behind
    return operator(*args, **{**kwargs, "dtype": torch.float32})


def _promoted(operator: Any, args: Any, kwargs: Any) -> Any:
    """Have all arguments in the widest type that one of them has."""
    is_wide = tree_any(lambda each: eligible(each) and each.dtype is torch.float32, (args, kwargs))
    return _cast(_as_f32 if is_wide else _as_lower, operator, args, kwargs)


def _refused(operator: Any, _args: Any, _kwargs: Any) -> Any:
    raise RuntimeError(
        f"{operator.overloadpacket} is refused under torch.autocast on CUDA, where its values may"
        " overflow: use binary_cross_entropy_with_logits, or leave autocast for it"
    )
