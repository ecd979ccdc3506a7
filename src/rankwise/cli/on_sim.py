"""From the options of `rankwise run --on sim` to a run on simulated ranks.

All nodes are simulated in this process, so of the options about how nodes meet only the number of
nodes and the times of `--rdzv-conf` decide anything.
"""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.cli.main import begin_work
from rankwise.cli.node_flags import NodeCounts, node_counts, parse_settings
from rankwise.cli.run_job import job_from
from rankwise.drivers.real.early_signals import leave_alone
from rankwise.launch.options import (
    MACHINE,
    ORDER,
    PREFIX_OF_NODES,
    SIM,
    TIMING_ONLY,
    options_deciding,
    options_needing,
)
from rankwise.launch.telling.status_line import wipe

if TYPE_CHECKING:
    from rankwise.base.failure import Outcome
    from rankwise.cli.run_job import RunOptions
    from rankwise.core.rendezvous.configuration import RendezvousConfig
    from rankwise.launch.run.job import Job
    from rankwise.simranks.prediction import Prediction
    from rankwise.simranks.run.rehearsal import Rehearsal
    from rankwise.simranks.world.faults import Fault

_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What the runtimes of GPUs read: a simulation uses none of this machine's."""
_MACHINE_EXPECTED = f"expected {MACHINE}, a preset or a topology file"


def simulate(options: "RunOptions", words: Sequence[str], environ: Mapping[str, str]) -> "Outcome":
    """Run what the options ask for on simulated ranks, and tell on stderr how it went wrong.

    `words` are those of the command line, in strict spelling.

    Raises:
        ConfigError: a value cannot be used.
    """
    counts = node_counts(options.nnodes, 0, label=options.label("nnodes"))
    machine = (options.on or "").partition(":")[2] or None
    _check_files(options, machine)
    options.refuse_with(SIM)
    one_node = msgspec.structs.replace(options, nnodes="1", spares=0)
    if counts.most > 1 and not {"log_prefix", "no_prefix"} & options.origins.keys():
        one_node = msgspec.structs.replace(one_node, log_prefix=PREFIX_OF_NODES)
    job = job_from(one_node, environ)
    leave_alone(job.signals)
    from rankwise.launch.run.thread_limit import thread_environment  # noqa: PLC0415  # the same
    from rankwise.simranks.run.leftovers import Leftovers  # noqa: PLC0415  # not for --help

    # As early as can be, so that it comes last: libraries end their processes at the exit, too.
    leftovers = Leftovers(_tell_of_leftovers)
    # As each rank of a real run; libraries read it once, so it must be there before them.
    limit = thread_environment(counts.most * job.gang.size, environ)
    os.environ.update(limit)
    job = msgspec.structs.replace(job, environment={**job.environment, **limit})
    for name in _VISIBLE_GPUS:
        # For C libraries alone: `os.environ` is what ranks are told, which may name a node's GPUs.
        os.putenv(name, "")
    from rankwise.base.failure import OutcomeStatus  # noqa: PLC0415  # not for --help
    from rankwise.cli.run_files import RunFiles  # noqa: PLC0415  # the same
    from rankwise.launch.run.run_history import failure_command_of  # noqa: PLC0415  # the same
    from rankwise.launch.run.supervision import tell  # noqa: PLC0415  # the same
    from rankwise.sim.faults.reading import read_faults_of_run  # noqa: PLC0415  # the same
    from rankwise.simranks.run.equal_ranks import run_equals_once  # noqa: PLC0415  # the same
    from rankwise.simranks.run.exploration import WantedOrder  # noqa: PLC0415  # the same
    from rankwise.simranks.run.rehearsal import Rehearsal  # noqa: PLC0415  # after all checks
    from rankwise.simranks.run.simulation_options import SimulationOptions  # noqa: PLC0415  # the same

    faults, chip_faults = read_faults_of_run(
        options.faults,
        counts.most * job.gang.size,
        node_count=counts.most + options.spares,
        has_machine=machine is not None,
    )
    rendezvous = _rendezvous(options, job, counts, faults)
    files = None
    if options.report is not None and machine is None:
        _check_one_run(options, has_nodes=rendezvous is not None)
        files = RunFiles(options, job)
        job = files.job
    simulation = SimulationOptions(
        **{name: getattr(options, name) for name in SimulationOptions.__struct_fields__}
    )
    make = partial(
        Rehearsal,
        # An exploration is one event, its schedules are not.
        job if options.explore is None else msgspec.structs.replace(job, on_failure=None),
        simulation,
        node_count=counts.most,
        rendezvous=rendezvous,
        machine=machine,
        keeps_log=(options.trace, options.report) != (None, None),
        faults=faults,
        chip_faults=chip_faults,
    )
    _check_timing_only(options, machine)
    _check_one_order(options)
    _check_packages(options)
    order = WantedOrder.of(simulation)
    begin_once = cache(begin_work)  # several orders may be run, each by a rehearsal of its own
    with _shown(options, job, machine) as watch:

        def watched(**how: Any) -> "Rehearsal":
            made = make(**how)
            # Only now, as there is nothing to be taken down before: an exception that is raised
            # while modules are imported may be lost.
            begin_once()
            watch(made)
            return made

        outcome, rehearsal, is_shown, again = run_equals_once(
            watched, order, partial(_again, words), _say
        )
    leftovers.are_shown = job.console and outcome.status is OutcomeStatus.SUCCEEDED
    if not is_shown:
        return outcome
    if job.console:
        tell(outcome, rehearsal.supervision)
        if again and outcome.status is OutcomeStatus.FAILED:
            _say(f"again: {again}")
    if rehearsal.prediction is not None:
        has_failed = outcome.status is not OutcomeStatus.SUCCEEDED
        _tell_prediction(options, rehearsal.prediction, job, has_failed=has_failed)
        _keep_prediction(options, rehearsal)
    if files is not None:
        files.write(rehearsal.supervision.places)
    if rehearsal.supervision.has_failure_command:
        rehearsal.supervision.run_failure_command()
    elif command := failure_command_of(job):  # of an exploration, whose runs have none
        from rankwise.launch.telling.failure_command import tell_of_end  # noqa: PLC0415  # rare

        tell_of_end(command, outcome, rehearsal.supervision)
    return outcome


@contextmanager
def _shown(
    options: "RunOptions", job: "Job", machine: object
) -> "Iterator[Callable[[Rehearsal], None]]":
    """Show how far it has come; what it gives is called with each run that begins."""
    from rankwise.cli.sim_progress import counted, predicted  # noqa: PLC0415  # not for --help

    if not job.console or (options.explore is None and machine is None):
        yield lambda _: None
    elif options.explore is None:
        with predicted(options.training_script) as watch:
            yield watch
    else:
        begun = count()
        with counted(
            options.explore, options.training_script, "schedule", has_sinks=True
        ) as progress:
            yield lambda _: progress(done := next(begun), done)


def _tell_of_leftovers(killed: "Mapping[int, str]") -> None:
    from rankwise.launch.telling.announcements import left_behind_line  # noqa: PLC0415  # rare

    _say(left_behind_line(killed, may_be_kept=False))


def _rendezvous(
    options: "RunOptions", job: "Job", counts: NodeCounts, faults: "Sequence[Fault]"
) -> "RendezvousConfig | None":
    """How nodes meet that come and go; None if all of them are there from begin to end."""
    from rankwise.core.rendezvous.configuration import RendezvousConfig  # noqa: PLC0415  # not for --help
    from rankwise.launch.cluster.settings import split_settings, with_timing  # noqa: PLC0415  # the same
    from rankwise.sim.faults.vocabulary import FaultOfNode  # noqa: PLC0415  # the same

    label = options.label("rdzv_conf")
    config = RendezvousConfig(
        nodes_min=counts.least,
        nodes_max=counts.most,
        spares=options.spares,
        policy=job.plan.rendezvous.policy,
    )
    config = with_timing(
        config, split_settings(parse_settings(options.rdzv_conf), label=label), label
    )
    is_fixed = counts.least == counts.most and not options.spares
    return (
        None if is_fixed and not any(isinstance(each, FaultOfNode) for each in faults) else config
    )


def _check_one_order(options: "RunOptions") -> None:
    given = [
        options.label(option.name)
        for option in options_deciding(ORDER)
        if option.name in options.origins
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: each decides {ORDER}")


def _check_timing_only(options: "RunOptions", machine: str | None) -> None:
    for option in options_needing(MACHINE):
        if option.name in options.origins and machine is None:
            raise _no_machine(options, option.name)
    if options.timing_only:
        options.refuse_with(TIMING_ONLY)
    else:
        options.refuse_without(TIMING_ONLY)


def _no_machine(options: "RunOptions", name: str) -> ConfigError:
    return ConfigError(
        f"{options.label(name)} needs a machine, which says how long things take: "
        f"{_MACHINE_EXPECTED}"
    )


def _check_packages(options: "RunOptions") -> None:
    from rankwise.simranks.world.modules import PACKAGES_OF_PROCESSES  # noqa: PLC0415  # see above

    for package in options.import_per_rank:
        if package in PACKAGES_OF_PROCESSES:
            raise ConfigError(
                f"{options.label('import_per_rank')} is {package}, which a process can import only"
                " once: simulated ranks share it"
            )


def _again(words: Sequence[str], options: Mapping[str, str | int]) -> str:
    """The command of this run, with other options about its order."""
    end = list(words).index("--")
    instead = [f"--{name}={value}" for name, value in options.items()]
    own = {"--schedule", "--explore", "--replay", *(word.partition("=")[0] for word in instead)}
    kept = [word for word in words[:end] if word.partition("=")[0] not in own]
    return shlex.join(["rankwise", "run", *instead, *kept, *words[end + 1 :]])


def _say(text: str) -> None:
    wipe()
    with suppress(OSError):  # the reader of stderr has gone
        print(f"rankwise: {text}", file=sys.stderr, flush=True)


def _check_files(options: "RunOptions", machine: str | None) -> None:
    """Refuse files that cannot be written before anything runs.

    Raises:
        ConfigError: names the option and why.
    """
    from rankwise.cli.run_files import check_files  # noqa: PLC0415  # only there

    if options.trace is not None and machine is None:
        raise _no_machine(options, "trace")
    check_files(options)


def _check_one_run(options: "RunOptions", *, has_nodes: bool) -> None:
    """Refuse a page without a machine, which is made of a journal, where that tells of several."""
    if has_nodes or options.explore is not None:
        of = "nodes that come and go" if has_nodes else "several schedules"
        raise ConfigError(f"{options.label('report')} of {of} needs a machine: {_MACHINE_EXPECTED}")


def _keep_prediction(options: "RunOptions", rehearsal: "Rehearsal") -> None:
    """Leave the figures beside the journal, which tells nothing of a model's time."""
    from rankwise.simranks.prediction import summary as told  # noqa: PLC0415  # only here
    from rankwise.simranks.run.compared import PREDICTION_FILE  # noqa: PLC0415  # only here

    if rehearsal.prediction is None or options.log_dir in {None, os.devnull}:
        return
    directory = rehearsal.supervision.places.directory
    if directory is None:
        return
    path = str(Path(directory, PREDICTION_FILE))
    try:
        told.write_document(rehearsal.prediction, path, options.training_script)
    except RankwiseError as error:
        _say(f"prediction: {error}")


def _tell_prediction(
    options: "RunOptions", prediction: "Prediction", job: "Job", *, has_failed: bool
) -> None:
    """Show the figures on stderr, and write the files that were asked for."""
    from rankwise.cli.run_files import tell_file  # noqa: PLC0415  # only there
    from rankwise.simranks.prediction import summary as told  # noqa: PLC0415  # the same

    told.write_files(prediction, options.training_script, options.trace, options.report)
    if options.prediction is not None:
        told.write_document(prediction, options.prediction, options.training_script)
    if options.record_values is not None and prediction.record is not None:
        prediction.record.write(options.record_values)
    if not job.console:
        return
    print(told.summary(prediction, has_failed=has_failed), file=sys.stderr)
    for name, path in (
        ("trace", options.trace),
        ("report", options.report),
        ("prediction", options.prediction),
        ("values", options.record_values),
    ):
        if path is not None:
            print(tell_file(name, path, ""), file=sys.stderr)
