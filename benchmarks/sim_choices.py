"""The algorithm that `auto` chooses, and the best of all, over a grid of sizes, ranks and networks.

The judge is the level of queues. Slots are so large that a ring has about `SLOTS` of them, and at
least 4 KiB: more than `auto` simulates by queues itself, so that the larger sizes are chosen by
messages and judged by queues. 64 ranks have 4 lanes. What has more than `JUDGED_SLOTS` slots is
judged by messages, as it is chosen; such cases are counted apart.

Algorithms of one time by messages, to the picosecond, are the same algorithm on that network, and
judged once. The last lines say how often the choice was the best, and how much slower it was at
most. `--kept FILE` keeps times by queues, so that the grid goes on where it stopped; the parts of
`--only` are numbers of ranks.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from measuring import Table, apart, arguments, describe_machine

from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.planning import devices_of
from rankwise.sim.benches.session import topology_with
from rankwise.sim.ccl.choice import CLOSE, AlgorithmTrial, Chooser, Wanted
from rankwise.sim.ccl.configuration import CollectiveConfiguration
from rankwise.sim.ccl.fidelity import has_more_slots
from rankwise.sim.hardware import HardwareMachine, parse_topology
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.runtime.collective_calls import wanted_of
from rankwise.sim.triton.dtypes import dtype_named

SIZES = (4 << 10, 32 << 10, 256 << 10, 4 << 20)
NETWORKS = ("line", "switch", "torus", "nodes on rails", "fat tree 1:2")
RANKS = (4, 16, 64)
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather")
SLOTS, JUDGED_SLOTS = 24_000, 150_000
SLOT_LEAST, CHUNKS = 4 << 10, 4
LARGE, MANY = 1 << 20, 16
WITHIN = 1.6
"""What takes longer than so many times the fastest, by messages, is not judged."""


class Case(NamedTuple):
    """A collective on a network; `size` is what a rank has, in bytes."""

    collective: str
    network: str
    ranks: int
    size: int


class Verdict(NamedTuple):
    """Picoseconds of each algorithm that may be the best, and the choice of `auto`."""

    times: dict[str, int]
    chosen: str
    is_by_queues: bool
    is_chosen_by_messages: bool


def network(name: str, ranks: int) -> Topology:
    """A network of so many devices."""
    if name in {"line", "switch"}:
        preset = {"line": "default", "switch": "switch8"}[name]
        return topology_with(preset, {"system.sips.count": str(ranks)})
    if name == "torus":
        rows = int(ranks**0.5)
        shape = f"[{rows}, {ranks // rows}]"
        return topology_with(
            "torus16", {"system.sips.count": str(ranks), "system.sips.shape": shape}
        )
    outer: dict[str, Any] = {"graph": "rails"}
    if name.startswith("fat"):
        outer = {"graph": "fat_tree", "spines": 2, "oversubscription": 2}
    inside = {4: 2, 16: 4, 64: 8}[ranks]
    levels = [
        {"name": "inside", "count": inside, "graph": "switch",
         "link": {"bandwidth_GBps": 450, "latency_ns": 500}},
        {"name": "outside", "count": ranks // inside,
         "link": {"bandwidth_GBps": 50, "latency_ns": 2000}, **outer},
    ]  # fmt: skip
    tree = {"like": "switch8", "system": {"sips": {"levels": levels}}}
    return parse_topology(yaml.safe_dump(tree), name)


class KnowingChooser(Chooser):
    """A chooser that simulates each algorithm by queues once, for the choice and for the judge."""

    def __init__(
        self, machine: HardwareMachine, ccl: CollectiveConfiguration, known: dict[str, int]
    ) -> None:
        super().__init__(machine, ccl)
        self._by_name, self._by_time = known, dict[int, int]()

    def by_queues(self, trial: AlgorithmTrial, wanted: Wanted) -> int:
        """Picoseconds; those that are known, or of an algorithm that is the same here."""
        name = trial.algorithm.name
        if name not in self._by_name:
            if trial.time not in self._by_time:
                self._by_time[trial.time] = super().by_queues(trial, wanted)
            self._by_name[name] = self._by_time[trial.time]
        return self._by_name[name]


def defaults_of(case: Case) -> dict[str, Any]:
    """Settings with which its collectives can be simulated by queues."""
    many = {"buffer_kind": "hbm", "n_lanes": 4} if case.ranks > MANY else {}
    if case.size < LARGE:
        return many
    slot_size = SLOT_LEAST
    while 2 * (case.ranks - 1) * case.size > 1.5 * SLOTS * slot_size:
        slot_size *= 2
    chunk = slot_size // CHUNKS
    return {"buffer_kind": "hbm", **many, "slot_size": slot_size, "vc_chunk_size": chunk}


def judged(case: Case, kept: dict[str, int]) -> Verdict:
    """What `auto` chooses, and how long the algorithms take; times that are kept count."""
    engine = GraphEngine(network(case.network, case.ranks), enable_data=False)
    ccl = {"defaults": defaults_of(case)}
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        elements = case.size // 4 // (1 if case.collective == "all_reduce" else case.ranks)
        devices = devices_of(torch, case.ranks)
        dtype = dtype_named("f32")
        wanted = wanted_of(case.collective, elements, 0, devices, dtype, ReduceOp.SUM)
        chooser = KnowingChooser(engine.machine, torch.ccl, kept)
        trials = chooser.trials(wanted)
        trials = [each for each in trials if each.time <= WITHIN * trials[0].time]
        chosen = chooser.fastest(wanted).name
        close = [each for each in trials if each.time <= CLOSE * trials[0].time]
        by_messages = len(close) == 1 or not all(chooser.is_small(each, wanted) for each in close)

        def is_small(trial: AlgorithmTrial) -> bool:
            slot_size = trial.algorithm.queues.slot_size
            return not has_more_slots(
                trial.plan, wanted.work.item_bytes, trial.layout.lane_count, slot_size, JUDGED_SLOTS
            )

        if not all(map(is_small, trials)):
            times = {each.algorithm.name: each.time for each in trials}
            return Verdict(times, chosen, is_by_queues=False, is_chosen_by_messages=by_messages)
        times = {each.algorithm.name: chooser.by_queues(each, wanted) for each in trials}
        return Verdict(times, chosen, is_by_queues=True, is_chosen_by_messages=by_messages)


class Kept:
    """Times by queues, in a file of one case a line."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.times: dict[Case, dict[str, int]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.times[Case(*entry["case"])] = entry["times"]

    def add(self, case: Case, verdict: Verdict) -> None:
        """Keep what was simulated."""
        if self._path is not None and verdict.is_by_queues:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, "times": verdict.times}) + "\n")


def cases(ranks: Sequence[int], *, is_quick: bool) -> Iterator[Case]:
    """All cases, few ranks and small sizes first."""
    sizes = SIZES[:1] if is_quick else SIZES
    for count, size, collective, name in product(ranks, sizes, COLLECTIVES, NETWORKS):
        yield Case(collective, name, count, size)


def own_option() -> Path | None:
    """The file of `--kept`, which is taken out of the arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kept", type=Path)
    own, sys.argv[1:] = parser.parse_known_args()
    path: Path | None = own.kept
    return path


def main() -> None:
    """Print the grid."""
    kept = Kept(own_option())
    parts = tuple(map(str, RANKS))
    options = arguments(__doc__, repetitions=1, parts=parts, quick_parts=parts[:1])
    describe_machine()
    columns = (
        "collective",
        "network",
        "ranks",
        "KiB",
        "by",
        "judge",
        "chosen",
        "best",
        "us",
        "/ best",
        "s",
    )
    table = Table("What auto chooses", columns, options.json)
    ratios: list[float] = []
    of_messages: list[float] = []
    by_construction = 0
    for case in cases([int(part) for part in options.only], is_quick=options.quick):
        began = time.monotonic()
        verdict = apart(partial(judged, case, kept.times.get(case, {})))
        kept.add(case, verdict)
        times, chosen, is_by_queues, by_messages = verdict
        best = min(times, key=times.__getitem__)
        ratio = times[chosen] / times[best] if chosen in times else float("inf")
        if is_by_queues:
            ratios.append(ratio)
            of_messages += [ratio] if by_messages else []
        else:
            by_construction += 1
        table.row(
            case.collective, case.network, str(case.ranks), f"{case.size >> 10:,}",
            "messages" if by_messages else "queues", "queues" if is_by_queues else "messages",
            chosen, best,
            f"{times[best] / 1e6:.2f}", f"{ratio:.3f}", f"{time.monotonic() - began:.0f}",
        )  # fmt: skip
    for name, some in (("all", ratios), ("chosen by messages", of_messages)):
        right = sum(ratio == 1 for ratio in some)
        print(
            f"\n{name}, judged by queues: the best in {right} of {len(some)} cases;"
            f" {max(some, default=1):.3f} times the best at most."
        )
    print(f"\n{by_construction} more were chosen and judged by messages.")


if __name__ == "__main__":
    main()
