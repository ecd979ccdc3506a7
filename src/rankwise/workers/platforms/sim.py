"""The platform `sim`: each chip is a SIP of a simulated machine, with real numerics and its time.

This is the one module in which the real world meets the simulated one. The process that opens a
chip simulates a machine of its own and uses one SIP of it: chips do not contend for the links
between them, and data that goes from one to another passes through the host, as tensors do that
tasks share.

A task on tensors of the host is what it is on an accelerator: inputs are copied into device memory,
the kernel runs, outputs are copied back, and each takes its time; so does finding room for them.
Tensors in the chip's own memory (`child_memory`) stay where they are. Windows that chips share lie
in memory of the host and are used in place, in the time that the chip's own memory would take.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import numpy as np

from rankwise.base.errors import TreeValueError
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tasks.tensors import ContinuousTensor, DataType
from rankwise.sim.hardware import (
    GraphEngine,
    KernelLaunch,
    Memory,
    MemoryExhausted,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
    OpLog,
    load_topology,
)
from rankwise.sim.hardware.commands import Command
from rankwise.sim.runtime.placement import Device as SimulatedDevice
from rankwise.sim.runtime.placement import Layout, layout_of
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.arrays import Bytes, data_type_of, host_bytes, numpy_type
from rankwise.workers.callables import ChipCallable, CoreCallable, Parameter
from rankwise.workers.errors import BadArguments
from rankwise.workers.platforms.heap import DeviceHeap
from rankwise.workers.platforms.port import Leak, Span, TaskReport
from rankwise.workers.platforms.summaries import summaries_of

_TYPE_NAMES = {
    DataType.FLOAT32: "fp32", DataType.FLOAT16: "fp16", DataType.INT32: "int32",
    DataType.INT16: "int16", DataType.INT8: "int8", DataType.UINT8: "uint8",
    DataType.BFLOAT16: "bf16", DataType.INT64: "int64", DataType.UINT64: "uint64",
    DataType.UINT16: "uint16", DataType.UINT32: "uint32", DataType.BOOL: "int1",
    DataType.FLOAT64: "fp64",
}  # fmt: skip
_COMMANDS = frozenset({"MmuMap", "MmuUnmap", "MemoryWrite", "MemoryRead", "KernelLaunch"})


class SimulatedPlatform:
    """Chips of a topology: a preset's name, or a file.

    Raises:
        ConfigError: there is no such topology, or it is wrong; says what and in which line.
    """

    name = "sim"

    def __init__(self, topology: str = "default") -> None:
        self._topology = load_topology(topology)

    def open(self, device_id: int) -> "SimulatedChip":
        """Open the SIP of that number."""
        if not 0 <= device_id < self._topology.sip_count:
            raise TreeValueError(
                f"device_id is {device_id}, but the topology {self._topology.name!r} has "
                f"{self._topology.sip_count} chips, 0 to {self._topology.sip_count - 1}",
                hint="choose a larger one: platform='sim:pod64', or a file of your own",
            )
        return SimulatedChip(device_id, GraphEngine(self._topology))


class SimulatedChip:
    """One SIP of a machine that this process simulates."""

    def __init__(self, chip: int, engine: GraphEngine) -> None:
        sip = engine.topology.machine.sip
        self.chip = chip
        self._engine = engine
        self._device = SimulatedDevice(
            chip, tuple(range(sip.cubes.count)), engine.topology.machine.cube.pes.count
        )
        capacity = sip.cubes.count * engine.topology.machine.cube.hbm.capacity
        self._heap = DeviceHeap(chip, capacity)

    @property
    def committed_bytes(self) -> int:
        """How much memory is given out."""
        return self._heap.used

    def malloc(self, size: int) -> int:
        """Take memory, spread over the HBM of all cubes; it holds zeros."""
        return self._allocate(size, "malloc")

    def free(self, pointer: int) -> None:
        """Give memory back."""
        block = self._heap.release(pointer)
        self._do(MmuUnmap(sip=self.chip, address=block.address, name=f"free {block.name}"))

    def copy_to(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from the host over its link."""
        self._heap.find(destination, size, "copy_to")
        self._write(destination, host_bytes(source, size, "the source"), "copy_to")

    def copy_from(self, destination: int, source: int, size: int) -> None:
        """Copy bytes to the host over its link."""
        self._heap.find(source, size, "copy_from")
        host_bytes(destination, size, "the target")[:] = self._read(source, size, "copy_from")

    def attach(self, address: int, size: int, name: str) -> None:
        """Map shared memory of the host at its own address."""
        self._heap.attach(address, size, name)
        space = self._engine.space(self.chip)
        sip = self._engine.machine.sip(self.chip)
        places = []
        layout = self._layout(size)
        for piece in layout.pieces:
            # It takes the time of the chip's memory, and none of its room.
            port = sip.cube(piece.cube).hbm(piece.pe).port
            memory = Memory("hbm", (self.chip, piece.cube, piece.pe), piece.size, port)
            places.append((piece.size, memory))
        mapping = space.map_places(address, places, layout.interleave)
        mapping.lie_in(host_bytes(address, size, name))

    def detach(self, address: int) -> None:
        """Undo `attach`."""
        self._heap.detach(address)
        self._engine.space(self.chip).unmap(address)

    def run(
        self, callable_: ChipCallable, args: TaskArgs, config: ChipCallConfig, not_before_ps: int
    ) -> TaskReport:
        """Run a kernel, or a program that launches kernels."""
        if not callable_.is_kernel and not callable_.children:
            raise BadArguments(
                f"{callable_.name} is a plain function, which the platform 'sim' cannot run",
                hint="decorate a kernel of the tl language with jit, or use platform='host'",
            )
        values = callable_.values(args)
        self._engine.op_log = OpLog()  # a worker lives long, and a log only grows
        if not_before_ps > self._engine.now:
            self._engine.simulator.run(not_before_ps)
        start_ps = self._engine.now
        with ExitStack() as stack:
            staged = [
                stack.enter_context(self._staged(callable_, place, parameter, value))
                for place, (parameter, value) in enumerate(values)
            ]
            if callable_.children:
                chip = stack.enter_context(_program_chip(self, callable_, config))
                callable_.binary(chip, *staged, **callable_.meta)
            else:
                self.launch(callable_, staged, callable_.grid, config, callable_.meta)
            summaries = (
                self._summaries(callable_, values, staged) if config.enable_dump_tensor else ()
            )
        return TaskReport(
            chip=self.chip,
            task=callable_.name,
            start_ps=start_ps,
            end_ps=self._engine.now,
            spans=self._spans(all_operations=config.enable_profiling),
            tensors=summaries,
        )

    def launch(
        self,
        kernel: CoreCallable,
        values: Sequence[Any],
        grid: Any,
        config: ChipCallConfig,
        meta: dict[str, Any],
    ) -> None:
        """Run one kernel over a grid, on all PEs."""
        if not kernel.is_kernel:
            raise BadArguments(
                f"{kernel.name} is a plain function, which the platform 'sim' cannot launch",
                hint="decorate a kernel of the tl language with jit",
            )
        shape = config.block_dim if grid is None else grid
        if not callable(shape):
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._do(
            KernelLaunch(
                sip=self.chip,
                runner=KernelRunner(meta, shape),
                kernel_fn=kernel.binary,
                kernel_args=[_argument(value) for value in values],
                num_programs=1 if callable(shape) else prod(shape),
                name=kernel.name,
            )
        )

    def allocate_tensor(self, shape: tuple[int, ...], dtype: Any, name: str) -> "ChipTensor":
        """A tensor of zeros in the chip's memory."""
        kind = dtype if isinstance(dtype, DataType) else data_type_of(dtype)
        described = ContinuousTensor(0, shape, kind, child_memory=True)
        address = self._allocate(described.nbytes(), name)
        return ChipTensor(address, described.shapes, kind, name)

    def close(self) -> tuple[Leak, ...]:
        """Release all memory; returns what was not freed."""
        leaks = self._heap.leaks()
        for leak in leaks:
            self.free(leak.address)
        return leaks

    def _layout(self, size: int) -> Layout:
        turns = self._engine.topology.machine.cube.hbm.interleave_bytes
        return layout_of((size,), 1, None, self._device, turns)

    def _allocate(self, size: int, name: str) -> int:
        address = self._heap.reserve(size, name)
        layout = self._layout(size)
        try:
            self._do(
                MmuMap(
                    sip=self.chip,
                    address=address,
                    size=size,
                    places=tuple((piece.size, piece.cube, piece.pe) for piece in layout.pieces),
                    interleave=layout.interleave,
                    name=f"map {name}",
                )
            )
        except MemoryExhausted as error:  # one channel is full before all are
            self._heap.release(address)
            raise self._heap.exhausted(size) from error
        return address

    @contextmanager
    def _staged(
        self, callable_: CoreCallable, place: int, parameter: Parameter, value: Any
    ) -> Iterator[Any]:
        """An argument where the kernel can use it; brought back afterwards if it is to be."""
        if not isinstance(value, ContinuousTensor):
            yield value
            return
        name = callable_.argument_name(place, parameter)
        if value.dtype not in _TYPE_NAMES:
            raise BadArguments(
                f"{name} has dtype {value.dtype.name}, which kernels do not have",
                hint="functions over arrays do, on platform='host'",
            )
        size = value.nbytes()
        if not size:
            raise BadArguments(f"{name} has shape {value.shapes}, and no elements")
        if value.child_memory:
            self._heap.find(value.data, size, name)
            yield ChipTensor(value.data, value.shapes, value.dtype, name)
            return
        on_host = host_bytes(value.data, size, name)
        address = self._allocate(size, name)
        try:
            if parameter.is_read:
                self._write(address, on_host, f"copy in {name}")
            yield ChipTensor(address, value.shapes, value.dtype, name)
            if parameter.is_written:
                self._bring_back(address, on_host, name)
        finally:
            self.free(address)

    def _bring_back(self, address: int, on_host: Bytes, name: str) -> None:
        result = self._read(address, on_host.size, f"copy out {name}")
        # A tensor of which only the kernel knows that it is an input must not be written to: others
        # may read it at the same time, or it may not be writable.
        if not np.array_equal(on_host, result):
            on_host[:] = result

    def _write(self, address: int, data: Bytes, name: str) -> None:
        self._do(MemoryWrite(sip=self.chip, address=address, data=data, name=name))

    def _read(self, address: int, size: int, name: str) -> Bytes:
        data: Bytes = self._do(MemoryRead(sip=self.chip, address=address, size=size, name=name))
        return data

    def _do(self, command: Command) -> Any:
        return self._engine.wait(self._engine.submit(command))

    def _spans(self, *, all_operations: bool) -> tuple[Span, ...]:
        return tuple(
            Span(each.name, each.kind, each.place, each.start, each.end)
            for each in self._engine.op_log
            if all_operations or each.kind in _COMMANDS
        )

    def _summaries(
        self,
        callable_: CoreCallable,
        values: Sequence[tuple[Parameter, Any]],
        staged: Sequence[Any],
    ) -> Any:
        """Look at tensors where they lie, which costs no simulated time."""
        space = self._engine.space(self.chip)
        seen = []
        for place, ((parameter, value), there) in enumerate(zip(values, staged, strict=True)):
            if isinstance(value, ContinuousTensor):
                stored = space.read(there.address, value.nbytes()).view(numpy_type(value.dtype))
                seen.append((callable_.argument_name(place, parameter), value, stored))
        return summaries_of(seen)


class ChipTensor:
    """A tensor in the chip's memory, as programs over children handle it: to be passed on.

    Attributes:
        shape: its lengths.
        kind: what its elements are.
    """

    def __init__(self, address: int, shape: tuple[int, ...], kind: DataType, name: str) -> None:
        self.address = address
        self.shape = shape
        self.kind = kind
        self.name = name

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The numpy type in which its elements are stored."""
        return numpy_type(self.kind)

    def __repr__(self) -> str:
        return f"<ChipTensor {self.name}: {self.shape} {self.kind.name} at {self.address:#x}>"


class ProgramChip:
    """What a program over children gets: it launches kernels, one after the other."""

    def __init__(self, chip: SimulatedChip, program: ChipCallable, config: ChipCallConfig) -> None:
        self._chip = chip
        self._program = program
        self._config = config
        self.allocated: list[ChipTensor] = []

    def launch(self, func_id: int, *arguments: Any, grid: Any = None, **meta: Any) -> None:
        """Run a child."""
        child = self._program.child_of(func_id)
        chosen = child.grid if grid is None else grid
        self._chip.launch(child, arguments, chosen, self._config, {**child.meta, **meta})

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> ChipTensor:
        """A tensor of zeros, until the program ends."""
        name = f"scratch {len(self.allocated)} of {self._program.name}"
        self.allocated.append(self._chip.allocate_tensor(shape, dtype, name))
        return self.allocated[-1]


@contextmanager
def _program_chip(
    chip: SimulatedChip, program: ChipCallable, config: ChipCallConfig
) -> Iterator[ProgramChip]:
    handle = ProgramChip(chip, program, config)
    try:
        yield handle
    finally:
        for tensor in handle.allocated:
            chip.free(tensor.address)


def _argument(value: Any) -> Any:
    if not isinstance(value, ChipTensor):
        return value
    return DevicePointer(value.address, _TYPE_NAMES[value.kind], prod(value.shape), value.name)
