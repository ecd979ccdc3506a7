"""What a leader concludes from the records of the nodes; what follows, `leader.py` decides.

*Who is here* (`View`). All instants are of the leader's own clock: when it read of something, never
when something was said to have happened. A new leader begins with an empty view, reads every
record, and takes each member that is missing for lost at that moment, so that it errs on the side
of waiting; unless it has left a note that its workers have all succeeded, which nothing that
happens to it can change.

*Who has which rank* (`ranked`). A node that stays keeps its rank wherever it can: its workers'
caches, shards and log directories carry it. Gaps are filled by newcomers in the order of the
network, so that neighbours in rank are neighbours in topology. Equal questions have equal answers,
whichever node leads.

*What a failed round means* (`judge`): whose fault it was, whether another one may follow. Failures
of several nodes are put in order on the leader's clock: when it read of each, minus the age that
its node gave it. Whatever the order is off by is what two messages to the leader differ by. The
rules are those of one gang (`base/root_cause.py`). A member that vanished explains the failures of
the others: their connections to it broke, long before its lease ended. Such a round ended by a
change of membership, and costs no restart.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.root_cause import suspects_in_order
from rankwise.base.units import ZERO, Instant, after
from rankwise.core.rendezvous.configuration import (
    RendezvousConfig,
    has_progressed,
    obstacle_to_another,
)
from rankwise.core.rendezvous.records import (
    Departure,
    NodeRecord,
    Round,
    RoundPhase,
    Suspect,
    Verdict,
)


@dataclass(slots=True, frozen=True)
class ObservedRecord:
    """A node's record as last received, and when that was.

    `record` is None if it cannot be read; `problem` then says why.
    """

    record: NodeRecord | None
    at: Instant
    problem: str = ""


@dataclass(slots=True, frozen=True)
class Gone:
    """A member whose record has vanished: what it was at last, and when that was seen."""

    last: ObservedRecord | None
    at: Instant
    has_ended: bool
    """Whether it had told before that none of its workers lived any more."""


class View:
    """The nodes as their leader sees them.

    Args:
        config: which nodes may join, and how long they wait.
        now: when this node began to lead.
    """

    def __init__(self, config: RendezvousConfig, now: Instant) -> None:
        self.config = config
        self.nodes: dict[str, ObservedRecord] = {}
        self.unreadable: dict[str, str] = {}
        """Those whose record cannot be read, and why."""
        self.since: dict[str, Instant] = {}
        """When each of them was first seen."""
        self.gone: dict[str, Gone] = {}
        """Members of the present or last round that have vanished."""
        self.done: dict[str, NodeRecord] = {}
        """What nodes have noted when they were done, in this round or an earlier one."""
        self.returned: set[str] = set()
        """Members that had vanished, and have written a new record since."""
        self.round: Round | None = None
        self.membership: frozenset[str] = frozenset()
        """The members, in no order."""
        self.round_since = now
        self.newcomer_at = now
        self.enough_since: Instant | None = None
        self.ended_since: Instant | None = None

    def put(self, node: str, observed: ObservedRecord) -> None:
        """A node has written its record."""
        if node not in self.nodes:
            self.since[node] = observed.at
            self.newcomer_at = observed.at
            if node in self.gone:
                # Its new record says nothing of the workers that it had when it vanished.
                self.returned.add(node)
        self.nodes[node] = observed
        if observed.record is None:
            self.unreadable[node] = observed.problem
        else:
            self.unreadable.pop(node, None)

    def delete(self, node: str, now: Instant) -> None:
        """A node's record has vanished: it has said goodbye, or its lease has ended."""
        last = self.nodes.pop(node, None)
        self.unreadable.pop(node, None)
        self.since.pop(node, None)
        if node in self.membership:
            self.gone[node] = Gone(last, now, last is not None and self.has_ended(last.record))

    def turn_to(self, new: Round, now: Instant) -> None:
        """The round has been read, or written."""
        old, self.round = self.round, new
        # By identity: a set of a thousand members is not to be made for each change of a round.
        if old is None or old.members is not new.members:
            self.membership = frozenset(new.members)
        if old is not None and (old.number, old.phase) == (new.number, new.phase):
            return
        self.round_since = now
        self.enough_since = self.ended_since = None
        if new.phase is RoundPhase.RUNNING:
            self.gone.clear()
            self.returned.clear()
        for node in new.members:
            if node not in self.nodes and node not in self.gone:
                # From now on, as the time of its loss is unknown: the fence must suffice in any
                # case.
                self.gone[node] = self._gone_unseen(node, now)

    def _gone_unseen(self, node: str, now: Instant) -> Gone:
        """What is known of a member that vanished before this node led."""
        noted = self.done.get(node)
        if noted is None or noted.ended != self.run_number:
            return Gone(None, now, has_ended=False)
        return Gone(ObservedRecord(noted, now), now, has_ended=True)

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the running round, or of the last."""
        return () if self.round is None else self.round.members

    @property
    def run_number(self) -> int:
        """The number of the round that runs or ran last; -1 before the first."""
        if self.round is None:
            return -1
        return self.round.number - (self.round.phase is RoundPhase.GATHERING)

    def has_ended(self, record: NodeRecord | None) -> bool:
        """Whether a member has told that none of its workers of the last round lives any more."""
        number = self.run_number
        return record is not None and (record.ended >= number or record.ready > number)

    def is_ready(self, node: str, record: NodeRecord) -> bool:
        """Whether a node could take part in the next round."""
        return (
            record.departure is Departure.STAYS
            and record.ready >= 0
            and (record.ready > self.run_number or node not in self.membership)
            and node not in self.refusals
        )

    @property
    def refusals(self) -> dict[str, str]:
        """Nodes that may not take part, with the reason."""
        return {} if self.round is None else self.round.refusals

    def candidates(self) -> dict[str, NodeRecord]:
        """The nodes that could take part in the next round."""
        run_number, members, refusals = self.run_number, self.membership, self.refusals
        return {
            node: record
            for node, observed in self.nodes.items()
            if (record := observed.record) is not None
            and record.departure is Departure.STAYS
            and record.ready >= 0
            and (record.ready > run_number or node not in members)
            and node not in refusals
        }

    def blockers(self) -> list[str]:
        """Members of the last round that are here, and have workers that may still live."""
        number = self.run_number
        return [
            node
            for node in self.members
            if (observed := self.nodes.get(node)) is not None
            and (
                observed.record is None
                or (observed.record.ended < number and observed.record.ready <= number)
            )
        ]

    @property
    def lost(self) -> tuple[str, ...]:
        """Members that vanished, or gave up because they were cut off, in the order of their ranks.

        A member that had told of a failure of its own first is not lost: it has failed.
        """
        return tuple(node for node in self.members if self._is_lost(node))

    def _is_lost(self, node: str) -> bool:
        number = self.run_number
        gone = self.gone.get(node)
        words = [self.nodes.get(node), None if gone is None else gone.last]
        records = [
            observed.record
            for observed in words
            if observed is not None and observed.record is not None
        ]
        suspect = None if self.round is None else self.round.suspect
        is_suspect = suspect is not None and suspect.node == node
        if is_suspect or any(record.failing == number for record in records):
            return False
        if any(record.cut_off == number for record in records):
            return True
        return gone is not None and not gone.has_ended

    @property
    def fenced_until(self) -> Instant | None:
        """Until when workers of members that vanished may still live; None if none may."""
        # A member that has said that its workers ended, or is here again, holds no ranks any more.
        vanished = [
            gone.at
            for node, gone in self.gone.items()
            if not gone.has_ended and node not in self.nodes
        ]
        return after(max(vanished), self.config.fence) if vanished else None

    def last_records(self) -> Iterator[tuple[str, ObservedRecord]]:
        """Each member with its last record, whether it is here or gone, in the order of ranks."""
        for node in self.members:
            observed = self.nodes.get(node)
            gone = self.gone.get(node)
            if gone is not None and gone.last is not None:
                yield node, gone.last
            if observed is not None:
                yield node, observed

    def host(self, node: str) -> str:
        """The machine on which a node is or was, as far as is known."""
        observed = self.nodes.get(node)
        if observed is None and node in self.gone:
            observed = self.gone[node].last
        if observed is not None and observed.record is not None:
            return observed.record.host
        # It vanished before this node led; the leader before has written down who it was.
        hosts = () if self.round is None else self.round.lineup.hosts
        label = dict(zip(self.members, hosts, strict=False)).get(node, "")
        # A label is `HOST`, or `HOST/NODE` where several nodes have one host (`leader._Labels`).
        return label.partition("/")[0]

    def label(self, node: str) -> str:
        """A node for people: its id, and its host if known."""
        host = self.host(node)
        return f"{node} on {host}" if host else node


_NUMBERS = re.compile(r"(\d+)")


def active_count(config: RendezvousConfig, ready_count: int) -> int:
    """How many of that many ready nodes run; the others are spares. 0 if there are too few."""
    if ready_count < config.nodes_min:
        return 0
    # Spares come last: a job that has the least number of nodes runs without any.
    return min(config.nodes_max, max(config.nodes_min, ready_count - config.spares))


def ranked(
    candidates: Mapping[str, NodeRecord], previous: Sequence[str], count: int
) -> tuple[str, ...]:
    """The ids of the `count` candidates that run, in the order of their ranks.

    Args:
        candidates: nodes that are ready, by id.
        previous: the members of the round before, in the order of their ranks.
        count: how many are wanted; at most as many as there are candidates.
    """
    assert count <= len(candidates), f"{count} ranks for {len(candidates)} nodes"
    # Before newcomers: they have the state of the job in memory, or on their disks.
    survivors = [node for node in previous if node in candidates][:count]
    newcomers = _in_network_order(candidates, candidates.keys() - set(previous))
    chosen = set(survivors) | set(newcomers[: count - len(survivors)])
    ranks: list[str | None] = [None] * count
    for rank, node in enumerate(previous[:count]):
        if node in chosen:
            # In its old place: files and shards are named by rank.
            ranks[rank] = node
    placed = {node for node in ranks if node is not None}
    # Survivors whose rank is out of range come before newcomers, in the order that they had.
    waiting = [node for node in survivors if node not in placed]
    waiting += [node for node in newcomers if node in chosen]
    gaps = iter(waiting)
    return tuple(node if node is not None else next(gaps) for node in ranks)


def in_static_order(candidates: Mapping[str, NodeRecord], count: int) -> tuple[str, ...] | None:
    """The candidates by static rank, or None while a rank is missing or taken twice."""
    by_rank = {record.static_rank: node for node, record in candidates.items()}
    if len(candidates) != count or by_rank.keys() != set(range(count)):
        return None
    return tuple(by_rank[static_rank] for static_rank in range(count))


def _in_network_order(candidates: Mapping[str, NodeRecord], nodes: Iterable[str]) -> list[str]:
    def place(node: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]], str]:
        record = candidates[node]
        return _natural(record.topology), _natural(record.host), node

    return sorted(nodes, key=place)


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which `rack2` comes before `rack10`."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(text) if part
    ]


class Judgement(NamedTuple):
    """What the end of a round means.

    Attributes:
        root: the failure that explains the others; None if there was none.
        failure_count: how many workers failed by themselves.
        is_failure: whether it costs a restart.
        rounds_without_progress: how many rounds in a row have now ended without progress.
        best_step: the farthest step that was ever told.
        strikes: root causes by host, this one included.
        obstacle: why there can be no further round; None if there can.
    """

    root: Suspect | None
    failure_count: int
    is_failure: bool
    rounds_without_progress: int
    best_step: int | None
    strikes: dict[str, int]
    obstacle: str | None


def judge(view: View, ended: Round) -> Judgement:
    """Judge the round whose members have all ended.

    Args:
        view: with the last words of its members.
        ended: the record that gathers the next round.
    """
    suspects = suspects_in_order(_suspects(view, ended), lambda suspect: suspect.failure)
    root = suspects[0] if suspects else ended.suspect
    # The loss of a node explains what other ranks raised, and must not cost a restart.
    is_failure = ended.is_failure and not view.lost
    steps = [
        observed.record.step
        for _, observed in view.last_records()
        if observed.record is not None and observed.record.step is not None
    ]
    best_step = max([*steps, *([] if ended.best_step is None else [ended.best_step])], default=None)
    rounds_without_progress = ended.rounds_without_progress
    # Nodes lost after a round that ended for another reason did not end it: a leader that has left
    # looks lost to the next one, though it had said that it leaves.
    if ended.is_failure or (ended.gone and view.lost):
        ran = [
            observed.record.ran
            for _, observed in view.last_records()
            if observed.record is not None
        ]
        progressed = has_progressed(
            view.config.policy, steps, ended.best_step, max(ran, default=ZERO)
        )
        rounds_without_progress = 0 if progressed else rounds_without_progress + 1
    strikes = dict(ended.strikes)
    if is_failure and root is not None and root.host and not _is_of_several_hosts(root, suspects):
        # Only where one host is to blame: a wrong strike would exclude a good machine.
        strikes[root.host] = strikes.get(root.host, 0) + 1
    return Judgement(
        root=root,
        failure_count=max(len(suspects), root is not None),
        is_failure=is_failure,
        rounds_without_progress=rounds_without_progress,
        best_step=best_step,
        strikes=strikes,
        obstacle=obstacle_to_another(
            view.config.policy,
            root=root.failure if is_failure and root is not None else None,
            is_failure=is_failure,
            rounds_without_progress=rounds_without_progress,
            restarts=ended.restarts,
        ),
    )


def _is_of_several_hosts(root: Suspect, suspects: Iterable[Suspect]) -> bool:
    """Whether ranks of other hosts are to blame as much as the root cause is."""
    return root.failure.is_shared and any(
        each.failure.accused == root.failure.accused and each.host != root.host for each in suspects
    )


def first_suspect(view: View, number: int) -> Suspect | None:
    """The failure of round `number` that explains the others, as far as is known yet."""
    suspects = _reported_failures(view, number)
    return next(iter(suspects_in_order(suspects, lambda suspect: suspect.failure)), None)


def verdict_on_failure(judgement: Judgement, ended: Round) -> Verdict:
    """What every node is told when a failure was the last one."""
    root = judgement.root
    return Verdict(
        status=OutcomeStatus.FAILED,
        detail=judgement.obstacle or "",
        root=None if root is None else root.failure,
        node="" if root is None else root.node,
        host="" if root is None else root.host,
        failure_count=judgement.failure_count,
        restarts=ended.restarts,
    )


def _suspects(view: View, ended: Round) -> list[Suspect]:
    told = list(_reported_failures(view, ended.number - 1))
    known = ended.suspect
    if known is None:
        return told
    if any((each.node, each.failure.rank) == (known.node, known.failure.rank) for each in told):
        return told
    # Its node vanished after it had told. It was the first that the leader read of.
    earliest = min((each.failure.at for each in told), default=known.failure.at)
    failure = msgspec.structs.replace(known.failure, at=earliest)
    return [msgspec.structs.replace(known, failure=failure), *told]


def _reported_failures(view: View, number: int) -> Iterator[Suspect]:
    """The failures of a round in which workers failed by themselves, on the leader's clock."""
    seen: set[tuple[str, int]] = set()
    for node, observed in view.last_records():
        record = observed.record
        if record is None or record.failing != number:
            continue
        for note in record.failures:
            if note.failure.cause is FailureCause.STOPPED or (node, note.failure.rank) in seen:
                continue
            seen.add((node, note.failure.rank))
            failure = msgspec.structs.replace(note.failure, at=Instant(observed.at - note.age))
            yield Suspect(failure=failure, node=node, host=record.host)
