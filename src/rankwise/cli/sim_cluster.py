"""`rankwise sim cluster`: a cluster of agents in virtual time, and what goes wrong there.

Exit codes: 0 every invariant held, also if simulated jobs failed; 1 one was broken; 2 a
plan or an option that cannot be used, and nothing has run.
"""

import gc
import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rankwise.base.errors import ConfigError, SimulationError
from rankwise.base.units import SECOND, between, format_bytes, format_duration
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.node_flags import node_counts

if TYPE_CHECKING:
    from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
    from rankwise.drivers.virtual.cluster.simulator import ClusterRun

    PlanOf = Callable[[int], ClusterPlan]

WHY_MAX = 60
ROUNDS_SHOWN = 12

Decorator = Callable[[Callable[..., int]], Callable[..., int]]


def _count(name: str, least: int, most: int | None = None, **attributes: Any) -> Decorator:
    return click.option(name, metavar="N", type=click.IntRange(least, most), **attributes)


@click.command(
    "cluster",
    short_help="Simulate a cluster of agents, with faults.",
    context_settings=CONTEXT_SETTINGS,
)
@_count(
    "--nodes",
    1,
    100_000,
    help="Number of nodes. [default: those of --nnodes and --spares; 8 without --nnodes]",
)
@click.option(
    "--nnodes", metavar="N|MIN:MAX", help="Number of nodes that run the job. [default: all]"
)
@_count("--spares", 0, help="Number of spare nodes. [default: 0]")
@_count("--nproc-per-node", 1, help="Workers of each node. [default: 1]")
@_count("--max-restarts", 0, help="Number of restarts. [default: 0]")
@click.option(
    "--faults",
    metavar="FAULT|PLAN.yaml",
    multiple=True,
    help="A fault, such as kill:node=1,at=15s,back_after=4s or "
    "partition:nodes=0+3,at=25s,lasts=8s; or a file with a plan. Repeatable. See "
    "docs/development/cluster-simulation.md.",
)
@click.option(
    "--standalone",
    "--alone",
    "is_alone",
    is_flag=True,
    help="One node without a store, like 'rankwise run' without --nnodes.",
)
@click.option("--random", "is_random", is_flag=True, help="Draw the whole plan from the seed.")
@click.option(
    "--seed", metavar="N", type=int, default=0, help="Seed of everything random. [default: 0]"
)
@_count("--seeds", 1, default=1, help="Number of seeds to run, starting with --seed. [default: 1]")
@click.option("--journal", metavar="FILE", help="Write every fact and order as JSON lines.")
@click.option(
    "--story", is_flag=True, help="With --standalone, print each fact and order in words."
)
@click.option("--plan-only", is_flag=True, help="Print the plan as JSON, and run nothing.")
def cluster(
    *,
    nodes: int | None,
    nnodes: str | None,
    spares: int | None,
    nproc_per_node: int | None,
    max_restarts: int | None,
    faults: tuple[str, ...],
    is_alone: bool,
    is_random: bool,
    seed: int,
    seeds: int,
    journal: str | None,
    story: bool,
    plan_only: bool,
) -> int:
    """Simulate a cluster: agents, a store, a network, and faults.

    The agents are those of a real cluster. After every step, checkers look for a broken rule. A
    seed that breaks one is printed with the command that repeats it.
    """
    for option, is_given in (("--journal", journal is not None), ("--story", story)):
        if is_given and seeds > 1:
            raise ConfigError(f"{option} is for one run, and --seeds makes several")
    if story and not is_alone:
        raise ConfigError("--story shows one node: give --standalone, or look into --journal")
    given = {
        "--nodes": nodes,
        "--nnodes": nnodes,
        "--spares": spares,
        "--nproc-per-node": nproc_per_node,
        "--max-restarts": max_restarts,
        "--faults": faults or None,
    }
    if is_random and (
        named := ", ".join(name for name, value in given.items() if value is not None)
    ):
        raise ConfigError("--random draws the whole plan from the seed", hint=f"leave out {named}")
    nodes_min, nodes_max = (None, None) if nnodes is None else node_counts(nnodes, 0)
    plan: ClusterPlan | None = None
    if not is_random:
        from rankwise.drivers.virtual.cluster.plan_file import load_plan  # noqa: PLC0415  # not for --help

        if nodes is None and nodes_max is not None and not is_alone:
            nodes = nodes_max + (spares or 0)
        plan = load_plan(
            faults,
            nodes=nodes,
            nodes_min=nodes_min,
            nodes_max=nodes_max,
            spares=spares,
            per_node=nproc_per_node,
            restarts_max=max_restarts,
            is_alone=is_alone or None,
        )
    plan_of = _drawn(is_alone=is_alone) if plan is None else lambda _: plan
    if plan_only:
        click.echo(msgspec.json.format(msgspec.json.encode(plan_of(seed))))
        return 0
    again = _command(given, is_alone=is_alone, is_random=is_random)
    if seeds > 1:
        return _run_many(plan_of, range(seed, seed + seeds), again)
    return _run_one(plan_of(seed), seed, journal, again, tells=story)


def _drawn(*, is_alone: bool) -> "PlanOf":
    """What draws the plan of a seed."""
    if is_alone:
        from rankwise.drivers.virtual import random_plans as gangs  # noqa: PLC0415  # not for --help

        return gangs.random_plan
    from rankwise.drivers.virtual.cluster import random_plans as clusters  # noqa: PLC0415  # likewise

    return clusters.random_plan


def _command(
    given: dict[str, str | int | tuple[str, ...] | None], *, is_alone: bool, is_random: bool
) -> str:
    """The command of this run, but for its seed."""
    words = ["rankwise", "sim", "cluster"]
    for name, value in given.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [] if each is None else [name, str(each)]
    words += ["--standalone"] * is_alone + ["--random"] * is_random
    return shlex.join(words)


def _run_one(
    plan: "ClusterPlan", seed: int, journal: str | None, again: str, *, tells: bool
) -> int:
    from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator  # noqa: PLC0415  # not for --help

    simulator = ClusterSimulator(plan, seed, keeps_journal=tells or journal is not None)
    gc.disable()  # what a large simulation allocates lives as long as it does
    began = time.perf_counter()
    broken: SimulationError | None = None
    try:
        run = simulator.run()
    except SimulationError as error:
        broken = error
    elapsed = time.perf_counter() - began
    gc.enable()
    if journal is not None:
        _write_journal(journal, simulator.journal.lines())
    if tells:
        from rankwise.drivers.virtual.story import story  # noqa: PLC0415  # not for --help

        click.echo(story(simulator.journal.lines()))
    if broken is not None:
        click.echo(f"seed {seed}: {broken}\nagain: {again} --seed {seed}", err=True)
        return 1
    click.echo(_summary(plan, run, elapsed))
    return 0


def _run_many(plan_of: "PlanOf", seeds: range, again: str) -> int:
    from rankwise.cli.sim_progress import counted  # noqa: PLC0415  # not for --help
    from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator  # noqa: PLC0415  # not for --help

    began = time.perf_counter()
    ends: dict[str, int] = {}
    broken = 0
    with counted(len(seeds), "cluster", "seed") as progress:
        for done, seed in enumerate(seeds):
            progress(done, done)
            try:
                run = ClusterSimulator(plan_of(seed), seed, keeps_journal=False).run()
            except SimulationError as error:
                broken += 1
                click.echo(f"seed {seed}: {error}\nagain: {again} --seed {seed}", err=True)
                continue
            status = "without a verdict" if run.verdict is None else str(run.verdict.status)
            ends[status] = ends.get(status, 0) + 1
    elapsed = time.perf_counter() - began
    shown = ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))
    click.echo(
        f"{len(seeds)} clusters in {elapsed:.1f} s: {shown or 'none ended'}; {broken} broken"
    )
    return 1 if broken else 0


def _write_journal(path: str, lines: bytes) -> None:
    try:
        with open(path, "wb") as file:  # noqa: PTH123  # a plain name, as given
            file.write(lines)
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from error
    click.echo(f"journal: {path} (rankwise replay {shlex.quote(path)})", err=True)


def _summary(plan: "ClusterPlan", run: "ClusterRun", elapsed: float) -> str:
    config = plan.rendezvous
    verdict = run.verdict
    traffic = f"{format_bytes(run.traffic.bytes_total)} in {run.traffic.messages:,} messages"
    least, most = config.nodes_min, config.nodes_max
    who = f"of which {least if least == most else f'{least} to {most}'} run"
    rounds = len(run.rounds)
    if plan.is_alone:
        who, rounds = "alone", max((end.last_round + 1 for end in run.finished.values()), default=0)
    lines = [
        f"nodes             {plan.nodes}, {who}",
        f"verdict           {_verdict(run)}",
        f"rounds, restarts  {rounds}, {0 if verdict is None else verdict.restarts}",
        f"virtual time      {run.ended_at / SECOND:.3f} s",
        f"real time         {elapsed:.2f} s for {run.steps:,} steps",
    ]
    if plan.is_alone:
        return "\n".join(lines)
    lines += [
        f"through the store {traffic}",
        "",
        f"{'round':>5} {'nodes':>6} {'began at':>10} {'all had ranks':>14} {'ended at':>10}  why",
    ]
    all_records = list(run.rounds.values())
    hidden = len(all_records) - ROUNDS_SHOWN
    for records in all_records[:ROUNDS_SHOWN]:
        began, all_began, ended = records.running_at, records.all_began_at, records.dissolved_at
        took = "-" if all_began is None else format_duration(between(began, all_began))
        until = "-" if ended is None else f"{ended / SECOND:.3f} s"
        why = records.ended_because[:WHY_MAX]
        number, members = records.record.number, len(records.record.members)
        line = f"{number:>5} {members:>6} {began / SECOND:>8.3f} s {took:>14} {until:>10}  {why}"
        lines.append(line.rstrip())
    if hidden > 0:
        lines.append(f"      and {hidden} more")
    return "\n".join(lines)


def _verdict(run: "ClusterRun") -> str:
    verdict = run.verdict
    if verdict is None:
        reasons = sorted(
            {
                finish.detail or (finish.refusal.why if finish.refusal else "")
                for finish in run.finished.values()
            }
        )
        return f"no node learned one: {'; '.join(reasons)}"
    words = [str(verdict.status)]
    if verdict.root is not None:
        what = verdict.root.error.type if verdict.root.error else verdict.root.exit
        words.append(f"rank {verdict.root.rank} on {verdict.host} ({what or verdict.root.detail})")
    if verdict.detail:
        words.append(verdict.detail)
    return ": ".join(words)
