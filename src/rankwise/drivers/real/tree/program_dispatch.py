"""Runs recorded programs at children: each is sent one word, and tells with one that it is done."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from rankwise.base.errors import TreeTimeout
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.drivers.real.tree.children import Children
from rankwise.drivers.real.tree.pipe_protocol import PROGRAM
from rankwise.drivers.real.tree.reports import Report, rebuilt

KILL_PATIENCE = Duration(5 * SECOND)
"""How long it may take until a child is dead that was killed."""
LATE_KILL_PATIENCE = PROGRAM_GRACE = Duration(SECOND // 2)
"""The same when a time-out holds for all; and how long the others may go on after an error."""


class ProgramRuns:
    """The programs that children run now.

    Args:
        children: the processes.
        deaths: the children that have ended, and how, since the run began.
        on_words: takes in the words that they send.
        check_alive: raises `WorkerDied` if a child has ended.
    """

    def __init__(
        self,
        children: Children,
        deaths: Mapping[int, str],
        on_words: Callable[[list[int]], None],
        check_alive: Callable[[int], None],
    ) -> None:
        self._children = children
        self._deaths = deaths
        self._on_words = on_words
        self._check_alive = check_alive
        self._ends: dict[int, Report | None] = {}

    def run(self, programs: Mapping[int, int], deadline: Instant | None) -> None:
        """Run a program at each of these children; see `Engine.run_programs`."""
        self._ends.clear()
        for child, number in programs.items():
            self._children.send(child, [PROGRAM | number])
        try:
            self._wait(programs, deadline)
        except BaseException as error:
            # Late ends would be taken for those of the next replay.
            is_late = isinstance(error, TimeoutError)
            with self._children.gate.patience():
                self._end(programs, is_late=is_late)
            raise
        for child in programs:
            self._check_alive(child)
        for child, failure in sorted(self._ends.items()):
            if failure is not None:
                raise rebuilt(failure, self._children.name_of(child))

    def on_ended(self, child: int, failure: Report | None) -> None:
        """A child is done, and went well if there is no failure."""
        self._ends[child] = failure

    def _end(self, programs: Mapping[int, int], *, is_late: bool) -> None:
        if not is_late:
            with suppress(TimeoutError):
                self._wait(programs, Instant(time.monotonic_ns() + PROGRAM_GRACE))
        killed = self._unfinished(programs)
        for child in killed:
            self._children.kill(child)
        # An end that comes meanwhile does not count: the child is killed all the same.
        patience = LATE_KILL_PATIENCE if is_late else KILL_PATIENCE
        deadline = Instant(time.monotonic_ns() + patience)
        while not self._deaths.keys() >= set(killed) and time.monotonic_ns() < deadline:
            self._on_words(self._children.read(deadline))

    def _wait(self, programs: Mapping[int, int], deadline: Instant | None) -> None:
        while self._unfinished(programs):
            if deadline is not None and time.monotonic_ns() >= deadline:
                raise TreeTimeout("a recorded graph has not ended in time")
            self._on_words(self._children.read(deadline))
            self._children.gate.run_due()

    def _unfinished(self, programs: Mapping[int, int]) -> list[int]:
        ends, deaths = self._ends, self._deaths
        return [child for child in programs if child not in ends and child not in deaths]
