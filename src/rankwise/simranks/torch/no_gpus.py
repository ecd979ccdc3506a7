"""Keeps simulated ranks away from real GPUs: each build of torch acts as one for the CPU.

The usual build of torch is one for CUDA. It takes CUDA for its accelerator also where there is no
driver, and fails when it asks the accelerator for its stream. Where there are GPUs, it would use
them beside the simulation. So the questions of torch's Python code about accelerators are answered
as a build for the CPU answers them, and the doors to the devices raise. Modelled devices (`cuda`)
are put before these answers.

A build for CUDA comes with Triton, which torch's code would use for the modelled devices, too. For
the same reason, torch is told that there is none.

What C++ asks by itself is not reached from here: `rankwise run` hides the GPUs from its own
process as well (`cli.on_sim`), and ranks of a program that uses a GPU itself have a mode.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _triton

_NO = False
_HINT = "a simulated rank has no GPU; --device cuda models one"


def hide_gpus(*, can_pin: bool) -> Callable[[], None]:
    """Let torch find no accelerator in this process; returns what undoes it.

    Args:
        can_pin: whether something else looks after pinned memory, which these answers refuse.
    """
    stack = ExitStack()

    def replace(owner: Any, name: str, value: Any) -> None:
        if not hasattr(owner, name):
            return  # a build for the CPU has none of them
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    for name in ("is_available", "is_initialized"):
        replace(torch.cuda, name, _answers(_NO))
    replace(torch.cuda, "device_count", _answers(0))
    replace(torch.cuda, "_lazy_init", _refuse)
    replace(torch._C, "_cuda_getDeviceCount", _answers(0))  # noqa: SLF001  # what the others ask
    replace(torch._C, "_cuda_init", _refuse)  # noqa: SLF001  # the same
    replace(torch._C, "_accelerator_getAccelerator", _answers(None))  # noqa: SLF001  # the same
    replace(torch._C, "_accelerator_isAllocatorInitialized", _answers(_NO))  # noqa: SLF001  # the same
    replace(Tensor, "is_pinned", _answers(_NO))
    if not can_pin:
        replace(Tensor, "pin_memory", _refuse_to_pin)
    stack.callback(_hide_triton())
    return stack.close


_worlds_without_triton: list[object] = []
"""Modules that are imported meanwhile keep the answers for good, so these ask whether they hold."""


def _hide_triton() -> Callable[[], None]:
    questions = {name: each for name, each in vars(_triton).items() if name.startswith("has_")}
    answers = {name: _no_while_hidden(asked) for name, asked in questions.items()}
    stack = ExitStack()
    for module in [each for name, each in sys.modules.items() if name.startswith("torch.")]:
        for name, asked in questions.items():
            if vars(module).get(name) is asked:  # modules have them under the same names
                stack.callback(setattr, module, name, asked)
                setattr(module, name, answers[name])
    _worlds_without_triton.append(stack)
    stack.callback(_worlds_without_triton.remove, stack)
    return stack.close


def _no_while_hidden(asked: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: not _worlds_without_triton and asked()


class NoGpu(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Refuses CUDA to the ranks of a process that uses it: C++ has initialised it by then."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, unless that names a device of CUDA."""
        del types
        kwargs = kwargs or {}
        if func is Tensor.cuda or kwargs.get("pin_memory"):
            _refuse()
        if func is not torch.device and any(map(_is_gpu, (*args, *kwargs.values()))):
            _refuse()
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return bool(value.type == "cuda")
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _answers(value: Any) -> Callable[..., Any]:
    """A function that always gives this; a new one each time, as `torch.compile` wants them."""
    return lambda *_, **__: value


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError(f"Torch not compiled with CUDA enabled: {_HINT}")


def _refuse_to_pin(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"Cannot access accelerator device when none is available: {_HINT}")
