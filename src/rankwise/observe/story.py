"""What happened in a run, read back from the journals of its nodes.

A journal is read from the first line to the last that is whole: its writer may have been killed in
the middle of one, or the disk was full. Of facts and orders only those are looked at that people
care about afterwards; the records of `rankwise.observe.records` tell the rest. Instants stay those
of each node's own clock; `rankwise.observe.clocks` relates the clocks to each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import Failure, Outcome
from rankwise.base.units import Instant
from rankwise.core.agent.vocabulary import (
    AGENT,
    AgentStarted,
    AnnounceRestart,
    AnnounceRound,
    AnnounceRoundEnd,
    BeginAttempt,
    FailuresDescribed,
    FinishRun,
)
from rankwise.core.gang.vocabulary import (
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    TellWorker,
    WorkerExited,
    WorkerSpawned,
)
from rankwise.core.matching import CallSignature
from rankwise.core.rendezvous.records import LateRank
from rankwise.core.rendezvous.vocabulary import InquiryAnswered, World
from rankwise.observe.records import (
    BEGUN_BY_CPP,
    RECORDER,
    CallsSampled,
    CallsSeen,
    GpuErrorReported,
    GpuSample,
    GpusSampled,
    RanksSampled,
    Record,
    RecordedGroup,
    RunDescribed,
    Sample,
    SectionsSeen,
)


class TimedCall(NamedTuple):
    """A rank's call of a group (`None` for a message); `ended_at` is 0 if no end was seen.

    `stage` is as in `RecordedCall`.
    """

    group: RecordedGroup | None
    number: int
    begun_at: int
    ended_at: int
    stage: int
    signature: CallSignature
    place: str


class TimedSection(NamedTuple):
    """A section of a rank; `ended_at` is 0 if no end was seen."""

    name: str
    depth: int
    begun_at: int
    ended_at: int


@dataclass(slots=True)
class RankLife:
    """One rank in one attempt.

    Attributes:
        rank, attempt: which; of several nodes, an attempt is a round.
        begun_at: when its process was there.
        ended_at: when it had ended; None if the journal ends before.
        exit: how, in words; empty for a success, and while it is not known.
        covered: between these pairs of instants no call is missing.
    """

    rank: int
    attempt: int
    begun_at: int
    ended_at: int | None = None
    exit: str = ""
    calls: list[TimedCall] = field(default_factory=list)
    sections: list[TimedSection] = field(default_factory=list)
    covered: list[tuple[int, int]] = field(default_factory=list)


class Moment(NamedTuple):
    """Something that was decided or reported: a restart, the end of a round, an error of a GPU."""

    at: int
    text: str


@dataclass(slots=True)
class NodeStory:
    """What happened on one node.

    Attributes:
        path: of its journal.
        node_id: the agent's, as rounds list it.
        host: its machine.
        described: what ran there; None if it was not recorded.
        wall_offset: nanoseconds from its clock to the calendar, as of its first line.
        first_at, last_at: the instants of its first and last line.
        lives: by attempt and rank.
        samples: of each rank, with the instant at which it was taken.
        gpus: samples of each GPU, by its number, likewise.
        moments: restarts and ends of rounds.
        failures: of attempts that failed, by attempt, the root cause first.
        outcome: how the run ended for this node; None if its journal does not tell.
        worlds: the place of this node in each attempt.
        late: the rank of all nodes that has made the others wait notably, as the node was told.
        is_cut: whether the journal ends in the middle of a line.
    """

    path: str
    node_id: str = ""
    host: str = ""
    is_alone: bool = True
    described: RunDescribed | None = None
    wall_offset: int = 0
    first_at: int = 0
    last_at: int = 0
    lives: dict[tuple[int, int], RankLife] = field(default_factory=dict)
    samples: dict[int, list[tuple[int, Sample]]] = field(default_factory=dict)
    gpus: dict[int, list[tuple[int, GpuSample]]] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    failures: dict[int, tuple[Failure, ...]] = field(default_factory=dict)
    outcome: Outcome | None = None
    worlds: dict[int, World] = field(default_factory=dict)
    late: LateRank | None = None
    is_cut: bool = False

    @property
    def node_rank(self) -> int:
        """Its rank among the nodes of the last round that it was in."""
        return self.worlds[max(self.worlds)].node_rank if self.worlds else 0

    @property
    def ranks(self) -> list[int]:
        """All ranks that have lived here."""
        return sorted({rank for _, rank in self.lives})


class _StoryLine(msgspec.Struct, frozen=True):
    at: Instant
    machine: str
    wall: str = ""
    stimulus: msgspec.Raw = msgspec.Raw()
    effect: msgspec.Raw = msgspec.Raw()
    record: msgspec.Raw = msgspec.Raw()


class _StoryKind(msgspec.Struct, frozen=True):
    type: str = ""


_Word = (
    AgentStarted
    | WorkerSpawned
    | WorkerExited
    | RecoveryMessageSent
    | TellWorker
    | FailuresDescribed
    | BeginAttempt
    | AnnounceRestart
    | AnnounceRound
    | AnnounceRoundEnd
    | InquiryAnswered
    | FinishRun
)
_WORDS = frozenset(str(word.__struct_config__.tag) for word in _Word.__args__)


def read_story(lines: Iterable[bytes], path: str) -> NodeStory:
    """What a journal tells of its node.

    Args:
        lines: of the journal.
        path: its name, for the page and for errors.

    Raises:
        ConfigError: a whole line is no entry of a journal, or there is none.
    """
    reader = _Reader(NodeStory(path))
    for line in _whole_lines(lines, path, reader.story):
        reader.read(line)
    if reader.has_simulated_nodes:
        raise ConfigError(
            f"{path} is of several simulated nodes (--on sim), of which there is no page",
            hint="rankwise replay shows their agents; --on sim:MACHINE --report predicts the time",
        )
    if not reader.has_agent:
        raise ConfigError(
            f"{path} has no entries of an agent",
            hint="is it the journal.jsonl of a run's log directory, by this version of rankwise?",
        )
    return reader.story


def _whole_lines(
    lines: Iterable[bytes], path: str, story: NodeStory
) -> Iterator[_StoryLine | _Word | Record]:
    decode = msgspec.json.Decoder(_StoryLine).decode
    words, records = msgspec.json.Decoder(_Word), msgspec.json.Decoder(Record)
    kinds = msgspec.json.Decoder(_StoryKind)
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            story.is_cut = bool(text.strip(b"\0 "))
            return  # the writer was killed meanwhile
        if not text.strip():
            continue
        try:
            line = decode(text)
            yield line
            if line.machine == RECORDER:
                yield records.decode(line.record)
            elif line.machine == AGENT:
                word = line.effect if bytes(line.effect) else line.stimulus
                if kinds.decode(word).type in _WORDS:
                    yield words.decode(word)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}, line {number}: {error}",
                hint="is it the journal of a run, by this version of rankwise?",
            ) from error


_UNKNOWN = CallSignature("a call"), ""


def _of_text(text: str) -> CallSignature:
    """A call of a journal that tells it in words: they stand for the operation."""
    return CallSignature(text.replace(" #?", "", 1))


class _Reader:
    """Puts a story together, entry by entry."""

    def __init__(self, story: NodeStory) -> None:
        self.story = story
        self.has_agent = self.has_simulated_nodes = False
        self._at = 0
        self._attempt = -1
        self._calls: dict[tuple[int, int], dict[int, tuple[CallSignature, str]]] = {}
        self._groups: dict[tuple[int, int], dict[int, RecordedGroup]] = {}

    def read(self, entry: _StoryLine | _Word | Record) -> None:
        match entry:
            case _StoryLine():
                self._take_time(entry)
            case RunDescribed():
                self.story.described = entry
            case RanksSampled():
                for sample in entry.samples:
                    self.story.samples.setdefault(sample.rank, []).append((self._at, sample))
            case GpuErrorReported(text=text):
                self.story.moments.append(Moment(self._at, text))
            case GpusSampled():
                for gpu in entry.samples:
                    self.story.gpus.setdefault(gpu.gpu, []).append((self._at, gpu))
            case CallsSeen():
                self._take_calls(entry)
            case CallsSampled():
                self._take_sample(entry)
            case SectionsSeen():
                self._life(entry.attempt, entry.rank).sections.extend(
                    TimedSection(name, depth, begun, 0 if lasted < 0 else begun + lasted)
                    for name, depth, begun, lasted in map(msgspec.structs.astuple, entry.sections)
                )
            case _:
                self._take_word(entry)

    def _take_time(self, line: _StoryLine) -> None:
        self._at = line.at
        if not self.story.first_at:
            self.story.first_at = line.at
            if line.wall:
                wall = datetime.fromisoformat(line.wall)
                self.story.wall_offset = round(wall.timestamp() * 1e6) * 1000 - line.at
        self.story.last_at = max(self.story.last_at, line.at)
        self.has_agent |= line.machine == AGENT
        self.has_simulated_nodes |= line.machine.startswith(f"{AGENT} ")  # which tells its node

    def _take_word(self, word: _Word) -> None:
        story = self.story
        match word:
            case AgentStarted(spec):
                story.node_id, story.host = spec.offer.node_id, spec.offer.host
                story.is_alone = spec.is_alone
            case BeginAttempt(world):
                story.worlds[world.round] = world
                self._attempt, story.late = world.round, None
            case WorkerSpawned():
                self._life(word.attempt, self._rank(word.local_rank)).begun_at = self._at
            case WorkerExited():
                life = self._life(word.attempt, self._rank(word.local_rank))
                life.ended_at = word.at
                life.exit = "" if word.exit.ok else str(word.exit)
            case RecoveryMessageSent(word=RecoveryMessage.YIELDED):
                life = self._life(word.attempt, self._rank(word.local_rank))
                life.ended_at, life.exit = self._at, "left its function, to be called again"
            case TellWorker(word=RecoveryOrder.AGAIN):
                self._life(word.attempt, self._rank(word.local_rank)).begun_at = self._at
            case FailuresDescribed():
                story.failures[word.round] = word.failures
            case AnnounceRestart():
                story.failures[word.attempt] = word.failures
                story.moments.append(Moment(self._at, "restart"))
            case AnnounceRound(world):
                if world.why:
                    story.moments.append(Moment(self._at, f"new round: {world.why}"))
            case AnnounceRoundEnd():
                story.moments.append(Moment(self._at, f"end of the round: {word.why}"))
            case InquiryAnswered():
                story.late = word.late or story.late
            case FinishRun():
                size = None if story.is_alone else self._world_size()
                story.outcome = word.as_outcome(size)
            case RecoveryMessageSent() | TellWorker():
                pass  # these ask no rank to leave or to come

    def _world_size(self) -> int | None:
        world = self.story.worlds.get(self._attempt)
        return None if world is None else world.size

    def _rank(self, local_rank: int) -> int:
        world = self.story.worlds.get(self._attempt)
        return local_rank if world is None else world.first_rank + local_rank

    def _life(self, attempt: int, rank: int) -> RankLife:
        lives = self.story.lives
        if (attempt, rank) not in lives:
            lives[attempt, rank] = RankLife(rank, attempt, self._at)
        return lives[attempt, rank]

    def _take_calls(self, seen: CallsSeen) -> None:
        key = (seen.attempt, seen.rank)
        known = self._calls.setdefault(key, {})
        groups = self._groups.setdefault(key, {})
        known |= seen.signatures
        known |= {at: (_of_text(text), place) for at, (text, place) in seen.texts.items()}
        groups |= seen.groups
        life = self._life(*key)
        life.covered.append((seen.since, seen.until))
        for call in seen.calls:
            begun = seen.base + call.begun
            ended = 0 if call.lasted < 0 else begun + call.lasted
            what, place = known.get(call.what, _UNKNOWN)
            group = groups.get(call.group)
            life.calls.append(TimedCall(group, call.number, begun, ended, call.stage, what, place))

    def _take_sample(self, sample: CallsSampled) -> None:
        life = self._life(sample.attempt, sample.rank)
        signatures = sample.signatures or tuple(map(_of_text, sample.texts))
        for group, number, begun, what in sample.calls:
            at = sample.base + begun
            life.calls.append(
                TimedCall(
                    sample.groups[group], number, at, at, BEGUN_BY_CPP, signatures[what],
                    "begun by C++",
                )
            )  # fmt: skip
