"""What became of simulated ranks that failed: the same values, in the same order, as of processes.

Times are those of the simulation, and nothing is of the machine that simulates: equal runs have
equal failures. A rank whose exception came while it was ended for another one has not failed.
"""

import traceback
from collections.abc import Collection, Mapping

from rankwise.base.errors import Waiting
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.root_cause import root_cause_first
from rankwise.base.units import Instant
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_NANOSECOND


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
            traceback="".join(traceback.format_exception(error)),
            raised_at=at,
            wall_ns=0,
        )
        cause, exit_ = FailureCause.RAISED, ExitStatus(1)
    return Failure(
        local_rank=rank, rank=rank, attempt=0, cause=cause, at=at, exit=exit_, error=record
    )


def exit_code(leaving: SystemExit) -> int:
    """The code that a process would have which is left so: 256 is 0, and a text is 1."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def failures_of_stuck(
    reason: str,
    blamed: Collection[int],
    waiting: Mapping[int, Waiting],
    stacks: Mapping[int, str],
    now_ps: int,
) -> tuple[Failure, ...]:
    """The failures of ranks that wait in vain, after those of the ranks that are to blame."""
    failures = []
    for rank in sorted({*blamed, *waiting}):
        is_blamed = rank in blamed
        failures.append(
            Failure(
                local_rank=rank,
                rank=rank,
                attempt=0,
                cause=FailureCause.OUT_OF_STEP if is_blamed else FailureCause.HUNG,
                at=Instant(now_ps // PICOSECONDS_PER_NANOSECOND),
                detail=reason if is_blamed else "",
                stacks=stacks.get(rank, ""),
                waits_for=waiting[rank].what if rank in waiting else "",
            )
        )
    return root_cause_first(failures)
