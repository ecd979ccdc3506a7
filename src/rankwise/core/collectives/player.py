"""One rank's way through its program, for a driver that sends and receives messages.

The machine is told what has happened (`begin`, `received`, `sent`) and answers with what is to be
done now, in order: instructions of the program, and what its messages need.

- A message that is `Transmit`ted leaves whenever the driver gets rid of it: the program goes on at
  once, since two ranks that send to each other before they receive must not wait for each other.
- Sending reads the span at its place of the program. Before the span changes while the message is
  still here, the driver is told to `Keep` what is left of it elsewhere.
- There is one `Receive` at a time, the last of the effects that are given: nothing behind it may
  happen before it is done. `ProgramEnded` comes when nothing is left of it, and all messages have
  left.

States: running (effects are being given), receiving (a `Receive` is out), leaving (the program has
ended, messages have not), finished. The driver decides which wait lasts how long, and what follows
when a peer dies: it knows peers, and the machine knows what it waits for.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send, Span


class Transmit(NamedTuple):
    """Send this span to that rank; `number` names the message."""

    number: int
    peer: int
    span: Span


class Keep(NamedTuple):
    """Copy what has not left of this message: its span is about to change."""

    number: int


class ProgramEnded(NamedTuple):
    """Nothing is left to be done."""


Effect: TypeAlias = Transmit | Keep | Receive | Copy | Fold | ProgramEnded


class PlayedInstruction(NamedTuple):
    """An instruction, and the earlier messages (by number) whose span it changes."""

    instruction: Instruction
    endangers: tuple[int, ...]


def steps_of(program: Iterable[Instruction]) -> tuple[PlayedInstruction, ...]:
    """Find out, ahead of all runs, which messages an instruction endangers."""
    sent: list[Span] = []
    steps = []
    for instruction in program:
        if isinstance(instruction, Send):
            steps.append(PlayedInstruction(instruction, ()))
            sent.append(instruction.span)
            continue
        written = instruction.span if isinstance(instruction, Receive) else instruction.target
        endangered = tuple(
            number
            for number, span in enumerate(sent)
            if span.start < written.stop and written.start < span.stop
        )
        steps.append(PlayedInstruction(instruction, endangered))
    return tuple(steps)


class Player:
    """Plays the program of one rank once."""

    def __init__(self, steps: tuple[PlayedInstruction, ...]) -> None:
        self._steps = steps
        self._place = 0
        self._message_count = 0
        self._leaving: set[int] = set()
        """Messages that the driver has not got rid of."""
        self._is_receiving = False

    def begin(self) -> list[Effect]:
        """What is to be done first."""
        return self._go_on()

    def received(self) -> list[Effect]:
        """The message of the last `Receive` has come, and is where it belongs."""
        assert self._is_receiving, "a message came without a receive"
        self._is_receiving = False
        return self._go_on()

    def sent(self, number: int) -> list[Effect]:
        """That message has left."""
        self._leaving.discard(number)
        return self._end()

    def _go_on(self) -> list[Effect]:
        effects: list[Effect] = []
        steps = self._steps
        while self._place < len(steps):
            instruction, endangered = steps[self._place]
            self._place += 1
            if isinstance(instruction, Send):
                self._leaving.add(self._message_count)
                effects.append(Transmit(self._message_count, instruction.peer, instruction.span))
                self._message_count += 1
                continue
            effects.extend(Keep(number) for number in endangered if number in self._leaving)
            effects.append(instruction)
            if isinstance(instruction, Receive):
                self._is_receiving = True
                return effects
        return effects + self._end()

    def _end(self) -> list[Effect]:
        if self._leaving or self._is_receiving or self._place < len(self._steps):
            return []
        return [ProgramEnded()]
