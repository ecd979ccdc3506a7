"""Programs compiled for memory that all ranks read: rounds, with a barrier after each.

In a round every rank does as much of its program as it can. It *posts* a message into its own slot,
which the others read in the next round; it goes on past that, and stops at a receive whose message
has not been posted before this round. A rank that is not yet at the receive puts the message aside,
for slots are used again. So memory, barriers, deaths and deadlines are those of the segment
(`rankwise.collectives.barrier`), and there is nothing to wait for but the barrier.

All ranks compile the programs of all ranks, and so know where each message lies.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send, Span


class SlotPost(NamedTuple):
    """Copy a span into this rank's slot, from element `place` on."""

    span: Span
    place: int


class Take(NamedTuple):
    """Copy or combine what a peer posted in the round before at `place` of its slot."""

    peer: int
    place: int
    span: Span
    combines: bool


class PutAside(NamedTuple):
    """Copy what a peer posted in the round before, as message `number`, out of its slot."""

    peer: int
    place: int
    length: int
    number: int


class TakeAside(NamedTuple):
    """Copy or combine a message that was put aside."""

    number: int
    span: Span
    combines: bool


Action: TypeAlias = SlotPost | Take | PutAside | TakeAside | Copy | Fold


class Rounds(NamedTuple):
    """What each rank does in each round, `actions[rank][round]`, and how much a slot must hold."""

    actions: tuple[tuple[tuple[Action, ...], ...], ...]
    slot_elements: int


class _LockstepMessage:
    def __init__(self, number: int, sender: int, place: int, length: int) -> None:
        self.number, self.sender, self.place, self.length = number, sender, place, length
        self.is_set_aside = False


def rounds_of(programs: Sequence[Sequence[Instruction]]) -> Rounds:
    """Compile the programs of all ranks, which must fit each other."""
    return _Compiler(programs).compiled()


class _Compiler:
    def __init__(self, programs: Sequence[Sequence[Instruction]]) -> None:
        self._programs = programs
        self._places = [0] * len(programs)
        self._mail: dict[tuple[int, int], deque[_LockstepMessage]] = {}
        self._message_count = 0
        self._slot_elements = 0

    def compiled(self) -> Rounds:
        """Go from round to round until every program has ended."""
        actions: list[list[tuple[Action, ...]]] = [[] for _ in self._programs]
        ends = [len(program) for program in self._programs]
        while self._places != ends:
            before = list(self._places)
            posted: list[tuple[int, _LockstepMessage]] = []
            for rank, row in enumerate(actions):
                row.append(tuple(self._round(rank, posted)))
            assert self._places != before, "programs that fit each other do not get stuck"
            for receiver, message in posted:
                self._mail.setdefault((message.sender, receiver), deque()).append(message)
        return Rounds(tuple(map(tuple, actions)), self._slot_elements)

    def _round(self, rank: int, posted: list[tuple[int, _LockstepMessage]]) -> list[Action]:
        actions: list[Action] = []
        program, filled = self._programs[rank], 0
        while self._places[rank] < len(program):
            instruction = program[self._places[rank]]
            if isinstance(instruction, Send):
                length = instruction.span.length
                actions.append(SlotPost(instruction.span, filled))
                message = _LockstepMessage(self._message_count, rank, filled, length)
                posted.append((instruction.peer, message))
                self._message_count += 1
                filled += length
            elif isinstance(instruction, Receive):
                box = self._mail.get((instruction.peer, rank))
                if not box:  # it is posted in this round, and there in the next
                    break
                message = box.popleft()
                span, combines = instruction.span, instruction.combines
                if message.is_set_aside:
                    actions.append(TakeAside(message.number, span, combines))
                else:
                    actions.append(Take(message.sender, message.place, span, combines))
            else:
                actions.append(instruction)
            self._places[rank] += 1
        self._slot_elements = max(self._slot_elements, filled)
        return actions + self._unread(rank)

    def _unread(self, rank: int) -> list[Action]:
        """Put aside what came and is not wanted yet."""
        actions: list[Action] = []
        for (sender, receiver), box in self._mail.items():
            for message in box:
                if receiver == rank and not message.is_set_aside:
                    message.is_set_aside = True
                    actions.append(PutAside(sender, message.place, message.length, message.number))
        return actions
