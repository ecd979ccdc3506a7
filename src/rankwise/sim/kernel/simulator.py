"""The event loop of a simulation: what happens next, in integer time.

The agenda says for each instant what happens then: one item, or a list of them in the order in
which they were asked for; that order is the sequence number. An event at the current instant goes
to the list `_ready`, which is taken as the next *wave* of the same instant. So ties need no
comparison, nothing is ordered by a hash or an address, and many things at one instant, which is
what symmetrical machines do, cost next to nothing.

Events far ahead are in a dictionary, in no order. The loop sorts the next *stretch* of it into two
lists, instants and items, and walks through them; what is asked for inside of the stretch is
inserted ahead of the walk. That is cheaper than a heap: most of what is asked for lies beyond the
stretch, where it costs an entry of a dictionary and its share of a sort. Instants that a sort has
seen and no stretch has taken are the first ones in the dictionary; they are kept sorted beside it.

An item of the agenda is either a process to resume or a pair of callback and arguments. Resuming
is written out in the loop itself: it is the inner loop of everything else in `rankwise.sim`.

A process that waits for a `Timer` is on the agenda itself, as with a delay.

A process that waits for something that has already happened goes on at once, without a wave; after
`_PATIENCE` of those in a row it takes a wave all the same, so that time limits hold.

An unhandled exception leaves `run` after the rest of the wave was put back: the
simulation can be run on from there. Time limits are checked between waves. The wall clock never
decides anything but whether to give up.
"""

import gc
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import length_hint
from typing import Any

from rankwise.base.errors import LocalProtocolError, TimeLimit
from rankwise.sim.kernel.deadlock import deadlock_of
from rankwise.sim.kernel.futures import AgendaItem, Future, Process, Steps, Timer, Wave

_NEVER = 1 << 256
_PATIENCE = 1_000
_OBJECTS_PER_COLLECTION = 50_000
_WAVES_PER_LOOK_AT_THE_CLOCK = 4_096
_STRETCH = 512
"""A stretch takes all instants there are, up to this many; of more, this many or an eighth.

The longer it is, the more of what is asked for lies inside of it and has to be inserted.
"""
_WALK = 8_192
"""How many instants a stretch has at most, those included that a walk has passed."""


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
        self._soon_at: list[int] = []
        self._soon: list[Wave] = []
        self._later: dict[int, Wave] = {}
        self._sorted: list[int] = []
        self._ready: list[AgendaItem] = []
        self._wave: Iterator[AgendaItem] = iter(())
        self._ahead: Iterator[int] = iter(())
        self._living: dict[Process, None] = {}
        self._owner = threading.get_ident()
        self._is_running = False

    def call_at(self, instant: int, callback: Callable[..., object], *args: Any) -> None:
        """Have `callback(*args)` called at `instant`, after what is already on the agenda then."""
        if instant > self.now:
            self._put((callback, args), instant)
        elif instant == self.now:
            self._ready.append((callback, args))
        else:
            raise LocalProtocolError(f"instant {instant} is in the past: it is {self.now}")

    def future(self, name: object = "") -> Future:
        """Make a future that the caller lets happen with `succeed` or `fail`."""
        return Future(self, name)

    def timer(self, delay: int) -> Future:
        """Make a future that happens by itself, `delay` from now.

        It costs next to nothing, and keeps only those processes running that wait for it.
        """
        if delay < 0:
            raise LocalProtocolError(f"a timer of {delay} would go back in time")
        timer: Timer = Timer()
        timer._simulator = self  # noqa: SLF001 (the kernel is one module in files)
        timer.due = self.now + delay
        return timer

    def process(
        self,
        generator: Steps,
        name: object = "",
        *,
        locate: Callable[[], str] | None = None,
    ) -> Process:
        """Start a process: it takes its first step at this instant, in a later wave.

        `locate` says for the deadlock report where it waits, if its generator cannot.
        """
        self._assert_thread()
        process = Process(self, generator, name, locate=locate)
        self._living[process] = None
        self._ready.append(process)
        return process

    def catch_up(self, since: int, begin: Callable[[], object]) -> None:
        """Let something have begun at an earlier instant: it is carried out up to now, by itself.

        It must be apart from all that has happened since. What it does now and later goes to the
        agenda. May be called from inside the simulation.
        """
        now = self.now
        if since >= now:
            begin()
            return
        agenda = self._soon_at, self._soon, self._later, self._sorted, self._ready
        walk = self._wave, self._ahead
        self._soon_at, self._soon, self._later, self._sorted, self._ready = [], [], {}, [], []
        self._wave, self._ahead = iter(()), iter(())
        self.now = since
        try:
            begin()
            self._carry_out(None, now - 1)
        finally:
            left = sorted(
                [*zip(self._soon_at, self._soon, strict=True), *self._later.items()],
                key=lambda entry: entry[0],
            )
            self._soon_at, self._soon, self._later, self._sorted, self._ready = agenda
            self._wave, self._ahead = walk
            self.now = now
            for instant, wave in left:
                for item in wave if type(wave) is list else [wave]:
                    if instant > now:
                        self._put(item, instant)  # type: ignore[arg-type]
                    else:
                        self._ready.append(item)  # type: ignore[arg-type]

    def ends_instant(self) -> bool:
        """Whether nothing else is left to happen at this instant; to be asked by a process."""
        return not length_hint(self._wave) and not self._ready

    def run(self, until: Future | int | None = None) -> Any:
        """Carry out the agenda.

        Args:
            until: a future: run until it has happened, and return its value (or raise its
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
            if isinstance(until, Future):
                # Marked as waited for, so that a process that fails here fails through `until`.
                if not until.is_done:
                    until.add_callback(self._end_wave)
                with _few_collections():
                    self._carry_out(until, None)
                if not until.is_done:
                    raise deadlock_of(self._living, self.now, str(until), self.written)
                return until.value
            with _few_collections():
                self._carry_out(None, until)
            if until is not None:
                self.now = max(self.now, until)
            elif any(process.waits_for for process in self._living):
                raise deadlock_of(self._living, self.now, written=self.written)
            return None
        finally:
            self._is_running = False

    def _carry_out(self, stop: Future | None, last_instant: int | None) -> None:
        """Run until `stop` has happened, `last_instant` is over, or nothing is left.

        One function, because it is the inner loop of everything: a call per instant is a fifth of
        its time. If an exception leaves it, the rest of the wave is put back.
        """
        if stop is not None and stop.is_done:
            return
        soon_at, soon, later = self._soon_at, self._soon, self._later
        last = _NEVER if last_instant is None else last_instant
        now = self.now
        # Events at this instant are carried out, wherever the limit is.
        horizon = max(now, last if self.time_limit is None else min(last, self.time_limit))
        wall_end = None if self.wall_limit_s is None else time.monotonic() + self.wall_limit_s
        waves = 0
        items: Iterator[AgendaItem] = iter(())
        ahead = iter(soon_at)
        try:
            while self._begin_stretch(ahead, horizon):
                ahead = self._ahead = iter(soon_at)
                furthest = soon_at[-1]
                for instant, wave in zip(ahead, soon):  # noqa: B905 (mypyc knows it so)
                    self.now = now = instant
                    if type(wave) is Process:
                        alone: Process = wave
                        try:
                            # CPython 3.11 is slow to call a slot as if it were a method.
                            send = alone._send  # noqa: SLF001 (the kernel is one module in files)
                            target = send(None)
                            # Timers first: they are the dearer ones, for having been made.
                            if type(target) is Timer:
                                at = target.due
                            elif type(target) is int:
                                at = now + target
                            else:
                                at = 0
                            if at > furthest:
                                if later or now < furthest or at > horizon or len(soon) > _WALK:
                                    there = later.setdefault(at, alone)
                                    if there is not alone:
                                        later[at] = _joined(there, alone)
                                else:  # it is the only one: there is nothing to sort
                                    soon_at.append(at)
                                    soon.append(alone)
                                    furthest = at
                            elif at > now:
                                self._put(alone, at)
                            else:
                                self._settle(alone, target)
                        except BaseException as end:  # noqa: BLE001 (sorted out in `_end`)
                            self._end(alone, end)
                        if not self._ready:
                            continue
                    else:
                        items = iter(wave) if type(wave) is list else iter((wave,))  # type: ignore[arg-type]
                        self._wave = items
                    while True:
                        for item in items:
                            if type(item) is tuple:
                                item[0](*item[1])
                                continue
                            process: Process = item  # type: ignore[assignment]
                            awaited = process._waits_for  # noqa: SLF001
                            try:
                                send = process._send  # noqa: SLF001
                                if awaited is None:
                                    target = send(None)
                                else:
                                    process._waits_for = None  # noqa: SLF001
                                    if awaited._failure is None:  # noqa: SLF001
                                        target = send(awaited._value)  # noqa: SLF001
                                    else:
                                        target = process._generator.throw(awaited._failure)  # noqa: SLF001
                                if type(target) is int:
                                    at = now + target
                                elif type(target) is Timer:
                                    at = target.due
                                elif isinstance(target, Future) and not target._is_done:  # noqa: SLF001
                                    process._waits_for = target  # noqa: SLF001
                                    process._since = now  # noqa: SLF001
                                    target._waiters.append(process)  # noqa: SLF001
                                    continue
                                else:
                                    at = 0
                                if at > furthest:
                                    there = later.setdefault(at, process)
                                    if there is not process:
                                        later[at] = _joined(there, process)
                                elif at > now:
                                    self._put(process, at)
                                else:
                                    self._settle(process, target)
                            except BaseException as end:  # noqa: BLE001 (the same)
                                self._end(process, end)
                        if not self._ready:
                            break
                        # All that wait for `stop` are ready now, so it need not be asked earlier.
                        if stop is not None and stop.is_done:
                            return
                        items = self._wave = iter(self._ready)
                        self._ready = []
                        waves += 1
                        if not waves % _WAVES_PER_LOOK_AT_THE_CLOCK:
                            self._look_at_the_clock(wall_end)
                self._look_at_the_clock(wall_end)
            if later:
                self._refuse_beyond(last, min(later))
        except BaseException:
            self._ready = [*items, *self._ready]
            raise
        finally:
            self._leave_behind(ahead)

    def _begin_stretch(self, ahead: Iterator[int], horizon: int) -> bool:
        """Forget what a walk has passed, and sort what comes next; whether anything may happen."""
        self._leave_behind(ahead)
        soon_at, soon, later = self._soon_at, self._soon, self._later
        if later and not soon:
            soon_at[:] = self._sorted
            soon_at.extend(islice(later, len(self._sorted), None))
            soon_at.sort()
            end = max(_STRETCH, len(later) // 8)
            self._sorted = soon_at[end:]
            del soon_at[end:]
            soon[:] = map(later.pop, soon_at)
        self._put_off(bisect(soon_at, horizon))
        if self._ready:
            soon_at.insert(0, self.now)
            soon.insert(0, self._ready)
            self._ready = []
        return bool(soon)

    def _put_off(self, place: int) -> None:
        """Let the stretch end before a place in it."""
        if place < len(self._soon):
            self._later.update(zip(self._soon_at[place:], self._soon[place:], strict=True))
            del self._soon_at[place:], self._soon[place:]

    def _leave_behind(self, ahead: Iterator[int]) -> None:
        passed = len(self._soon) - length_hint(ahead)
        del self._soon_at[:passed], self._soon[:passed]

    def _look_at_the_clock(self, wall_end: float | None) -> None:
        if wall_end is not None and time.monotonic() > wall_end:
            raise TimeLimit(
                f"the simulation took more than {self.wall_limit_s:g} s of real time,"
                f" and has come to instant {self.written(self.now)}"
            )

    def _end_wave(self, _event: Future) -> None:
        """Stand in the list of waiters for the caller of `run`, who sees it between two waves."""
        self._ready.append((_nothing, ()))

    def _end(self, process: Process, how: BaseException) -> None:
        """A process has returned or failed; a failure without a waiter leaves the loop."""
        del self._living[process]
        if isinstance(how, StopIteration):
            process.succeed(how.value)
            return
        is_awaited = bool(process._waiters)  # noqa: SLF001 (the kernel is one module in files)
        process.fail(how)
        # An interrupt or a limit is not a failure of the running process: it ends the run.
        if not is_awaited or not isinstance(how, Exception) or isinstance(how, TimeLimit):
            raise how

    def _refuse_beyond(self, last: int, instant: int) -> None:
        """Raise if the next instant is beyond the time limit, and not only beyond `last`."""
        if self.time_limit is not None and self.time_limit < instant <= last:
            raise TimeLimit(
                f"simulated time exceeds its limit of {self.written(self.time_limit)}:"
                f" the next event is at {self.written(instant)}"
            )

    def _put(self, item: AgendaItem, instant: int) -> None:
        soon_at, soon, later = self._soon_at, self._soon, self._later
        if not soon_at or instant > soon_at[-1]:
            there = later.setdefault(instant, item)
            if there is not item:
                later[instant] = _joined(there, item)
            return
        place = bisect(soon_at, instant)
        if soon_at[place - 1] == instant:
            soon[place - 1] = _joined(soon[place - 1], item)
        elif len(soon) > _WALK:
            self._put_off(place)
            later[instant] = item
        else:
            soon_at.insert(place, instant)
            soon.insert(place, item)

    def _settle(self, process: Process, target: Any) -> None:
        """Take what a process yielded that is neither a delay nor a future still to come."""
        resume = process._generator  # noqa: SLF001 (the kernel is one module in files)
        patience = _PATIENCE
        while True:
            if isinstance(target, Future):
                value = failure = None
                if type(target) is Timer:
                    if target.due > self.now:
                        self._put(process, target.due)
                        return
                elif not target._is_done:  # noqa: SLF001
                    process._waits_for = target  # noqa: SLF001
                    process._since = self.now  # noqa: SLF001
                    target._waiters.append(process)  # noqa: SLF001
                    return
                else:
                    value, failure = target._value, target._failure  # noqa: SLF001
                patience -= 1
                if not patience:
                    process._waits_for = None if type(target) is Timer else target  # noqa: SLF001
                    self._ready.append(process)
                    return
                target = resume.send(value) if failure is None else resume.throw(failure)
            elif type(target) is not int:
                target = resume.throw(
                    LocalProtocolError(
                        f"a process yielded {target!r}; expected a delay (int) or a future"
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
        ahead = (*zip(self._soon_at, self._soon, strict=True), *self._later.items())
        for instant, there in ahead:
            wave: list[AgendaItem] = there if isinstance(there, list) else [there]
            if instant > self.now and process in wave:
                if len(wave) > 1:
                    wave.remove(process)
                elif instant in self._later:
                    del self._later[instant]
                    self._sorted = []
                else:
                    place = bisect(self._soon_at, instant) - 1
                    del self._soon_at[place], self._soon[place]
                self._ready.append(process)
                return

    def _assert_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise LocalProtocolError(
                "a simulator belongs to the thread that made it, and this is another one",
                hint="make the simulator in the thread that runs it",
            )


def _joined(there: Wave, item: AgendaItem) -> Wave:
    """What is to happen at an instant, and one thing more."""
    if type(there) is list:
        there.append(item)
        return there
    return [there, item]  # type: ignore[list-item]


@contextmanager
def _few_collections() -> Iterator[None]:
    """Have Python look for cyclic garbage less often, as long as a simulation runs.

    Events on the agenda outlive the shortest-lived things by far, and every look goes over it in
    vain: half the time of a large system. There are next to no cycles in a simulation.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _OBJECTS_PER_COLLECTION:
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _nothing() -> None:
    """Be ready, and do nothing."""
