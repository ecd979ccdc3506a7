"""Plug-ins made for torchrun, working for a run of ours: log specs, event and rendezvous handlers.

A log specs class is asked once per attempt where the workers' output goes, as torchrun does; one
event about the outcome goes to the event handler. Both are rare, so that nothing of this is
imported unless a command line asks for it. A rendezvous handler is an agent's way to meet others
that knows nothing of our agents, so with one the agent is `rankwise.compat.torch`'s.
"""

import argparse
import json
import socket
import sys
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import Outcome, OutcomeStatus
from rankwise.base.units import SECOND
from rankwise.compat.torch.elastic.events import Event, EventSource, record
from rankwise.compat.torch.elastic.multiprocessing.reified_logs import ReifiedLogs
from rankwise.compat.torch.elastic.multiprocessing.std import Std
from rankwise.launch.options import PLUG_IN, options_refused
from rankwise.launch.run.job import Job, StreamChoice, Streams
from rankwise.launch.run.log_layout import Destinations, LogPlaces
from rankwise.launch.run.supervision import supervise

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions


def supervise_with_plugins(
    job: Job, event_handler: str, places: LogPlaces | None = None
) -> Outcome:
    """Run a job with the log specs that it names, and tell the handler what became of it.

    `places` are those of the log files where no log specs decide.

    Raises:
        ConfigError: the log specs refuse their arguments.
    """
    began_ns = time.monotonic_ns()
    if job.logs.log_specs is not None:
        places = PluggedInLogs(job, job.logs.log_specs)
    outcome = supervise(job, places, ends_process=True)
    seconds = (time.monotonic_ns() - began_ns) // 1_000_000_000
    record(outcome_event(job, outcome, seconds), event_handler)
    return outcome


def is_rendezvous_plugin(backend: str) -> bool:
    """Whether the backend is brought by an installed package as a handler for torchrun."""
    return bool(entry_points(group="torchrun.handlers", name=backend))


def launch_with_handler(options: "RunOptions") -> int:
    """Launch with the plug-in's rendezvous handler; return the exit code.

    Raises:
        ConfigError: a value cannot be used.
    """
    from rankwise.compat.torch.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from rankwise.compat.torch.run import run  # noqa: PLC0415  # all three pay for much

    for option in options_refused(PLUG_IN):
        if option.name in options.origins:
            raise ConfigError(
                f"{options.label(option.name)} {option.refused[PLUG_IN]}",
                hint="choose another --rdzv-backend",
            )
    args = argparse.Namespace(**msgspec.structs.asdict(options))
    grace = options.shutdown_timeout
    args.shutdown_timeout = None if grace is None else grace // SECOND
    args.training_script_args = list(options.training_script_args)
    args.start_method = "forkserver" if "fork" in options.start_method else "spawn"
    try:
        run(args)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code or 1
    except SignalException as error:
        return 128 + error.sigval
    except (AssertionError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return 0


class PluggedInLogs:
    """Log files where a plug-in of the group `torchrun.logs_specs` wants them: a `LogPlaces`."""

    directory: str | None = None  # the plug-in has its own, which may be shared by many runs
    root: str | None = None
    keep = True

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        (entry_point, *_) = entry_points(group="torchrun.logs_specs", name=name)
        try:
            specs_class = entry_point.load()
            std = _streams_class(specs_class)
            self._specs = specs_class(
                log_dir=job.logs.directory,
                redirects=_in_torchs_words(job.logs.redirects, std),
                tee=_in_torchs_words(job.logs.tee, std),
                local_ranks_filter=None
                if job.logs.console_ranks is None
                else set(job.logs.console_ranks),
            )
        except Exception as error:
            raise ConfigError(
                f"--logs-specs {name!r} could not be used: {type(error).__name__}: {error}"
            ) from error

    def prepare(self, attempt: int) -> Destinations:
        """Let the plug-in make its places for an attempt."""
        envs = {
            rank: {
                "TORCHELASTIC_RUN_ID": self._job.run_id,
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            for rank in range(self._job.gang.size)
        }
        return ReifiedLogs(self._specs.reify(envs), envs).prepare(0)

    def discard(self) -> None:
        """Leave everything where it is: it belongs to the plug-in."""


def outcome_event(job: Job, outcome: Outcome, seconds: int) -> Event:
    """The event that torchrun's agent records at the end of its life."""
    state = "SUCCEEDED" if outcome.status is OutcomeStatus.SUCCEEDED else "FAILED"
    root_cause = outcome.failures[0] if outcome.failures else None
    raw_error = root_cause.error.traceback if root_cause and root_cause.error else None
    nodes = 1 if outcome.size is None else outcome.size // job.gang.size
    about_the_agent = {"group_world_size": nodes, "entry_point": job.program_name}
    return Event(
        name=f"torchelastic.worker.status.{state}",
        source=EventSource.AGENT,
        timestamp=time.time_ns() // 1_000_000,
        metadata={
            "run_id": job.run_id,
            "global_rank": None,
            "group_rank": 0,
            "worker_id": None,
            "role": job.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": seconds,
            "rdzv_backend": "static" if job.cluster is None else job.cluster.backend or "static",
            "raw_error": raw_error,
            "metadata": json.dumps(about_the_agent),
            "agent_restarts": outcome.attempts - 1,
            "duration_ms": None,
        },
    )


def _streams_class(specs_class: type) -> Any:
    """The `Std` of the module of the base class: torch tests for its own."""
    for base in specs_class.__mro__:
        if std := getattr(sys.modules.get(base.__module__), "Std", None):
            return std
    return Std


def _in_torchs_words(choice: StreamChoice, std: Any) -> Any:
    if isinstance(choice, Streams):
        return std(int(choice))
    return {rank: std(int(streams)) for rank, streams in choice.items()}
