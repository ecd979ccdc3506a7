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

from measuring import Table, apart, arguments, describe_machine, seconds

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with

ALGORITHMS = (
    "halving_doubling_allreduce", "recursive_doubling_allreduce", "tree_allreduce",
    "hierarchical_allreduce",
)  # fmt: skip
MACHINES = (("default", 8), ("switch8", 8), ("torus16", 16))
SIZES = (64 << 10, 1 << 20)
LANES = (2, 32)
RANKS = (64, 256, 1_024, 4_096)
SCALE_SIZES = (64 << 10, 1 << 20, 1 << 30)
RANKS_MOST = {"hierarchical_allreduce": 256}
"""Programs of more ranks have millions of instructions."""


def run(case: tuple[str, str, int, int], fidelity: str, lanes: int) -> int:
    """Picoseconds of an all-reduce: algorithm, machine, ranks, and bytes of each rank."""
    algorithm, machine, ranks, size = case
    engine = GraphEngine(
        topology_with(machine, {} if machine == "torus16" else {"system.sips.count": str(ranks)}),
        enable_data=False,
    )

    def worker(_rank: int, torch: Any) -> None:
        torch.distributed.all_reduce(torch.empty(size // 4, dtype="f32"), algorithm=algorithm)

    ccl = {"defaults": {"fidelity": fidelity, "n_lanes": lanes}}
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        return int(torch.now)


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
    columns = ("algorithm", "ranks", "MiB per rank", "CPU", "memory, MiB")
    table = Table("Messages at scale, on one switch", columns, options.json)
    for algorithm, ranks, size in product(ALGORITHMS, RANKS, SCALE_SIZES):
        if (options.quick and ranks > RANKS[0]) or ranks > RANKS_MOST.get(algorithm, ranks):
            continue
        cpu, memory = apart(partial(cost_of, (algorithm, "switch8", ranks, size)))
        told = f"{size / (1 << 20):g}"
        table.row(algorithm, f"{ranks:,}", told, seconds(cpu), f"{memory:,}")


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
