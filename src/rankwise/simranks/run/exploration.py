"""In which order simulated ranks take their turns: the usual one, one by chance, or many.

`--explore 500`, or `rankwise.run(…, explore=500)`, runs a job once on each of so many schedules.
One that fails in a new way is written to a file, which `replay` takes. The output of these runs
goes nowhere; the first one that fails is run once more, for all to see.
"""

import os
import random
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import Failure, Outcome, OutcomeStatus
from rankwise.launch.telling.failure_report.text import first_line
from rankwise.launch.telling.outcomes import who_stopped
from rankwise.simranks.run.simulation_options import SimulationOptions
from rankwise.simranks.world.schedules import Exploration, Schedule

if TYPE_CHECKING:
    from rankwise.simranks.run.rehearsal import Rehearsal

_WHY_MAX = 150


class ScheduleFile(msgspec.Struct, frozen=True):
    """What is in such a file.

    Attributes:
        choices: which way was taken wherever there were several.
        program: the name of what was run.
        ranks: how many there were.
    """

    choices: list[int]
    program: str = ""
    ranks: int = 0


class WantedOrder(NamedTuple):
    """Which orders are wanted; at most one of `is_random`, `explore` and `replay` is given.

    Attributes:
        is_random: one that `seed` decides, instead of the usual one.
        seed: of everything random.
        explore: so many different ones, or all if there are fewer.
        replay: the file of the one to follow.
    """

    is_random: bool = False
    seed: int = 0
    explore: int | None = None
    replay: str | None = None

    @classmethod
    def of(cls, options: SimulationOptions) -> Self:
        """That of a run with these options."""
        return cls(options.schedule == "random", options.seed, options.explore, options.replay)


class Ordered(NamedTuple):
    """What came of it.

    Attributes:
        outcome: of the last run.
        run: that run.
        is_shown: whether what it printed was shown.
        again: how to have the same order again, if it is not the usual one.
    """

    outcome: Outcome
    run: "Rehearsal"
    is_shown: bool = True
    again: str = ""


def run_in_order(
    make: "Callable[..., Rehearsal]",
    order: WantedOrder,
    again: Callable[[Mapping[str, str | int]], str],
    say: Callable[[str], None],
) -> Ordered:
    """Run a job in the order, or the orders, that are wanted.

    Args:
        make: makes the run of a schedule, given `schedule`, and where its output goes.
        order: what is wanted.
        again: tells how to run the job with these options instead of those of `order`.
        say: tells the user a line.

    Raises:
        ConfigError: the file of a schedule cannot be read or written.
    """
    schedule, how, first_failure = None, "", None
    if order.replay is not None:
        found_before = read_schedule(order.replay)
        schedule = Schedule(found_before.choices)
    elif order.is_random:
        schedule = Schedule(chance=random.Random(order.seed))  # noqa: S311  # simulation, no secret
        how = again({"schedule": "random", "seed": order.seed})
    elif order.explore is not None:
        found = _explore(make, order.explore, order.seed, again, say)
        if found.schedule is None:
            return found.last
        schedule, how, first_failure = found.schedule, found.last.again, found.last
    # The failing schedule of an exploration runs once more, now with its output shown.
    run = make(schedule=schedule)
    if order.replay is not None:
        _check_origin(order.replay, found_before, run, say)
    outcome = run.run()
    if first_failure is not None and outcome.status is OutcomeStatus.SUCCEEDED:
        say(
            "the failure did not repeat under the same schedule: the program depends on something"
            " outside, such as a file of an earlier run; this is the report of the first failure"
        )
        return first_failure
    if schedule is not None and schedule.has_strayed:
        say("the program has changed: it did not follow the schedule to its end")
    return Ordered(outcome, run, again=how)


class _Found(NamedTuple):
    """The last run, or the first one that failed, and then its schedule."""

    last: Ordered
    schedule: Schedule | None = None


def _explore(
    make: "Callable[..., Rehearsal]",
    runs_max: int,
    seed: int,
    again: Callable[[Mapping[str, str | int]], str],
    say: Callable[[str], None],
) -> _Found:
    """Run a job on up to `runs_max` schedules, no two of them equal; `seed` decides which ones."""
    exploration = Exploration(seed)
    schedule: Schedule | None = exploration.next_schedule()
    first: _Found | None = None
    causes: dict[str, int] = {}
    done = 0
    nowhere = (os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY))
    try:
        while schedule is not None and done < runs_max:
            run = make(schedule=schedule, console_fds=nowhere)
            outcome = run.run()
            if outcome.status is OutcomeStatus.STOPPED:
                who, number = who_stopped(outcome, run.supervision), done + 1
                say(f"stopped {who} in schedule {number}; before that {_failed(causes)}")
                return _Found(Ordered(outcome, run, is_shown=False))
            done += 1
            # A stopped run teaches nothing: it did not come to its choices.
            exploration.learn(schedule)
            if outcome.status is OutcomeStatus.FAILED:
                why = _why(outcome.failures)
                # Of each kind of failure one schedule is kept: thousands may fail alike.
                if why not in causes:
                    choices = [choice.chosen for choice in schedule.choices]
                    how = again({"replay": _written(choices, run)})
                    first = first or _Found(Ordered(outcome, run, again=how), Schedule(choices))
                    say(f"schedule {done} failed: {why}; again: {how}")
                causes[why] = causes.get(why, 0) + 1
            schedule = exploration.next_schedule()
    finally:
        for descriptor in nowhere:
            os.close(descriptor)
    which = f"all {done}" if schedule is None else f"{done}"
    say(f"{which} schedules, no two of them equal: {_failed(causes)}")
    return first or _Found(Ordered(outcome, run, is_shown=False))


def _failed(causes: Mapping[str, int]) -> str:
    """How many schedules failed, given how many did so for each reason."""
    ways = "one way" if len(causes) == 1 else f"{len(causes)} ways"
    return f"{sum(causes.values())} failed, in {ways}" if causes else "none failed"


def read_schedule(path: str) -> ScheduleFile:
    """What is in the file of a schedule.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=ScheduleFile)
    except OSError as error:
        raise ConfigError(f"the schedule {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a schedule that --explore has written: {error}"
        ) from error


def _check_origin(
    path: str, schedule: ScheduleFile, run: "Rehearsal", say: Callable[[str], None]
) -> None:
    """Tell if a schedule is of another program.

    Raises:
        ConfigError: it is of another number of ranks.
    """
    if schedule.ranks not in (0, run.size):
        raise ConfigError(
            f"the schedule {path} is of {schedule.program} on {schedule.ranks} ranks, and there are"
            f" {run.size} now"
        )
    name = run.supervision.job.program_name
    if schedule.program and os.path.basename(schedule.program) != os.path.basename(name):
        say(f"the schedule {path} is of {schedule.program}, and this is {name}")


def _written(choices: list[int], run: "Rehearsal") -> str:
    """Write a schedule to a file of its own, whose name is the first that is free."""
    text = (
        msgspec.json.encode(ScheduleFile(choices, run.supervision.job.program_name, run.size))
        + b"\n"
    )
    for number in count(1):
        path = f"rankwise-schedule-{number}.json"
        try:
            with open(path, "xb") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"the schedule {path} cannot be written: {error.strerror}") from error
        return path
    raise AssertionError("numbers do not end")


def _why(failures: tuple[Failure, ...]) -> str:
    if not failures:
        return "it could not be run"
    root = failures[0]
    why = (
        f"{root.error.type}: {root.error.message}" if root.error else root.detail or str(root.exit)
    )
    return f"rank {root.rank}: {first_line(why, _WHY_MAX)}"
