"""What a platform offers, and what it tells of a task.

A platform opens devices; a device has memory and runs callables, one at a time, for the one process
that has opened it. Pointers are numbers of the device's own; see `heap` for how they are given.
Times are picoseconds on the device's own clock, which stands at 0 when it is opened and moves only
while the device does something; a platform that models no time leaves it there.
"""

from typing import Any, Protocol

import msgspec

from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.callables import ChipCallable


class Span(msgspec.Struct, frozen=True):
    """Something that took from `start_ps` to `end_ps`; `place` is the part of the device."""

    name: str
    kind: str
    place: str
    start_ps: int
    end_ps: int


class TensorSummary(msgspec.Struct, frozen=True):
    """Statistics of a tensor after a task.

    Attributes:
        minimum, maximum, mean: of its finite elements; 0 if there are none.
        nans, infinities: how many elements are none, or without bound.
    """

    argument: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    nans: int = 0
    infinities: int = 0


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a device tells of a task that it has run.

    Attributes:
        chip: the number of the device.
        task: what the callable is called.
        start_ps, end_ps: when it began and ended on the device's clock; copies from and to the
            host are in between. Equal where time is not modelled.
        spans: what happened in between; all operations if profiling was asked for.
        tensors: what its tensors held afterwards, if that was asked for.
    """

    chip: int
    task: str
    start_ps: int
    end_ps: int
    spans: tuple[Span, ...] = ()
    tensors: tuple[TensorSummary, ...] = ()

    @property
    def duration_ns(self) -> int:
        """How long it took, rounded up to whole nanoseconds."""
        return -((self.start_ps - self.end_ps) // 1000)


class Leak(msgspec.Struct, frozen=True):
    """Memory of a device that was not freed."""

    address: int
    size: int
    name: str


class Device(Protocol):
    """A chip, as the process that has opened it sees it."""

    chip: int

    def malloc(self, size: int) -> int:
        """Take memory; returns its address.

        Raises:
            ConfigError: the size is not at least one byte.
            DeviceMemoryExhausted: there is too little left; says how much.
        """
        ...

    def free(self, pointer: int) -> None:
        """Give memory back.

        Raises:
            BadPointer: `malloc` has not given this pointer, or it was freed before.
        """
        ...

    def copy_to(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from an address of the host to the device's memory.

        Raises:
            BadPointer: one of the ranges does not lie where it should.
        """
        ...

    def copy_from(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from the device's memory to an address of the host."""
        ...

    def run(
        self, callable_: ChipCallable, args: TaskArgs, config: ChipCallConfig, not_before_ps: int
    ) -> TaskReport:
        """Run a task; it begins when the device's clock has reached `not_before_ps`.

        Raises:
            BadArguments: they do not fit the signature; names which.
            BadPointer: a tensor does not lie in memory that the device can use.
        """
        ...

    def attach(self, address: int, size: int, name: str) -> None:
        """Let memory that other devices see too, at an address of the host, be the device's own."""
        ...

    def detach(self, address: int) -> None:
        """Undo `attach`."""
        ...

    @property
    def committed_bytes(self) -> int:
        """How much memory is given out."""
        ...

    def close(self) -> tuple[Leak, ...]:
        """Release everything; returns the memory that was not freed."""
        ...


class Platform(Protocol):
    """A kind of chip."""

    name: str

    def open(self, device_id: int) -> Device:
        """Open a chip; the process that calls it owns it.

        Raises:
            ConfigError: there is no chip of that number.
        """
        ...


class Chip(Protocol):
    """What a program over children is given as its first argument."""

    def launch(self, func_id: int, *arguments: Any, grid: Any = None, **meta: Any) -> None:
        """Run a child on tensors that the program was given or has allocated, and on numbers."""
        ...

    def alloc(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor of the program's own, with zeros, until the program ends."""
        ...
