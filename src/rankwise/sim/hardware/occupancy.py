"""Which processing element a program runs on: each PE takes one program at a time.

Program i of a launch on n PEs begins on PE i modulo n if it is free, else on the lowest free PE of
the launch, else it queues. When a program ends, the first program in the queue that may run there
takes its PE. Launches queue in the order of their begins, programs in the order of their numbers.
Programs that end at one instant free their PEs in the order of their ends. So the order of events
alone decides which program runs where.

**Waiting for another program** frees the PE, because the other program may be in the queue. When
the wait ends, the program continues at once on its PE. If another program runs there by then, both
share the engines.

Programs that are **addressed** by their numbers (`tl.send`) keep PE i modulo n. They begin at once,
beside the program that runs there.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.kernel import EndOfMany, Future, Process, Simulator

if TYPE_CHECKING:
    from rankwise.sim.hardware.hardware_machine import Pe

Result = TypeVar("Result")


class PeOccupancy:
    """Which PEs of a device are taken, and the launches whose programs queue for PEs."""

    def __init__(self) -> None:
        self._taken: dict[Pe, int] = {}
        self._queue: list[ProgramsOnPes] = []

    def is_free(self, pe: "Pe") -> bool:
        """Whether no program runs on a PE."""
        return not self._taken.get(pe)

    def take(self, pe: "Pe") -> None:
        """Take a PE, also beside another program."""
        self._taken[pe] = self._taken.get(pe, 0) + 1

    def leave(self, pe: "Pe") -> None:
        """Leave a PE: if it is free now, the first program in the queue that may takes it."""
        self._taken[pe] -= 1
        if self._taken[pe]:
            return
        for launch in self._queue:
            if launch.may_run_on(pe):
                launch.begin_next(pe)
                if not launch.queues:
                    self._queue.remove(launch)
                break

    def enqueue(self, launch: "ProgramsOnPes") -> None:
        """Let programs of a launch have the PEs that become free."""
        self._queue.append(launch)

    def withdraw(self, launch: "ProgramsOnPes") -> None:
        """The programs of a launch that queue are not to begin any more."""
        if launch in self._queue:
            self._queue.remove(launch)


class ProgramsOnPes:
    """The programs of one launch, from the first PE that one takes to the end of all.

    Args:
        simulator: the simulation.
        occupancy: that of the device; None if the programs take no PE.
        pes: the PEs that they are dealt to.
        count: how many programs there are.
        begin: begins a program, by its number, on a PE.
        are_addressed: whether program i has to run on PE i modulo their number.

    Attributes:
        done: happens when all have ended; if one fails, with its failure, and the others are ended.
    """

    def __init__(
        self,
        simulator: Simulator,
        occupancy: PeOccupancy | None,
        pes: "Sequence[Pe]",
        count: int,
        begin: "Callable[[int, Pe], Process]",
        *,
        are_addressed: bool = False,
    ) -> None:
        self._occupancy = occupancy
        self._pes = pes
        self._count = count
        self._begin = begin
        self._next = 0
        self._left = count
        self._running: dict[Process, Pe] = {}
        self._members: frozenset[Pe] | None = None
        self.done: Future = EndOfMany(simulator, self)
        if not count:
            self.done.succeed()
        elif are_addressed or occupancy is None:
            for number in range(count):
                self.begin_next(pes[number % len(pes)])
        else:
            self._begin_on_free_pes(occupancy)

    def _begin_on_free_pes(self, occupancy: PeOccupancy) -> None:
        pes, lowest = self._pes, 0
        while self.queues:
            pe = pes[self._next % len(pes)]
            if not occupancy.is_free(pe):
                while lowest < len(pes) and not occupancy.is_free(pes[lowest]):
                    lowest += 1
                if lowest == len(pes):
                    break
                pe = pes[lowest]
            self.begin_next(pe)
        if self.queues:
            occupancy.enqueue(self)

    @property
    def queues(self) -> bool:
        """Whether a program has not begun."""
        return self._next < self._count

    def may_run_on(self, pe: "Pe") -> bool:
        """Whether a PE is one of the launch's."""
        if self._members is None:
            self._members = frozenset(self._pes)
        return pe in self._members

    def begin_next(self, pe: "Pe") -> None:
        """Let the next program begin on a PE."""
        if self._occupancy is not None:
            self._occupancy.take(pe)
        number, self._next = self._next, self._next + 1
        process = self._begin(number, pe)
        self._running[process] = pe
        process.add_callback(self._on_end)

    def wait(self, pe: "Pe", wait: Callable[[], Result]) -> Result:
        """Wait for another program, and leave the PE meanwhile."""
        if self._occupancy is None:
            return wait()
        self._occupancy.leave(pe)
        try:
            return wait()
        finally:
            self._occupancy.take(pe)

    def _on_end(self, process: Future) -> None:
        assert isinstance(process, Process), "programs are processes"
        pe = self._running.pop(process)
        self._left -= 1
        if process.failure is not None and not self.done.is_done:
            self.end(LocalProtocolError(f"another program of the launch failed: {process.failure}"))
            self.done.fail(process.failure)
        if self._occupancy is not None:
            self._occupancy.leave(pe)
        if not self._left and not self.done.is_done:
            self.done.succeed()

    def end(self, exception: Exception) -> None:
        """End all programs that are left."""
        if self._occupancy is not None:
            self._occupancy.withdraw(self)
        self._next = self._count
        for process in list(self._running):
            process.cancel(exception)

    def __str__(self) -> str:
        queued = self._count - self._next
        pending = [str(process) for process in self._running]
        shown = ", ".join(pending[:3]) + (", ..." if len(pending) > 3 else "")
        waiting = f", and {queued} that queue for a PE" if queued else ""
        return f"{self._left} of {self._count}: {shown}{waiting}"
