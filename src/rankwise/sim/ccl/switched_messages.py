"""Messages that a switch copies or combines: which instructions of which ranks are one message.

A program says so at its sends and receives (`program.Switching`). Sends of one span that follow
each other are one message to all of their peers; receives into one span that follow each other are
one message that is combined of those of all peers. Messages between the same ranks keep their
order.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rankwise.core.collectives.program import Instruction, Receive, Send


class SwitchedMessage(NamedTuple):
    """What the switch does with it, the ranks that send it, and those that receive it."""

    switch: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


@lru_cache(maxsize=4096)
def leaders(program: tuple[Instruction, ...]) -> tuple[int, ...]:
    """For every instruction, the first one that is the same message; itself, most of the time."""
    found: list[int] = []
    for step, instruction in enumerate(program):
        is_more = bool(step) and _is_more(program[step - 1], instruction)
        found.append(found[-1] if is_more else step)
    return tuple(found)


def _is_more(before: Instruction, instruction: Instruction) -> bool:
    match before, instruction:
        case (Send(_, span, switch="copies"), Send(_, other, switch="copies")):
            return span == other
        case (Receive(_, span, switch="combines"), Receive(_, other, switch="combines")):
            return span == other
        case _:
            return False


def switched_messages(
    programs: Sequence[tuple[Instruction, ...]],
) -> dict[tuple[int, int], SwitchedMessage]:
    """By rank and instruction: the message that a switch copies or combines.

    Of several instructions that are one message, only the first one stands there.
    """
    found: dict[tuple[int, int], SwitchedMessage] = {}
    of_pair: dict[tuple[str, int, int], deque[SwitchedMessage]] = {}
    for rank, program in enumerate(programs):
        groups: dict[int, list[int]] = {}
        for step, leader in enumerate(leaders(program)):
            instruction = program[step]
            if isinstance(instruction, Send | Receive) and _is_one_of_many(instruction):
                groups.setdefault(leader, []).append(instruction.peer)
        for leader, group in groups.items():
            peers = tuple(sorted(group))
            if isinstance(program[leader], Send):
                message = SwitchedMessage("copies", (rank,), peers)
            else:
                message = SwitchedMessage("combines", peers, (rank,))
            found[rank, leader] = message
            for peer in peers:
                of_pair.setdefault((message.switch, rank, peer), deque()).append(message)
    for rank, program in enumerate(programs):
        for step, instruction in enumerate(program):
            if not isinstance(instruction, Send | Receive) or instruction.switch == "passes":
                continue
            if not _is_one_of_many(instruction):
                found[rank, step] = of_pair[instruction.switch, instruction.peer, rank].popleft()
    return found


def _is_one_of_many(instruction: Send | Receive) -> bool:
    """Whether it is at the end of a message that has several instructions."""
    return instruction.switch == ("copies" if isinstance(instruction, Send) else "combines")
