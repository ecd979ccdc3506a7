"""Calculate the numbers of a collective: its programs without time, and a check that they fit.

The numbers depend on the programs alone, not on the machine: each rank's instructions
are in order, and messages of a pair stay in order. So the arithmetic is done here, once, in whole
messages, and the executor moves sizes only. That is why results do not depend on the order of
simultaneous events, nor on chunks, slots and credits.

Everything but the arithmetic depends on the programs alone. So they are played once, without
numbers, into an *instruction order*: one row of calculations, in an order that the messages allow.
A received message is read where it lies, in the sender's own workspace. If its elements are about
to change before that, it is copied, and becomes a space of its own. The numbers are then a loop
over the row, as often as they are wanted.

A collective whose ranks do not fit each other (a message that is never received, a rank that waits
for one that is never sent, lengths that differ) is refused before anything runs.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send, Span
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.ccl.rounded_reductions import combine, fold
from rankwise.sim.triton.dtypes import Array, dtype

_MESSAGES = (Send, Receive)
_COPY, _COMBINE, _FOLD, _KEEP = range(4)

_Calculation: TypeAlias = tuple[int, int, int, int, int, int, int]
"""What, then space, start and stop of the target, then those of the source."""


class InstructionOrder(NamedTuple):
    """What the programs calculate, in order.

    Attributes:
        row: the calculations. Spaces are the ranks' workspaces, then the copied messages; the
            source of a fold is a number in `folds`.
        folds: what is folded, as spans of the target's space.
        space_count: how many spaces there are.
    """

    row: tuple[_Calculation, ...]
    folds: tuple[tuple[Span, ...], ...]
    space_count: int


def order_of(programs: Sequence[Sequence[Instruction]], lengths: Sequence[int]) -> InstructionOrder:
    """Play programs without numbers.

    Args:
        programs: the instructions of every rank.
        lengths: how many elements the workspace of every rank has.

    Raises:
        ConfigError: the programs do not fit each other, or leave their workspaces.
    """
    for rank, (program, length) in enumerate(zip(programs, lengths, strict=True)):
        for step, instruction in enumerate(program):
            if not _is_inside(rank, instruction, length, len(programs)):
                _refuse(rank, step, instruction, length, len(programs))
    return _UntimedRun(programs).played()


def _is_inside(rank: int, instruction: Instruction, length: int, size: int) -> bool:
    """Whether an instruction touches its workspace and speaks to other ranks only."""
    if isinstance(instruction, _MESSAGES):
        start, stop = instruction.span
        peer = instruction.peer
        return 0 <= start <= stop <= length and 0 <= peer < size and peer != rank
    spans = spans_of(instruction)
    return all(
        0 <= start <= stop <= length and stop - start == spans[0].length for start, stop in spans
    )


def spans_of(instruction: Instruction) -> list[Span]:
    """All spans of an instruction; where it writes, or what it sends, is the last one."""
    match instruction:
        case Send() | Receive():
            return [instruction.span]
        case Copy(source, target):
            return [source, target]
        case Fold(sources, target):
            return [*sources, target]


def _refuse(rank: int, step: int, instruction: Instruction, length: int, size: int) -> None:
    where = f"instruction {step} of rank {rank}, {instruction}"
    if isinstance(instruction, _MESSAGES):
        peer = instruction.peer
        if peer == rank or not 0 <= peer < size:
            raise ConfigError(f"{where}: rank {peer} is not another rank of 0 to {size - 1}")
    for span in spans_of(instruction):
        if not 0 <= span.start <= span.stop <= length:
            raise ConfigError(f"{where}: {span} is outside the workspace of {length} elements")
    raise ConfigError(f"{where}: the spans differ in length")


class _SentMessage:
    """A message on its way: where its elements lie."""

    __slots__ = ("sender", "space", "start", "stop")

    def __init__(self, sender: int, start: int, stop: int) -> None:
        self.sender = self.space = sender
        self.start = start
        self.stop = stop


class _Unread:
    """Messages of one rank that still lie in its workspace."""

    __slots__ = ("_messages", "_start", "_stop")

    def __init__(self) -> None:
        self._messages: dict[_SentMessage, None] = {}
        self._start = self._stop = 0
        """All of them lie between these: what is written elsewhere need not look at each."""

    def add(self, message: _SentMessage) -> None:
        """A message was sent."""
        if self._messages:
            self._start = min(self._start, message.start)
            self._stop = max(self._stop, message.stop)
        else:
            self._start, self._stop = message.start, message.stop
        self._messages[message] = None

    def discard(self, message: _SentMessage) -> None:
        """It was received, or is kept elsewhere."""
        self._messages.pop(message, None)

    def between(self, start: int, stop: int) -> list[_SentMessage]:
        """Those some of whose elements lie there."""
        if not self._messages or stop <= self._start or self._stop <= start:
            return []
        return [each for each in self._messages if each.start < stop and start < each.stop]


class _UntimedRun:
    """A run of all programs without time: each rank continues until it waits, in turn."""

    def __init__(self, programs: Sequence[Sequence[Instruction]]) -> None:
        self._programs = programs
        self._mail: dict[tuple[int, int], deque[_SentMessage]] = {}
        self._unread = [_Unread() for _ in programs]
        self._places = [0] * len(programs)
        self._runnable = deque(range(len(programs)))
        self._waiting: dict[tuple[int, int], int] = {}
        self._row: list[_Calculation] = []
        self._folds: list[tuple[Span, ...]] = []
        self._space_count = len(programs)

    def played(self) -> InstructionOrder:
        """Play to the end."""
        while self._runnable:
            rank = self._runnable.popleft()
            place, program = self._places[rank], self._programs[rank]
            while place < len(program) and self._carry_out(rank, program[place]):
                place += 1
            self._places[rank] = place
        self._check_end()
        return InstructionOrder(tuple(self._row), tuple(self._folds), self._space_count)

    def _carry_out(self, rank: int, instruction: Instruction) -> bool:
        """Play one instruction; False if it has to wait for a message."""
        if isinstance(instruction, Send):
            self._send(rank, instruction)
            return True
        if isinstance(instruction, Receive):
            return self._receive(rank, instruction)
        start, stop = instruction.target
        self._will_change(rank, start, stop)
        if isinstance(instruction, Copy):
            self._row.append((_COPY, rank, start, stop, rank, *instruction.source))
        else:
            self._row.append((_FOLD, rank, start, stop, len(self._folds), 0, 0))
            self._folds.append(instruction.sources)
        return True

    def _send(self, rank: int, instruction: Send) -> None:
        way = (rank, instruction.peer)
        message = _SentMessage(rank, *instruction.span)
        self._unread[rank].add(message)
        box = self._mail.get(way)
        if box is None:
            box = self._mail[way] = deque()
        box.append(message)
        if way in self._waiting:
            self._runnable.append(self._waiting.pop(way))

    def _receive(self, rank: int, instruction: Receive) -> bool:
        way = (instruction.peer, rank)
        box = self._mail.get(way)
        if not box:
            self._waiting[way] = rank
            return False
        message = box.popleft()
        self._unread[message.sender].discard(message)
        start, stop = instruction.span
        if message.stop - message.start != stop - start:
            raise ConfigError(
                f"rank {instruction.peer} sends {message.stop - message.start} elements where rank"
                f" {rank} receives {stop - start} into {instruction.span}"
            )
        self._will_change(rank, start, stop)
        what = _COMBINE if instruction.combines else _COPY
        self._row.append((what, rank, start, stop, message.space, message.start, message.stop))
        return True

    def _will_change(self, rank: int, start: int, stop: int) -> None:
        """Copy the messages that would no longer say what they said when they were sent."""
        for message in self._unread[rank].between(start, stop):
            self._unread[rank].discard(message)
            space, length = self._space_count, message.stop - message.start
            self._row.append((_KEEP, space, 0, length, rank, message.start, message.stop))
            message.space, message.start, message.stop = space, 0, length
            self._space_count += 1

    def _check_end(self) -> None:
        if self._waiting:
            (source, target), rank = next(iter(self._waiting.items()))
            raise ConfigError(
                f"the programs do not fit: rank {target} waits at instruction"
                f" {self._places[rank]} for a message of rank {source} that is never sent"
                f" ({len(self._waiting)} of {len(self._programs)} ranks wait)"
            )
        for (source, target), box in self._mail.items():
            if box:
                raise ConfigError(
                    f"the programs do not fit: rank {target} leaves {len(box)} messages of"
                    f" rank {source} unread"
                )


def calculate(
    order: InstructionOrder, workspaces: Sequence[Array], op: ReduceOp, kind: dtype
) -> None:
    """Calculate in this order, on the workspaces of the ranks, which are changed in place."""
    spaces = [*workspaces, *[_NOTHING] * (order.space_count - len(workspaces))]
    with np.errstate(over="ignore", invalid="ignore"):
        for what, space, start, stop, source, low, high in order.row:
            if what == _COMBINE:
                combine(op, kind, spaces[space][start:stop], spaces[source][low:high])
            elif what == _COPY:
                spaces[space][start:stop] = spaces[source][low:high]
            elif what == _KEEP:
                spaces[space] = spaces[source][low:high].copy()
            else:
                parts = [spaces[space][each.start : each.stop] for each in order.folds[source]]
                spaces[space][start:stop] = fold(op, kind, parts)


_NOTHING: Array = np.zeros(0)
