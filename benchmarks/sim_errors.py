"""How far the message level is from queues, and the record of it that `auto` reads.

Each algorithm runs on 8, 16 and 64 ranks of three machines, with 2 and 32 lanes, by queues and by
messages. Runs by queues take from a second to minutes. Their times are kept in a record, so that
what has been run is not run again; messages are timed anew. Delete a line to have it run again.

- **fill**: runs what the record lacks, the quickest first.
- **table**: prints the errors, and writes the times by messages into the record.
"""

import csv
import time
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from measuring import KIB, MIB, Table, arguments, describe_machine

import rankwise
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with
from rankwise.sim.hardware.topology import Topology

RECORD = Path(rankwise.__file__).parent / "sim" / "ccl" / "message_errors.csv"
ALGORITHMS = (
    "ring_allreduce", "tree_allreduce", "recursive_doubling_allreduce",
    "halving_doubling_allreduce", "hierarchical_allreduce", "direct_allreduce",
    "direct_all_to_all", "pairwise_all_to_all", "hierarchical_all_to_all",
)  # fmt: skip
MACHINES = ("default", "switch8", "torus16")
RANKS = (8, 16, 64)
LANES = (2, 32)
SIZES = (64 * KIB, MIB)
SHAPES = {8: "[2, 4]", 16: "[4, 4]", 64: "[8, 8]"}


class Case(NamedTuple):
    """A collective of one size on one machine."""

    algorithm: str
    machine: str
    ranks: int
    lanes: int
    size: int

    @property
    def work(self) -> int:
        """How much there is to simulate by queues: the bytes and slots of all messages."""
        log = (self.ranks - 1).bit_length()
        of_data = {"recursive_doubling_allreduce": log, "hierarchical_all_to_all": log}
        messages = {"halving_doubling_allreduce": 2 * log, "tree_allreduce": 4}
        slots = self.size * of_data.get(self.algorithm, 2) // (4 * KIB)
        if "ring" in self.algorithm or "direct" in self.algorithm or "pair" in self.algorithm:
            messages[self.algorithm] = 2 * self.ranks
        return self.ranks * (slots + self.lanes * messages.get(self.algorithm, 2 * log))


def all_cases() -> list[Case]:
    """The grid, the quickest first."""
    grid = product(ALGORITHMS, MACHINES, RANKS, LANES, SIZES)
    return sorted((Case(*each) for each in grid), key=lambda each: each.work)


def topology_of(case: Case) -> Topology:
    """The preset with so many devices."""
    change = {"system.sips.count": str(case.ranks)}
    if case.machine == "torus16":
        change["system.sips.shape"] = SHAPES[case.ranks]
    return topology_with(case.machine, change)


def run(case: Case, fidelity: str) -> int:
    """Picoseconds of a collective."""
    engine = GraphEngine(topology_of(case), enable_data=False)
    is_all_to_all = "all_to_all" in case.algorithm

    def worker(_rank: int, torch: Any) -> None:
        tensor = torch.empty(case.size // 4, dtype="f32")
        if is_all_to_all:
            torch.distributed.all_to_all_single(torch.empty(case.size // 4, dtype="f32"), tensor)
        else:
            torch.distributed.all_reduce(tensor)

    defaults: dict[str, Any] = {"fidelity": fidelity, "n_lanes": case.lanes}
    if case.ranks > 16 and "direct" in case.algorithm:
        defaults["slot_size"] = 1024  # queues from all ranks do not fit into scratch memory
    collective = "all_to_all" if is_all_to_all else "all_reduce"
    ccl = {"defaults": defaults, "collectives": {collective: case.algorithm}}
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=case.ranks)
        return int(torch.now)


Times = dict[Case, tuple[int, int]]


def read_record() -> Times:
    """By case: picoseconds by queues, and by messages as of the last table."""
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {
        Case(name, machine, int(ranks), int(lanes), int(size)): (int(queues), int(messages))
        for name, machine, ranks, lanes, size, queues, messages in rows
    }


def write_record(times: Times) -> None:
    """Write all of it, in the order of the grid."""
    order = [Case(*each) for each in product(ALGORITHMS, MACHINES, RANKS, LANES, SIZES)]
    known = [each for each in order if each in times]
    partial = RECORD.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("algorithm", "machine", "ranks", "lanes", "bytes", "queue", "message"))
        writer.writerows((*each, *times[each]) for each in known)
    partial.replace(RECORD)


def fill(options: Namespace) -> None:
    """Run by queues what the record lacks."""
    for case in all_cases():
        if case in read_record() or (options.quick and case.work > _QUICK):
            continue
        began = time.process_time()
        queues, messages = run(case, "queue"), run(case, "message")
        write_record({**read_record(), case: (queues, messages)})
        cost = time.process_time() - began
        print(*case, f"{error_of(queues, messages):+.1f} %", f"{cost:.1f} s", flush=True)


def error_of(queues: int, messages: int) -> float:
    """Percent."""
    return 100 * (messages / queues - 1)


def show(options: Namespace) -> None:
    """Print the table of errors."""
    times = {}
    for case, (queues, messages) in read_record().items():
        is_new = not options.quick or case.work <= _QUICK
        times[case] = queues, run(case, "message") if is_new else messages
    if not options.quick:
        write_record(times)
    columns = ("algorithm", "lanes, KiB", *(f"{m}, {r}" for m in MACHINES for r in RANKS))
    table = Table("Messages against queues, percent of the time", columns, options.json)
    for algorithm, lanes, size in product(ALGORITHMS, LANES, SIZES):
        cells = []
        for machine, ranks in product(MACHINES, RANKS):
            known = times.get(Case(algorithm, machine, ranks, lanes, size))
            cells.append("-" if known is None else f"{error_of(*known):+.1f}")
        table.row(algorithm, f"{lanes}, {size // KIB}", *cells)
    for size, most in zip(SIZES, (15, 5), strict=True):
        errors = [abs(error_of(*each)) for case, each in times.items() if case.size == size]
        good = sum(each <= most for each in errors)
        worst = max(errors, default=0)
        print(f"{size // KIB} KiB: {good} of {len(errors)} within {most} %, largest {worst:.1f} %")


_QUICK = 1_000


def main() -> None:
    """Fill the record, print the table."""
    options = arguments(__doc__, repetitions=1, parts=("fill", "table"))
    describe_machine()
    if "fill" in options.only:
        fill(options)
    if "table" in options.only:
        show(options)


if __name__ == "__main__":
    main()
