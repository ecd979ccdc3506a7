"""Code that waits in the middle of a function: ranks and kernels as greenlets.

A generator can only wait where it says `yield`; user code calls functions that call functions that
wait. So user code runs in a greenlet, and `park` leaves it from any depth, to the greenlet that
resumed it.

A `Fiber` is such a greenlet driven by a process: the future that it parks on is what the process
yields. Its parent is the greenlet that drives the agenda, never the one that happened to start it:
a kernel is not the child of the rank that launched it. A `RankGreenlet` is one that a scheduler of
its own drives, in rounds; the kernel only gives it its number.
"""

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel.futures import Future, Process, Steps
from rankwise.sim.kernel.places import frames_of_stack, users_line_among
from rankwise.sim.kernel.simulator import Simulator


class RankGreenlet(greenlet):
    """A greenlet that runs one rank's program.

    Attributes:
        rank: its number.
    """

    def __init__(self, rank: int, run: Callable[..., Any]) -> None:
        super().__init__(run, main_greenlet())
        self.rank = rank


class Fiber(greenlet):
    """A greenlet that a process drives; made by `start_fiber`."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        super().__init__(run, main_greenlet())
        self.name = name
        self.process: Process | None = None

    @property
    def where(self) -> str:
        """The line of user code on which it waits; empty for a kernel that comes with rankwise."""
        return users_line_among(frames_of_stack(self.gr_frame))

    def steps(self, *args: Any) -> Steps:
        """Run the fiber as a process: yield what it parks on, return what it returns."""
        self.parent = getcurrent()
        try:
            parked_on = self.switch(*args)
            while not self.dead:
                try:
                    value = yield parked_on
                except Exception as exception:  # noqa: BLE001 (handed to the fiber, which owns it)
                    self._adopt()
                    parked_on = self.throw(exception)
                else:
                    self._adopt()
                    parked_on = self.switch(value)
            return parked_on
        finally:
            if not self.dead and self.gr_frame is not None:
                self._adopt()
                self.throw()  # GreenletExit: its `finally` blocks run now, not at collection

    def _adopt(self) -> None:
        driver = getcurrent()
        if self.parent is not driver:
            self.parent = driver


def main_greenlet() -> greenlet:
    """The greenlet of this thread that has no parent."""
    current = getcurrent()
    while current.parent is not None:
        current = current.parent
    return current


def start_fiber(
    simulator: Simulator, run: Callable[..., Any], *args: Any, name: str = "fiber"
) -> Process:
    """Start `run(*args)` in a greenlet of its own; the process ends with what it returns."""
    fiber = Fiber(name, run)
    fiber.process = simulator.process(fiber.steps(*args), name, locate=lambda: fiber.where)
    return fiber.process


def park(target: Future | int) -> Any:
    """Wait, inside a fiber, for a future or a delay; return the future's value."""
    current = getcurrent()
    if not isinstance(current, Fiber):
        raise LocalProtocolError(
            f"park({target!r}) was called outside a fiber",
            hint="start the code with start_fiber, or yield from a process instead",
        )
    if isinstance(target, Future) and target.is_done:
        return target.value
    parent = current.parent
    assert parent is not None, "a fiber always has the parent that its process gave it"
    return parent.switch(target)
