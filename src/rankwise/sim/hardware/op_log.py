"""The op log: every command and every operation of a kernel, with its times, place and operands.

Two uses. It is the account of a run, byte-identical for equal runs. And the data can be computed
again from it: `replay` starts from nothing and applies the log in program order.

**Why a replay never resurrects bytes.** An operation does not carry a copy of what it read, it says
*where* it read: memory space, place and address. The replay looks each operand up in the very space
that the log names, as it is after everything that comes before in the log, so it sees what program
order gives it, not what came later at the same scratch address. Only what came from outside (a
write of the host, a result of a kernel) has its bytes in the log.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.hardware.memory import Bytes


class Operand(msgspec.Struct, frozen=True):
    """Bytes that an operation read or wrote, and the memory space in which they lay.

    Attributes:
        space: `hbm`, `tcm` or `host`.
        place: which memory of that space: `sip0` for the virtual addresses of its HBM, or the name
            of a PE's TCM.
    """

    space: str
    place: str
    address: int
    bytes: int


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log. `number` is its position in program order; times are picoseconds."""

    number: int
    kind: str
    name: str
    place: str
    start: int
    end: int
    bytes: int = 0
    flops: int = 0
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()


Compute = Callable[[list[Bytes]], list[Bytes]]
"""From the bytes of the operands that are read to those of the operands that are written."""

_ENCODER = msgspec.json.Encoder(order="deterministic")


class OpLog:
    """The operations of a run in program order.

    Args:
        keeps_data: also keep what `replay` needs.
    """

    def __init__(self, *, keeps_data: bool = False) -> None:
        self.keeps_data = keeps_data
        self._operations: list[Operation] = []
        self._computations: dict[int, Compute] = {}

    def append(
        self,
        kind: str,
        name: str,
        place: str,
        start: int,
        end: int,
        *,
        size: int = 0,
        flops: int = 0,
        reads: Iterable[Operand] = (),
        writes: Iterable[Operand] = (),
        compute: Compute | None = None,
    ) -> Operation:
        """Record an operation that has just had its effect."""
        operation = Operation(
            number=len(self._operations),
            kind=kind,
            name=name,
            place=place,
            start=start,
            end=end,
            bytes=size,
            flops=flops,
            reads=tuple(reads),
            writes=tuple(writes),
        )
        self._operations.append(operation)
        if compute is not None and self.keeps_data:
            self._computations[operation.number] = compute
        return operation

    def encode(self) -> bytes:
        """The log as JSON, one line per operation; equal runs give equal bytes."""
        return b"\n".join(_ENCODER.encode(operation) for operation in self._operations)

    def replay(self) -> "Memories":
        """Compute all data again, in the order of the log, from empty memories."""
        if not self.keeps_data:
            raise LocalProtocolError(
                "this op log did not keep what a replay needs",
                hint="GraphEngine(..., replayable=True) does",
            )
        memories = Memories()
        for operation in self._operations:
            compute = self._computations.get(operation.number)
            if compute is None:
                continue
            results = compute([memories.read(operand) for operand in operation.reads])
            for operand, result in zip(operation.writes, results, strict=True):
                memories.write(operand, result)
        return memories

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, number: int) -> Operation:
        return self._operations[number]


class Memories:
    """The contents of all memories while a log is replayed; unwritten bytes are zero."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, str, int], Bytes] = {}

    def read(self, operand: Operand) -> Bytes:
        """The bytes of an operand, looked up in its own space and place."""
        result = np.zeros(operand.bytes, np.uint8)
        for page, inside, outside in _pages_of(operand):
            held = self._pages.get((operand.space, operand.place, page))
            if held is not None:
                result[outside] = held[inside]
        return result

    def write(self, operand: Operand, data: Any) -> None:
        """Set the bytes of an operand."""
        for page, inside, outside in _pages_of(operand):
            key = (operand.space, operand.place, page)
            held = self._pages.get(key)
            if held is None:
                held = self._pages[key] = np.zeros(_PAGE, np.uint8)
            held[inside] = data[outside]


_PAGE = 65_536


def _pages_of(operand: Operand) -> Iterator[tuple[int, slice, slice]]:
    """The pages that an operand touches: number, part of the page, part of the operand."""
    address, end = operand.address, operand.address + operand.bytes
    while address < end:
        page, offset = divmod(address, _PAGE)
        count = min(_PAGE - offset, end - address)
        begin = address - operand.address
        yield page, slice(offset, offset + count), slice(begin, begin + count)
        address += count
