"""Many runs of one job, each on another schedule: `rankwise run --on sim --explore 500`.

A schedule that fails in a new way is written to a file, which `--replay` takes. What the runs
print goes nowhere; the first one that fails is run again by the caller, for all to see.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import Failure, Outcome, OutcomeStatus
from rankwise.sim.rehearsal.schedules import Exploration, Schedule

if TYPE_CHECKING:
    from rankwise.launch.on_sim.rehearsal import Rehearsal

_WHY_MAX = 150


class ScheduleFile(msgspec.Struct, frozen=True):
    """What is in such a file: which way was taken wherever there were several."""

    choices: list[int]


class Found(NamedTuple):
    """What came of it: how the last run ended, and the first schedule that failed, if one did."""

    outcome: Outcome
    schedule: Schedule | None = None
    command: str = ""


def explore(
    make: "Callable[..., Rehearsal]",
    count: int,
    seed: int,
    again: Callable[[str], str],
    say: Callable[[str], None],
) -> Found:
    """Run a job on up to `count` schedules, no two of them equal.

    Args:
        make: makes the run of a schedule, given `schedule`, and where its output goes.
        count: how many runs there are at most.
        seed: decides which ones, where there are more.
        again: gives the command that runs the job with one more option.
        say: tells the user a line.

    Returns:
        The first schedule that failed, to be run again, and the command that does.
    """
    exploration = Exploration(seed)
    schedule, first = exploration.next_schedule(), None
    causes: dict[str, int] = {}
    done = 0
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        while schedule is not None and done < count:
            outcome = make(schedule=schedule, console_fds=(nowhere, nowhere)).run()
            if outcome.status is OutcomeStatus.STOPPED:
                return Found(outcome)
            done += 1
            exploration.learn(schedule)
            if outcome.status is OutcomeStatus.FAILED:
                why = _why(outcome.failures)
                if why not in causes:
                    choices = [choice.chosen for choice in schedule.choices]
                    command = again(f"--replay={_written(choices, len(causes) + 1)}")
                    first = first or Found(outcome, Schedule(choices), command)
                    say(f"schedule {done} failed: {why}; again: {command}")
                causes[why] = causes.get(why, 0) + 1
            schedule = exploration.next_schedule()
    finally:
        os.close(nowhere)
    which = f"all {done}" if schedule is None else f"{done}"
    failed = f"{sum(causes.values())} failed, in {len(causes)} ways" if causes else "none failed"
    say(f"{which} schedules, no two of them equal: {failed}")
    return first or Found(outcome)


def read_schedule(path: str) -> Schedule:
    """The schedule in a file.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=ScheduleFile)
    except OSError as error:
        raise ConfigError(f"the schedule {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a schedule that --explore has written: {error}"
        ) from error
    return Schedule(found.choices)


def _written(choices: list[int], number: int) -> str:
    path = f"rankwise-schedule-{number}.json"
    try:
        Path(path).write_bytes(msgspec.json.encode(ScheduleFile(choices)) + b"\n")
    except OSError as error:
        raise ConfigError(f"the schedule {path} cannot be written: {error.strerror}") from error
    return path


def _why(failures: tuple[Failure, ...]) -> str:
    if not failures:
        return "it could not be run"
    root = failures[0]
    why = (
        f"{root.error.type}: {root.error.message}" if root.error else root.detail or str(root.exit)
    )
    line = why.splitlines()[0]
    return f"rank {root.rank}: {line[:_WHY_MAX]}"
