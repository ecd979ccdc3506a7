"""Launches of kernels on a simulated machine with arguments of the host: torch's, numpy's.

A program that was written for a device and knows nothing of the simulator makes its tensors with
torch. While a kernel runs, the memory behind its arguments also lies on the device, spread over all
channels as any tensor is; that takes no time. So it sees what the host has written, and the host
sees what it has stored, without a copy. Arguments that share memory share it there as well.
"""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from rankwise.sim.hardware.commands import KernelLaunch
from rankwise.sim.runtime.context import RuntimeContext
from rankwise.sim.triton.launch_arguments import HOST_MACHINE, Arguments, TensorDescriptor
from rankwise.sim.triton.memory import Buffer


class LentTensor:
    """A tensor of the host as the device sees it; for hooks of tuning it is the tensor itself.

    Attributes:
        address: where the lowest of its elements lies on the device.
        first: which of them it begins with.
        kind: its element type.
        name: empty: messages call it as the kernel's parameter is called.
    """

    name = ""

    def __init__(self, tensor: Any, buffer: Buffer, address: int) -> None:
        self._tensor = tensor
        self._buffer = buffer
        self.kind = buffer.dtype
        self.address, self.first = address, buffer.first

    def numel(self) -> int:
        """How many elements lie between its first and its last."""
        return len(self._buffer.flat)

    def kernel_buffer(self) -> Buffer:
        """The same elements where they lie on the host."""
        return self._buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tensor[key] = value


class _HostMachine:
    """Launches kernels of the host on a machine, and tells the time there."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    @property
    def now(self) -> int:
        return self._context.now

    def launch(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        with mapped_on_device(self._context, args, meta) as (on_device, by_name):
            command = self._context.launch(kernel, grid, *on_device, **by_name).command
        assert isinstance(command, KernelLaunch), "a launch is what was submitted"
        return command.kernel_fn.compiled()


@contextmanager
def mapped_on_device(
    context: RuntimeContext, args: Sequence[Any], meta: Mapping[str, Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The arguments of a launch as the device sees them, with the memory that they lie in."""
    mapping = _LaunchMapping(context)
    try:
        values = mapping.replaced([*args, *meta.values()])
        yield values[: len(args)], dict(zip(meta, values[len(args) :], strict=True))
    finally:
        mapping.end()


@contextmanager
def launches_on(context: RuntimeContext) -> Iterator[None]:
    """Let kernels run on this machine when none of their arguments lies on any."""
    token = HOST_MACHINE.set(_HostMachine(context))
    try:
        yield
    finally:
        HOST_MACHINE.reset(token)


class _LaunchMapping:
    """The memory behind the arguments of one launch, while it lies on the device."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._device = context.current_stream().device
        self._space = context.engine.space(self._device.sip)
        self._mapped: list[int] = []

    def replaced(self, values: list[Any]) -> list[Any]:
        """The values, with what the device sees in the place of tensors."""
        buffers = buffers_behind(values)
        addresses = self._map(buffers)
        return [_replaced(value, buffers, addresses) for value in values]

    def _map(self, buffers: Mapping[int, Buffer]) -> dict[int, int]:
        """Map the runs of memory that buffers cover; where each buffer begins, by its key."""
        addresses: dict[int, int] = {}
        end = start = mapped = 0
        in_order = sorted(buffers, key=lambda key: buffers[key].address)
        for place, key in enumerate(in_order):
            buffer = buffers[key]
            if not buffer.size_bytes:
                continue
            if buffer.address >= end:
                start = buffer.address
                end = _end_of_run(buffers[each] for each in in_order[place:])
                mapped = self._map_run(start, end - start)
            addresses[key] = mapped + buffer.address - start
        return addresses

    def _map_run(self, start: int, size: int) -> int:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        device = self._device
        mapping = self._context.engine.map_host(device.sip, memory, cubes=device.cubes)
        self._mapped.append(mapping.start)
        return mapping.start

    def end(self) -> None:
        """Take the memory back."""
        for address in self._mapped:
            self._space.unmap(address)


def _end_of_run(buffers: Iterator[Buffer]) -> int:
    """Where the memory ends that the first of these covers, together with those that overlap."""
    end = 0
    for buffer in buffers:
        if end and buffer.address >= end:
            break
        end = max(end, buffer.address + buffer.size_bytes)
    return end


def buffers_behind(values: Iterable[Any]) -> dict[int, Buffer]:
    """The buffers behind tensors among arguments, by the identity of those."""
    buffers: dict[int, Buffer] = {}
    for value in values:
        _collect(value, buffers)
    return buffers


def _collect(value: Any, buffers: dict[int, Buffer]) -> None:
    if isinstance(value, TensorDescriptor):
        _collect(value.base, buffers)
    elif type(value) in {tuple, list}:
        for each in value:
            _collect(each, buffers)
    elif id(value) not in buffers and not isinstance(value, np.generic):
        buffer = Arguments().buffer("", value)
        if buffer is not None:
            buffers[id(value)] = buffer


def _replaced(value: Any, buffers: Mapping[int, Buffer], addresses: Mapping[int, int]) -> Any:
    if isinstance(value, TensorDescriptor):
        described = copy(value)
        described.base = _replaced(value.base, buffers, addresses)
        return described
    if type(value) in {tuple, list}:
        return tuple(_replaced(each, buffers, addresses) for each in value)
    if id(value) in addresses:
        return LentTensor(value, buffers[id(value)], addresses[id(value)])
    return value
