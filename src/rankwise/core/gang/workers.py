"""What is true of a gang's workers together: who runs, who is left, whether all have ended."""

from collections.abc import Iterator
from itertools import islice

from rankwise.base.units import Duration, Instant, postponed
from rankwise.core.gang.state import RecallState, WorkerLife


class GangWorkers:
    """The workers of a gang.

    Attributes:
        lives: each worker's, by local rank.
    """

    def __init__(self, size: int) -> None:
        self.lives = [WorkerLife(local_rank) for local_rank in range(size)]
        # Below these all have a process, and have ended: to look at all of them for each one that
        # is made or ends would take a large gang longer than all else that it does.
        self._made_below = self._ended_below = 0

    def __iter__(self) -> Iterator[WorkerLife]:
        return iter(self.lives)

    @property
    def are_made(self) -> bool:
        """Whether every worker has a process, or had one."""
        lives = self.lives
        while self._made_below < len(lives) and lives[self._made_below].pid is not None:
            self._made_below += 1
        return self._made_below == len(lives)

    @property
    def have_ended(self) -> bool:
        """Whether every worker has ended."""
        lives = self.lives
        while self._ended_below < len(lives) and lives[self._ended_below].has_ended:
            self._ended_below += 1
        return self._ended_below == len(lives)

    def have_ended_but(self, local_rank: int) -> bool:
        """Whether all others have ended."""
        others = islice(self.lives, 0 if self.have_ended else self._ended_below, None)
        return all(each.has_ended or each.local_rank == local_rank for each in others)

    @property
    def has_failure(self) -> bool:
        """Whether any of them has failed."""
        return any(worker.has_failed for worker in self.lives)

    @property
    def running(self) -> list[WorkerLife]:
        """Those that have a process, as far as is known."""
        return [worker for worker in self.lives if worker.is_running]

    @property
    def kept(self) -> tuple[int, ...]:
        """The local ranks of those that run."""
        return tuple(worker.local_rank for worker in self.running)

    @property
    def recallable(self) -> list[WorkerLife]:
        """Those that run a function, or have left one, that can be called again."""
        can_be = (RecallState.OFFERED, RecallState.EXCEPTION_HELD)
        return [worker for worker in self.running if worker.recall_state in can_be]

    @property
    def in_functions(self) -> list[WorkerLife]:
        """Those that run and have not left their functions since they were recalled."""
        return [worker for worker in self.running if worker.recall_state is not RecallState.YIELDED]

    def have_succeeded_by(self, at: Instant) -> bool:
        """Whether all had ended well by then."""
        return all(
            worker.ended_at is not None and worker.ended_at <= at and not worker.has_failed
            for worker in self.lives
        )

    def give_up_unmade(self, reason: str, now: Instant) -> None:
        """Count those that have no process as refused."""
        for worker in self.lives:
            if worker.pid is None and not worker.has_ended:
                worker.refusal = reason
                # A refusal is an end: its process will never be made.
                worker.ended_at = now

    def note_survivors(self, now: Instant) -> Instant | None:
        """Note who should have ended by now; when the next of the others should have."""
        following: Instant | None = None
        for worker in self.lives:
            if worker.must_end_by is None or worker.has_ended:
                continue
            worker.has_lingered = now >= worker.must_end_by
            if not worker.has_lingered:
                following = min(following or worker.must_end_by, worker.must_end_by)
        return following

    def renew(self) -> tuple[int, ...]:
        """Make those anew that have ended; the local ranks of the others."""
        kept = self.kept
        for worker in tuple(self.lives):
            if worker.local_rank in kept:
                # It has yielded and waits: the same process runs the function again.
                worker.recall_state = RecallState.OFFERED
            else:
                self.lives[worker.local_rank] = WorkerLife(worker.local_rank)
        self._made_below = self._ended_below = 0
        return kept

    def postpone(self, duration: Duration) -> None:
        """Let them end so much later."""
        for worker in self.lives:
            worker.must_end_by = postponed(worker.must_end_by, duration)
