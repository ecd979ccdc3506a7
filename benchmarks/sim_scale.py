"""Collectives of up to 4,096 ranks on the simulated machine, by messages: CPU and memory.

- **collectives**: algorithms x ranks x sizes, each run in a process of its own: CPU seconds without
  Python's start, and the peak of memory. One switch; hierarchical algorithms on nodes of 8 with a
  rail for each place. Wanted: under 20 s and 1 GB each.
- **program**: a user's program of 256 ranks, a data-parallel and a tensor-parallel step of layers:
  its cost from the program itself.
"""

import resource
import time
from functools import partial
from itertools import product
from typing import Any

import yaml
from measuring import Table, apart, arguments, describe_machine, seconds

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.topology import Topology

RANKS = (64, 256, 1_024, 4_096)
SIZES = (64 << 10, 32 << 20, 1 << 30)
ALGORITHMS = (
    ("ring_allreduce", "switch8"), ("tree_allreduce", "switch8"),
    ("halving_doubling_allreduce", "switch8"), ("recursive_doubling_allreduce", "switch8"),
    ("hierarchical_allreduce", "nodes of 8"), ("direct_all_to_all", "switch8"),
    ("pairwise_all_to_all", "switch8"), ("hierarchical_all_to_all", "nodes of 8"),
)  # fmt: skip
PROGRAM_RANKS = 256


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


def cost_of(algorithm: str, machine: str, ranks: int, size: int) -> tuple[float, int, int]:
    """CPU seconds, MiB at the peak, and simulated picoseconds of one collective."""
    began = time.process_time()
    collective = "all_to_all" if "all_to_all" in algorithm else "all_reduce"
    defaults: dict[str, Any] = {"fidelity": "message"}
    if collective == "all_to_all":  # queues from all ranks do not fit into scratch memory
        defaults["buffer_kind"] = "hbm"
    ccl = {"defaults": defaults, "collectives": {collective: algorithm}}

    def worker(_rank: int, torch: Any) -> None:
        # An all-to-all needs an element for each other rank.
        tensor = torch.empty(max(size // 4, ranks), dtype="f32")
        if collective == "all_reduce":
            torch.distributed.all_reduce(tensor)
        else:
            torch.distributed.all_to_all_single(torch.empty(tensor.numel(), dtype="f32"), tensor)

    engine = GraphEngine(topology_of(machine, ranks), enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        simulated = int(torch.now)
    return time.process_time() - began, _peak(), simulated


def program_cost(ranks: int, layers: int) -> tuple[float, int, int]:
    """The same of a user's program: gradients over rails, activations inside of nodes."""
    began = time.process_time()
    per_node = 8

    def worker(rank: int, torch: Any) -> None:
        dist = torch.distributed
        inside = [
            dist.new_group(list(range(first, first + per_node)))
            for first in range(0, ranks, per_node)
        ][rank // per_node]
        across = [dist.new_group(list(range(place, ranks, per_node))) for place in range(per_node)][
            rank % per_node
        ]
        activations = torch.empty(2 << 20, dtype="f16")
        gradients = torch.empty(8 << 20, dtype="f16")
        for _ in range(layers):
            dist.all_reduce(activations, group=inside)
            dist.all_reduce(gradients, group=across)

    ccl = {"defaults": {"fidelity": "message"}}
    engine = GraphEngine(topology_of("nodes of 8", ranks), enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        simulated = int(torch.now)
    return time.process_time() - began, _peak(), simulated


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__, repetitions=1, parts=("collectives", "program"))
    describe_machine()
    if "collectives" in options.only:
        columns = ("algorithm", "machine", "ranks", *(f"{size >> 10:,} KiB" for size in SIZES))
        table = Table("Collectives by messages: CPU, peak memory", columns, options.json)
        for (algorithm, machine), ranks in product(ALGORITHMS, RANKS):
            if options.quick and ranks > RANKS[0]:
                continue
            told = []
            for size in SIZES:
                cpu, memory, _ = apart(partial(cost_of, algorithm, machine, ranks, size))
                told.append(f"{seconds(cpu)}, {memory:,} MiB")
            table.row(algorithm, machine, f"{ranks:,}", *told)
    if "program" in options.only:
        columns = ("ranks", "layers", "CPU", "peak", "simulated")
        table = Table("A user's program", columns, options.json)
        for layers in (2,) if options.quick else (2, 8):
            ranks = 64 if options.quick else PROGRAM_RANKS
            cpu, memory, simulated = apart(partial(program_cost, ranks, layers))
            table.row(
                str(ranks), str(layers), seconds(cpu), f"{memory} MiB", f"{simulated / 1e6:,.1f} us"
            )


if __name__ == "__main__":
    main()
