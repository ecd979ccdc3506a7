"""What is scarce: credits, queues, and servers that work off one thing after the other.

All of them serve by order of request. A `Server` does work whose duration is known when it is asked
for; it needs no queue, because the end of each piece of work is the later of now and the end of the
one before, plus its duration: one future per piece.
"""

from collections import deque
from typing import Any

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel.futures import Future
from rankwise.sim.kernel.simulator import Simulator


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
        # The work ahead is one unbroken stretch, since work begins as soon as it can.
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
        self._queue: deque[Future] = deque()
        self._granted = Future(simulator, self)
        self._granted.succeed()

    def spend(self) -> Future:
        """Ask for a credit; the future happens when it is ours. First come, first served."""
        if self.free:
            self.free -= 1
            return self._granted
        future = Future(self._simulator, self)
        self._queue.append(future)
        return future

    def give_back(self) -> None:
        """Return a credit, to the one that waits first."""
        if self._queue:
            self._queue.popleft().succeed()
            return
        if self.free == self.capacity:
            raise LocalProtocolError(f"{self} got back more credits than it has given")
        self.free += 1

    def __str__(self) -> str:
        return f"{self.name or 'credits'} ({self.free} of {self.capacity} free)"


class Channel:
    """A queue of things between processes; it has no bound."""

    __slots__ = ("_getters", "_simulator", "_things", "name")

    def __init__(self, simulator: Simulator, name: str = "") -> None:
        self._simulator = simulator
        self.name = name
        self._things: deque[Any] = deque()
        self._getters: deque[Future] = deque()

    def put(self, thing: Any) -> None:
        """Append, or hand it to the one that waits first."""
        if self._getters:
            self._getters.popleft().succeed(thing)
        else:
            self._things.append(thing)

    def get(self) -> Future:
        """Take the first thing; the future's value is that thing."""
        future = Future(self._simulator, self)
        if self._things:
            future.succeed(self._things.popleft())
        else:
            self._getters.append(future)
        return future

    def __len__(self) -> int:
        return len(self._things)

    def __str__(self) -> str:
        return f"{self.name or 'channel'} ({len(self._things)} in it)"
