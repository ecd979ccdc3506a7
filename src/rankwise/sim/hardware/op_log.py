"""The op log: every command and every operation of a kernel, with its times, place and operands.

It is the account of a run, byte-identical for equal runs.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from rankwise.core.matching import CallSignature


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


class LoggedOperation(msgspec.Struct, frozen=True, kw_only=True):
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


class LoggedCall(NamedTuple):
    """The call of a rank whose part of a collective or message an entry is.

    Attributes:
        rank: the rank.
        number: of the call in its group.
        signature: what was called.
        way: who sends to whom, of a message; None of a collective.
    """

    rank: int
    number: int
    signature: CallSignature
    way: tuple[int, int] | None


def name_of_command(call: str, rank: int) -> str:
    """The name of the command that carries out a rank's part of a call, by the call's own."""
    return f"{call} of rank {rank}"


_ENCODER = msgspec.json.Encoder(order="deterministic")


class OpLog:
    """The operations of a run in program order."""

    def __init__(self) -> None:
        self._operations: list[LoggedOperation] = []
        # Beside the entries, whose bytes are the account of a run: reports need values, not names.
        self.calls: dict[int, LoggedCall] = {}
        """By the number of an entry, the call that it is a part of."""
        self.on_append: Callable[[], None] | None = None
        """Called after each operation, while samples are taken."""

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
        call: LoggedCall | None = None,
    ) -> LoggedOperation:
        """Record an operation that has just had its effect."""
        operation = LoggedOperation(
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
        if call is not None:
            self.calls[operation.number] = call
        if self.on_append is not None:
            self.on_append()
        return operation

    def encode(self) -> bytes:
        """The log as JSON, one line per operation; equal runs give equal bytes."""
        return b"\n".join(_ENCODER.encode(operation) for operation in self._operations)

    def __iter__(self) -> Iterator[LoggedOperation]:
        return iter(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, number: int) -> LoggedOperation:
        return self._operations[number]
