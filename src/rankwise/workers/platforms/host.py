"""The platform `host`: numpy functions in memory of the process. It models no time.

A function gets its arguments in the order of its signature: tensors as numpy arrays, to be read and
written in place, and scalars as numbers. A kernel of the `tl` language runs too, in its emulation.
"""

from typing import Any

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tasks.tensors import ContinuousTensor
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.arrays import Array, Bytes, array_at, data_type_of, host_bytes, numpy_type
from rankwise.workers.callables import ChipCallable, CoreCallable
from rankwise.workers.platforms.heap import DeviceHeap
from rankwise.workers.platforms.port import Leak, TaskReport
from rankwise.workers.platforms.summaries import summaries_of


class HostPlatform:
    """Chips whose memory is the process's own."""

    name = "host"

    def open(self, device_id: int) -> "HostDevice":
        """Open a chip; any number will do."""
        return HostDevice(device_id)


class HostDevice:
    """A chip that is a numpy program."""

    def __init__(self, chip: int) -> None:
        self.chip = chip
        self._heap = DeviceHeap(chip)
        self._memory: dict[int, Bytes] = {}

    @property
    def committed_bytes(self) -> int:
        """How much memory is given out."""
        return self._heap.used

    def malloc(self, size: int) -> int:
        """Take memory; it holds zeros."""
        address = self._heap.reserve(size, "malloc")
        try:
            self._memory[address] = np.zeros(size, np.uint8)
        except MemoryError:
            self._heap.release(address)
            raise self._heap.exhausted(size) from None
        return address

    def free(self, pointer: int) -> None:
        """Give memory back."""
        del self._memory[self._heap.release(pointer).address]

    def copy_to(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from the host."""
        self._bytes(destination, size, "copy_to")[:] = host_bytes(source, size, "the source")

    def copy_from(self, destination: int, source: int, size: int) -> None:
        """Copy bytes to the host."""
        host_bytes(destination, size, "the target")[:] = self._bytes(source, size, "copy_from")

    def attach(self, address: int, size: int, name: str) -> None:
        """Use shared memory of the host like memory of the chip."""
        self._heap.attach(address, size, name)

    def detach(self, address: int) -> None:
        """Undo `attach`."""
        self._heap.detach(address)

    def run(
        self, callable_: ChipCallable, args: TaskArgs, config: ChipCallConfig, not_before_ps: int
    ) -> TaskReport:
        """Run a task; it takes no time on this device's clock."""
        values: list[Any] = []
        seen: list[tuple[str, ContinuousTensor, Array]] = []
        for place, (parameter, value) in enumerate(callable_.values(args)):
            if isinstance(value, ContinuousTensor):
                name = callable_.argument_name(place, parameter)
                array = self._array(value, name)
                values.append(array)
                seen.append((name, value, array))
            else:
                values.append(value)
        if callable_.children:
            callable_.binary(HostChip(callable_, config), *values, **callable_.meta)
        else:
            call(callable_, values, callable_.grid, config, callable_.meta)
        return TaskReport(
            chip=self.chip,
            task=callable_.name,
            start_ps=not_before_ps,
            end_ps=not_before_ps,
            tensors=summaries_of(seen) if config.enable_dump_tensor else (),
        )

    def close(self) -> tuple[Leak, ...]:
        """Release all memory; returns what was not freed."""
        leaks = self._heap.leaks()
        for leak in leaks:
            self.free(leak.address)
        return leaks

    def _array(self, tensor: ContinuousTensor, name: str) -> Array:
        if not tensor.child_memory:
            return array_at(tensor, name)
        flat = self._bytes(tensor.data, tensor.nbytes(), name)
        return flat.view(numpy_type(tensor.dtype)).reshape(tensor.shapes)

    def _bytes(self, pointer: int, size: int, what: str) -> Bytes:
        if size < 1:
            return np.empty(0, np.uint8)
        block = self._heap.find(pointer, size, what)
        if not block.is_own:
            return host_bytes(pointer, size, what)
        start = pointer - block.address
        return self._memory[block.address][start : start + size]


class HostChip:
    """What a program over children gets: launches are calls."""

    def __init__(self, program: ChipCallable, config: ChipCallConfig) -> None:
        self._program = program
        self._config = config

    def launch(self, func_id: int, *arguments: Any, grid: Any = None, **meta: Any) -> None:
        """Run a child."""
        child = self._program.child_of(func_id)
        chosen = child.grid if grid is None else grid
        call(child, list(arguments), chosen, self._config, {**child.meta, **meta})

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros."""
        data_type_of(dtype)  # refuses what no chip has
        return np.zeros(shape, dtype)


def call(
    callable_: CoreCallable,
    values: list[Any],
    grid: Any,
    config: ChipCallConfig,
    meta: dict[str, Any],
) -> None:
    """Call a function, or launch a kernel in its emulation."""
    if callable_.is_kernel:
        shape = (config.block_dim,) if grid is None else grid
        callable_.binary[shape](*values, **meta)  # type: ignore[index]  # a kernel is launched so
        return
    result = callable_.binary(*values, **meta)
    if result is not None and not any(result is value for value in values):
        raise LocalProtocolError(
            f"{callable_.name} returned {type(result).__name__}, and a result is not sent back",
            hint="write results into the arrays of its OUT and INOUT arguments",
        )
