"""Which layouts an operation of a backend takes, and which tensors that require gradients.

gloo takes a tensor's memory as it is: of a view with gaps it reads and writes the neighbours, and
says nothing. That is refused here, beside what gloo refuses itself. An expanded tensor has right
numbers afterwards, if it is expanded on all ranks alike, and other numbers behind it have changed:
that is warned of. gloo's behaviour is recorded in
`tests/conformance/rehearsal/layouts_of_gloo.json`. NCCL's rules are torch's checks before it.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rankwise.simranks.torch.loads import is_expanded, tensors_in
from rankwise.simranks.torch.sentences import describe_shapes

Rule = Callable[[Tensor], str]
"""What is wrong with a tensor; nothing if it is empty."""


def _without_gaps(tensor: Tensor) -> str:
    if tensor.is_contiguous() or tensor.numel() < 2:  # one number has no neighbour
        return ""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * stride for extent, stride in pairs)
    return "has gaps in memory" if span > tensor.numel() else ""


def _dense(tensor: Tensor) -> str:
    return (
        "is expanded: its elements share memory" if is_expanded(tensor) else _without_gaps(tensor)
    )


def _contiguous(tensor: Tensor) -> str:
    return "" if tensor.is_contiguous() else "is not contiguous"


def _of_format(tensor: Tensor) -> str:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim())
    if wanted is not None and tensor.is_contiguous(memory_format=wanted):
        return ""
    return _contiguous(tensor)


def _writable(tensor: Tensor) -> str:
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return ""
    base = tensor._base  # noqa: SLF001  # torch has no other name for it
    is_refused = tensor.is_leaf or (base is not None and base.is_leaf)
    return "is a leaf that requires grad, so nothing may be written into it" if is_refused else ""


def _writable_without_gaps(tensor: Tensor) -> str:
    return _writable(tensor) or _without_gaps(tensor)


def _was_complex(tensor: Tensor) -> bool:
    """Whether torch has made it of a complex tensor, before it has called the backend."""
    base = tensor._base  # noqa: SLF001  # the same
    return base is not None and base.is_complex()


def _real_without_grad(tensor: Tensor) -> str:
    is_refused = tensor.requires_grad and not _was_complex(tensor) and torch.is_grad_enabled()
    return "requires grad" if is_refused else ""


def _complex_without_grad(tensor: Tensor) -> str:
    is_refused = tensor.requires_grad and _was_complex(tensor) and torch.is_grad_enabled()
    return "is complex and requires grad" if is_refused else ""


def _any(_tensor: Tensor) -> str:
    return ""


_BROADCAST_OF_ROOT = "broadcast, of the root"
_GLOO: dict[str, tuple[Rule, Rule]] = {
    "all_reduce": (_without_gaps, _any),
    "all_reduce_coalesced": (_without_gaps, _any),
    "reduce": (_without_gaps, _any),
    "broadcast": (_without_gaps, _any),
    _BROADCAST_OF_ROOT: (_without_gaps, _any),
    "send": (_contiguous, _any),
    "recv": (_contiguous, _any),
    "all_gather": (_writable, _any),
    "all_gather_single": (_writable, _real_without_grad),
    "reduce_scatter": (_writable_without_gaps, _any),
    "reduce_scatter_single": (_writable, _any),
    "scatter": (_without_gaps, _dense),
    "gather": (_writable, _any),
    "all_to_all": (_writable, _complex_without_grad),
    "all_to_all_single": (_of_format, _of_format),
}
"""By operation, what it takes as outputs, or as the tensors that it replaces, and as inputs."""
_NCCL: dict[str, tuple[Rule, Rule]] = {
    "all_reduce": (_of_format, _any),
    "reduce": (_of_format, _any),
    "broadcast": (_of_format, _any),
    _BROADCAST_OF_ROOT: (_of_format, _any),
    "all_gather": (_any, _of_format),
    "all_gather_single": (_of_format, _of_format),
    "reduce_scatter": (_of_format, _any),
    "reduce_scatter_single": (_of_format, _of_format),
    "scatter": (_of_format, _contiguous),
    "gather": (_contiguous, _of_format),
    "all_to_all": (_of_format, _of_format),
    "all_to_all_single": (_of_format, _of_format),
}
"""The same of NCCL; `gather` and `scatter` hand the memory of the root's tensors over unchecked."""


class LayoutRules:
    """What one member's tensors must be like in memory.

    Args:
        member: the rank whose tensors they are, as the world counts it.
        backend: the backend that the program has asked for.
        is_of_gloo: whether gloo carries its operations out.
    """

    def __init__(self, member: int, backend: str, *, is_of_gloo: bool) -> None:
        self._member = member
        self._backend = "gloo" if is_of_gloo else "nccl"
        is_of_nccl = not is_of_gloo and ("nccl" in backend or "gloo" in backend)
        self._rules = _GLOO if is_of_gloo else _NCCL if is_of_nccl else {}
        self._error: type[Exception] = RuntimeError if is_of_gloo else ValueError

    def check(self, name: str, load: Any, *, is_root: bool = False) -> None:
        """Refuse the tensors of an operation.

        Raises:
            RuntimeError, ValueError: as gloo, and as torch before NCCL.
        """
        if is_root and name == "broadcast":
            rules = self._rules.get(_BROADCAST_OF_ROOT)
        else:
            rules = self._rules.get(name)
        if rules is None:
            return
        if not isinstance(load, tuple):
            self._check(name, "tensor", load, rules[0])
            return
        outputs, inputs = load[:2]
        self._check(name, "output", outputs, rules[0])
        self._check(name, "input", inputs, rules[1])

    def describe_expanded(self, load: Any) -> str:
        """Say which tensor is expanded, where gloo goes beyond it; empty if none is."""
        if self._rules is not _GLOO or isinstance(load, tuple):
            return ""
        strided = (each for each in tensors_in(load) if each.layout is torch.strided)
        tensor = next(filter(is_expanded, strided), None)
        if tensor is None:
            return ""
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        beyond = tensor.numel() - 1 - sum((extent - 1) * stride for extent, stride in pairs)
        return (
            f"the tensor of rank {self._member} is expanded ({describe_shapes([tensor])}, strides"
            f" {tensor.stride()}): gloo also reads and overwrites the next {beyond} numbers in"
            " memory. Hand over a copy (`x.contiguous()`)"
        )

    def warn_of_message(self, tensors: Sequence[Tensor]) -> None:
        """Warn once, as torch does, of a message by NCCL that is not contiguous."""
        if self._rules is _NCCL and any(map(_of_format, tensors)):
            _warn_once()

    def _check(self, name: str, side: str, tensor: Any, rule: Rule) -> None:
        if rule is _any:
            return
        if isinstance(tensor, list | tuple):
            for each in tensor:
                self._check(name, side, each, rule)
        elif tensor.layout is torch.strided and (wrong := rule(tensor)):
            takes = "takes it for dense memory, and its neighbours are sent and overwritten"
            refuses = "takes no such tensor" if "gaps" not in wrong else takes
            raise self._error(
                f"{name}: the {side} of rank {self._member} {wrong}"
                f" ({describe_shapes([tensor])}, strides {tensor.stride()}); {self._backend}"
                f" {refuses if self._backend == 'gloo' else 'wants: Tensors must be contiguous'}."
                " Hand over a copy (`x.contiguous()`, `x.detach()`)"
            )


@cache
def _warn_once() -> None:
    warnings.warn(
        "Detected non-contiguous tensor in P2P operations: both ends must have the same strides",
        stacklevel=5,
    )
