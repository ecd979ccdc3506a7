"""How each rank of this node is, at this moment: for `rankwise ps`, `rankwise top` and the metrics.

Nothing is sampled without a question. An answer costs a third of a millisecond for 8 ranks: what
they write into their segment anyway is read once. Rates are the asker's business: it divides the
difference of two answers by the time between them. So are CPU and memory, which the kernel tells
anyone.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from rankwise.base.failure import Failure, what_it_did
from rankwise.base.units import SECOND, Instant, between
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import WorkerLife
from rankwise.core.ledger import Delay
from rankwise.drivers.real.last_calls import LastCall, awaited, last_call
from rankwise.drivers.real.segments import Segment
from rankwise.launch.run.node_ranks import NodeRanks

RankState = Literal["starting", "running", "hung", "failed", "stopped", "ended", "idle"]
"""Only workers of pools are idle."""


class CallStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The collective call that a rank began last.

    Attributes:
        text: the operation in words, with its number in the group.
        group: how people call the group; empty for the group of all ranks.
        place: the line of the program.
        in_s: for how long the rank has been in it; None once that has ended.
        operation: what is called, without its arguments.
        number: its number in the group; None where calls are not numbered.
    """

    text: str
    group: str
    place: str
    in_s: float | None
    operation: str = ""
    number: int | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank is.

    Attributes:
        rank: which one.
        local_rank: its number on this node.
        pid: its process, while that lives.
        state: what has become of it.
        why: how it failed, in a few words.
        steps: how many steps it has done (`rankwise.should_stop`), else how many sections.
        step_s: how many seconds these took together.
        marks: words that change when it goes on in its program.
        calls: how many collective calls it has begun.
        call: the last one of these.
        awaited_by: how many ranks of this node wait for it in a collective.
        awaited_s: for how long the first of them has.
        came_last: the share of the collectives to which it came last; None where none was judged,
            as of groups with members on other nodes.
        waited_for_s: how long the others have waited for it alone, up to now, while they wait, too.
        task: of a pool's worker: what it calls.
        task_s: for how long it has.
    """

    rank: int
    local_rank: int
    pid: int | None
    state: RankState
    why: str = ""
    steps: int = 0
    step_s: float = 0.0
    marks: tuple[int, ...] = ()
    calls: int = 0
    call: CallStatus | None = None
    awaited_by: int = 0
    awaited_s: float = 0.0
    came_last: float | None = None
    waited_for_s: float = 0.0
    task: str = ""
    task_s: float | None = None


class WaitedSoFar:
    """What was told of how long others have waited for each rank, in the present attempt.

    It never becomes less: when a wait is over, it counts what is found to have been late then.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._seconds: dict[int, float] = {}

    def at_least(self, attempt: int, rank: int, seconds: float) -> float:
        """The seconds, or what was told before if that is more."""
        if attempt != self._attempt:
            self._attempt, self._seconds = attempt, {}
        self._seconds[rank] = max(seconds, self._seconds.get(rank, 0.0))
        return self._seconds[rank]


def ranks_now(
    gang: Gang,
    ranks: NodeRanks,
    segment: Segment | None,
    delays: Iterable[Delay],
    now: Instant,
    *,
    waited_so_far: WaitedSoFar,
) -> list[RankStatus]:
    """How each rank of a gang is; its segment is that of the gang's present attempt."""
    calls = {} if segment is None else _last_calls(segment)
    alive = {worker.local_rank for worker in gang.workers if worker.is_running}
    # The memory of a rank outlives it: a dead rank waits for none.
    moving = {rank: call for rank, call in calls.items() if rank in alive}
    waited = {} if segment is None else awaited(segment, moving, now)
    late = {delay.rank: delay for delay in delays}
    failures = {failure.local_rank: failure for failure in gang.failures_so_far}
    statuses = []
    for worker in gang.workers:
        local_rank = worker.local_rank
        status = RankStatus(
            rank=ranks.rank(local_rank),
            local_rank=local_rank,
            pid=worker.pid if worker.is_running else None,
            state=_state(worker),
            why=_why(worker, failures.get(local_rank)),
        )
        if segment is not None and local_rank < segment.worker_count:
            pace = segment.pace(local_rank)
            status = msgspec.structs.replace(
                status,
                steps=pace.steps,
                step_s=round(pace.time / SECOND, 6),
                marks=segment.marks(local_rank),
            )
        if (call := calls.get(local_rank)) is not None:
            status = msgspec.structs.replace(
                status,
                calls=call.sequence,
                call=_call_status(call, now if local_rank in alive else None),
            )
        if (by := waited.get(local_rank)) is not None and worker.is_running:
            count, since = by
            seconds = round(between(since, now) / SECOND, 3)
            status = msgspec.structs.replace(status, awaited_by=count, awaited_s=seconds)
            if count == len(gang.workers) - 1:  # it alone; what goes on is not in its delay yet
                begun = [call.begun_at for other, call in moving.items() if other != local_rank]
                alone_s = round(between(max(begun), now) / SECOND, 6)
                status = msgspec.structs.replace(status, waited_for_s=alone_s)
        if (delay := late.get(status.rank)) is not None:
            status = msgspec.structs.replace(
                status,
                came_last=round(delay.last, 4),
                waited_for_s=round(status.waited_for_s + delay.waited / SECOND, 6),
            )
        # Counters of metrics must not fall when a wait is over, and its share is judged anew.
        waited_for_s = waited_so_far.at_least(gang.attempt, status.rank, status.waited_for_s)
        statuses.append(msgspec.structs.replace(status, waited_for_s=waited_for_s))
    return statuses


def _last_calls(segment: Segment) -> dict[int, LastCall]:
    calls = ((rank, last_call(segment, rank)) for rank in range(segment.worker_count))
    return {rank: call for rank, call in calls if call is not None}


def _call_status(call: LastCall, now: Instant | None) -> CallStatus:
    in_s = None
    if now is not None and call.is_standing:
        in_s = round(max(0, between(call.begun_at, now)) / SECOND, 3)
    return CallStatus(
        text=call.text,
        group=call.group,
        place=call.place,
        in_s=in_s,
        operation=call.signature.operation,
        number=call.shown_number,
    )


def _state(worker: WorkerLife) -> RankState:
    if worker.hung_at is not None:
        return "hung"
    if worker.blamed_at is not None or worker.error is not None:
        return "failed"
    if worker.has_ended:
        if not worker.has_failed:
            return "ended"
        return "stopped" if worker.is_ended_by_us else "failed"
    return "running" if worker.is_running else "starting"


def _why(worker: WorkerLife, failure: Failure | None) -> str:
    if worker.blame:
        return worker.blame
    if failure is not None:
        return failure.detail if worker.hung_at is not None else what_it_did(failure)
    return "" if worker.error is None else worker.error.type
