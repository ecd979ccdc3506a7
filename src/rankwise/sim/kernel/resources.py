"""What is scarce: places, queues, credits, and servers that work off one thing after the other.

All of them serve by order of request and count how long they were busy. Two kinds of scarcity need
two kinds of object. A `Resource` is held for as long as its holder likes. A `Server` does work
whose duration is known when it is asked for; it needs no queue, because the end of each piece of
work is the later of now and the end of the one before, plus its duration: one event per piece.
"""

from collections import deque
from typing import Any

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel.events import Event
from rankwise.sim.kernel.simulator import Simulator


class Resource:
    """A number of equal places that are taken and given back, first come, first served."""

    __slots__ = (
        "_busy",
        "_changed_at",
        "_granted",
        "_queue",
        "_simulator",
        "capacity",
        "in_use",
        "name",
    )

    def __init__(self, simulator: Simulator, capacity: int = 1, name: str = "") -> None:
        if capacity < 1:
            raise LocalProtocolError(
                f"resource {name!r} needs a capacity of 1 at least: {capacity}"
            )
        self._simulator = simulator
        self.capacity = capacity
        self.name = name
        self.in_use = 0
        self._busy = 0
        self._changed_at = simulator.now
        self._queue: deque[Event] = deque()
        self._granted = Event(simulator, self)
        self._granted.succeed()

    def acquire(self) -> Event:
        """Ask for a place; the event happens when it is ours. `release` gives it back."""
        if self.in_use < self.capacity:
            self._account()
            self.in_use += 1
            return self._granted
        event = Event(self._simulator, self)
        self._queue.append(event)
        return event

    def release(self) -> None:
        """Give a place back; the first in the queue has it at once."""
        if self._queue:
            self._queue.popleft().succeed()
        elif self.in_use:
            self._account()
            self.in_use -= 1
        else:
            raise LocalProtocolError(f"{self} was released more often than acquired")

    def withdraw(self, request: Event) -> None:
        """Give up a request that has not been granted; release it if it has."""
        if request.is_done:
            self.release()
        else:
            self._queue.remove(request)

    @property
    def busy(self) -> int:
        """Time up to now in which places were in use, summed over places."""
        return self._busy + self.in_use * (self._simulator.now - self._changed_at)

    def _account(self) -> None:
        now = self._simulator.now
        self._busy += self.in_use * (now - self._changed_at)
        self._changed_at = now

    def __str__(self) -> str:
        return f"{self.name or 'resource'} ({self.in_use} of {self.capacity} in use)"


class Server:
    """Works off pieces of work of known duration, one after the other, in order of request."""

    __slots__ = ("_simulator", "_work", "free_at", "name")

    def __init__(self, simulator: Simulator, name: str = "") -> None:
        self._simulator = simulator
        self._work = 0
        self.name = name
        self.free_at = simulator.now
        """When all that was asked for so far is done."""

    def occupy(self, duration: int) -> int:
        """Ask for `duration` of work; return the delay from now until it is done."""
        now = self._simulator.now
        start = self.free_at if self.free_at > now else now  # noqa: FURB136 (three times as fast)
        self.free_at = start + duration
        self._work += duration
        return self.free_at - now

    @property
    def busy(self) -> int:
        """Time up to now in which it worked; never more than the time that has passed."""
        # What lies ahead is one unbroken stretch, since work begins as soon as it can.
        return self._work - max(0, self.free_at - self._simulator.now)

    def __str__(self) -> str:
        return self.name or "server"


class CreditPool:
    """A number of credits that are spent and come back: the back-pressure of bounded queues."""

    __slots__ = ("_granted", "_queue", "_simulator", "capacity", "free", "name")

    def __init__(self, simulator: Simulator, capacity: int, name: str = "") -> None:
        self._simulator = simulator
        self.capacity = capacity
        self.free = capacity
        self.name = name
        self._queue: deque[tuple[int, Event]] = deque()
        self._granted = Event(simulator, self)
        self._granted.succeed()

    def spend(self, count: int = 1) -> Event:
        """Ask for credits; the event happens when they are ours. First come, first served."""
        if count > self.capacity:
            raise LocalProtocolError(f"{count} credits of {self} can never be had")
        if count <= self.free and not self._queue:
            self.free -= count
            return self._granted
        event = Event(self._simulator, self)
        self._queue.append((count, event))
        return event

    def give_back(self, count: int = 1) -> None:
        """Return credits, to those who wait first."""
        self.free += count
        if self.free > self.capacity:
            raise LocalProtocolError(f"{self} got back more credits than it has given")
        while self._queue and self._queue[0][0] <= self.free:
            wanted, event = self._queue.popleft()
            self.free -= wanted
            event.succeed()

    def __str__(self) -> str:
        return f"{self.name or 'credits'} ({self.free} of {self.capacity} free)"


class Channel:
    """A queue of things between processes, bounded by `capacity`; None for no bound."""

    __slots__ = ("_getters", "_granted", "_putters", "_simulator", "_things", "capacity", "name")

    def __init__(self, simulator: Simulator, capacity: int | None = None, name: str = "") -> None:
        self._simulator = simulator
        self.capacity = capacity
        self.name = name
        self._things: deque[Any] = deque()
        self._getters: deque[Event] = deque()
        self._putters: deque[tuple[Any, Event]] = deque()
        self._granted = Event(simulator, self)
        self._granted.succeed()

    def put(self, thing: Any) -> Event:
        """Append; the event happens when there is room for it."""
        if self._getters:
            self._getters.popleft().succeed(thing)
            return self._granted
        if self.capacity is None or len(self._things) < self.capacity:
            self._things.append(thing)
            return self._granted
        event = Event(self._simulator, self)
        self._putters.append((thing, event))
        return event

    def get(self) -> Event:
        """Take the first thing; the event's value is that thing."""
        event = Event(self._simulator, self)
        if self._things:
            event.succeed(self._things.popleft())
            if self._putters:
                thing, putter = self._putters.popleft()
                self._things.append(thing)
                putter.succeed()
        elif self._putters:
            thing, putter = self._putters.popleft()
            putter.succeed()
            event.succeed(thing)
        else:
            self._getters.append(event)
        return event

    def __len__(self) -> int:
        return len(self._things)

    def __str__(self) -> str:
        bound = "" if self.capacity is None else f" of {self.capacity}"
        return f"{self.name or 'channel'} ({len(self._things)}{bound} in it)"
