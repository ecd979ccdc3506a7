"""Carry out the programs of all ranks without time: check that they fit, and work out the numbers.

Whatever the machine does, the numbers are decided by the programs alone: each rank's instructions
are in order, and messages of a pair stay in order. So the arithmetic is done here, once, in whole
messages, and the executor moves sizes only. That is why results do not depend on the order of
simultaneous events, nor on chunks, slots and credits.

A collective whose ranks do not fit each other (a message that nobody takes, a rank that waits for
one that is never sent, lengths that differ) is refused before anything runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.sim.ccl.program import Copy, Fold, Instruction, Receive, Send, Span
from rankwise.sim.ccl.reductions import ReduceOp, combine, fold
from rankwise.sim.triton.dtypes import Array, dtype


def check_programs(programs: Sequence[Sequence[Instruction]], lengths: Sequence[int]) -> None:
    """Refuse programs that do not fit each other or leave their workspaces.

    Args:
        programs: the instructions of every rank.
        lengths: how many elements the workspace of every rank has.
    """
    for rank, (program, length) in enumerate(zip(programs, lengths, strict=True)):
        for step, instruction in enumerate(program):
            _check_instruction(rank, step, instruction, length, len(programs))
    _play(programs, lambda _rank, span: span.length, _take_note)


def _check_instruction(
    rank: int, step: int, instruction: Instruction, length: int, size: int
) -> None:
    where = f"instruction {step} of rank {rank}, {instruction}"
    match instruction:
        case Send(peer, span) | Receive(peer, span):
            if peer == rank or not 0 <= peer < size:
                raise ConfigError(f"{where}: rank {peer} is no other rank of 0 to {size - 1}")
            spans = [span]
        case Copy(source, target):
            spans = [source, target]
        case Fold(sources, target):
            spans = [*sources, target]
    for span in spans:
        if not 0 <= span.start <= span.stop <= length:
            raise ConfigError(f"{where}: {span} is outside the workspace of {length} elements")
        if span.length != spans[0].length:
            raise ConfigError(f"{where}: the spans differ in length")


class _Message:
    """A message on its way: the sender's own elements, copied only if they are about to change."""

    __slots__ = ("is_kept", "span", "values")

    def __init__(self, span: Span, values: Array) -> None:
        self.span = span
        self.values = values
        self.is_kept = False

    def __len__(self) -> int:
        return self.span[1] - self.span[0]

    def keep(self) -> None:
        """Hold on to the values as they are now."""
        if not self.is_kept:
            self.values = self.values.copy()
            self.is_kept = True


def rehearse(
    programs: Sequence[Sequence[Instruction]],
    workspaces: Sequence[Array],
    op: ReduceOp,
    kind: dtype,
) -> None:
    """Carry the programs out on workspaces, which are changed in place."""
    unread: list[list[_Message]] = [[] for _ in programs]

    def read(rank: int, span: Span) -> _Message:
        message = _Message(span, workspaces[rank][span.start : span.stop])
        unread[rank].append(message)
        return message

    def will_change(rank: int, start: int, stop: int) -> None:
        for message in unread[rank]:
            if message.span.start < stop and start < message.span.stop:
                message.keep()

    def write(rank: int, instruction: Instruction, message: _Message | None) -> None:
        space = workspaces[rank]
        match instruction:
            case Receive(peer, (start, stop), combines):
                assert message is not None, "a message was received"
                unread[peer].remove(message)
                will_change(rank, start, stop)
                if combines:
                    combine(op, kind, space[start:stop], message.values)
                else:
                    space[start:stop] = message.values
            case Copy(source, target):
                will_change(rank, target.start, target.stop)
                space[target.start : target.stop] = space[source.start : source.stop]
            case Fold(sources, target):
                parts = [space[each.start : each.stop] for each in sources]
                will_change(rank, target.start, target.stop)
                space[target.start : target.stop] = fold(op, kind, parts)
            case Send():
                pass

    with np.errstate(over="ignore", invalid="ignore"):
        _play(programs, read, write)


def _play(
    programs: Sequence[Sequence[Instruction]],
    read: Callable[[int, Span], _Message] | Callable[[int, Span], int],
    write: Callable[[int, Instruction, object], None] | Callable[..., None],
) -> None:
    """Let every rank go on until it waits, over and over, until all have finished."""
    mail: dict[tuple[int, int], deque[object]] = {}
    places = [0] * len(programs)
    runnable = deque(range(len(programs)))
    waiting: dict[tuple[int, int], int] = {}
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while places[rank] < len(program):
            instruction = program[places[rank]]
            message = None
            if isinstance(instruction, Send):
                way = (rank, instruction.peer)
                if way not in mail:
                    mail[way] = deque()
                mail[way].append(read(rank, instruction.span))
                if way in waiting:
                    runnable.append(waiting.pop(way))
            elif isinstance(instruction, Receive):
                way = (instruction.peer, rank)
                box = mail.get(way)
                if not box:
                    waiting[way] = rank
                    break
                message = box.popleft()
                _check_length(message, instruction, rank)
            write(rank, instruction, message)
            places[rank] += 1
    _check_end(programs, places, waiting, mail)


def _check_length(message: object, instruction: Receive, rank: int) -> None:
    length = message if isinstance(message, int) else len(cast("_Message", message))
    if length != instruction.span.length:
        raise ConfigError(
            f"rank {instruction.peer} sends {length} elements where rank {rank} receives"
            f" {instruction.span.length} into {instruction.span}"
        )


def _check_end(
    programs: Sequence[Sequence[Instruction]],
    places: list[int],
    waiting: dict[tuple[int, int], int],
    mail: dict[tuple[int, int], deque[object]],
) -> None:
    if waiting:
        (source, target), rank = next(iter(waiting.items()))
        raise ConfigError(
            f"the programs do not fit: rank {target} waits at instruction {places[rank]} for a"
            f" message of rank {source} that is never sent"
            f" ({len(waiting)} of {len(programs)} ranks wait)"
        )
    for (source, target), box in mail.items():
        if box:
            raise ConfigError(
                f"the programs do not fit: rank {target} leaves {len(box)} messages of"
                f" rank {source} unread"
            )


def _take_note(_rank: int, _instruction: Instruction, _message: object) -> None:
    """Nothing is computed while programs are only checked."""
