"""The event loop of a simulation: what happens next, in integer time.

The agenda is a heap of instants and, for each of them, what happens then: one item, or a list of
them in the order in which they were asked for; that order is the sequence number. What is asked for
at the current instant goes to the list `_ready`, which is taken as the next *wave* of the same
instant. So ties need no comparison, nothing is ordered by a hash or an address, and many things at
one instant, which is what symmetrical machines do, cost next to nothing. Where a process is alone
at its instant and asks for another delay, which is what asymmetrical machines do, its old instant
is exchanged for the new one in one pass over the heap.

An item of the agenda is either a process to resume or a pair of callback and arguments. Resuming
is written out in the loop itself: it is the inner loop of everything else in `rankwise.sim`.

A process that waits for something that has already happened goes on at once, without a wave; after
`_PATIENCE` of those in a row it takes a wave all the same, so that time limits hold.

An exception that nobody handles leaves `run` after the rest of the wave was put back: the
simulation can be run on from there. Time limits are checked between waves. The wall clock never
decides anything but whether to give up.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush, heapreplace
from itertools import repeat
from typing import Any

from rankwise.base.errors import LocalProtocolError, TimeLimit
from rankwise.sim.kernel.deadlock import deadlock_of
from rankwise.sim.kernel.events import AgendaItem, Event, Process, Steps

_NEVER = 1 << 256
_PATIENCE = 1_000
_OBJECTS_PER_COLLECTION = 50_000
_WAVES_PER_LOOK_AT_THE_CLOCK = 4_096


class Simulator:
    """One run of a simulated world.

    Attributes:
        now: the current instant. Its unit is the model's business.
        time_limit: the last instant that may be reached; None for no limit.
        wall_limit_s: how many seconds one `run` may take in the real world; None for no limit.
        written: how messages write an instant, for models whose instants have a unit.
    """

    def __init__(
        self,
        *,
        time_limit: int | None = None,
        wall_limit_s: float | None = None,
        written: Callable[[int], str] = str,
    ) -> None:
        self.now = 0
        self.written = written
        self.time_limit = time_limit
        self.wall_limit_s = wall_limit_s
        self._instants: list[int] = []
        self._agenda: dict[int, AgendaItem | list[AgendaItem]] = {}
        self._ready: list[AgendaItem] = []
        self._living: dict[Process, None] = {}
        self._thread = threading.get_ident()
        self._is_running = False

    def call_at(self, instant: int, callback: Callable[..., object], *args: Any) -> None:
        """Have `callback(*args)` called at `instant`, after what is already on the agenda then."""
        if instant > self.now:
            there = self._agenda.get(instant)
            if there.__class__ is list:
                there.append((callback, args))
            else:
                self._put((callback, args), instant)
        elif instant == self.now:
            self._ready.append((callback, args))
        else:
            raise LocalProtocolError(f"instant {instant} is in the past: it is {self.now}")

    def event(self, name: object = "") -> Event:
        """Make an event that somebody will let happen with `succeed` or `fail`."""
        return Event(self, name)

    def timer(self, delay: int, value: Any = None, name: object = "timer") -> Event:
        """Make an event that happens by itself, `delay` from now."""
        event = Event(self, name)
        self.call_at(self.now + delay, event.succeed, value)
        return event

    def process(
        self,
        generator: Steps,
        name: object = "",
        *,
        is_daemon: bool = False,
        locate: Callable[[], str] | None = None,
    ) -> Process:
        """Start a process: it takes its first step at this instant, in a later wave.

        A daemon serves others: nobody minds if it still waits when nothing else is left to do.
        `locate` says for the deadlock report where it waits, if its generator cannot.
        """
        self._assert_thread()
        process = Process(self, generator, name, is_daemon=is_daemon, locate=locate)
        self._living[process] = None
        self._ready.append(process)
        return process

    def run(self, until: Event | int | None = None) -> Any:
        """Carry out the agenda.

        Args:
            until: an event: run until it has happened, and return its value (or raise its
                exception); an instant: run what happens up to it, itself included, and make it the
                current one; None: run until nothing is left to do.

        Raises:
            Deadlock: nothing is left to do, but `until` has not happened or a process still waits.
            TimeLimit: the time limit or the wall limit is exceeded.
        """
        self._assert_thread()
        if self._is_running:
            raise LocalProtocolError("Simulator.run was called from inside the simulation")
        self._is_running = True
        try:
            if isinstance(until, Event):
                # Marked as waited for, so that a process that fails here fails through `until`.
                if not until.is_done:
                    until.add_callback(_nothing)
                with _few_collections():
                    self._carry_out(until, None)
                if not until.is_done:
                    raise deadlock_of(self._living, self.now, str(until), self.written)
                return until.value
            with _few_collections():
                self._carry_out(None, until)
            if until is not None:
                self.now = max(self.now, until)
            elif any(process.waits_for and not process.is_daemon for process in self._living):
                raise deadlock_of(self._living, self.now, written=self.written)
            return None
        finally:
            self._is_running = False

    def _carry_out(self, stop: Event | None, last_instant: int | None) -> None:
        """Run until `stop` has happened, `last_instant` is over, or nothing is left.

        One function, because it is the inner loop of everything: a call per instant is a fifth of
        its time. If an exception leaves it, the rest of the wave is put back.
        """
        instants, agenda = self._instants, self._agenda
        last = _NEVER if last_instant is None else last_instant
        horizon = last if self.time_limit is None else min(last, self.time_limit)
        wall_end = None if self.wall_limit_s is None else time.monotonic() + self.wall_limit_s
        items: Iterator[AgendaItem] = iter(())
        now = self.now
        try:
            while True:
                for _ in repeat(None, _WAVES_PER_LOOK_AT_THE_CLOCK):
                    if stop is not None and stop.is_done:
                        return
                    if self._ready:
                        items = iter(self._ready)
                        self._ready = []
                    elif instants:
                        instant = instants[0]
                        if instant > horizon:
                            self._refuse_beyond(last, instant)
                            return
                        wave = agenda.pop(instant)
                        self.now = now = instant
                        if wave.__class__ is Process:
                            alone: Process = wave
                            # Nobody else asks for this instant, so it is still the first.
                            try:
                                target = alone._send(None)  # noqa: SLF001 (the kernel is one module in files)
                                if target.__class__ is int and target > 0:
                                    instant = now + target
                                    if instant not in agenda:
                                        agenda[instant] = alone
                                        heapreplace(instants, instant)
                                        continue
                                heappop(instants)
                                self._settle(alone, target)
                            except BaseException as end:  # noqa: BLE001 (sorted out in `_end`)
                                if instants and instants[0] == now:
                                    heappop(instants)
                                self._end(alone, end)
                            continue
                        heappop(instants)
                        items = iter(wave) if wave.__class__ is list else iter((wave,))  # type: ignore[arg-type]
                    else:
                        return
                    for item in items:
                        if item.__class__ is tuple:
                            item[0](*item[1])
                            continue
                        process: Process = item  # type: ignore[assignment]
                        awaited = process._waits_for  # noqa: SLF001
                        try:
                            if awaited is None:
                                target = process._send(None)  # noqa: SLF001
                            else:
                                process._waits_for = None  # noqa: SLF001
                                if awaited._failure is None:  # noqa: SLF001
                                    target = process._send(awaited._value)  # noqa: SLF001
                                else:
                                    target = process._generator.throw(awaited._failure)  # noqa: SLF001
                            if target.__class__ is int and target > 0:
                                instant = now + target
                                if instant in agenda:
                                    there = agenda[instant]
                                    if isinstance(there, list):
                                        there.append(process)
                                    else:
                                        agenda[instant] = [there, process]
                                else:
                                    agenda[instant] = process
                                    heappush(instants, instant)
                            elif isinstance(target, Event) and not target.is_done:
                                process._waits_for = target  # noqa: SLF001
                                process._since = now  # noqa: SLF001
                                target._waiters.append(process)  # noqa: SLF001
                            else:
                                self._settle(process, target)
                        except BaseException as end:  # noqa: BLE001 (the same)
                            self._end(process, end)
                if wall_end is not None and time.monotonic() > wall_end:
                    raise TimeLimit(  # noqa: TRY301 (the handler puts items back)
                        f"the simulation took more than {self.wall_limit_s:g} s of real time,"
                        f" and has come to instant {self.written(now)}"
                    )
        except BaseException:
            self._ready = [*items, *self._ready]
            raise

    def _end(self, process: Process, how: BaseException) -> None:
        """A process has returned or failed; a failure that nobody waits for leaves the loop."""
        del self._living[process]
        if isinstance(how, StopIteration):
            process.succeed(how.value)
            return
        is_awaited = bool(process._waiters)  # noqa: SLF001 (the kernel is one module in files)
        process.fail(how)
        # An interrupt or a limit is nobody's failure: it ends the run, whoever was running.
        if not is_awaited or not isinstance(how, Exception) or isinstance(how, TimeLimit):
            raise how

    def _refuse_beyond(self, last: int, instant: int) -> None:
        """Raise if the next instant is beyond the time limit, and not only beyond `last`."""
        if instant <= last:
            assert self.time_limit is not None, "something else than `last` is in the way"
            raise TimeLimit(
                f"simulated time exceeds its limit of {self.written(self.time_limit)}:"
                f" the next event is at {self.written(instant)}"
            )

    def _put(self, item: AgendaItem, instant: int) -> None:
        there = self._agenda.get(instant)
        if there is None:
            self._agenda[instant] = item
            heappush(self._instants, instant)
        elif isinstance(there, list):
            there.append(item)
        else:
            self._agenda[instant] = [there, item]

    def _settle(self, process: Process, target: Any) -> None:
        """Take what a process yielded that is neither a delay nor an event still to come."""
        resume = process._generator  # noqa: SLF001 (the kernel is one module in files)
        patience = _PATIENCE
        while True:
            if isinstance(target, Event):
                if not target.is_done:
                    process._waits_for = target  # noqa: SLF001
                    process._since = self.now  # noqa: SLF001
                    target._waiters.append(process)  # noqa: SLF001
                    return
                patience -= 1
                if not patience:
                    process._waits_for = target  # noqa: SLF001
                    self._ready.append(process)
                    return
                failure = target._failure  # noqa: SLF001
                if failure is not None:
                    target = resume.throw(failure)
                else:
                    target = resume.send(target._value)  # noqa: SLF001
            elif target.__class__ is not int:
                target = resume.throw(
                    LocalProtocolError(
                        f"a process yielded {target!r}; expected a delay (int) or an event"
                    )
                )
            elif target > 0:
                self._put(process, self.now + target)
                return
            elif target == 0:
                self._ready.append(process)
                return
            else:
                target = resume.throw(
                    LocalProtocolError(f"a delay of {target} would go back in time")
                )

    def _hasten(self, process: Process) -> None:
        """Resume a process that lets time pass at this instant, instead of when it wanted to."""
        for instant, there in self._agenda.items():
            if there is process or (isinstance(there, list) and process in there):
                if isinstance(there, list):
                    there.remove(process)
                if there is process or not there:
                    del self._agenda[instant]
                    self._instants.remove(instant)
                    heapify(self._instants)
                self._ready.append(process)
                return

    def _assert_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(
                "a simulator belongs to the thread that made it, and this is another one",
                hint="greenlets and threads do not mix: make the simulator where it runs",
            )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Have Python look for cyclic garbage less often, as long as a simulation runs.

    What waits on the agenda outlives the shortest-lived things by far, and every look goes over it
    in vain: half the time of a large system. There are next to no cycles in a simulation.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _OBJECTS_PER_COLLECTION:
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _nothing(_event: Event) -> None:
    """Stand in the list of waiters for the caller of `run`."""
