"""One timeline of a run, made of the stories of its nodes: every rank, on one clock.

Instants are nanoseconds since the run began on the node that began first. What a rank waited in a
call is known where all members of the group were seen: it lasts until the last of them came.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.base.units import ZERO, Duration
from rankwise.core.ledger import (
    INIT_GROUP,
    UNNUMBERED,
    Arrival,
    Begun,
    Delay,
    Group,
    Lateness,
    SampledLateness,
    Stage,
)
from rankwise.core.ledger.sampled import Straggler
from rankwise.core.matching import CallSignature, describe_call
from rankwise.observe.clocks import NodeClock, align
from rankwise.observe.records import BEGUN_BY_CPP, OF_HANDLE, GpuSample, Sample
from rankwise.observe.story import NodeStory, RankLife, TimedCall, read_story

_NOT_COUNTED = (OF_HANDLE, BEGUN_BY_CPP)
_WITHOUT_WAITING = (Stage.ISSUED, BEGUN_BY_CPP)
CallKey = tuple[int, str, int]
"""Attempt, group and number: the same on all members."""


class PlacedLife(NamedTuple):
    """A rank's life in one attempt; `node` is the number of its node's story."""

    attempt: int
    node: int
    begin: int
    end: int
    exit: str
    is_over: bool


class PlacedCall(NamedTuple):
    """A call, in which the rank waited until `waited_until` for the rank `awaited` to come.

    No rank (-1) is awaited where that is not known, and by the one that came last. After an issued
    call, a rank waits where it waits for its handle, which is a call of its own. `stage` is as in
    `rankwise.observe.records.RecordedCall`.
    """

    key: CallKey | None
    begin: int
    end: int
    waited_until: int
    awaited: int
    signature: CallSignature
    place: str
    is_over: bool
    stage: int
    label: str

    @property
    def text(self) -> str:
        """What was called, for people."""
        is_numbered = self.key is not None and self.key[1] not in UNNUMBERED
        number = self.key[2] if self.key is not None and is_numbered else None
        return self._of_wait(describe_call(self.signature, number))

    @property
    def text_without_number(self) -> str:
        """The same for all calls of one kind."""
        return self._of_wait(describe_call(self.signature))

    def _of_wait(self, text: str) -> str:
        is_wait = self.stage == OF_HANDLE and self.key is not None
        return f"wait for {text}" if is_wait else text

    @property
    def is_counted(self) -> bool:
        """Whether it is one of the calls by which the group's calls are numbered."""
        return self.stage not in _NOT_COUNTED


class PlacedSection(NamedTuple):
    """A section."""

    name: str
    depth: int
    begin: int
    end: int
    is_over: bool


@dataclass(slots=True)
class RankTrack:
    """What one rank did."""

    rank: int
    lives: list[PlacedLife] = field(default_factory=list)
    calls: list[PlacedCall] = field(default_factory=list)
    sections: list[PlacedSection] = field(default_factory=list)
    covered: list[tuple[int, int]] = field(default_factory=list)
    samples: list[tuple[int, Sample]] = field(default_factory=list)

    def cpu_wait(self, since: int) -> Duration:
        """For how long it was ready to run and had no CPU since then, by the share in samples."""
        waited = seen = 0.0
        for (begin, early), (end, late) in pairwise(sorted(self.samples, key=itemgetter(0))):
            more, counted = late.cpu_wait - early.cpu_wait, end - max(begin, since)
            if counted > 0 and more >= 0:  # what is less is of another process, which begins anew
                waited += more * counted / (end - begin)
                seen += counted
        lived = sum(max(0, life.end - max(life.begin, since)) for life in self.lives)
        return Duration(round(waited * max(lived, seen) / seen)) if seen else ZERO


@dataclass(slots=True)
class RunTimeline:
    """A run.

    Attributes:
        nodes: their stories, that of the lowest rank first; `clocks` are theirs.
        tracks: by rank, in its order.
        moments: what was decided, on all nodes.
        end: when the last line of all journals was written.
        wall_ns: when the run began, as nanoseconds since 1970.
        delays: what each rank has cost the others by coming late.
        seen: the share of the calls that this is known of.
        straggler: the rank that made the others wait in what C++ calls, as far as its sample tells.
        world_size: how many ranks the last attempt had on all nodes.
        origin: where the timeline begins, on the clock of the first node.
        gpus: samples of each GPU, by the index of its node in `nodes` and its number there.
    """

    nodes: list[NodeStory]
    clocks: list[NodeClock]
    tracks: dict[int, RankTrack]
    moments: list[tuple[int, str]]
    end: int
    wall_ns: int
    delays: tuple[Delay, ...]
    seen: float
    straggler: Straggler | None
    world_size: int
    origin: int
    gpus: dict[tuple[int, int], list[tuple[int, GpuSample]]] = field(default_factory=dict)

    @property
    def calls_recorded(self) -> float:
        """The share of groups' calls that were recorded; numbers tell how many there were."""
        counts: dict[tuple[int, int, str], tuple[int, int]] = {}
        for rank, track in self.tracks.items():
            for call in track.calls:
                if call.key is not None and call.is_counted:
                    attempt, group, number = call.key
                    count, highest = counts.get((rank, attempt, group), (0, 0))
                    counts[rank, attempt, group] = count + 1, max(highest, number)
        made = sum(highest for _, highest in counts.values())
        return sum(count for count, _ in counts.values()) / made if made else 1.0

    @property
    def first_call_at(self) -> int:
        """When the first rank took part: came to a call in a group, and not only to make one."""
        keyed = (
            (call.begin, call.key)
            for track in self.tracks.values()
            for call in track.calls
            if call.key is not None
        )
        return min((begin for begin, (_, group, _) in keyed if group != INIT_GROUP), default=0)

    @property
    def lasted(self) -> Duration:
        """For how long ranks took part, until the last has ended: what lateness is a share of."""
        lives = (life for track in self.tracks.values() for life in track.lives)
        return Duration(max((life.end for life in lives), default=self.end) - self.first_call_at)

    @property
    def clock_error(self) -> int | None:
        """How well the clocks of nodes agree; None if that is not known of one of them."""
        errors = [clock.error for clock in self.clocks]
        known = [error for error in errors if error is not None]
        return max(known) if len(known) == len(errors) else None

    @property
    def node_count(self) -> int:
        """How many nodes the run had in its largest round, also such as left no journal here."""
        worlds = (world for node in self.nodes for world in node.worlds.values())
        return max((len(world.members) for world in worlds), default=1)

    def place(self, node: int, at: int) -> int:
        """An instant of a node's clock, on the timeline."""
        return self.clocks[node].common(at) - self.origin


def timeline_of(journals: Iterable[tuple[str, Iterable[bytes]]]) -> RunTimeline:
    """Join journals of one run, one for each node.

    Args:
        journals: the name and the lines of each.

    Raises:
        ConfigError: one of them is none, or they are not of one run.
    """
    nodes = [read_story(lines, path) for path, lines in journals]
    _check_one_run(nodes)
    nodes.sort(key=lambda node: (node.node_rank, node.path))
    clocks = align(nodes)
    origin = min(clock.common(node.first_at) for node, clock in zip(nodes, clocks, strict=True))
    end = max(clock.common(node.last_at) for node, clock in zip(nodes, clocks, strict=True))
    timeline = RunTimeline(
        nodes, clocks, {}, [], end - origin, origin + nodes[0].wall_offset, (), 1.0, None, 0, origin
    )
    lives = [(index, life) for index, node in enumerate(nodes) for life in node.lives.values()]
    lives.sort(key=lambda each: (each[1].attempt, each[1].rank))
    members = _members(lives)
    last_to_come = _last_to_come(timeline, lives, members)
    for index, life in lives:
        track = timeline.tracks.setdefault(life.rank, RankTrack(life.rank))
        _place_life(timeline, track, index, life, last_to_come)
        life.calls.clear()  # there may be hundreds of thousands, which are on the timeline now
    timeline.tracks = dict(sorted(timeline.tracks.items()))
    for index, node in enumerate(nodes):
        for rank, samples in node.samples.items():
            track = timeline.tracks.setdefault(rank, RankTrack(rank))
            track.samples += [(timeline.place(index, at), sample) for at, sample in samples]
        for number, seen in sorted(node.gpus.items()):
            timeline.gpus[index, number] = [(timeline.place(index, at), each) for at, each in seen]
        timeline.moments += [(timeline.place(index, at), text) for at, text in node.moments]
    timeline.moments = sorted(set(timeline.moments))
    worlds = [node.worlds[max(node.worlds)] for node in nodes if node.worlds]
    timeline.world_size = max((world.size for world in worlds), default=len(timeline.tracks))
    timeline.delays, timeline.seen = _lateness(timeline, members)
    timeline.straggler = _straggler(timeline, members)
    return timeline


def _check_one_run(nodes: Sequence[NodeStory]) -> None:
    seen: dict[str, NodeStory] = {}
    for node in nodes:
        other = seen.setdefault(node.node_id, node)
        if other is not node:
            raise ConfigError(f"{other.path} and {node.path} are the journal of the same node")
    lineups: dict[int, tuple[str, ...]] = {}
    for node in nodes:
        is_among = len(nodes) == 1 or not node.is_alone
        # A name may be used again; what a round agreed upon is the same on all that were in it.
        for number, world in node.worlds.items():
            is_among &= lineups.setdefault(number, world.members) == world.members
        if not is_among:
            paths = ", ".join(node.path for node in nodes)
            raise ConfigError(
                f"the journals are of different runs: {paths}",
                hint="give those that the nodes of one run have written",
            )


def _members(lives: Sequence[tuple[int, RankLife]]) -> dict[tuple[int, str], Group]:
    """The groups of each attempt, with the members that any journal knows."""
    found: dict[tuple[int, str], Group] = {}
    for _, life in lives:
        for group in {id(call.group): call.group for call in life.calls}.values():
            if group is None:
                continue
            key = (life.attempt, group.key)
            known = found.get(key)
            here = set(group.members) | set(known.members if known is not None else ())
            found[key] = Group(label=group.label, size=group.size, members=tuple(sorted(here)))
    return found


def _key_of(attempt: int, call: TimedCall) -> CallKey | None:
    return None if call.group is None else (attempt, call.group.key, call.number)


def _last_to_come(
    timeline: RunTimeline,
    lives: Sequence[tuple[int, RankLife]],
    members: dict[tuple[int, str], Group],
) -> dict[CallKey, tuple[int, int]]:
    """When the last member came, and which: of calls to which all came, or one of them never."""
    come: dict[CallKey, list[tuple[int, int]]] = {}
    highest: dict[tuple[int, str, int], int] = {}
    for index, life in lives:
        for call in life.calls:
            key = _key_of(life.attempt, call)
            if key is not None and call.stage not in _NOT_COUNTED:
                at = timeline.place(index, call.begun_at)
                come.setdefault(key, []).append((at, life.rank))
                of_rank = (life.attempt, key[1], life.rank)
                highest[of_rank] = max(highest.get(of_rank, 0), call.number)
    found: dict[CallKey, tuple[int, int]] = {}
    for (attempt, key_of_group, number), ranks in come.items():
        group = members[attempt, key_of_group]
        key = (attempt, key_of_group, number)
        if len(ranks) >= group.size:
            found[key] = max(ranks)
        elif len(group.members) == group.size:
            absent = (
                rank
                for rank in group.members
                if highest.get((attempt, key_of_group, rank), 0) < number
            )
            missing = next(absent, None)
            if missing is not None:
                found[key] = timeline.end, missing
    return found


def _place_life(
    timeline: RunTimeline,
    track: RankTrack,
    index: int,
    life: RankLife,
    last_to_come: dict[CallKey, tuple[int, int]],
) -> None:
    def place(at: int) -> int:
        return timeline.place(index, at)

    # A process that was not seen to end lived as long as its journal tells anything.
    ended_at = timeline.nodes[index].last_at if life.ended_at is None else life.ended_at
    end = place(ended_at)
    is_over = life.ended_at is not None
    # An agent that starts many ranks learns of their processes later than they begin their work.
    firsts = [life.begun_at, *(call.begun_at for call in life.calls[:1])]
    begin = place(min([*firsts, *(each.begun_at for each in life.sections)]))
    track.lives.append(PlacedLife(life.attempt, index, begin, end, life.exit, is_over))
    track.covered += [(place(since), place(until)) for since, until in life.covered]
    for name, depth, begun_at, section_end in life.sections:
        until = place(section_end) if section_end else end
        track.sections.append(PlacedSection(name, depth, place(begun_at), until, bool(section_end)))
    for call in life.calls:
        key = _key_of(life.attempt, call)
        begin, until = place(call.begun_at), place(call.ended_at) if call.ended_at else end
        last, awaited = begin, -1
        if key is not None and call.stage not in _WITHOUT_WAITING:
            last, awaited = last_to_come.get(key, (begin, -1))
        label = "" if call.group is None else call.group.label
        track.calls.append(
            PlacedCall(
                key, begin, max(begin, until), max(begin, min(last, until)),
                awaited if last > begin else -1, call.signature, call.place,
                bool(call.ended_at), call.stage, label,
            )
        )  # fmt: skip


def _lateness(
    timeline: RunTimeline, members: dict[tuple[int, str], Group]
) -> tuple[tuple[Delay, ...], float]:
    """The rank that made the others wait, by the judge of a run that lasts."""
    lateness = Lateness(timeline.tracks)
    arrivals: dict[int, list[tuple[str, int, int, Arrival]]] = {}
    for rank, track in timeline.tracks.items():
        for call in track.calls:
            if call.key is not None and call.is_over and call.stage != BEGUN_BY_CPP:
                attempt, group, number = call.key
                arrival = Arrival(group, number, call.begin, call.end, call.stage == OF_HANDLE)
                arrivals.setdefault(attempt, []).append((group, number, rank, arrival))
    for attempt, come in sorted(arrivals.items()):
        groups = {key: group for (of, key), group in members.items() if of == attempt}
        for _, _, rank, arrival in sorted(come):
            lateness.see(rank, groups, (arrival,))
        lateness.forget_groups()
    return lateness.delays() if len(timeline.tracks) > 1 else (), lateness.seen


def _straggler(timeline: RunTimeline, members: dict[tuple[int, str], Group]) -> Straggler | None:
    """The rank that is late in what C++ calls in the last attempt, by the judge of a run."""
    attempt = max((attempt for attempt, _ in members), default=0)
    groups = {key: group for (of, key), group in members.items() if of == attempt}
    sampled = SampledLateness()
    for rank, track in timeline.tracks.items():
        calls = (
            Begun(call.key[1], call.key[2], call.begin)
            for call in track.calls
            if call.stage == BEGUN_BY_CPP and call.key is not None and call.key[0] == attempt
        )
        sampled.see(rank, groups, calls)
    return sampled.straggler()


def clocks_in_words(timeline: RunTimeline) -> str:
    """How well the clocks of the nodes are aligned; empty for one node, which has one clock."""
    if len(timeline.nodes) < 2:
        return ""
    error, count = timeline.clock_error, len(timeline.nodes)
    if error is None:
        return (
            f"the clocks of {count} nodes are aligned by wall-clock time alone: they share no "
            "collective in which ranks wait, such as a barrier"
        )
    calls = sum(clock.calls for clock in timeline.clocks)
    bound = max(clock.bound for clock in timeline.clocks)
    return (
        f"the clocks of {count} nodes agree within {_milliseconds(error)}, measured at the "
        f"ends of {calls:,} shared collectives (at most {_milliseconds(bound)}, by the order of "
        "waits)"
    )


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.2g} ms"
