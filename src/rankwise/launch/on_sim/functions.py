"""Functions on simulated ranks: what `rankwise.run(…, on="sim")` is told about its simulation."""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rankwise.base.errors import ConfigError, WorkersFailed
from rankwise.launch.job import Function, Job
from rankwise.launch.limits import shown
from rankwise.launch.notices import notice
from rankwise.launch.on_sim.equal_ranks import run_equals_once
from rankwise.launch.on_sim.exploration import Order
from rankwise.launch.on_sim.output import write_all
from rankwise.launch.on_sim.rehearsal import Rehearsal
from rankwise.launch.outcomes import raise_unless_succeeded
from rankwise.launch.supervision import Supervision
from rankwise.sim.faults.reading import read_faults_of_run


class Simulation(NamedTuple):
    """The arguments of `rankwise.run` that are for simulated ranks only; see there."""

    virtual_clock: bool
    schedule: str
    seed: int
    explore: int | None
    replay: str | os.PathLike[str] | None
    faults: str | Sequence[str]
    device: str
    timing_only: bool
    every_rank: bool
    synthetic_data: bool
    tokens_per_step: int | None
    values: str
    prediction: str | os.PathLike[str] | None

    def run(self, job: Job, machine: str | None) -> Supervision:
        """Run a job on simulated ranks, and return its last run when that has succeeded.

        Args:
            job: of one function.
            machine: a preset or a topology file; None: no time but what is slept.

        Raises:
            WorkersFailed: ranks failed. A note says how to have their order again.
            ConfigError: an argument cannot be used.
        """
        __tracebackhide__ = True  # from pytest, as in `raise_unless_succeeded`
        self._check()
        for name in ("timing_only", "prediction", "tokens_per_step"):
            if getattr(self, name) and machine is None:
                raise ConfigError(f"{name} needs a machine: on='sim:MACHINE', a preset or a file")
        for name in ("values", "every_rank", "synthetic_data"):
            if getattr(self, name) and not self.timing_only:
                raise ConfigError(f"{name} has no meaning without timing_only=True")
        words = [self.faults] if isinstance(self.faults, str) else self.faults
        faults, chip_faults = read_faults_of_run(
            words, job.gang.size, "faults:", has_machine=machine is not None
        )
        make = partial(
            Rehearsal,
            job,
            machine=machine,
            seed=self.seed,
            faults=faults,
            chip_faults=chip_faults,
            device=self.device,
            has_virtual_clock=self.virtual_clock,
            timing_only=self.timing_only,
            every_rank=self.every_rank,
            synthetic_data=self.synthetic_data,
            tokens_per_step=self.tokens_per_step,
            values=self.values,
        )
        replay = None if self.replay is None else os.fspath(self.replay)
        order = Order(self.schedule == "random", self.seed, self.explore, replay)
        done = run_equals_once(make, order, _again, partial(_say, job))
        if self.prediction is not None and done.run.prediction is not None:
            from rankwise.sim.prediction.summary import write_document  # noqa: PLC0415  # only there

            program = job.program.name if isinstance(job.program, Function) else ""
            write_document(done.run.prediction, os.fspath(self.prediction), program)
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

    def _check(self) -> None:
        for name, value, names in (
            ("schedule", self.schedule, ("queue", "random")),
            ("device", self.device, ("cpu", "cuda")),
        ):
            if value not in names:
                raise ConfigError(f"{name} is {shown(value)}, expected {' or '.join(names)}")
        for name, number, least in (
            ("seed", self.seed, 0),
            ("explore", self.explore, 1),
            ("tokens_per_step", self.tokens_per_step, 1),
        ):
            is_number = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (is_number and number >= least):
                raise ConfigError(
                    f"{name} is {shown(number)}, expected an integer of at least {least}"
                )
        several = isinstance(self.faults, list | tuple)
        if not all(isinstance(each, str) for each in (self.faults if several else [self.faults])):
            raise ConfigError(
                f"faults is {shown(self.faults)}, expected a string, or a list of them, such as"
                " 'kill:rank=3@collective=9'"
            )
        given = [
            name
            for name, is_given in (
                ("schedule", self.schedule != "queue"),
                ("explore", self.explore is not None),
                ("replay", self.replay is not None),
            )
            if is_given
        ]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} exclude each other: each decides the order of ranks"
            )


def _again(options: Mapping[str, str | int]) -> str:
    return f"rankwise.run(…, {', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _say(job: Job, text: str) -> None:
    write_all(2, notice(job, text).encode("utf-8", "replace"))
