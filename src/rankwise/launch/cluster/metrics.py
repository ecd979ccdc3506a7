"""The metrics of an agent: what each one is, and the same values as Prometheus's text (0.0.4).

One table has all of them. A metric is of the agent, or has a value per rank of this node or per
kind of failure. Names have their unit, counters end in `_total`, and a metric that is here stays:
dashboards know it. `launch.cluster.telemetry` hands the same table to OpenTelemetry.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from rankwise.base.failure import FailureCause
from rankwise.base.units import SECOND
from rankwise.drivers.real.gpus import GpuUse
from rankwise.drivers.real.process_work import Usage
from rankwise.launch.looking.rank_status import RankStatus

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent is.

    Attributes:
        run_id: which run, or a name for it where the id is secret.
        node: the node's id in the run.
        phase: where in its life the agent is.
        round: the number of the present round; -1 before the first.
        node_rank: this node's rank in the round; -1 between rounds.
        nodes: how many nodes the round has; 0 between rounds.
        workers: how many of its workers live.
        restarts: how many restarts the job has spent.
        failures: how many of its workers have failed by themselves, by kind.
        leads: whether this node leads.
        step: the farthest step of its ranks; -1 where they are not counted.
        waited_for_seconds: by rank, how long the others waited for it alone in collectives.
        xids: how many XID errors each GPU of this node has reported in this run.
    """

    run_id: str
    node: str
    phase: str
    round: int = -1
    node_rank: int = -1
    nodes: int = 0
    workers: int = 0
    restarts: int = 0
    failures: Mapping[str, int] = {}
    leads: bool = False
    step: int = -1
    waited_for_seconds: Mapping[int, float] = {}
    xids: Mapping[int, int] = {}


class AgentSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What metrics are made of.

    Attributes:
        status: how the agent is.
        ranks: how each rank of its present round is.
        usage: what processes use, by the process that leads their session.
        gpus: what these use of GPUs, by the same, where that is known.
    """

    status: AgentStatus
    ranks: tuple[RankStatus, ...] = ()
    usage: Mapping[int, Usage] = {}
    gpus: Mapping[int, GpuUse] = {}

    def usage_of(self, rank: RankStatus) -> Usage | None:
        """What a rank and its children use, while it lives."""
        return None if rank.pid is None else self.usage.get(rank.pid)

    def gpus_of(self, rank: RankStatus) -> GpuUse | None:
        """What a rank and its children use of GPUs, while it lives."""
        return None if rank.pid is None else self.gpus.get(rank.pid)


Values = Mapping[str, float]
"""By the label's value; by an empty one, where a metric has no label."""


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: without the `rankwise_` in front.
        is_counter: whether it only grows, until a process is another one.
        what: it is, in a sentence.
        values: its values, by those of its label.
        label: what tells its values apart; empty where there is one.
    """

    name: str
    is_counter: bool
    what: str
    values: Callable[[AgentSnapshot], Values]
    label: str = ""

    @property
    def full_name(self) -> str:
        """As Prometheus has it."""
        return f"rankwise_{self.name}{'_total' if self.is_counter else ''}"

    @property
    def kind(self) -> str:
        """As Prometheus calls it."""
        return "counter" if self.is_counter else "gauge"


def _of_agent(name: str, what: str, *, is_counter: bool = False) -> Metric:
    return Metric(
        name, is_counter, what, lambda snapshot: {"": int(getattr(snapshot.status, name))}
    )


def _of_ranks(
    name: str, what: str, value: Callable[[RankStatus], float], *, is_counter: bool = False
) -> Metric:
    def values(snapshot: AgentSnapshot) -> Values:
        return {str(rank.rank): value(rank) for rank in snapshot.ranks}

    return Metric(name, is_counter, f"For each rank: {what}", values, "rank")


def _of_processes(
    name: str, what: str, value: Callable[[Usage], float], *, is_counter: bool = False
) -> Metric:
    def values(snapshot: AgentSnapshot) -> Values:
        used = ((str(rank.rank), snapshot.usage_of(rank)) for rank in snapshot.ranks)
        return {rank: value(usage) for rank, usage in used if usage is not None}

    return Metric(name, is_counter, f"For each rank that lives: {what}", values, "rank")


def _of_gpus(
    name: str, what: str, value: Callable[[GpuUse], float | None], *, is_counter: bool = False
) -> Metric:
    def values(snapshot: AgentSnapshot) -> Values:
        uses = ((str(rank.rank), snapshot.gpus_of(rank)) for rank in snapshot.ranks)
        known = ((rank, value(use)) for rank, use in uses if use is not None)
        return {rank: figure for rank, figure in known if figure is not None}

    return Metric(name, is_counter, f"For each rank with GPUs: {what}", values, "rank")


def _failures(snapshot: AgentSnapshot) -> Values:
    kinds = (str(kind) for kind in FailureCause if kind is not FailureCause.STOPPED)
    return {kind: snapshot.status.failures.get(kind, 0) for kind in kinds}


def _in_call_s(rank: RankStatus) -> float:
    return (rank.call.in_s or 0.0) if rank.call is not None else 0.0


METRICS = (
    _of_agent("round", "Number of the present round, -1 before the first."),
    _of_agent("node_rank", "Rank of this node in the round, -1 while it is in none."),
    _of_agent("nodes", "Nodes in the round."),
    _of_agent("workers", "Workers of this node that live."),
    _of_agent("restarts", "Restarts that the job has spent.", is_counter=True),
    _of_agent("leads", "1 if this node leads the run."),
    _of_agent(
        "step", "Farthest step that a rank of this node has started, -1 if none counts steps."
    ),
    Metric(
        "waited_for_seconds",
        is_counter=False,
        what="For each rank: how long the others of this node have waited in collectives for it "
        "alone, up to now.",
        values=lambda snapshot: {
            str(rank): waited_s for rank, waited_s in snapshot.status.waited_for_seconds.items()
        },
        label="rank",
    ),
    Metric(
        "failures",
        is_counter=True,
        what="Workers of this node that have failed by themselves, by kind.",
        values=_failures,
        label="kind",
    ),
    _of_ranks(
        "steps",
        "steps that it has done (rankwise.should_stop), else outermost sections; 0 in a new "
        "attempt.",
        lambda rank: rank.steps,
        is_counter=True,
    ),
    _of_ranks(
        "step_seconds",
        "time that these took together: divided by their number, the time of a step.",
        lambda rank: rank.step_s,
        is_counter=True,
    ),
    _of_ranks(
        "collectives",
        "collective calls that it has begun; 0 in a new attempt.",
        lambda rank: rank.calls,
        is_counter=True,
    ),
    Metric(
        "came_last_ratio",
        is_counter=False,
        what="For each rank: share of the collectives of this node to which it came last, 0 to 1. "
        "Some rank always comes last; `rankwise_waited_for_seconds` tells what it costs.",
        values=lambda snapshot: {
            str(rank.rank): rank.came_last for rank in snapshot.ranks if rank.came_last is not None
        },
        label="rank",
    ),
    _of_ranks(
        "waiting_seconds",
        "how long it has been in its present collective, 0 in none.",
        _in_call_s,
    ),
    _of_ranks(
        "awaited_seconds",
        "how long a rank of this node has waited in a collective to which this one has not come.",
        lambda rank: rank.awaited_s,
    ),
    _of_processes(
        "cpu_seconds",
        "CPU time of it and its children.",
        lambda usage: usage.cpu_s,
        is_counter=True,
    ),
    _of_processes(
        "memory_bytes",
        "resident memory of it and its children; what they share counts for each.",
        lambda usage: usage.memory_bytes,
    ),
    _of_gpus(
        "gpu_memory_bytes",
        "GPU memory of it and its children.",
        lambda use: use.memory_bytes,
    ),
    _of_gpus(
        "gpu_busy_ratio",
        "share of the last second in which its busiest GPU ran a kernel, 0 to 1.",
        lambda use: use.utilisation,
    ),
    _of_gpus(
        "gpu_temperature_celsius",
        "temperature of its hottest GPU.",
        lambda use: use.temperature_c,
    ),
    _of_gpus(
        "gpu_throttled_seconds",
        "time in which its GPU was throttled by heat, since the driver was loaded.",
        lambda use: None if use.throttled_ns is None else use.throttled_ns / SECOND,
        is_counter=True,
    ),
    _of_gpus(
        "gpu_memory_errors",
        "uncorrectable memory errors of its GPUs, since the driver was loaded.",
        lambda use: use.ecc_errors,
        is_counter=True,
    ),
    Metric(
        "gpu_xids",
        is_counter=True,
        what="XID errors that the GPUs of this node have reported in this run, by GPU.",
        values=lambda snapshot: {str(gpu): count for gpu, count in snapshot.status.xids.items()},
        label="gpu",
    ),
)


def metrics_text(snapshot: AgentSnapshot) -> str:
    """The metrics in Prometheus's text format."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, snapshot))


def _lines(metric: Metric, snapshot: AgentSnapshot) -> Iterable[str]:
    status, name = snapshot.status, metric.full_name
    labels = f'run_id="{_escaped(status.run_id)}",node="{_escaped(status.node)}"'
    yield f"# HELP {name} {metric.what}"
    yield f"# TYPE {name} {metric.kind}"
    for key, value in metric.values(snapshot).items():
        own = f'{labels},{metric.label}="{_escaped(key)}"' if metric.label else labels
        yield f"{name}{{{own}}} {_number(value)}"


def _number(value: float) -> str:
    """Times to the millisecond, and what is counted in whole numbers as such."""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
