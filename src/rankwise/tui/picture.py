"""Rows of ranks from what was looked up: judged, folded by state, the odd ones first.

Pure: a picture is made of the latest look and of those shortly before it.

    state     the rank                                                        shown
    failed    has died by itself, or is to blame that others did              failed
    hung      was found without progress for the hang timeout                 hung
    awaited   has not come to a collective in which others stand              awaited 41 s
    late      has cost the others a notable part of the run                   late
    still     has made no progress for 10 s, and is in no collective          still 12 s
    waiting   has been in the same collective for a second                    waiting 41 s
    suspended its process is stopped, as by SIGSTOP, Ctrl-Z or a debugger     suspended
    starting, stopped, running, ended: none of that

Progress is what `--hang-timeout` counts too (`core.gang.progress`), seen from outside. It is known
only to who has looked for a while.

Ranks in the same state are folded into one row, which shows the slowest rate, CPU on average, and
else the largest value.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from rankwise.base.units import SECOND, Duration, between, duration_from_seconds
from rankwise.core.gang.progress import Activity, ProgressWatch
from rankwise.core.ledger.lateness import Delay, notable
from rankwise.launch.control.client import RunSummary
from rankwise.launch.looking.rank_activity import activity_of
from rankwise.launch.looking.rank_status import RankStatus
from rankwise.tui.samples import RunSample, RunStatus

_Number = TypeVar("_Number", int, float)
NOTABLE_S = 1.0
"""Seconds: healthy ranks, too, wait for each other for less than that."""
STILL = Duration(10 * SECOND)
WINDOW = Duration(10 * SECOND)
"""Rates are of that time: a step of three seconds must not show as none, and then as one."""
UNFOLDED_MAX = 16
"""So few ranks are shown one by one; and so are the ranks of an odd state, if they are no more."""
ODD_UNFOLDED_MAX = 4


class State(StrEnum):
    """How a rank is; in the order in which they are shown."""

    FAILED = "failed"
    HUNG = "hung"
    AWAITED = "awaited"
    LATE = "late"
    STILL = "still"
    WAITING = "waiting"
    SUSPENDED = "suspended"
    STARTING = "starting"
    STOPPED = "stopped"
    RUNNING = "running"
    IDLE = "idle"
    ENDED = "ended"


_ORDER = {state: number for number, state in enumerate(State)}
ODD = frozenset({State.FAILED, State.HUNG, State.AWAITED, State.LATE, State.STILL})


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, or all in a state.

    Attributes:
        ranks: which.
        state: how they are.
        for_s: for how long they have been, where that is known.
        step_rate: steps in a second; None where none are counted.
        call: the last collective; of several ranks, if it is the same.
        late_share: the share of the time since the first call in which the others waited for it
            alone; None where no collective was judged.
        waited_for_s: how long the others have waited for it alone.
        cpu_percent: 100 is one core.
        memory_bytes, gpu_bytes: what is resident, and what it has on GPUs.
        gpu_busy, gpu_celsius: the share of time in which kernels ran, and the temperature, of its
            busiest and of its hottest GPU.
        gpu_slow: why their clocks are slow.
        gpu_errors: uncorrectable errors of their memory since the driver was loaded.
        is_folded: whether it stands for ranks that have no rows of their own.
        depth: 1 for a rank below the row of its state.
        why: how it failed.
    """

    ranks: tuple[int, ...]
    state: State
    for_s: float | None = None
    step_rate: float | None = None
    call: str = ""
    late_share: float | None = None
    waited_for_s: float = 0.0
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    gpu_busy: float | None = None
    gpu_celsius: int | None = None
    gpu_slow: tuple[str, ...] = ()
    gpu_errors: int | None = None
    is_folded: bool = False
    depth: int = 0
    why: str = ""

    @property
    def key(self) -> str:
        """A name that stays the same from picture to picture."""
        return str(self.ranks[0]) if self.depth or len(self.ranks) == 1 else self.state


class SortOrder(StrEnum):
    """By what rows are sorted."""

    STATE = "state"
    RANK = "rank"
    STEPS = "steps"
    LATE = "late"
    CPU = "CPU"
    MEMORY = "memory"


class RunPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is shown.

    Attributes:
        run: which.
        status: what its agent said last; None if it has not answered yet.
        rows: its ranks, one by one, in their order.
        problem: why it is not known how the run is now; empty where it is.
        end: how it ended, once it has.
        lacks_gpus: why nothing is known of this machine's GPUs; empty where it has none.
    """

    run: RunSummary
    status: RunStatus | None
    rows: tuple[Row, ...] = ()
    problem: str = ""
    end: str = ""
    lacks_gpus: str = ""


class Watcher:
    """Makes pictures of one run from the looks at it, of which it remembers those it needs."""

    def __init__(self, run: RunSummary) -> None:
        self._run = run
        self._samples: deque[RunSample] = deque()
        self._watch: ProgressWatch | None = None
        self._latest = RunPicture(run=run, status=None)

    def see(self, sample: RunSample) -> RunPicture:
        """Add a sample. Without an answer, or after the end, the picture stays as it was."""
        if self._latest.end:
            return self._latest
        if sample.status is None:
            told = self._latest.status
            pids = {} if told is None else {each.rank: each.pid for each in told.workers}
            rows = tuple(
                _halted(row, State.SUSPENDED) if pids[row.ranks[0]] in sample.stopped else row
                for row in self._latest.rows
            )
            self._latest = msgspec.structs.replace(self._latest, problem=sample.problem, rows=rows)
            return self._latest
        while self._samples and between(self._samples[0].at, sample.at) > WINDOW:
            self._samples.popleft()
        if self._samples and _attempt(self._samples[-1]) != _attempt(sample):
            self._samples.clear()
        self._samples.append(sample)
        still = self._see_progress(sample)
        before = self._samples[0] if self._samples[0].at < sample.at else None
        late = _notably_late(sample.status)
        rows = tuple(
            _row(
                worker,
                sample,
                before,
                still.get(worker.local_rank, 0.0),
                is_late=worker.rank in late,
            )
            for worker in sample.status.workers
        )
        self._latest = RunPicture(
            run=self._run, status=sample.status, rows=rows, lacks_gpus=sample.lacks_gpus
        )
        return self._latest

    def end(self, how: str) -> RunPicture:
        """The last picture, with how the run ended; no rank lives any more."""
        rows = tuple(_halted(row, State.ENDED) for row in self._latest.rows)
        self._latest = msgspec.structs.replace(self._latest, end=how, problem="", rows=rows)
        return self._latest

    def _see_progress(self, sample: RunSample) -> dict[int, float]:
        """For how many seconds each rank has made no progress."""
        self._watch = self._watch or ProgressWatch(None, sample.at)
        assert sample.status is not None, "asked for looks with an answer"
        works = {
            worker.local_rank: _work(worker, sample)
            for worker in sample.status.workers
            if worker.pid in sample.works
        }
        self._watch.look(works, sample.at)
        return {
            rank: between(progress.last_progress, sample.at) / SECOND
            for rank, progress in self._watch.ranks.items()
        }


def _halted(row: Row, state: State) -> Row:
    """The row of a rank that does nothing more, or for now, unless it has ended before."""
    if row.state in (State.FAILED, State.HUNG, State.STOPPED, State.ENDED):
        return row
    return msgspec.structs.replace(row, state=state, for_s=None, cpu_percent=None)


def _attempt(sample: RunSample) -> tuple[int, int | None]:
    assert sample.status is not None, "looks without an answer are not remembered"
    return sample.status.attempt, sample.status.round


def _work(worker: RankStatus, sample: RunSample) -> Activity:
    assert worker.pid is not None, "asked for ranks that live"
    return msgspec.structs.replace(
        activity_of(worker.pid, sample.works[worker.pid]),
        marks=(*worker.marks, worker.calls),
        is_in_call=worker.call is not None and worker.call.in_s is not None,
    )


def _notably_late(status: RunStatus) -> Collection[int]:
    delays = [
        Delay(
            rank=worker.rank,
            last=worker.came_last or 0.0,
            waited=duration_from_seconds(worker.waited_for_s),
        )
        for worker in status.workers
    ]
    worst = notable(delays, duration_from_seconds(status.calling_s)) if len(delays) > 1 else None
    return () if worst is None else (worst.rank,)


def _row(
    worker: RankStatus,
    sample: RunSample,
    before: RunSample | None,
    still_s: float,
    *,
    is_late: bool,
) -> Row:
    state, for_s = _state(worker, still_s, is_late=is_late)
    if worker.pid in sample.stopped and state not in (State.FAILED, State.HUNG, State.ENDED):
        state, for_s = State.SUSPENDED, None
    usage = None if worker.pid is None else sample.usage.get(worker.pid)
    gpus = None if worker.pid is None else sample.gpus.get(worker.pid)
    earlier = _earlier(worker, before)
    return Row(
        ranks=(worker.rank,),
        state=state,
        for_s=for_s,
        step_rate=_step_rate(worker, earlier, sample, before),
        call=worker.task if worker.call is None else _call_in_words(worker),
        late_share=_late_share(worker, sample),
        waited_for_s=worker.waited_for_s,
        cpu_percent=_cpu_percent(worker, sample, before),
        memory_bytes=None if usage is None else usage.memory_bytes,
        gpu_bytes=None if gpus is None else gpus.memory_bytes,
        gpu_busy=None if gpus is None else gpus.utilisation,
        gpu_celsius=None if gpus is None else gpus.temperature_c,
        gpu_slow=() if gpus is None else gpus.throttled_by,
        gpu_errors=None if gpus is None else gpus.ecc_errors,
        why=worker.why,
    )


def _state(worker: RankStatus, still_s: float, *, is_late: bool) -> tuple[State, float | None]:
    told = State(worker.state)
    if told is not State.RUNNING:
        return told, None
    if worker.task_s is not None:  # a task may sleep for as long as it likes
        return told, worker.task_s if worker.task_s >= NOTABLE_S else None
    if worker.awaited_s >= NOTABLE_S:
        return State.AWAITED, worker.awaited_s
    in_s = None if worker.call is None else worker.call.in_s
    if is_late and (in_s is None or in_s < NOTABLE_S):
        return State.LATE, None
    if in_s is not None:
        return (State.WAITING, in_s) if in_s >= NOTABLE_S else (State.RUNNING, None)
    if still_s >= STILL / SECOND:
        return State.STILL, still_s
    return State.RUNNING, None


def _call_in_words(worker: RankStatus) -> str:
    assert worker.call is not None, "asked for ranks that have called something"
    call = worker.call
    number = "" if call.number is None else f"#{call.number}"
    # The number first: where there is little room, the end is cut.
    return " ".join(filter(None, (number, call.operation or call.text, call.group)))


def _late_share(worker: RankStatus, sample: RunSample) -> float | None:
    if worker.came_last is None or sample.status is None or not sample.status.calling_s:
        return None
    return worker.waited_for_s / sample.status.calling_s


def _earlier(worker: RankStatus, before: RunSample | None) -> RankStatus | None:
    """The same life of a rank in an earlier look."""
    if before is None or before.status is None:
        return None
    same = (each for each in before.status.workers if each.local_rank == worker.local_rank)
    return next((each for each in same if each.pid == worker.pid), None)


def _step_rate(
    worker: RankStatus, earlier: RankStatus | None, sample: RunSample, before: RunSample | None
) -> float | None:
    if not worker.steps:
        return None
    if earlier is not None and before is not None and worker.pid is not None:
        return (worker.steps - earlier.steps) * SECOND / between(before.at, sample.at)
    return worker.steps / worker.step_s if worker.step_s else None


def _cpu_percent(worker: RankStatus, sample: RunSample, before: RunSample | None) -> float | None:
    usage = None if worker.pid is None else sample.usage.get(worker.pid)
    if usage is None or worker.pid is None:
        return None
    earlier = None if before is None else before.usage.get(worker.pid)
    if earlier is not None and before is not None:
        return 100 * (usage.cpu_s - earlier.cpu_s) * SECOND / between(before.at, sample.at)
    return 100 * usage.cpu_s / max(sample.boot_s - usage.began_s, 0.01)


_KEYS: Mapping[SortOrder, Callable[[Row], float]] = {
    SortOrder.STATE: lambda row: _ORDER[row.state],
    SortOrder.RANK: lambda row: row.ranks[0],
    SortOrder.STEPS: lambda row: float("inf") if row.step_rate is None else row.step_rate,
    SortOrder.LATE: lambda row: -row.waited_for_s,
    SortOrder.CPU: lambda row: -(row.cpu_percent or 0.0),
    SortOrder.MEMORY: lambda row: -(row.memory_bytes or 0),
}


def arranged(
    rows: Sequence[Row],
    order: SortOrder = SortOrder.STATE,
    *,
    folds: bool | None = None,
    unfolded: Collection[State] = (),
) -> list[Row]:
    """The rows to show.

    Args:
        rows: all ranks.
        order: by what they are sorted: the ranks of each state, where they are folded.
        folds: whether to fold by state; None does so for many ranks.
        unfolded: states whose ranks are shown below them, and those of odd states that are not.
    """
    by_order = sorted(rows, key=lambda row: (_KEYS[order](row), row.ranks))
    if not (len(rows) > UNFOLDED_MAX if folds is None else folds):
        return by_order
    groups: dict[State, list[Row]] = {}
    for row in by_order:
        groups.setdefault(row.state, []).append(row)
    shown: list[Row] = []
    for state in sorted(groups, key=_ORDER.__getitem__):
        group = groups[state]
        opens = (state in ODD and len(group) <= ODD_UNFOLDED_MAX) != (state in unfolded)
        if len(group) == 1:
            shown += group
            continue
        shown.append(_folded(group, is_folded=not opens))
        if opens:
            shown += (msgspec.structs.replace(row, depth=1) for row in group)
    return shown


def _folded(rows: Sequence[Row], *, is_folded: bool) -> Row:
    calls = {row.call for row in rows}
    cpus = _known(row.cpu_percent for row in rows)
    return Row(
        ranks=tuple(sorted(row.ranks[0] for row in rows)),
        state=rows[0].state,
        for_s=max(_known(row.for_s for row in rows), default=None),
        step_rate=min(_known(row.step_rate for row in rows), default=None),
        call=calls.pop() if len(calls) == 1 else f"{len(calls)} different",
        late_share=max(_known(row.late_share for row in rows), default=None),
        waited_for_s=max(row.waited_for_s for row in rows),
        cpu_percent=sum(cpus) / len(cpus) if cpus else None,
        memory_bytes=max(_known(row.memory_bytes for row in rows), default=None),
        gpu_bytes=max(_known(row.gpu_bytes for row in rows), default=None),
        gpu_busy=min(_known(row.gpu_busy for row in rows), default=None),
        gpu_celsius=max(_known(row.gpu_celsius for row in rows), default=None),
        gpu_slow=tuple(dict.fromkeys(why for row in rows for why in row.gpu_slow)),
        is_folded=is_folded,
    )


def _known(values: Iterable[_Number | None]) -> list[_Number]:
    return [value for value in values if value is not None]
