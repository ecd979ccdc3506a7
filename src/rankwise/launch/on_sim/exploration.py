"""In which order simulated ranks take their turns: the usual one, one by chance, or many.

`--explore 500`, or `rankwise.run(…, explore=500)`, runs a job once on each of so many schedules.
One that fails in a new way is written to a file, which `replay` takes. What these runs print goes
nowhere; the first one that fails is run once more, for all to see.
"""

import os
import random
from collections.abc import Callable, Mapping
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


class Order(NamedTuple):
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
    order: Order,
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
    schedule, how = None, ""
    if order.replay is not None:
        schedule = read_schedule(order.replay)
    elif order.is_random:
        schedule = Schedule(chance=random.Random(order.seed))  # noqa: S311  # simulation, no secret
        how = again({"schedule": "random", "seed": order.seed})
    elif order.explore is not None:
        found = _explore(make, order.explore, order.seed, again, say)
        if found.schedule is None:
            return found.last
        schedule, how = found.schedule, found.last.again
    run = make(schedule=schedule)
    outcome = run.run()
    if schedule is not None and schedule.has_strayed:
        say("the program has changed: it did not follow the schedule to its end")
    return Ordered(outcome, run, again=how)


class _Found(NamedTuple):
    """The last run, or the first one that failed, and then its schedule."""

    last: Ordered
    schedule: Schedule | None = None


def _explore(
    make: "Callable[..., Rehearsal]",
    count: int,
    seed: int,
    again: Callable[[Mapping[str, str | int]], str],
    say: Callable[[str], None],
) -> _Found:
    """Run a job on up to `count` schedules, no two of them equal; `seed` decides which ones."""
    exploration = Exploration(seed)
    schedule: Schedule | None = exploration.next_schedule()
    first: _Found | None = None
    causes: dict[str, int] = {}
    done = 0
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        while schedule is not None and done < count:
            run = make(schedule=schedule, console_fds=(nowhere, nowhere))
            outcome = run.run()
            if outcome.status is OutcomeStatus.STOPPED:
                return _Found(Ordered(outcome, run, is_shown=False))
            done += 1
            exploration.learn(schedule)
            if outcome.status is OutcomeStatus.FAILED:
                why = _why(outcome.failures)
                if why not in causes:
                    choices = [choice.chosen for choice in schedule.choices]
                    how = again({"replay": _written(choices, len(causes) + 1)})
                    first = first or _Found(Ordered(outcome, run, again=how), Schedule(choices))
                    say(f"schedule {done} failed: {why}; again: {how}")
                causes[why] = causes.get(why, 0) + 1
            schedule = exploration.next_schedule()
    finally:
        os.close(nowhere)
    which = f"all {done}" if schedule is None else f"{done}"
    failed = f"{sum(causes.values())} failed, in {len(causes)} ways" if causes else "none failed"
    say(f"{which} schedules, no two of them equal: {failed}")
    return first or _Found(Ordered(outcome, run, is_shown=False))


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
