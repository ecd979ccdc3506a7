"""What a rank has its clock do in one microbatch, to be done again for equal ones.

Theory of operation
===================

A recording has two parts, forward and backward. While a part is under way, the clock and the
storages of its rank note each step: launches, marks and waits of lanes, calls of collectives, and
memory that is taken and given back. Storages, marks and collectives have numbers, which count
from the first step of a recording on. So two recordings are equal if their steps are.

A replay takes the steps one after the other. It does what the program would have done, to the
clock, to the memory and in the groups, but it has no tensors, and storages of its own.

Anything that depends on more than the steps refuses the recording: a message, a sleep, a value that
the program reads, memory from before that changes its size.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rankwise.core.matching import CallSignature
from rankwise.simranks.world.equals import NotEqual

if TYPE_CHECKING:
    from rankwise.simranks.prediction.clocks import Passage, PricedWork
    from rankwise.simranks.prediction.holders import Holder
    from rankwise.simranks.prediction.queued_clocks import Lane, LaneMark, QueuedClock

Step = tuple[int, Any]
"""A code, and its argument; see the constants."""
(
    TIME, WORK, UNTRACKED_WORK, REPEATED, LANE, MARK, LAUNCHED, LET_WAIT, SYNCHRONIZE, ARRIVE, WAIT,
    TAKE, RESIZE, GIVE_BACK, USE, LOOK_UP,
) = range(16)  # fmt: skip
_LEFT_BYTES_MAX = 1 << 20
_HOST_TIME_MAX = 20_000_000
"""Picoseconds by which the host's time of two parts may differ."""


class Repetition:
    """Whether equal microbatches of a run are carried out once.

    Attributes:
        is_wanted: whether they are.
        difference: why some were not equal after all; empty if none are known.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.difference = ""

    def stop(self, why: str) -> None:
        """Microbatches that were taken as equal are not: the run begins anew without that.

        Raises:
            NotEqual: always.
        """
        self.difference, self.is_wanted = why, False
        raise NotEqual(why)


class RankEnd(Protocol):
    """A rank's end of a group."""

    def come_again(self, call: CallSignature, size: int, root: int) -> Any:
        """Come to a collective without tensors; returns what `finish` takes."""
        ...

    def finish(self, come: Any) -> None:
        """Wait for it."""
        ...


class StorageInUse(Protocol):
    """A storage, as far as a recording is concerned."""

    size: int
    holder: "Holder | None"

    def occupy(self) -> None:
        """Take memory."""
        ...

    def vacate(self) -> None:
        """Give it back."""
        ...

    def use(self, stream: int) -> None:
        """Note that another stream uses it."""
        ...


class Recording:
    """One microbatch of a rank; see the module's text.

    Attributes:
        forward, backward: the steps.
        refused: why they cannot be taken again; empty if they can.
        holders: of each storage, by its number.
        marks: by their numbers.
    """

    def __init__(self, clock: "QueuedClock") -> None:
        self.forward: list[Step] = []
        self.backward: list[Step] = []
        self.refused = ""
        self.holders: list[Holder | None] = []
        self.marks: list[LaneMark] = []
        self._clock = clock
        self._steps = self.forward
        self._storages: dict[int, tuple[int, StorageInUse]] = {}
        self._given_back: set[int] = set()
        self._marks: dict[int, int] = {}
        self._marked: set[int] = set()
        self._passages: dict[int, tuple[int, Passage]] = {}
        self._awaited: set[int] = set()
        self._is_repeated = False

    def begin(self, steps: list[Step]) -> None:
        """Note what comes in this part."""
        self._steps = steps
        self._is_repeated = self._clock.work.is_repeated
        steps.append((REPEATED, self._is_repeated))
        self._marked.clear()
        if self._clock.lane is not self._clock.default_lane:
            self.refuse("it begins on another stream")
        self._clock.recording = self

    def end(self) -> None:
        """The part is over."""
        self._clock.recording = None
        if self._clock.lane is not self._clock.default_lane:
            self.refuse("it ends on another stream")

    def refuse(self, why: str) -> None:
        """The steps cannot be taken again."""
        self.refused = self.refused or why

    def check_whole(self, kept: Sequence[int]) -> None:
        """Both parts are over: nothing may be left but the storages with these numbers."""
        if len(self._awaited) < len(self._passages):
            self.refuse("it leaves a collective that is not waited for")
        left = sum(
            storage.size
            for number, storage in self._storages.values()
            if number not in self._given_back and number not in kept
        )
        if left > _LEFT_BYTES_MAX:
            self.refuse(f"it leaves {left:,} bytes")
        self._storages.clear()
        self._passages.clear()

    def number_of(self, storage: object) -> int | None:
        """The number of a storage that was made in it."""
        found = self._storages.get(id(storage))
        return None if found is None else found[0]

    # Steps

    def note_time(self, duration: int) -> None:
        """The host needs so much, and launches nothing."""
        steps = self._steps
        if steps[-1][0] == TIME:
            steps[-1] = (TIME, steps[-1][1] + duration)
        else:
            steps.append((TIME, duration))

    def note_work(self, priced: "PricedWork") -> None:
        """An operation is launched."""
        clock, steps = self._clock, self._steps
        if priced.at_peak and clock.work.is_repeated is not self._is_repeated:
            self._is_repeated = clock.work.is_repeated
            steps.append((REPEATED, self._is_repeated))
        steps.append((UNTRACKED_WORK if clock.trail is None else WORK, priced))

    def note_lane(self, number: int) -> None:
        """The lane with this number gets what is launched from now on."""
        self._steps.append((LANE, number))

    def note_mark(self, lane: int, mark: "LaneMark") -> None:
        """A lane is marked."""
        number = self._marks.get(id(mark))
        if number is None:
            number = self._marks[id(mark)] = len(self.marks)
            self.marks.append(mark)
        self._marked.add(number)
        self._steps.append((MARK, (lane, number)))

    def note_launched(self, mark: "LaneMark") -> None:
        """A mark is not before the present time of the host."""
        self._steps.append((LAUNCHED, self._marks[id(mark)]))

    def note_let_wait(self, lane: "Lane", number: int, mark: "LaneMark") -> None:
        """A lane waits for a mark."""
        of_mark = self._marks.get(id(mark))
        if of_mark is not None and of_mark in self._marked:
            self._steps.append((LET_WAIT, (number, of_mark)))
        elif mark.ends_at > lane.ends_at:
            self.refuse("it waits for an event from before")

    def note_synchronize(self, until: int | None) -> None:
        """The host waits for its device."""
        if until is None:
            self._steps.append((SYNCHRONIZE, None))
        else:
            self.refuse("its host waits for an event")

    def note_arrival(
        self, passage: "Passage", end: RankEnd, call: CallSignature, size: int, root: int
    ) -> None:
        """A collective is called."""
        self._passages[id(passage)] = len(self._passages), passage
        self._steps.append((ARRIVE, (end, call, size, root)))

    def note_wait(self, passage: "Passage") -> None:
        """The present lane waits for a collective."""
        found = self._passages.get(id(passage))
        if found is not None:
            self._awaited.add(found[0])
            self._steps.append((WAIT, found[0]))
        elif passage.ends_at > self._clock.lane.ends_at:
            self.refuse("it waits for a collective from before")

    def note_made(self, storage: StorageInUse) -> None:
        """A storage has been made, and takes memory of the device next."""
        self._storages[id(storage)] = len(self.holders), storage
        self.holders.append(storage.holder)
        self._steps.append((TAKE, storage.size))

    def note_resized(self, storage: StorageInUse) -> None:
        """A storage takes more or less memory."""
        number = self.number_of(storage)
        if number is None:
            self.refuse("memory from before changes its size")
        else:
            self._steps.append((RESIZE, (number, storage.size)))

    def note_given_back(self, storage: StorageInUse) -> None:
        """A storage gives its memory back."""
        number = self.number_of(storage)
        if number is not None:  # the garbage collector may end others at any time
            self._given_back.add(number)
            self._steps.append((GIVE_BACK, number))

    def note_use(self, storage: StorageInUse, stream: int) -> None:
        """Another stream uses a storage."""
        number = self.number_of(storage)
        if number is None:
            self.refuse("another stream uses memory from before")
        else:
            self._steps.append((USE, (number, stream)))

    def note_lookup(self, which: Any, count: int) -> None:
        """Indices are looked up in an embedding."""
        self._steps.append((LOOK_UP, (which, count, self._clock.work.is_repeated)))


def are_alike(ones: Sequence[Step], others: Sequence[Step]) -> bool:
    """Whether two parts have the same steps.

    The time that the host needs between launches may differ by a few calls: in all backward passes
    of a step but the last, FSDP looks for parameters to prefetch.
    """
    told = ([step for step in steps if step[0] != TIME] for steps in (ones, others))
    times = [sum(step[1] for step in steps if step[0] == TIME) for steps in (ones, others)]
    return next(told) == next(told) and abs(times[0] - times[1]) <= _HOST_TIME_MAX


class Replay:
    """One microbatch that takes the steps of a recorded one.

    Args:
        clock: of the rank.
        make: makes a storage, given its number, its size and its holder.
    """

    def __init__(
        self,
        clock: "QueuedClock",
        make: "Callable[[int, int, Holder | None], StorageInUse | None]",
    ) -> None:
        self._clock = clock
        self._make = make
        self._storages: list[StorageInUse | None] = []
        self._calls: list[tuple[RankEnd, Any]] = []

    def take(self, recording: Recording, steps: Sequence[Step]) -> None:
        """Take the steps of a part; of storages that `make` has not given, none are taken."""
        # Kept over both parts: backward gives back what the forward part has left.
        clock, storages, calls = self._clock, self._storages, self._calls
        marks, holders = recording.marks, recording.holders
        for code, argument in steps:
            if code == WORK:
                clock.compute(argument)
            elif code == TIME:
                clock.time += argument
            elif code == TAKE:
                number = len(storages)
                storages.append(self._make(number, argument, holders[number]))
            elif code == GIVE_BACK:
                storage, storages[argument] = storages[argument], None
                if storage is not None:
                    storage.vacate()
            elif code == ARRIVE:
                end, call, size, root = argument
                calls.append((end, end.come_again(call, size, root)))
            elif code == WAIT:
                end, come = calls[argument]
                end.finish(come)
            elif code == REPEATED:
                clock.work.is_repeated = argument
            elif code == LANE:
                clock.use_lane(clock.lane_with(argument))
            elif code == MARK:
                clock.mark(clock.lane_with(argument[0]), marks[argument[1]])
            elif code == LAUNCHED:
                clock.be_launched(marks[argument])
            elif code == LET_WAIT:
                clock.let_wait(clock.lane_with(argument[0]), marks[argument[1]])
            elif code == UNTRACKED_WORK:
                trail, clock.trail = clock.trail, None
                clock.compute(argument)
                clock.trail = trail
            elif code == RESIZE:
                storage = storages[argument[0]]
                if storage is not None:
                    storage.size = argument[1]
                    storage.occupy()
            elif code == USE:
                storage = storages[argument[0]]
                if storage is not None:
                    storage.use(argument[1])
            elif code == LOOK_UP:
                which, count, clock.work.is_repeated = argument
                clock.work.count_lookups(which, count)
            else:
                clock.synchronize()

    def close(self) -> None:
        """Give back what is left."""
        storages, self._storages = self._storages, []
        for storage in storages:
            if storage is not None:
                storage.vacate()
