"""Where tensors are on a run without data: on the modelled device, or on the host.

torch's own code finds all of them on the CPU. The program finds those on CUDA that it has made
there or moved there: `tensor.device`, `tensor.is_cuda`. A call that names a device, or makes a
tensor, tells the mode that charges operations where its results are.

What reads the numbers of a tensor past all operations, `tolist` and numpy, gets those that were
computed, or else what the policy says (`prediction.values`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

from rankwise.base.errors import ConfigError
from rankwise.sim.triton import modelled_device
from rankwise.simranks.torch.cuda import CUDA, OnCpu, on_cpu, present_device
from rankwise.simranks.torch.storages import (
    PLACEMENT,
    SMALL_BYTES,
    hold,
    is_hollow,
    is_on_device,
    name_cuda,
    storage_of,
    strided_in,
)
from rankwise.simranks.torch.timing_only import TimingMode
from rankwise.simranks.world.places import place_here

_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
_IS_CPU = Tensor.is_cpu.__get__
_GET_DEVICE = Tensor.get_device
_READS = frozenset({"tolist", "numpy", "__array__", "__repr__", "__reduce_ex__"})
"""Names of methods that read memory past all operations; others wrap some of them, too."""
_MOVES = frozenset({Tensor.to, Tensor.cuda, Tensor.cpu})
_MAKERS = frozenset(_device._device_constructors())  # noqa: SLF001  # what a default device is for
_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class Placing(OnCpu):
    """Sends to the CPU what is meant for CUDA, and keeps what that was."""

    def __init__(self, mode: TimingMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with other devices, and note where its results are."""
        if _names_no_device(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        is_torch = modelled_device.is_asked_by(sys._getframe(1), "torch")  # noqa: SLF001  # no other way to the caller
        if func in _ABOUT_DEVICES:
            return _answer(func, args, is_torch=is_torch)
        kwargs = dict(kwargs or {})
        if args and getattr(func, "__name__", "") in _READS and isinstance(args[0], Tensor):
            self._give_numbers(args[0])
            return func(*args, **kwargs)
        if func is torch.device and args and not is_torch and on_cpu(args[0]) is not args[0]:
            name_cuda(self._mode.clock)
        hint = self._hint(func, args, kwargs, is_torch=is_torch)
        if hint is None:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _MOVES and not kwargs.get("copy"):
            source = args[0]
            if hint and func is Tensor.cuda and is_on_device(source):
                return source
            if hint == is_on_device(source):  # it is there; its type may change
                with _hinted(hint):
                    return func(*map(on_cpu, args), **{k: on_cpu(v) for k, v in kwargs.items()})
        with _hinted(hint):
            made = super().__torch_function__(func, types, args, kwargs)
            if func in _MOVES and made is args[0]:  # it has been on the CPU, for torch
                made = made.clone()
        if func in _FROM_VALUES and isinstance(made, Tensor) and type(made) is Tensor:
            place(made, self._mode, hint=hint)
        return made

    def _is_of_device(self, tensor: Tensor) -> bool:
        return is_on_device(tensor)

    def _hint(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_torch: bool
    ) -> bool | None:
        """Whether a call makes its tensors on the device; None if it does not say."""
        device = kwargs.get("device")
        if func is Tensor.cuda:
            name_cuda(self._mode.clock)
            return True
        if func is Tensor.cpu:
            return False
        if func is Tensor.to and device is None and len(args) > 1:
            device = args[1] if isinstance(args[1], torch.device | str | int) else None
            if isinstance(args[1], Tensor):
                return is_on_device(args[1])
        if device is None:
            if func in _MAKERS:
                return PLACEMENT.is_default if PLACEMENT.names_cuda else None
            return None
        if isinstance(device, int) or on_cpu(device) is not device:
            name_cuda(self._mode.clock)
            return True
        if not PLACEMENT.names_cuda or torch.device(device).type != "cpu":
            return None
        if PLACEMENT.target is not None:
            return PLACEMENT.target
        # torch has asked a tensor or a mesh for it, unless it spells it out.
        return is_torch and isinstance(device, torch.device)

    def _give_numbers(self, tensor: Tensor) -> None:
        """Fill a tensor that has no numbers, since they are about to be read."""
        local = getattr(tensor, "_local_tensor", tensor)
        if not is_hollow(local):
            return
        if local.nbytes > SMALL_BYTES:
            raise ConfigError(
                f"{place_here()} reads the numbers of a tensor of {local.nbytes:,} bytes, which are"
                " not computed with --timing-only",
                hint="leave it out on such a run",
            )
        kind = _KINDS.get(local.dtype, float if local.dtype.is_floating_point else int)
        value = self._mode.answer(kind)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # noqa: SLF001  # no operation of the program
            local.detach().fill_(value)


def place(tensor: Tensor, mode: TimingMode, *, hint: bool) -> None:
    """Say where a tensor is that no operation has made."""
    held = storage_of(tensor)
    if held is None:
        held = hold(tensor, mode.clock, mode.paths.holder() if hint else None, is_on_device=hint)
    elif held.is_on_device != hint:
        relocate(tensor, hint=hint)


def relocate(tensor: Tensor, *, hint: bool) -> None:
    """Have a tensor's storage be elsewhere, as a copy would that replaces it."""
    for each in strided_in(getattr(tensor, "_local_tensor", tensor)):
        held = storage_of(each)
        if held is not None and held.is_on_device != hint:
            if hint:
                held.is_on_device = True
                held.occupy()
            else:
                held.is_on_device = False
                held.vacate()


@contextmanager
def _hinted(hint: bool) -> Iterator[None]:  # of this module
    before, PLACEMENT.hint = PLACEMENT.hint, hint
    try:
        yield
    finally:
        PLACEMENT.hint = before


def _answer(func: Any, args: tuple[Any, ...], *, is_torch: bool) -> Any:
    """What the program finds out of where a tensor is; torch itself goes on as on the CPU."""
    there = not is_torch and is_on_device(args[0])
    if func == _DEVICE:
        return torch.device(CUDA.type, present_device()) if there else func(*args)
    if func == _IS_CUDA:
        return there or func(*args)
    if func == _IS_CPU:
        return not there and func(*args)
    return present_device() if there else func(*args)


_ABOUT_DEVICES = frozenset({_DEVICE, _IS_CUDA, _IS_CPU, _GET_DEVICE})
_KINDS = {torch.bool: bool}
_LOOKED_AT = (
    _ABOUT_DEVICES | _MOVES | _MAKERS | _FROM_VALUES
    | {torch.device, Tensor.type, Tensor.pin_memory, torch._C._nn.scaled_dot_product_attention}  # noqa: SLF001  # see `cuda`
)  # fmt: skip
"""Functions that may be about devices without naming one."""
_are_plain: dict[Any, bool] = {}
"""By function: whether it is about a device only if an argument names one."""


def _names_no_device(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call is the same on all devices, as most are."""
    is_plain = _are_plain.get(func)
    if is_plain is None:
        is_plain = func not in _LOOKED_AT and getattr(func, "__name__", "") not in _READS
        _are_plain[func] = is_plain
    if not is_plain:
        return False
    for each in args:
        if isinstance(each, str | torch.device):
            return False
    if kwargs:
        if "device" in kwargs or "pin_memory" in kwargs:
            return False
        for each in kwargs.values():
            if isinstance(each, str | torch.device):
                return False
    return True
