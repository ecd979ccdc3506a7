"""Looks at runs of any size, as agents would have told them."""

from collections.abc import Callable, Iterable
from typing import Any

from rankwise.base.units import SECOND, Duration, Instant, duration_from_seconds
from rankwise.drivers.real.gpus import GpuUse
from rankwise.drivers.real.process_work import ProcessWork, Usage
from rankwise.launch.control.client import RunSummary
from rankwise.launch.looking.rank_status import CallStatus, RankStatus
from rankwise.tui.samples import RunSample, RunStatus

NIGHTLY = RunSummary("nightly", 4711, 1000)
MIB = 1 << 20


def standing(number: int, in_s: float | None, group: str = "dp") -> CallStatus:
    text = f"all_reduce #{number} (sum) of (4096,) bfloat16"
    return CallStatus(
        text=text,
        group=group,
        place="train.py:88",
        in_s=in_s,
        operation="all_reduce",
        number=number,
    )


def rank_status(rank: int, **fields: Any) -> RankStatus:
    call = {
        "calls": 1204,
        "call": standing(1204, None),
        "steps": 1200,
        "step_s": 100.0,
        "came_last": 0.0,
    }
    known = {"rank": rank, "local_rank": rank, "pid": 5000 + rank, "state": "running", **call}
    return RankStatus(**{**known, **fields})


def look_of(
    workers: Iterable[RankStatus],
    *,
    run: RunSummary = NIGHTLY,
    at_s: float = 1000.0,
    cpu_s: Callable[[int], float] = lambda _rank: 90.0,
    gpus: GpuUse | None = None,
    **status: Any,
) -> RunSample:
    workers = tuple(workers)
    pids = {worker.pid: worker.rank for worker in workers if worker.pid is not None}
    known = {
        "state": "running",
        "age_s": 125.0,
        "calling_s": 100.0,
        "program": "train.py",
        "world_size": len(workers),
    }
    return RunSample(
        run=run,
        at=Instant(round(at_s * SECOND)),
        status=RunStatus(nproc=len(workers), workers=workers, **{**known, **status}),
        usage={pid: Usage(cpu_s(rank), 1536 * MIB, at_s - 100) for pid, rank in pids.items()},
        gpus={} if gpus is None else dict.fromkeys(pids, gpus),
        works={
            pid: ProcessWork(duration_from_seconds(cpu_s(rank)), Duration(0), {0: Duration(0)}, 0)
            for pid, rank in pids.items()
        },
        boot_s=at_s,
    )


def four_ranks() -> list[RankStatus]:
    """Rank 1 has not come, for which the others wait."""
    waiting = [
        rank_status(rank, call=standing(1205, 41.2), calls=1205) for rank in range(4) if rank != 1
    ]
    awaited = rank_status(1, awaited_by=3, awaited_s=41.2)
    return [*waiting[:1], awaited, *waiting[1:]]


def many_ranks(count: int = 4096) -> list[RankStatus]:
    """One has failed, one is awaited, ten have ended, the others run."""
    ranks = [rank_status(rank, pid=100_000 + rank) for rank in range(count)]
    ranks[77] = rank_status(77, pid=None, state="failed", why="failed: ValueError")
    ranks[1031] = rank_status(1031, awaited_by=9, awaited_s=3.0)
    for rank in range(4000, 4010):
        ranks[rank] = rank_status(rank, pid=None, state="ended")
    return ranks
