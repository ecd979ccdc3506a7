"""Which module computes, forward and backward: of what a rank's memory is held by.

Forward, it is the innermost module that is called. Backward, autograd tells the number of the node
that it runs, and the modules' calls are between such numbers: nodes are counted as they are made.
"""

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from rankwise.simranks.prediction.holders import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Holder,
)
from rankwise.simranks.torch.storages import storage_of
from rankwise.simranks.world.places import OUR_PACKAGE, CallSite, owner_of

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_OF_COLLECTIVES = ("/_fsdp_collectives.py", "/_fsdp_param_group.py", "/nn/parallel/distributed.py")
"""Files of torch that make what is sent and received."""
_OF_OPTIMIZERS, _INITIALISING = "/torch/optim/", "_init_group"
_FLAT_PARAMETERS = "/fsdp/_flat_param.py"
_sequence_number = torch.autograd._get_sequence_nr  # noqa: SLF001  # no public way
_node = torch._C._current_autograd_node  # noqa: SLF001  # the same


class ModulePaths:
    """The modules that one rank calls."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, str]] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._numbers: list[int] = []
        self._marks: list[tuple[str, str]] = []
        self._places: dict[tuple[CodeType, int], str] = {}

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        name = self._names.get(module)
        if name is None:
            if not self._stack:
                self._learn(module)
            name = self._names.get(module) or (self._stack[-1][0] if self._stack else "")
        mark = name, self._place(sys._getframe(2))  # noqa: SLF001  # the only way that costs no stack
        self._stack.append(mark)
        self._mark(mark)

    def leave(self) -> None:
        """It has returned."""
        self._stack.pop()
        self._mark(self._stack[-1] if self._stack else ("", ""))

    def end_step(self) -> None:
        """Forget a step whose backward is over."""
        self._numbers, self._marks = [], []

    def note_gradients(self) -> None:
        """Tell the gradients of the modules that were called from other tensors."""
        for module in list(self._names):
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    held = storage_of(local)
                    if held is not None and held.holder is not None:
                        held.holder.kind = GRADIENTS

    def holder(self) -> Holder:
        """The module that makes a storage now."""
        frame = sys._getframe(3)  # noqa: SLF001  # the same
        kind = _kind_of(frame)
        if self._stack:
            kind = kind or (ACTIVATIONS if torch.is_grad_enabled() else TEMPORARIES)
            return Holder(kind, self._stack[-1][0], self._place(frame), is_of_backward=False)
        node = _node()
        if node is None or not self._numbers:
            return Holder(kind or TEMPORARIES, "", self._place(frame), is_of_backward=False)
        index = bisect_right(self._numbers, node._sequence_nr()) - 1  # noqa: SLF001  # no public way
        module, place = self._marks[min(max(index, 0), len(self._marks) - 1)]
        return Holder(kind or TEMPORARIES, module, place, is_of_backward=True)

    def _mark(self, mark: tuple[str, str]) -> None:
        number = _sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._marks[-1] = mark
        elif not self._numbers or self._numbers[-1] < number:
            self._numbers.append(number)
            self._marks.append(mark)

    def _learn(self, root: nn.Module) -> None:
        """Name the modules below one that the program calls itself, and their parameters."""
        for name, module in root.named_modules():
            plain = _without_wrappers(name)
            self._names[module] = plain
            for parameter in module.parameters(recurse=False):
                local = getattr(parameter, "_local_tensor", parameter)
                held = storage_of(local)
                if held is not None and held.holder is not None:
                    held.holder.kind, held.holder.module = PARAMETERS, plain

    def _place(self, frame: FrameType | None) -> str:
        while frame is not None and owner_of(frame.f_code.co_filename) != "user":
            frame = frame.f_back
        if frame is None:
            return ""
        key = frame.f_code, frame.f_lasti
        place = self._places.get(key)
        if place is None:
            site = CallSite(*key)
            place = f"{PurePath(frame.f_code.co_filename).name}:{site.line}"
            self._places[key] = place
        return place


def _kind_of(frame: FrameType | None) -> str:
    """What a storage is for, by the innermost line that is not ours; empty if that says nothing."""
    while frame is not None and frame.f_code.co_filename.startswith(OUR_PACKAGE):
        frame = frame.f_back
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name == _INITIALISING and _OF_OPTIMIZERS in frame.f_code.co_filename:
            return OPTIMIZER
        if frame.f_code.co_filename.endswith(_OF_COLLECTIVES):
            return COMMUNICATION
        frame = frame.f_back
    return ""


def _without_wrappers(name: str) -> str:
    name = f"{name}."
    for each in _WRAPPERS:
        name = name.replace(f".{each}", ".").removeprefix(each)
    return name.rstrip(".")


_of_threads = threading.local()


def follow_modules() -> ModulePaths:
    """Follow the modules that the calling thread calls."""
    paths = _of_threads.paths = ModulePaths()
    return paths


def with_paths(original: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.__call__`, followed."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        paths: ModulePaths | None = getattr(_of_threads, "paths", None)
        if paths is None:
            return original(self, *args, **kwargs)
        paths.enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            paths.leave()

    return call
