"""What there is to know about the runs on this machine, at one moment: a look.

An agent is asked one question, its `status`, and does nothing between two. Everything that the
kernel tells anyone (CPU time, memory), and NVIDIA's driver, is looked up here.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.drivers.real.gpus import GpuReading, Gpus, GpuUse, require_gpus, uses_of
from rankwise.drivers.real.proc import may_have_gpus
from rankwise.drivers.real.process_work import ProcessWork, Usage, usage_by_session, works_of
from rankwise.launch.control.client import (
    RunSummary,
    RunSuspended,
    RunUnreachable,
    ask_all,
    is_suspended,
)
from rankwise.launch.looking.rank_status import RankStatus

PATIENCE = Duration(2 * SECOND)


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks of a pool no worker runs yet, and how many calls have ended and failed."""

    queued: int
    done: int
    failed: int


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of its run: see `rankwise.launch.control`."""

    run_id: str = ""
    nproc: int
    state: str
    age_s: float
    calling_s: float = 0.0
    program: str = ""
    node_rank: int = 0
    nodes: int = 1
    world_size: int = 0
    attempt: int = 0
    restarts: int = 0
    restarts_max: int = 0
    round: int | None = None
    failures: Mapping[str, int] = {}
    latest_failure: str = ""
    xids: tuple[str, ...] = ()
    workers: tuple[RankStatus, ...] = ()
    pool: PoolStatus | None = None


class RunSample(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as far as it has answered.

    Attributes:
        run: who was asked.
        at: when, on the monotonic clock.
        status: what it said; None if it has not answered, or cannot be understood.
        problem: which of these, in words.
        usage: what the processes of each rank use, by the rank's pid.
        gpus: what they use of GPUs, by the same; empty where that cannot be known.
        lacks_gpus: why it cannot, on a machine that has GPUs; else empty.
        works: what each rank has done, by the same, where progress is watched.
        stopped: processes that a signal such as SIGSTOP has stopped, of those that lead a session.
        boot_s: the moment on the clock on which processes begin.
    """

    run: RunSummary
    at: Instant
    status: RunStatus | None
    problem: str = ""
    usage: Mapping[int, Usage] = {}
    gpus: Mapping[int, GpuUse] = {}
    lacks_gpus: str = ""
    works: Mapping[int, ProcessWork] = {}
    stopped: Collection[int] = frozenset()
    boot_s: float = 0.0


def look_at(runs: Sequence[RunSummary], *, watches: bool = False) -> list[RunSample]:
    """Ask all of these runs, and look at their processes; closely, where progress is watched."""
    at = Instant(time.monotonic_ns())
    statuses = {
        reply.run: _status(reply.lines) for reply in ask_all(runs, "status", Instant(at + PATIENCE))
    }
    is_shown = any(status or is_suspended(run) for run, (status, _) in statuses.items())
    usage = usage_by_session() if is_shown else {}
    readings, lacks_gpus = _read_gpus() if usage else ([], "")
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    samples = []
    for run in runs:
        status, problem = statuses[run]
        workers = () if status is None else status.workers
        pids = {worker.pid for worker in workers if worker.pid is not None}
        samples.append(
            RunSample(
                run=run,
                at=at,
                status=status,
                problem=problem,
                usage={pid: usage[pid] for pid in pids if pid in usage},
                gpus=uses_of(readings, pids) if readings else {},
                lacks_gpus=lacks_gpus,
                works=works_of(pids) if watches else {},
                stopped={pid for pid, used in usage.items() if used.is_stopped},
                boot_s=boot_s,
            )
        )
    return sorted(samples, key=_place)


def _place(sample: RunSample) -> tuple[str, int, int]:
    """Agents of one run in the order of their nodes."""
    return sample.run.run_id, sample.status.node_rank if sample.status else 0, sample.run.pid


def _status(lines: Callable[[], list[dict[str, Any]]]) -> tuple[RunStatus | None, str]:
    """What an agent has answered, or why that is not known."""
    told: dict[str, Any] = {}
    try:
        for line in lines():
            told |= line
        return msgspec.convert(told, RunStatus), ""
    except RunSuspended:
        return None, "it is suspended, as by Ctrl-Z (fg in its terminal, or kill -CONT, resumes it)"
    except RunUnreachable:
        return None, "its agent does not answer (it is busy, or has just ended)"
    except msgspec.ValidationError:
        return None, "its agent is of another version of rankwise (rankwise ps knows more of it)"


_gpus: Gpus | None = None


def _read_gpus() -> tuple[list[GpuReading], str]:
    """Read the GPUs of this machine, or say why they cannot be read; neither if there are none."""
    global _gpus  # noqa: PLW0603  # NVML takes long to open: once for a screen that looks again
    if not may_have_gpus():
        return [], ""
    try:
        _gpus = _gpus or require_gpus()
    except ConfigError as error:
        return [], f"{error.message}: {error.hint}"
    return _gpus.read(), ""
