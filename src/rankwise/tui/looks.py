"""What there is to know about the runs on this machine, at one moment: a look.

An agent is asked one question, its `status`, and does nothing between two. Everything that the
kernel tells anyone (CPU time, memory) and the driver of NVIDIA's GPUs is looked up here.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.drivers.real.process_work import ProcessWork, Usage, usage_by_session, works_of
from rankwise.launch.control.client import (
    RunSummary,
    RunSuspended,
    RunUnreachable,
    ask_all,
    is_suspended,
)
from rankwise.launch.rank_status import RankStatus

PATIENCE = Duration(2 * SECOND)
_GPU_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


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
    workers: tuple[RankStatus, ...] = ()


class RunLook(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as far as it has answered.

    Attributes:
        run: who was asked.
        at: when, on the monotonic clock.
        status: what it said; None if it has not answered, or cannot be understood.
        problem: which of these, in words.
        usage: what the processes of each rank use, by the rank's pid.
        gpu_bytes: the GPU memory that they have, by the same; empty where that cannot be known.
        works: what each rank has done, by the same, where progress is watched.
        stopped: processes that a signal such as SIGSTOP has stopped, of those that lead a session.
        boot_s: the moment on the clock on which processes begin.
    """

    run: RunSummary
    at: Instant
    status: RunStatus | None
    problem: str = ""
    usage: Mapping[int, Usage] = {}
    gpu_bytes: Mapping[int, int] = {}
    works: Mapping[int, ProcessWork] = {}
    stopped: Collection[int] = frozenset()
    boot_s: float = 0.0


def look_at(runs: Sequence[RunSummary], *, watches: bool = False) -> list[RunLook]:
    """Ask all of these runs, and look at their processes; closely, where progress is watched."""
    at = Instant(time.monotonic_ns())
    statuses = {
        heard.run: _status(heard.lines) for heard in ask_all(runs, "status", Instant(at + PATIENCE))
    }
    is_shown = any(status or is_suspended(run) for run, (status, _) in statuses.items())
    usage = usage_by_session() if is_shown else {}
    on_gpus = gpu_bytes() if usage else {}
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    looks = []
    for run in runs:
        status, problem = statuses[run]
        workers = () if status is None else status.workers
        pids = {worker.pid for worker in workers if worker.pid is not None}
        looks.append(
            RunLook(
                run=run,
                at=at,
                status=status,
                problem=problem,
                usage={pid: usage[pid] for pid in pids if pid in usage},
                gpu_bytes={pid: on_gpus[pid] for pid in pids if pid in on_gpus},
                works=works_of(pids) if watches else {},
                stopped={pid for pid, used in usage.items() if used.is_stopped},
                boot_s=boot_s,
            )
        )
    return sorted(looks, key=_place)


def _place(look: RunLook) -> tuple[str, int, int]:
    """Agents of one run in the order of their nodes."""
    return look.run.run_id, look.status.node_rank if look.status else 0, look.run.pid


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


def gpu_bytes() -> dict[int, int]:
    """The GPU memory of each session, as NVIDIA's own tool tells it; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        told = subprocess.run(
            (tool, *_GPU_QUERY),
            capture_output=True,
            text=True,
            timeout=PATIENCE / SECOND,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return gpu_bytes_by_session(told.stdout)


def gpu_bytes_by_session(told: str) -> dict[int, int]:
    """Sum up lines such as `4711, 1024` (MiB) by the session of their processes."""
    found: dict[int, int] = {}
    for line in told.splitlines():
        pid, _, mebibytes = (part.strip() for part in line.partition(","))
        if not (pid.isdecimal() and mebibytes.isdecimal()):
            continue  # `[N/A]`: a driver that does not tell
        try:
            session = os.getsid(int(pid))
        except OSError:
            continue  # it has ended, or is in another container
        found[session] = found.get(session, 0) + (int(mebibytes) << 20)
    return found
