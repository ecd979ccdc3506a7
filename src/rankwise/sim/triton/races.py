"""The race detector: which program used which element last, and whether that was ordered.

Every program has a vector clock: how much of each program's work it knows to have happened. An
atomic operation that releases publishes the clock of its program at that address, and one that
acquires takes over what others have published there; signals and waits do the same. A store is a
race if the last store to, or load from, one of its elements is not known to its program; a load, if
the last store is not. Of the loads of an element only the latest is remembered, so that a race
between a store and an earlier load may be missed; what is reported is one.

An asynchronous copy (`put`, `get_nbi`) counts as a thread of its own. `quiet` orders the program
after it; the signal that follows it orders the ranks that wait for that signal.

Launches on a simulated machine may share a detector. A launch knows what earlier launches of its
rank have done, and those of other ranks up to the latest collective that both were in. Among ranks
an atomic orders only with `scope="sys"`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import DataRace, Execution, line_of_kernel, place
from rankwise.sim.triton.memory import AccessTarget, Buffer
from rankwise.sim.triton.tensor import tensor
from rankwise.sim.triton.wait_addresses import BufferElement

RunOf = Callable[[Buffer], tuple[int, int]]
"""The memory that a buffer is part of: where it begins, and how many bytes it has."""


class _Uses(NamedTuple):
    """For each byte of memory: who used it last in one way, when, and how that is told."""

    who: Array
    when: Array
    text_numbers: Array


class _Shadow(NamedTuple):
    """For each byte of memory: the last store and the last load."""

    stores: _Uses
    loads: _Uses


_SYSTEM = -1
"""The key of a clock that all ranks may take over; other clocks have the number of a rank."""


def _whole(buffer: Buffer) -> tuple[int, int]:
    return buffer.address, buffer.size_bytes


class _UseText(NamedTuple):
    """How a use is told to the one that it races with, and whose it was."""

    text: str
    rank: int
    is_of_copy: bool


class RaceDetector:
    """Watches launches whose programs run one by one."""

    def __init__(self) -> None:
        self.clocks = np.zeros((0, 0), np.int64)
        # By rank: whose slot it was is the same program to the rank that gets it next, never to
        # another rank.
        self._free: dict[int, list[int]] = {}
        self._of_ranks: dict[int, Array] = {}
        self._published: dict[tuple[int, int], Array] = {}
        self._shadows: dict[int, _Shadow] = {}
        self._texts: dict[_UseText, int] = {}

    def launch(self, program_count: int, rank: int = 0, run_of: RunOf = _whole) -> "LaunchRaces":
        """Watch a launch of a rank; it knows what that rank knows."""
        slots = self.take_slots(rank, program_count)
        known = self._of_rank(rank)
        for slot in slots:
            # Never less than before: its number stood for an earlier program until now.
            own = self.clocks[slot, slot]
            self.clocks[slot] = known
            self.clocks[slot, slot] = own + 1
        return LaunchRaces(self, slots, rank, run_of)

    def take_slots(self, rank: int, count: int) -> list[int]:
        """Places for the clocks of so many of a rank's programs, or of their copies."""
        free = self._free.setdefault(rank, [])
        if len(free) < count:
            free += self._grown(count - len(free))
        self._free[rank] = free[count:]
        return free[:count]

    def _grown(self, count: int) -> Iterable[int]:
        size = len(self.clocks)
        self.clocks = np.pad(self.clocks, ((0, count), (0, count)))
        return range(size, size + count)

    def _of_rank(self, rank: int) -> Array:
        known = self._of_ranks.get(rank, np.zeros(0, np.int64))
        return np.pad(known, (0, len(self.clocks) - len(known)))

    def ended(self, rank: int, slots: list[int]) -> None:
        """Let a rank know what the programs of a launch have done and known."""
        known = self.clocks[slots].max(axis=0, initial=0)
        self._of_ranks[rank] = np.maximum(self._of_rank(rank), known)
        self._free[rank] += slots

    def meet(self, ranks: Iterable[int]) -> None:
        """Let ranks know what each of them knows: they have been in a collective together."""
        members = list(ranks)
        known = np.max([self._of_rank(rank) for rank in members], axis=0)
        for rank in members:
            self._of_ranks[rank] = known

    def publish(self, address: int, clock: Array, rank: int, *, is_for_system: bool) -> None:
        """Let who acquires at an address know a clock: in the same rank, or in every one, too."""
        for whom in (rank, _SYSTEM) if is_for_system else (rank,):
            before = self._published.get((address, whom))
            self._published[address, whom] = clock if before is None else _joined(before, clock)

    def published(self, address: int, rank: int, *, is_for_system: bool) -> list[Array]:
        """What a program of a rank takes over when it acquires at an address."""
        found = (
            self._published.get((address, whom))
            for whom in ((rank, _SYSTEM) if is_for_system else (rank,))
        )
        return [clock for clock in found if clock is not None]

    def shadow_of(self, start: int, size: int) -> _Shadow:
        """The programs that used the bytes of some memory."""
        found = self._shadows.get(start)
        if found is None or len(found.stores.who) < size:
            stores, loads = (
                _Uses(
                    np.full(size, -1, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int32)
                )
                for _ in range(2)
            )
            found = self._shadows[start] = _Shadow(stores, loads)
        return found

    def number_of(self, text: _UseText) -> int:
        """A number for how a use is told."""
        return self._texts.setdefault(text, len(self._texts))

    def text_of(self, number: int) -> _UseText:
        """How a use is told."""
        return list(self._texts)[number]


def _joined(one: Array, other: Array) -> Array:
    if len(one) < len(other):
        one, other = other, one
    joined = one.copy()
    np.maximum(joined[: len(other)], other, out=joined[: len(other)])
    return joined


class LaunchRaces:
    """The detector as one launch sees it."""

    def __init__(self, detector: RaceDetector, slots: list[int], rank: int, run_of: RunOf) -> None:
        self._detector = detector
        self._slots = slots
        self._rank = rank
        self._run_of = run_of
        self._copies: dict[int, int] = {}
        """By a program's slot: that of its copies."""

    def ended(self) -> None:
        """Note that all programs have come to their end."""
        self._detector.ended(self._rank, [*self._slots, *self._copies.values()])

    def on_access(
        self, execution: Execution, target: AccessTarget, pointer: tensor, mask: tensor | None
    ) -> None:
        """Check a load or a store, and remember it."""
        touched = _touched(target, pointer, mask)
        self._use(execution, target, touched, is_store=target.action == "store")

    def touch(
        self,
        execution: Execution,
        first: BufferElement,
        size: int,
        *,
        is_store: bool,
        by_copy: bool,
    ) -> None:
        """Check a copy's use of consecutive bytes, and remember it.

        Args:
            execution: the program.
            first: where the bytes begin.
            size: how many they are.
            is_store: whether the copy stores them.
            by_copy: whether it uses them after the program has gone on.
        """
        me = self._slot(execution)
        start = first.position * first.element.itemsize
        target = AccessTarget("store" if is_store else "load", first.buffer, first.element, ())
        who = self._copies.get(me) if by_copy else None
        self._use(execution, target, np.arange(start, start + size), is_store=is_store, who=who)

    def copy_begins(self, execution: Execution) -> None:
        """Note that a program begins a copy that goes on while it does."""
        me = self._slot(execution)
        if me not in self._copies:
            (self._copies[me],) = self._detector.take_slots(self._rank, 1)
        copies = self._copies[me]
        self._join(copies, self._clock(me))
        self._clock(copies)[copies] += 1

    def copies_are_done(self, execution: Execution) -> None:
        """Order the program after all copies that it has begun."""
        me = self._slot(execution)
        if me in self._copies:
            self._join(me, self._clock(self._copies[me]))

    def on_atomic(
        self,
        execution: Execution,
        target: AccessTarget,
        read: Array,
        written: Array,
        order: tuple[str | None, str | None],
    ) -> None:
        """Order the program after those that released at the elements read, and publish its work.

        Only at those that it wrote: a comparison that failed has released nothing.
        """
        sem, scope = order
        me, is_for_system = self._slot(execution), scope == "sys"
        start, size = target.buffer.address, target.element.itemsize
        if sem in {None, "acq_rel", "acquire"}:
            for index in np.unique(read).tolist():
                self._take_over(me, start + index * size, is_for_system=is_for_system)
        if sem in {None, "acq_rel", "release"}:
            known = self._clock(me).copy()
            for index in np.unique(written).tolist():
                self._detector.publish(
                    start + index * size, known, self._rank, is_for_system=is_for_system
                )
        self._clock(me)[me] += 1

    def acquire(self, execution: Execution, word: BufferElement) -> None:
        """Order the program after those that have set a signal."""
        self._take_over(self._slot(execution), word.address, is_for_system=True)

    def take_over(self, execution: Execution, known: Array) -> None:
        """Order the program after who has sent it a message."""
        self._join(self._slot(execution), known)

    def snapshot(self, execution: Execution) -> Array:
        """What a program has done and known up to now, for a signal that it begins to set."""
        me = self._slot(execution)
        known = self._clock(me).copy()
        if me in self._copies:
            # The signal leaves after them, though the program does not wait.
            np.maximum(known, self._clock(self._copies[me]), out=known)
        self._clock(me)[me] += 1
        return known

    def publish(self, word: BufferElement, known: Array) -> None:
        """Let who waits for a signal know what was known where it was set."""
        self._detector.publish(word.address, known, self._rank, is_for_system=True)

    def _slot(self, execution: Execution) -> int:
        return self._slots[int(execution.programs[0])]

    def _clock(self, slot: int) -> Array:
        clock: Array = self._detector.clocks[slot]
        return clock

    def _take_over(self, me: int, address: int, *, is_for_system: bool) -> None:
        for known in self._detector.published(address, self._rank, is_for_system=is_for_system):
            self._join(me, known)

    def _join(self, me: int, known: Array) -> None:
        mine = self._clock(me)[: len(known)]
        np.maximum(mine, known, out=mine)

    def _use(
        self,
        execution: Execution,
        target: AccessTarget,
        offsets: Array,
        *,
        is_store: bool,
        who: int | None = None,
    ) -> None:
        me = self._slot(execution) if who is None else who
        start, size = self._run_of(target.buffer)
        addresses = offsets + (target.buffer.address - start)
        shadow = self._detector.shadow_of(start, size)
        for used in (shadow.stores, shadow.loads) if is_store else (shadow.stores,):
            self._check(execution, me, target, addresses, offsets, used)
        uses = shadow.stores if is_store else shadow.loads
        uses.who[addresses] = me
        uses.when[addresses] = self._clock(me)[me]
        text = (
            f"{'' if who is None else 'a copy begun by '}{self._program(execution)}, which"
            f" {'stored' if is_store else 'loaded'} it at {line_of_kernel()}"
        )
        use = _UseText(text, self._rank, is_of_copy=who is not None)
        uses.text_numbers[addresses] = self._detector.number_of(use)

    def _program(self, execution: Execution) -> str:
        return f"program {execution.coordinates(0)}" + (
            f" of rank {self._rank}" if execution.launch.peers is not None else ""
        )

    def _check(
        self,
        execution: Execution,
        me: int,
        target: AccessTarget,
        addresses: Array,
        offsets: Array,
        uses: _Uses,
    ) -> None:
        others = uses.who[addresses]
        unknown = (others >= 0) & (others != me)
        unknown &= uses.when[addresses] > self._clock(me)[np.maximum(others, 0)]
        if not unknown.any():
            return
        at = int(np.flatnonzero(unknown)[0])
        element = int(offsets[at]) // target.element.itemsize
        other = self._detector.text_of(int(uses.text_numbers[addresses[at]]))
        raise DataRace(
            f'{place()}: {target.action} of element {element} of buffer "{target.buffer.name}" by'
            f" {self._program(execution)} races with {other.text}",
            hint=self._remedy(other, is_of_copy=me in self._copies.values()),
        )

    def _remedy(self, other: _UseText, *, is_of_copy: bool) -> str:
        if other.rank != self._rank:
            return (
                "let one signal the other, which waits for it; between ranks an atomic orders only"
                ' with scope="sys"'
            )
        if other.is_of_copy or is_of_copy:
            return "wait for the copy first: quiet()"
        return "order them with an atomic, or give each program elements of its own"


def _touched(target: AccessTarget, pointer: tensor, mask: tensor | None) -> Array:
    index = pointer.data
    if mask is not None:
        index = np.broadcast_to(index, mask.data.shape)[mask.data]
    size = target.element.itemsize
    start = index.reshape(-1) * size
    offsets: Array = (start[:, None] + np.arange(size)).reshape(-1)
    return offsets
