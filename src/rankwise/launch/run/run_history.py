"""What became of the attempts before the last one, for the report at the end."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankwise.base.failure import EarlierAttempt, Failure, FailureCause
from rankwise.core.agent.vocabulary import Announcement, AnnounceRestart, AnnounceRound

if TYPE_CHECKING:
    from rankwise.launch.run.job import Job
    from rankwise.launch.telling.failure_command import FailureCommand


def failure_command_of(job: "Job") -> "FailureCommand | None":
    """The command that a job tells of failures; what it needs is loaded only if there is one."""
    if job.on_failure is None:
        return None
    from rankwise.launch.telling.failure_command import FailureCommand  # noqa: PLC0415  # rare

    return FailureCommand(job, job.on_failure)


class RunHistory:
    """Remembers why each attempt ended, from what people are told of it.

    Args:
        wall_ns: the calendar.
        command: is told when an attempt has failed and another one follows.
    """

    def __init__(self, wall_ns: Callable[[], int], command: "FailureCommand | None" = None) -> None:
        self._wall_ns = wall_ns
        self._command = command
        self._own_failures: tuple[Failure, ...] = ()
        self._earlier: list[EarlierAttempt] = []

    @property
    def earlier(self) -> tuple[EarlierAttempt, ...]:
        """All attempts but the last one, in their order."""
        return tuple(self._earlier)

    def on_failures(self, failures: tuple[Failure, ...]) -> None:
        """Ranks of this node, among several, have failed: whether a round follows is not known."""
        # Simulated nodes share one history: those of the second node follow those of the first.
        self._own_failures += tuple(
            failure for failure in failures if failure.cause is not FailureCause.STOPPED
        )

    def note(self, announcement: Announcement) -> None:
        """Take note of an attempt that is over."""
        match announcement:
            case AnnounceRestart():
                from rankwise.launch.telling.failure_report.sentences import one_line  # noqa: PLC0415  # rare

                failures = announcement.failures
                self._add(announcement.attempt, one_line(failures[0]))
                if self._command is not None:
                    left = announcement.restarts_left
                    self._command.start("restart", failures, restarts_left=left)
            case AnnounceRound(world) if world.why:
                self._add(world.round - 1, world.why)
                if self._command is not None and self._own_failures:
                    self._command.start("restart", self._own_failures)
                self._own_failures = ()
            case _:
                pass

    def _add(self, number: int, why: str) -> None:
        # Agents of simulated nodes, which share one history, all announce the same round.
        if all((attempt.number, attempt.why) != (number, why) for attempt in self._earlier):
            self._earlier.append(EarlierAttempt(number, self._wall_ns(), why))
