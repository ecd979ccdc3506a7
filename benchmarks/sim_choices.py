"""The algorithm that `auto` chooses, and the best of all, over a grid of sizes, ranks and networks.

The truth is simulated queue by queue up to 16,384 slots of each algorithm, as `auto` of `fidelity`
does; beyond, by messages. The last lines say how often the choice was the best, and how much slower
it was at most.
"""

from itertools import product
from typing import Any

import yaml
from measuring import Table, arguments, describe_machine

from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.planning import devices_of
from rankwise.sim.benches.session import topology_with
from rankwise.sim.ccl.choice import Chooser
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.runtime.meetings import wanted_of
from rankwise.sim.triton.dtypes import dtype_named

SIZES = (4 << 10, 32 << 10, 256 << 10, 16 << 20, 256 << 20)
NETWORKS = ("line", "switch", "torus", "nodes on rails", "fat tree 1:2")
RANKS = (4, 16)
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather")


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
    inside = 2 if ranks == RANKS[0] else 4
    levels = [
        {"name": "inside", "count": inside, "graph": "switch",
         "link": {"bandwidth_GBps": 450, "latency_ns": 500}},
        {"name": "outside", "count": ranks // inside,
         "link": {"bandwidth_GBps": 50, "latency_ns": 2000}, **outer},
    ]  # fmt: skip
    tree = {"like": "switch8", "system": {"sips": {"levels": levels}}}
    return parse_topology(yaml.safe_dump(tree), name)


def main() -> None:
    """Print the grid."""
    options = arguments(__doc__, repetitions=1)
    describe_machine()
    columns = ("collective", "network", "ranks", "KiB", "by", "chosen", "best", "us", "/ best")
    table = Table("What auto chooses", columns, options.json)
    ratios: list[float] = []
    sizes, ranks = (SIZES[:1], RANKS[:1]) if options.quick else (SIZES, RANKS)
    for collective, name, count, size in product(COLLECTIVES, NETWORKS, ranks, sizes):
        engine = GraphEngine(network(name, count), enable_data=False)
        with RuntimeContext(engine=engine, ccl={}) as torch:
            elements = size // 4 // (1 if collective == "all_reduce" else count)
            wanted = wanted_of(
                collective, elements, 0, devices_of(torch, count), dtype_named("f32"), ReduceOp.SUM
            )
            chooser = Chooser(engine.machine, torch.ccl)
            trials = chooser.trials(wanted)
            # What takes more than twice as long by messages is not the best.
            trials = [each for each in trials if each.time <= 2 * trials[0].time]
            is_exact = all(chooser.is_small(each, wanted) for each in trials)
            times = {
                each.algorithm.name: chooser.by_queues(each, wanted) if is_exact else each.time
                for each in trials
            }
            chosen = chooser.fastest(wanted).name
            assert chosen in times, "it is among those that messages say are fast"
        best = min(times, key=times.__getitem__)
        ratios.append(times[chosen] / times[best])
        table.row(
            collective, name, str(count), f"{size >> 10:,}", "queues" if is_exact else "messages",
            chosen, best, f"{times[chosen] / 1e6:.2f}", f"{ratios[-1]:.3f}",
        )  # fmt: skip
    right = sum(ratio == 1 for ratio in ratios)
    print(
        f"\nThe best in {right} of {len(ratios)} cases; {max(ratios):.2f} times the best at most."
    )


if __name__ == "__main__":
    main()
