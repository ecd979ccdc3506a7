"""Lives an agent's life again, from its journal: the same machine, the same facts, the same times.

A journal holds everything that a machine was told, and a machine has nothing but what it is told;
so its states can be seen again afterwards. The recorded orders are compared with those of this
version. Another version of rankwise may decide otherwise, and what follows then proves little.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AGENT, AgentStarted, Effect, Stimulus
from rankwise.core.watch.vocabulary import NoteHold
from rankwise.core.watch.wording import hold_in_words


class _ReplayedKind(msgspec.Struct, frozen=True):
    type: str = ""


class _ReplayedLine(msgspec.Struct, frozen=True):
    at: Instant
    machine: str
    wall: str = ""
    number: int = 0
    cause: int = 0
    stimulus: msgspec.Raw = msgspec.Raw()
    effect: msgspec.Raw = msgspec.Raw()
    record: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class ReplayStep:
    """One fact, and the state in which it left the machine.

    Attributes:
        machine: the machine's name in the journal.
        at: the instant of the fact on the machine's clock.
        wall: the same of the calendar, UTC; empty in a simulation.
        stimulus: the fact.
        effects: what the machine orders now.
        phase: of the agent.
        round: the number and phase of the round that it knows of; empty before the first.
        leads: whether its node leads.
        first_rank: the job's rank of the node's first worker.
        recorded: what it had ordered then.
        is_last: whether no agent's entry follows in the journal.
    """

    machine: str
    at: Instant
    wall: str
    stimulus: Stimulus
    effects: list[Effect]
    phase: str
    round: str
    leads: bool
    first_rank: int
    recorded: list[Effect]
    is_last: bool = False

    @property
    def held_exits(self) -> list[str]:
        """A line for each hold that this step ended: which exits, for how long, and why."""
        notes = (each for each in self.effects if isinstance(each, NoteHold))
        return [hold_in_words(note, self.first_rank) for note in notes]

    @property
    def differs(self) -> bool:
        """Whether the machine orders something else now than it did then."""
        return self.effects != self.recorded and not self.is_cut_off

    @property
    def is_cut_off(self) -> bool:
        """Whether the journal ends between this fact and the last of its orders."""
        # An agent's orders stand right behind their fact, before anything that an agent is told.
        count = len(self.recorded)
        return self.is_last and count < len(self.effects) and self.effects[:count] == self.recorded


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An entry of a journal as it stands there: what a machine was told, or has ordered.

    Attributes:
        machine, at, wall: see `ReplayStep`.
        cause: the number of the fact, of an order that of the fact that it follows from.
        kind: the name of the fact or order.
        text: all of it, as JSON.
        is_order: which of the two it is.
    """

    machine: str
    at: Instant
    wall: str
    cause: int
    kind: str
    text: str
    is_order: bool


def entries(lines: Iterable[bytes], path: str) -> Iterator[JournalEntry]:
    """Whatever machines have left in a journal, not lived again but read.

    Raises:
        ConfigError: a line is no entry of a journal.
    """
    for _, line in _read(lines, path):
        if bytes(line.record):
            continue  # no machine was told of it
        word = line.effect if bytes(line.effect) else line.stimulus
        kind = msgspec.json.decode(word, type=_ReplayedKind).type
        number = line.number or line.cause
        is_order = bool(bytes(line.effect))
        yield JournalEntry(
            line.machine, line.at, line.wall, number, kind, bytes(word).decode(), is_order
        )


def _read(lines: Iterable[bytes], path: str) -> Iterator[tuple[int, _ReplayedLine]]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            yield number, msgspec.json.decode(text, type=_ReplayedLine)
        except msgspec.DecodeError as error:
            if not text.endswith(b"\n"):
                raise ConfigError(
                    f"{path} ends in the middle of line {number}",
                    hint="its writer was killed, or the disk was full; the lines before hold",
                ) from error
            raise _no_entry(path, number, error) from error


def _no_entry(path: str, number: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: {error}",
        hint="is it the journal of a run, by this version of rankwise?",
    )


def replay(lines: Iterable[bytes], path: str) -> Iterator[ReplayStep]:
    """The steps of all agents in a journal, in the order in which they were taken.

    Args:
        lines: of the journal.
        path: its name, for errors.

    Raises:
        ConfigError: a line is no entry of a journal, or the beginning of a life is missing.
    """
    agents: dict[str, Agent] = {}
    pending: dict[str, ReplayStep] = {}
    stimuli = msgspec.json.Decoder(Stimulus)
    effects = msgspec.json.Decoder(Effect)
    last = ""
    for number, line in _read(lines, path):
        if not line.machine.startswith(AGENT):
            continue
        last = line.machine
        try:
            if bytes(line.effect):
                step = pending.get(line.machine)
                if step is not None:
                    step.recorded.append(effects.decode(line.effect))
                continue
            stimulus: Stimulus = stimuli.decode(line.stimulus)
        except msgspec.DecodeError as error:
            raise _no_entry(path, number, error) from error
        if line.machine in pending:
            yield pending.pop(line.machine)
        pending[line.machine] = _take(agents, line, stimulus, f"{path}, line {number}")
    if last in pending:
        pending[last].is_last = True
    yield from pending.values()


def _take(
    agents: dict[str, Agent], line: _ReplayedLine, stimulus: Stimulus, place: str
) -> ReplayStep:
    if isinstance(stimulus, AgentStarted):
        agents[line.machine] = Agent(stimulus.spec)
    agent = agents.get(line.machine)
    if agent is None:
        raise ConfigError(f"{place}: the beginning of {line.machine}'s life is missing")
    ordered = agent.handle(stimulus, line.at)
    round_ = agent.rendezvous.round
    return ReplayStep(
        machine=line.machine,
        at=line.at,
        wall=line.wall,
        stimulus=stimulus,
        effects=ordered,
        phase=str(agent.phase),
        round="" if round_ is None else f"{round_.number} {round_.phase}",
        leads=agent.rendezvous.is_leading,
        first_rank=0 if agent.world is None else agent.world.first_rank,
        recorded=[],
    )
