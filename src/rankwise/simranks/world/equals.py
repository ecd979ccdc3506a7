"""Classes of ranks: a few members of each class run the program, and stand for the others.

Theory of operation
===================

At first all ranks are one class. Rank 0 and a drawn rank run. A collective is complete when its
members that run have come: each of the others brings what a member of its class has brought, at the
same time. At the end the digests of what the ranks of a class have done must be equal.

Four observations lead to another choice, with which the run begins anew:

- *Groups.* Ranks may differ by their place in groups of some of them, such as those of tensor
  parallelism. So for each position in each kind of group a rank other than 0 runs; in groups of
  more than 4, for the first, the last and one drawn position.
- *Messages.* Ranks that send messages in groups of a kind are stages: their position there divides
  them into classes. All members of such a group run if one does, since a message needs its peer.
  Then the first and a drawn position of other groups are enough.
- *Shards.* An uneven shard divides ranks where its size changes.
- *Digests.* If digests differ within a class, the kind of group whose positions explain it divides
  the ranks. If no kind does, all ranks run.

Each observation only adds classes and ranks, so this ends.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rankwise.base.wording import ranks_in_words
from rankwise.core.matching import ANY_RANK, CallSignature
from rankwise.simranks.world.places import CallSite, place_here

_POSITIONS_MAX = 4
_CHOICES_MAX = 8


class NotEqual(BaseException):  # a program's `except Exception` must not catch it
    """Ranks differ of which one was to stand for others, or too few are simulated."""


class GroupKind(NamedTuple):
    """Groups that are alike: of `size` ranks whose numbers are `stride` apart.

    `ranks` are those of a group of another form, which is a kind of its own.
    """

    size: int
    stride: int
    ranks: tuple[int, ...] = ()

    def position(self, rank: int) -> int:
        """The place of a rank in its group; -1 if it is in none."""
        if self.ranks:
            return self.ranks.index(rank) if rank in self.ranks else -1
        return rank // self.stride % self.size

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The members of the group of a rank; empty if it is in none."""
        if self.ranks:
            return self.ranks if rank in self.ranks else ()
        first = rank - self.position(rank) * self.stride
        return tuple(range(first, first + self.size * self.stride, self.stride))

    def __str__(self) -> str:
        return f"groups of {self.size}"


def kind_of_group(ranks: tuple[int, ...]) -> GroupKind:
    """The kind of a group with these members, or of none for a message."""
    if not ranks:
        return GroupKind(0, 0)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    is_even = stride > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, stride))
    if is_even and ranks[0] // stride % len(ranks) == 0:
        return GroupKind(len(ranks), stride)
    return GroupKind(len(ranks), 0, ranks)


class Division(NamedTuple):
    """Ranks are divided by their position in a kind of group.

    Attributes:
        edges: the positions at which a part begins, without the first one.
        has_messages: whether members send each other messages: then all run if one does.
        is_guess: whether the edges follow from a few members that differ.
    """

    kind: GroupKind
    edges: tuple[int, ...]
    has_messages: bool = False
    is_guess: bool = False

    def part(self, rank: int) -> int:
        """The part of a rank."""
        return bisect_right(self.edges, self.kind.position(rank))


class RankChoice(NamedTuple):
    """The ranks that run the program, and the classes of all ranks.

    Attributes:
        simulated: the ranks that run.
        kinds: the kinds of groups that are known.
        divisions: ranks of one class are in the same part of each.
        why: the observation that led to it, in words.
        number: how many choices there were before.
        repeats: whether equal microbatches of a pipeline are carried out once.
    """

    simulated: frozenset[int] = frozenset()
    kinds: tuple[GroupKind, ...] = ()
    divisions: tuple[Division, ...] = ()
    why: str = ""
    number: int = 0
    repeats: bool = True


class ClassOfRanks(NamedTuple):
    """Ranks that are taken as equal, and those of them that run."""

    members: tuple[int, ...]
    simulated: tuple[int, ...]


class Equals:
    """The classes of a run, and what it observes of them.

    Args:
        choice: which ranks run, and what classes there are; of no ranks for the first choice.
        size: how many ranks there are.
        seed: decides which ones are drawn.

    Attributes:
        simulated: the numbers of those that run the program.
        difference: why all ranks have to run; empty until something says so.
        wanted: the choice to begin anew with; None until an observation leads to another.
        reads: the lines at which programs read the numbers of their ranks, and how often.
        price: what a collective of some ranks takes, on a machine whose links may differ.
    """

    def __init__(self, choice: RankChoice, size: int, seed: int = 0) -> None:
        self._size = size
        self._seed = seed
        if not choice.simulated:
            other = random.Random(f"{seed}/equal ranks").randrange(1, size)  # noqa: S311  # simulation, no secret
            choice = choice._replace(simulated=frozenset({0, other}))
        self._choice = choice
        self.simulated = choice.simulated
        self.difference = ""
        self.wanted: RankChoice | None = None
        self.reads: dict[tuple[str, str], int] = {}
        self.price: Callable[[tuple[int, ...]], object] | None = None
        self._kinds = dict.fromkeys(choice.kinds, True)
        self._class_of = self._divided(choice.divisions)
        self._weights = {
            rank: len(each.members) / len(each.simulated)
            for each in self.classes
            for rank in each.simulated
        }

    @property
    def classes(self) -> list[ClassOfRanks]:
        """The classes, by their first members."""
        return [
            ClassOfRanks(members, tuple(each for each in members if each in self.simulated))
            for members in _members(self._class_of)
        ]

    @property
    def choice(self) -> RankChoice:
        """The one to begin anew with, or else the present one."""
        return self.wanted or self._choice

    def weight(self, rank: int) -> float:
        """For how many ranks a simulated one stands."""
        return self._weights[rank]

    def note_group(self, ranks: tuple[int, ...]) -> None:
        """Ranks make a group."""
        if not 1 < len(ranks) < self._size:
            return
        kind = kind_of_group(ranks)
        if kind not in self._kinds:
            self._kinds[kind] = False
        self._check_links(kind)

    def note_shard(self, ranks: tuple[int, ...], length: int) -> None:
        """Members of a group share rows: those that get fewer are others.

        Raises:
            NotEqual: ranks are too few for the group.
        """
        self.check_positions(ranks)
        count = len(ranks)
        if count < 2 or not length % count:
            return
        whole = -(-length // count)
        kind = kind_of_group(ranks)
        edges = {length // whole, -(-length // whole)} - {0, count}
        self._divide(Division(kind, tuple(sorted(edges))), f"shards of {length:,} rows are uneven")

    def note_read(self, what: str, place: CallSite) -> None:
        """A program reads the number of its rank, by which it may do something else than others."""
        key = (f"{place.code.co_filename}:{place.line}", what)
        self.reads[key] = self.reads.get(key, 0) + 1

    def differ(self, difference: str) -> None:
        """Note why all ranks have to run, the first reason alone."""
        self.difference = self.difference or difference

    def check(self, ranks: tuple[int, ...] = ()) -> None:
        """Let a rank stop, if ranks are not equal, or too few for a group in which they meet.

        Raises:
            NotEqual: they are.
        """
        if self.wanted is None:
            self.check_positions(ranks)
        if self.difference or self.wanted is not None:
            raise NotEqual(self.difference)

    def check_positions(self, ranks: tuple[int, ...]) -> None:
        """The same, as soon as a group is used, and so before a large model is made.

        Raises:
            NotEqual: ranks are too few for the group.
        """
        if not 1 < len(ranks) < self._size:
            return
        kind = kind_of_group(ranks)
        if self._kinds.get(kind) and not self._lacks_class(ranks):
            return
        self._kinds = dict.fromkeys([*self._kinds, kind], True)
        divisions = (self.wanted or self._choice).divisions
        self._want(divisions, "ranks have positions in groups")
        if self.difference or self.wanted is not None:
            raise NotEqual(self.difference)

    def check_peer(self, ranks: tuple[int, ...], rank: int, peer: int, call: CallSignature) -> None:
        """The same, before a message in a group: its members are other stages."""
        kind = kind_of_group(ranks)
        is_known = any(each.kind == kind and each.has_messages for each in self._choice.divisions)
        if not is_known and len(self.simulated) < self._size:
            if kind.ranks or len(ranks) == self._size:
                if peer not in self.simulated:
                    where = place_here()
                    at = "" if where is None else f" ({where})"
                    other = "any rank" if peer == ANY_RANK else f"rank {peer}"
                    self.differ(f"rank {rank} calls {call.operation} with {other}{at}")
            else:
                every = tuple(range(1, kind.size))
                division = Division(kind, every, has_messages=True)
                self._divide(division, f"ranks send messages in {kind}")
        self.check(ranks)

    def representatives(self, ranks: Sequence[int], present: Sequence[int]) -> tuple[int, ...]:
        """For each member of a group, the present one of its class; empty if none is present."""
        if not present:
            return ()
        by_class: dict[tuple[int, ...], int] = {}
        for rank in present:
            by_class.setdefault(self._class_of[rank], rank)
        here = frozenset(present)
        return tuple(
            rank if rank in here else by_class.get(self._class_of[rank], present[0])
            for rank in ranks
        )

    def divided_by(self, digests: Mapping[int, bytes], difference: str) -> RankChoice | None:
        """The choice after digests of simulated ranks that differ; None if no position explains it.

        Args:
            digests: of what each simulated rank has done.
            difference: in words.
        """
        if self._choice.number >= _CHOICES_MAX:
            return None
        differing = [
            each.simulated for each in self.classes if len({digests[r] for r in each.simulated}) > 1
        ]
        # Positions are no part of digests: each rank of a mesh of several dimensions would be a
        # class of its own. They divide ranks only where they explain a difference, the fewest
        # first.
        found = []
        for kind in [GroupKind(self._size, 1), *sorted(self._kinds)]:
            edges: set[int] = set()
            for simulated in differing:
                changes = _changes(kind, {rank: digests[rank] for rank in simulated})
                if changes is None:
                    break
                edges |= changes
            else:
                found.append((len(edges), kind, tuple(sorted(edges))))
        if not found:
            return None
        _, kind, edges_of_kind = min(found)
        self._divide(
            Division(kind, edges_of_kind, is_guess=True), f"ranks are not equal: {difference}"
        )
        return self.wanted

    def places(self, rank: int) -> str:
        """The positions of a rank in the kinds of groups that there are, in words."""
        told = [f"position {kind.position(rank)} in {kind}" for kind in sorted(self._kinds)]
        return f" ({', '.join(told)})" if told else ""

    def _check_links(self, kind: GroupKind) -> None:
        """Groups of a kind must be alike, and so must be their links."""
        if self.price is None or kind.ranks or self.difference:
            return
        first = kind.group_of(0)
        wanted = self.price(first)
        for rank in range(1, self._size):
            if kind.position(rank):
                continue
            other = kind.group_of(rank)
            if other[-1] < self._size and self.price(other) != wanted:
                ones, others = ranks_in_words(first), ranks_in_words(other)
                self.differ(f"the links among {ones} differ from those among {others}")
                return

    def _divide(self, division: Division, why: str) -> None:
        """Divide ranks by a kind of group, as far as they are not."""
        divisions = {each.kind: each for each in (self.wanted or self._choice).divisions}
        before = divisions.get(division.kind)
        if before is not None:
            edges = tuple(sorted({*before.edges, *division.edges}))
            has_messages = before.has_messages or division.has_messages
            is_guess = before.is_guess or division.is_guess
            division = Division(division.kind, edges, has_messages, is_guess)
        if division == before:
            return
        divisions[division.kind] = division
        if len(division.kind.ranks or range(division.kind.size)) < self._size:
            self._kinds[division.kind] = True
        self._want(tuple(sorted(divisions.values())), why)

    def _want(self, divisions: tuple[Division, ...], why: str) -> None:
        simulated = self._chosen(divisions)
        if simulated != self.simulated or divisions != self._choice.divisions:
            if self._choice.number >= _CHOICES_MAX:
                self.differ(f"{_CHOICES_MAX} choices of ranks did not cover all groups and shards")
                return
            kinds = tuple(sorted(self._kinds))
            why = self.wanted.why if self.wanted else why
            self.wanted = self._choice._replace(
                simulated=simulated, kinds=kinds, divisions=divisions, why=why,
                number=self._choice.number + 1,
            )  # fmt: skip

    def _divided(self, divisions: Sequence[Division]) -> list[tuple[int, ...]]:
        """The class of each rank: its part in each division."""
        return [
            tuple([division.part(rank) for division in divisions]) for rank in range(self._size)
        ]

    def _lacks_class(self, ranks: tuple[int, ...]) -> bool:
        """Whether no simulated member of a group can stand for one of the others."""
        present = {self._class_of[rank] for rank in ranks if rank in self.simulated}
        return any(self._class_of[rank] not in present for rank in ranks)

    def _chosen(self, divisions: tuple[Division, ...]) -> frozenset[int]:
        """The simulated ranks, and those that are missing of each class and position."""
        drawn = random.Random(f"{self._seed}/positions")  # noqa: S311  # simulation, no secret
        class_of = self._divided(divisions)
        before = self.simulated
        if any(each.has_messages for each in {*divisions} - {*self._choice.divisions}):
            before = frozenset({0})  # a pipeline is drawn, not a rank
        choosing = _Choosing(self._size, before, class_of, divisions, sorted(self._kinds))
        ranks = list(range(1, self._size))
        drawn.shuffle(ranks)
        places = choosing.places(drawn)
        missing = places - choosing.covered(choosing.simulated)
        while missing:

            def gain(rank: int, left: frozenset[_Place] = frozenset(missing)) -> int:
                return len(left & choosing.covered([rank]))

            best = max(ranks, key=gain)  # the first drawn of equals
            if not gain(best):  # rank 0 alone has it
                break
            choosing.add([best])
            missing -= choosing.covered(choosing.simulated)
        for members in _members(class_of):
            few = min(2, len(members)) - len(choosing.simulated.intersection(members))
            absent = set(members) - choosing.simulated
            choosing.add([rank for rank in ranks if rank in absent][: max(0, few)])
        return frozenset(choosing.simulated)


_Place = tuple[tuple[int, ...], GroupKind, int]
"""A class, a kind of group, and a position in it."""


class _Choosing:
    """Ranks are chosen, with those that they need."""

    def __init__(
        self,
        size: int,
        simulated: frozenset[int],
        class_of: list[tuple[int, ...]],
        divisions: Sequence[Division],
        kinds: Sequence[GroupKind],
    ) -> None:
        self._size = size
        self._class_of = class_of
        self._of_stages = {each.kind for each in divisions if each.has_messages}
        self._guessed = [each.kind for each in divisions if each.is_guess]
        self._kinds = kinds
        self.simulated: set[int] = set()
        self.add(sorted(simulated))

    def add(self, ranks: Sequence[int]) -> None:
        """Choose ranks: all stages of their pipelines, and each class in each of their groups."""
        unvisited = list(ranks)
        while unvisited:
            rank = unvisited.pop()
            if rank in self.simulated:
                continue
            self.simulated.add(rank)
            for kind in self._kinds:
                group = kind.group_of(rank)
                if not group or group[-1] >= self._size or len(group) == self._size:
                    continue
                if kind in self._of_stages:  # a message needs its peer, so all stages run
                    unvisited += group
                    continue
                chosen = self.simulated.union(unvisited)
                present = {self._class_of[each] for each in group if each in chosen}
                for each in group:
                    if self._class_of[each] not in present:
                        present.add(self._class_of[each])
                        unvisited.append(each)

    def places(self, drawn: random.Random) -> set[_Place]:
        """The positions that are looked at, of each class."""
        found: set[_Place] = set()
        sampled: dict[tuple[int, ...], tuple[int, ...]] = {}  # stages alike, for one pipeline
        for members in _members(self._class_of):
            for kind in self._kinds:
                positions = tuple(sorted({kind.position(rank) for rank in members} - {-1}))
                if positions not in sampled:
                    sampled[positions] = self._sampled(positions, drawn)
                found |= {(self._class_of[members[0]], kind, at) for at in sampled[positions]}
            for kind in self._guessed:  # where a guess is wrong, an end of a class shows it
                at = {kind.position(rank) for rank in members}
                found |= {(self._class_of[members[0]], kind, each) for each in (min(at), max(at))}
        return found

    def _sampled(self, positions: tuple[int, ...], drawn: random.Random) -> tuple[int, ...]:
        if self._of_stages and len(positions) > 1:  # each takes a whole pipeline
            return positions[0], drawn.choice(positions[1:])
        if len(positions) > _POSITIONS_MAX:
            return positions[0], positions[drawn.randrange(1, len(positions) - 1)], positions[-1]
        return positions

    def covered(self, ranks: Sequence[int] | set[int]) -> set[_Place]:
        """The positions that ranks have; rank 0 often does more, so another one is looked at."""
        return {
            (self._class_of[rank], kind, kind.position(rank))
            for rank in ranks
            for kind in [*self._kinds, *self._guessed]
            if rank or self._of_stages
        }


def _members(class_of: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The ranks of each class."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, parts in enumerate(class_of):
        found.setdefault(parts, []).append(rank)
    return [tuple(each) for each in found.values()]


def _changes(kind: GroupKind, digests: Mapping[int, bytes]) -> set[int] | None:
    """The positions at which digests change; None if they do not depend on the position alone."""
    at: dict[int, bytes] = {}
    for rank, digest in sorted(digests.items()):
        if at.setdefault(kind.position(rank), digest) != digest:
            return None
    # Of positions between two that differ nothing is known: the first alone is the usual exception.
    return {1 if one == 0 else other for one, other in pairwise(sorted(at)) if at[one] != at[other]}
