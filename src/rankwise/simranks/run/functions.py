"""Functions on simulated ranks: what `rankwise.run(…, on="sim")` is told about its simulation."""

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import ConfigError, WorkersFailed
from rankwise.launch.limits import shown
from rankwise.launch.options import (
    INTEGER,
    MACHINE,
    OPTIONS,
    ORDER,
    TIMING_ONLY,
    Option,
    options_deciding,
    options_needing,
    options_refused,
)
from rankwise.launch.run.job import Function, Job
from rankwise.launch.run.supervision import Supervision
from rankwise.launch.telling.notices import notice
from rankwise.launch.telling.outcomes import raise_unless_succeeded
from rankwise.sim.faults.reading import read_faults_of_run
from rankwise.simranks.run.equal_ranks import run_equals_once
from rankwise.simranks.run.exploration import WantedOrder
from rankwise.simranks.run.output import write_all
from rankwise.simranks.run.rehearsal import Rehearsal
from rankwise.simranks.run.simulation_options import SimulationOptions

if TYPE_CHECKING:
    from rankwise.launch.api import SimulationArguments


def run_simulated(job: Job, machine: str | None, given: "SimulationArguments") -> Supervision:
    """Run a job on simulated ranks, and return its last run when that has succeeded.

    Args:
        job: of one function.
        machine: a preset or a topology file; None: only sleeping takes time.
        given: the arguments of `rankwise.run` that are for simulated ranks only; see there.

    Raises:
        WorkersFailed: ranks failed. A note says how to repeat their order.
        ConfigError: an argument cannot be used.
    """
    __tracebackhide__ = True  # from pytest, as in `raise_unless_succeeded`
    _check(given, machine)
    options = _options_from(given)
    faults, chip_faults = read_faults_of_run(
        options.faults, job.gang.size, "faults:", has_machine=machine is not None
    )
    make = partial(
        Rehearsal,
        job,
        options,
        machine=machine,
        faults=faults,
        chip_faults=chip_faults,
    )
    done = run_equals_once(make, WantedOrder.of(options), _again, partial(_say, job))
    if options.prediction is not None and done.run.prediction is not None:
        from rankwise.simranks.prediction.summary import write_document  # noqa: PLC0415  # only there

        program = job.program.name if isinstance(job.program, Function) else ""
        write_document(done.run.prediction, options.prediction, program)
    try:
        raise_unless_succeeded(done.outcome, done.run.supervision)
    except WorkersFailed as failed:
        if done.again:
            failed.add_note(f"the same order again: {done.again}")
        for missed in done.run.missed_faults:
            failed.add_note(missed)
        raise
    for missed in done.run.missed_faults:
        warnings.warn(missed, stacklevel=3)  # at the call of `rankwise.run`; pytest lists it
    return done.run.supervision


def _options_from(given: "SimulationArguments") -> SimulationOptions:
    """The arguments as the command line has them; Python's names of files may be any path."""
    values: dict[str, Any] = dict(given)
    faults = given["faults"]
    values["faults"] = (faults,) if isinstance(faults, str) else tuple(faults)
    for name in ("prediction", "replay"):
        if values[name] is not None:
            values[name] = os.fspath(values[name])
    return SimulationOptions(**values)


def _check(given: "SimulationArguments", machine: str | None) -> None:
    values: Mapping[str, Any] = given
    checked = [option for option in OPTIONS if option.name in values]
    # The table says what the command line accepts; values of Python have not passed its types.
    for option in checked:
        value, names = values[option.name], option.choices
        if names and value not in names:
            raise ConfigError(f"{option.name} is {shown(value)}, expected {' or '.join(names)}")
    for option in checked:
        if option.kind is INTEGER:
            _check_number(option, values[option.name])
    several = isinstance(given["faults"], list | tuple)
    if not all(
        isinstance(each, str) for each in (given["faults"] if several else [given["faults"]])
    ):
        raise ConfigError(
            f"faults is {shown(given['faults'])}, expected a string, or a list of them, such as"
            " 'kill:rank=3@collective=9'"
        )
    deciding = [
        option.name for option in options_deciding(ORDER) if values[option.name] != option.default
    ]
    if len(deciding) > 1:
        raise ConfigError(f"{' and '.join(deciding)} exclude each other: each decides {ORDER}")
    for option in options_needing(MACHINE):
        if values.get(option.name) and machine is None:
            raise ConfigError(
                f"{option.name} needs a machine: on='sim:MACHINE', a preset or a file"
            )
    for option in options_needing(TIMING_ONLY):
        if values[option.name] and not given["timing_only"]:
            raise ConfigError(f"{option.name} has no meaning without timing_only=True")
    for option in options_refused(TIMING_ONLY) if given["timing_only"] else ():
        if values.get(option.name):
            why = option.refused[TIMING_ONLY]
            raise ConfigError(f"{option.name} has no meaning with timing_only=True: {why}")


def _check_number(option: Option, number: Any) -> None:
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if number is not None and not (is_number and (option.least is None or number >= option.least)):
        raise ConfigError(
            f"{option.name} is {shown(number)}, expected an integer of at least {option.least}"
        )


def _again(options: Mapping[str, str | int]) -> str:
    return f"rankwise.run(…, {', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _say(job: Job, text: str) -> None:
    write_all(2, notice(job, text).encode("utf-8", "replace"))
