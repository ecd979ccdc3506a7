"""Memory windows between simulated ranks.

The code of real ranks runs: members, signals, barriers, in memory that all ranks of this process
share. The sleep of a rank differs. A rank that would sleep on a word in shared memory waits in the
scheduler instead, and who wakes the sleepers of the word makes them ready. And ranks meet in this
process, not at a socket; those of different nodes do not.

A death is told as by `PeerWatch`: a rank that ends without having left is marked in its windows.

Deadlines are instants of virtual time, so who times out first is the same in each equal run.
Sleeps of two minutes or more, which is the usual patience, have no deadline: when they can never
end, no rank can continue, and the report says which signal or barrier each rank waits for.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from mmap import mmap
from typing import Any

from rankwise.base.errors import CollectiveTimeout, RankwiseError, TreeValueError
from rankwise.base.units import SECOND, Duration, Instant, after, format_duration
from rankwise.base.wording import ranks_in_words
from rankwise.core.matching import missing
from rankwise.drivers.real.futex import FutexWord
from rankwise.drivers.real.windows.in_process_communicators import (
    IN_PROCESS_COMMUNICATORS,
    different_windows,
)
from rankwise.drivers.real.windows.layout import region_bytes
from rankwise.drivers.real.windows.region import Presence, WindowRegion
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.world import SimulatedWorld, refuse_threads, running_rank

_USUAL_PATIENCE = Duration(119 * SECOND)
"""A little less than the two minutes that a communicator has without a timeout."""
_NEVER = Instant((1 << 63) - 1)


class _Sleep(Gate):
    """A rank that sleeps on a word."""

    is_of_peers = True

    __slots__ = ("_word",)

    def __init__(self, word: FutexWord) -> None:
        super().__init__()
        self._word = word

    def describe(self) -> str:
        """Say what for, as the one who sleeps has left it at the word."""
        return "another rank" if self._word.awaited is None else self._word.awaited()


class _Point(Gate):
    """A step that all ranks of a communicator come to, and that the last one to come takes.

    Attributes:
        size: how many ranks there are.
        arrived: what each of them brings that has come.
    """

    is_of_peers = True

    __slots__ = ("_error", "_what", "arrived", "size")

    def __init__(self, what: str, size: int) -> None:
        super().__init__()
        self._what = what
        self.size = size
        self.arrived: dict[int, Any] = {}
        self._error: RankwiseError | None = None

    def describe(self) -> str:
        """Say what is waited for, and for whom."""
        absent = missing(range(self.size), self.arrived)
        return f"{self._what}, to which {ranks_in_words(absent)} did not come"

    def fail(self, error: RankwiseError) -> None:
        """It comes to nothing, for all of them."""
        self._error = error
        self.open()

    def come(
        self,
        rank: int,
        brings: Any,
        scheduler: Scheduler,
        patience: Duration,
        do: Callable[[], None] = lambda: None,
    ) -> None:
        """Come, and wait for the others; who comes last does what is to be done, for all."""
        self.arrived[rank] = brings
        if self.is_open:
            pass
        elif len(self.arrived) == self.size:
            try:
                do()
            except RankwiseError as error:
                self.fail(error)
            self.open()
        elif not scheduler.wait(self, _deadline(scheduler, patience)):
            late = f"{self.describe()} within {format_duration(patience)} of virtual time"
            self.fail(CollectiveTimeout(late))
        if (problem := self._error) is not None:
            raise type(problem)(problem.message, hint=problem.hint)


class _Communicator:
    """Ranks that meet at a path, and the memory that they get then."""

    def __init__(self, path: str, size: int) -> None:
        self.joining = _Point(f"CommHandle.meet at {path!r}", size)
        self.granting = _Point("the allocation of windows", size)
        self.memory: mmap | None = None

    def allocate(self) -> None:
        """Make the windows, if all ranks want the same ones."""
        wishes = self.granting.arrived
        if len(set(wishes.values())) > 1:
            raise different_windows(wishes)
        count, (size, signal_count) = self.granting.size, wishes[0]
        self.memory = mmap(-1, region_bytes(count, size, signal_count))
        WindowRegion.place(self.memory, 0, "comm", count, size, signal_count=signal_count)


class _Communicators:
    """The communicators of the ranks of one world, and the windows of each rank."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self.scheduler = world.scheduler
        self._joined: dict[Rank, list[tuple[mmap, int]]] = {}

    def meet(self, rank: int, count: int, path: str, patience: Duration) -> "_Membership | None":
        """Meet the other ranks of this node; see `JoinCommunicator`."""
        if running_rank() is None:
            refuse_threads("a communicator of windows")
            return None
        key = f"windows {os.environ.get('GROUP_RANK', '0')} {os.path.realpath(path)}"
        shared = self._world.shared
        communicator: _Communicator | None = shared.get(key)
        if communicator is None or communicator.joining.is_open:  # open is one that has failed
            communicator = shared[key] = _Communicator(path, count)
        joining = communicator.joining
        if joining.size != count:
            sizes = f"one says {joining.size}, another {count}"
            joining.fail(TreeValueError(f"ranks at {path!r} disagree on their number: {sizes}"))
        elif rank in joining.arrived:
            joining.fail(TreeValueError(f"two ranks at {path!r} say that they are rank {rank}"))
        if joining.is_open or len(joining.arrived) == count - 1:
            del shared[key]  # the next ones meet anew
        joining.come(rank, None, self.scheduler, patience)
        return _Membership(self, communicator, rank, patience)

    def join(self, memory: mmap, rank: int) -> WindowRegion:
        """The region of a rank, whose death will be noticed."""
        own = running_rank()
        assert own is not None, "simulated ranks ask"
        self._joined.setdefault(own, []).append((memory, rank))
        return WindowRegion.find(memory, 0)

    def leave(self, region: WindowRegion, number: int) -> None:
        """Forget windows that the rank that runs has left: its death is no news there."""
        own = running_rank()
        assert own is not None, "simulated ranks leave"
        others = [
            (memory, rank)
            for memory, rank in self._joined.pop(own, ())
            if memory is not region.memory or rank != number
        ]
        if others:
            self._joined[own] = others

    def end(self, rank: Rank) -> None:
        """Tell of a rank that has ended and not left its windows before."""
        for memory, number in self._joined.pop(rank, ()):
            region = WindowRegion.find(memory, 0)
            if region.presence(number) is Presence.JOINED:
                region.mark_dead(number)
            region.close()


class _Membership:
    """A rank of a communicator; a `CommunicatorMember`."""

    def __init__(
        self,
        communicators: _Communicators,
        communicator: _Communicator,
        rank: int,
        patience: Duration,
    ) -> None:
        self._communicators = communicators
        self._communicator = communicator
        self._rank = rank
        self._patience = patience

    def agree(self, size: int, signal_count: int) -> WindowRegion:
        """The windows that all want; who asks last makes them."""
        communicator, scheduler = self._communicator, self._communicators.scheduler
        wish = (size, signal_count)
        communicator.granting.come(
            self._rank, wish, scheduler, self._patience, communicator.allocate
        )
        assert communicator.memory is not None, "all have asked"
        return self._communicators.join(communicator.memory, self._rank)


class _Sleepers:
    """Lets ranks that sleep on words in memory wait in the scheduler; by address of the word."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._asleep: dict[int, list[_Sleep]] = {}

    def sleep(self, word: FutexWord, seen: int, deadline: Instant) -> None:
        """See `FutexWord.sleep`."""
        if word.look() != seen:
            return
        gate = _Sleep(word)
        asleep = self._asleep.setdefault(word.address, [])
        asleep.append(gate)
        try:
            self._scheduler.wait(gate, None if deadline == _NEVER else deadline)
        finally:
            if gate in asleep:
                asleep.remove(gate)
            if not asleep and self._asleep.get(word.address) is asleep:
                del self._asleep[word.address]

    def wake(self, word: FutexWord) -> None:
        """All that sleep on a word look again."""
        for gate in self._asleep.pop(word.address, ()):
            gate.open()


def install(world: SimulatedWorld) -> Callable[[], None]:
    """Let simulated ranks sleep and meet in this world; returns what undoes it."""
    communicators, sleepers = _Communicators(world), _Sleepers(world.scheduler)
    world.at_end_of_ranks(communicators.end)
    real_sleep, real_presence = FutexWord.sleep, WindowRegion.set_presence
    real_now, real_deadline_after = FutexWord.now, FutexWord.deadline_after

    # Other threads of this process, such as those of a pool, go on in real time.
    def now() -> Instant:
        return real_now() if running_rank() is None else world.scheduler.now

    def deadline_after(patience: Duration) -> Instant:
        if running_rank() is None:
            return real_deadline_after(patience)
        deadline = _deadline(world.scheduler, patience)
        return _NEVER if deadline is None else deadline

    def sleep(word: FutexWord, seen: int, deadline: Instant) -> None:
        if running_rank() is None:
            real_sleep(word, seen, deadline)
        else:
            sleepers.sleep(word, seen, deadline)

    def waking(real_wake: Callable[[FutexWord], None]) -> Callable[[FutexWord], None]:
        def wake(word: FutexWord) -> None:
            real_wake(word)
            sleepers.wake(word)

        return wake

    def set_presence(region: WindowRegion, rank: int, presence: Presence) -> None:
        own = running_rank()
        if own is None or not own.is_to_end:  # who is killed does not leave
            real_presence(region, rank, presence)
            if own is not None and presence is Presence.LEFT:
                communicators.leave(region, rank)

    stack = ExitStack()
    for owner, name, function in (
        (IN_PROCESS_COMMUNICATORS, "meet", communicators.meet),
        (WindowRegion, "set_presence", set_presence),
        (FutexWord, "now", staticmethod(now)),
        (FutexWord, "deadline_after", staticmethod(deadline_after)),
        (FutexWord, "sleep", sleep),
        (FutexWord, "add_and_wake", waking(FutexWord.add_and_wake)),
        (FutexWord, "ring", waking(FutexWord.ring)),
        (FutexWord, "wake", waking(FutexWord.wake)),
    ):
        stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
        setattr(owner, name, function)
    return stack.close


def _deadline(scheduler: Scheduler, patience: Duration) -> Instant | None:
    return None if patience > _USUAL_PATIENCE else after(scheduler.now, patience)
