"""Collectives from their programs, by messages: how far they are from queues, and what they cost.

- **error**: simulated time by messages against queues, over a grid of algorithms and machines.
- **scale**: CPU seconds and memory of whole runs, each in a process of its own.
"""

import resource
import time
from argparse import Namespace
from functools import partial
from itertools import product
from typing import Any

import yaml
from measuring import Table, apart, arguments, describe_machine, seconds

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.topology import Topology

ALGORITHMS = (
    "halving_doubling_allreduce", "recursive_doubling_allreduce", "tree_allreduce",
    "hierarchical_allreduce",
)  # fmt: skip
MACHINES = (("default", 8), ("switch8", 8), ("torus16", 16))
SIZES = (64 << 10, 1 << 20)
LANES = (2, 32)
RANKS = (64, 256, 1_024, 4_096)
SCALE_SIZES = (64 << 10, 1 << 20, 1 << 30)
AT_SCALE = (
    ("ring_allreduce", "switch8"), ("tree_allreduce", "switch8"),
    ("recursive_doubling_allreduce", "switch8"), ("halving_doubling_allreduce", "switch8"),
    ("hierarchical_allreduce", "nodes of 8"), ("direct_all_to_all", "switch8"),
    ("pairwise_all_to_all", "switch8"), ("hierarchical_all_to_all", "nodes of 8"),
)  # fmt: skip


def run(case: tuple[str, str, int, int], fidelity: str, lanes: int) -> int:
    """Picoseconds of an all-reduce: algorithm, machine, ranks, and bytes of each rank."""
    algorithm, machine, ranks, size = case
    engine = GraphEngine(topology_of(machine, ranks), enable_data=False)
    collective = "all_to_all" if "all_to_all" in algorithm else "all_reduce"

    def worker(_rank: int, torch: Any) -> None:
        tensor = torch.empty(size // 4, dtype="f32")
        if collective == "all_reduce":
            torch.distributed.all_reduce(tensor)
        else:
            torch.distributed.all_to_all_single(torch.empty(size // 4, dtype="f32"), tensor)

    defaults: dict[str, Any] = {"fidelity": fidelity, "n_lanes": lanes}
    if collective == "all_to_all":  # queues from all ranks do not fit into scratch memory
        defaults["buffer_kind"] = "hbm"
    ccl = {"defaults": defaults, "collectives": {collective: algorithm}}
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        return int(torch.now)


def topology_of(machine: str, ranks: int) -> Topology:
    """A preset with so many devices, or nodes of 8 on rails."""
    if machine != "nodes of 8":
        change = {} if machine == "torus16" else {"system.sips.count": str(ranks)}
        return topology_with(machine, change)
    levels = [
        {"name": "inside", "count": 8, "graph": "switch",
         "link": {"bandwidth_GBps": 450, "latency_ns": 500}},
        {"name": "rail", "count": ranks // 8, "graph": "rails",
         "link": {"bandwidth_GBps": 50, "latency_ns": 2000}},
    ]  # fmt: skip
    tree = {"like": "switch8", "system": {"sips": {"levels": levels}}}
    return parse_topology(yaml.safe_dump(tree), machine)


def cost_of(case: tuple[str, str, int, int]) -> tuple[float, int]:
    """CPU seconds, and MiB at the peak."""
    began = time.process_time()
    run(case, "message", 0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return time.process_time() - began, memory


def show_errors(options: Namespace) -> None:
    """Messages against queues."""
    columns = ("algorithm", "machine, ranks", "lanes", "KiB", "queues, us", "messages, us", "error")
    table = Table("Messages against queues", columns, options.json)
    for algorithm, (machine, ranks), lanes, size in product(ALGORITHMS, MACHINES, LANES, SIZES):
        if options.quick and (lanes, size) != (2, SIZES[0]):
            continue
        case = (algorithm, machine, ranks, size)
        queues, messages = (run(case, level, lanes) for level in ("queue", "message"))
        error = f"{100 * (messages / queues - 1):+.1f} %"
        times = (f"{queues / 1e6:.2f}", f"{messages / 1e6:.2f}")
        table.row(algorithm, f"{machine}, {ranks}", str(lanes), str(size >> 10), *times, error)


def show_scale(options: Namespace) -> None:
    """CPU and memory."""
    columns = ("algorithm", "machine", "ranks", *(f"{size >> 10:,} KiB" for size in SCALE_SIZES))
    table = Table("Messages at scale: CPU and peak memory", columns, options.json)
    for (algorithm, machine), ranks in product(AT_SCALE, RANKS):
        if options.quick and ranks > RANKS[0]:
            continue
        told = []
        for size in SCALE_SIZES:
            cpu, memory = apart(partial(cost_of, (algorithm, machine, ranks, size)))
            told.append(f"{seconds(cpu)}, {memory:,} MiB")
        table.row(algorithm, machine, f"{ranks:,}", *told)


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__, repetitions=1, parts=("error", "scale"))
    describe_machine()
    parts = options.only or ("error", "scale")
    if "error" in parts:
        show_errors(options)
    if "scale" in parts:
        show_scale(options)


if __name__ == "__main__":
    main()
