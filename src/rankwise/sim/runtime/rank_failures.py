"""What became of simulated ranks that failed: the same values, in the same order, as of processes.

Times are those of the simulation, and nothing is of the machine that simulates: equal runs have
equal failures. A rank that was ended for another one was told to stop, and has not failed.
"""

from collections.abc import Mapping
from typing import Any

from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.root_cause import root_cause_first
from rankwise.base.units import Instant
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_NANOSECOND
from rankwise.sim.kernel.places import traceback_in_text


def failure_of(rank: int, error: BaseException, now_ps: int) -> Failure:
    """The failure of a rank that has raised, or left with a code other than 0."""
    at = Instant(now_ps // PICOSECONDS_PER_NANOSECOND)
    if isinstance(error, SystemExit):
        cause, exit_, record = FailureCause.EXITED, ExitStatus(exit_code(error)), None
    else:
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        record = ErrorRecord(
            type=f"{module}{kind.__qualname__}",
            message=str(error),
            traceback=traceback_in_text(error),
            raised_at=at,
            wall_ns=0,
        )
        cause, exit_ = FailureCause.RAISED, ExitStatus(1)
    return _of_rank(rank, cause, now_ps, exit=exit_, error=record)


def failure_of_ended(rank: int, now_ps: int) -> Failure:
    """That of a rank that was ended since another one has failed."""
    return _of_rank(rank, FailureCause.STOPPED, now_ps, ended_by_us=True)


def exit_code(leaving: SystemExit) -> int:
    """The code that a process would have which is left so: 256 is 0, and a text is 1."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def failures_of_stuck(
    reason: str,
    blamed: tuple[int, ...],
    waiting: Mapping[int, str],
    stacks: Mapping[int, str],
    now_ps: int,
) -> tuple[Failure, ...]:
    """The failures of ranks that wait in vain, after those of the ranks that are to blame.

    `reason` is a sentence, and perhaps lines on what else waits. Ranks that wait were ended for
    those that are to blame; if none is, they have hung.
    """
    failures = []
    for rank in sorted({*blamed, *waiting}):
        is_blamed = rank in blamed
        waits = FailureCause.STOPPED if blamed else FailureCause.HUNG
        failures.append(
            _of_rank(
                rank,
                FailureCause.OUT_OF_STEP if is_blamed else waits,
                now_ps,
                detail=reason if is_blamed or not blamed else "",
                accused=blamed if is_blamed else (),
                ended_by_us=not is_blamed,
                stacks=stacks.get(rank, ""),
                waits_for=waiting.get(rank, ""),
            )
        )
    return root_cause_first(failures)


def _of_rank(rank: int, cause: FailureCause, now_ps: int, **known: Any) -> Failure:
    at = Instant(now_ps // PICOSECONDS_PER_NANOSECOND)
    return Failure(local_rank=rank, rank=rank, attempt=0, cause=cause, at=at, **known)
