"""Large collectives by messages: what they cost, and how far the levels of fidelity differ.

CPU seconds of whole runs of `ccl_allreduce`, without Python's own start:

- **size**: rings of 256, 1,024 and 4,096 ranks, and of a gigabyte.
- **numbers**: a ring with numbers, between the barriers around it. Making the data is left out: its
  pages take the system 0.3 to 5.5 s.
- **levels**: the same ring by queues and by messages, over a grid of machines and sizes.
"""

import resource
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from measuring import Table, apart, arguments, describe_machine, seconds

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import BenchSession, BenchSettings, topology_with
from rankwise.sim.reporting.results import BenchResult


class Ring(NamedTuple):
    """A machine and its data; no ranks are those of the preset."""

    topology: str
    ranks: int | None
    elements: int
    dtype: str = "f16"
    has_data: bool = False
    wanted: str = ""


LARGE = (
    Ring("default", 256, 1 << 16, wanted="1 s"),
    Ring("default", 1_024, 1 << 16, wanted="4 s"),
    Ring("default", 4_096, 1 << 16, wanted="20 s"),
    Ring("default", 64, 1 << 29, wanted="1 s"),
    Ring("pod64", None, 1 << 29, wanted="1 s"),
)
WITH_NUMBERS = Ring("default", 16, 1 << 24, "f32", has_data=True, wanted="2 s, 3 times the data")
GRID = (
    *(Ring("default", 4, 1 << power) for power in (14, 16, 18, 20)),
    *(Ring("default", 16, 1 << power) for power in (10, 14, 16, 17, 18, 19)),
    Ring("default", 32, 1 << 17),
    Ring("default", 64, 1 << 18),
    Ring("default", 128, 1 << 16),
    *(Ring("switch8", None, 1 << power) for power in (15, 19)),
    *(Ring("torus16", None, elements) for elements in (1 << 12, 1 << 16, 3 << 16, 1 << 19)),
    *(Ring("pod64", None, elements) for elements in (1 << 12, 1 << 16, 1 << 18, 3 << 17)),
)


def run(ring: Ring, fidelity: str) -> tuple[BenchResult, float]:
    """What a ring measured, and the CPU seconds that it took."""
    fields = {"elements": str(ring.elements), "dtype": ring.dtype, "fidelity": fidelity}
    if ring.ranks is not None:
        fields["system.sips.count"] = str(ring.ranks)
    settings = BenchSettings(
        program="ccl_allreduce", topology=ring.topology, fields=fields, has_data=ring.has_data
    )
    start = time.process_time()
    (result,) = BenchSession(settings).run().results
    return result, time.process_time() - start


def size(table: Table, rings: Sequence[Ring]) -> None:
    """What large rings cost."""
    for ring in rings:
        result, took, peak = apart(partial(_measured, ring))
        numbers = "numbers" if ring.has_data else "timing only"
        table.row(
            f"{ring.topology}, {result.case}, {numbers}",
            result.fidelity,
            f"{result.time_ps / 1e6:,.1f} us",
            seconds(took),
            f"{peak:.0f} MiB",
            ring.wanted,
        )


def _measured(ring: Ring) -> tuple[BenchResult, float, float]:
    result, took = run(ring, "auto")
    return result, took, _peak()


def _peak() -> float:
    """Mebibytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def numbers(table: Table, ring: Ring) -> None:
    """What a ring with numbers costs, without making its data."""
    took, peak = apart(partial(_measured_with_numbers, ring))
    case = f"{ring.topology}, {ring.ranks} ranks x {ring.elements} {ring.dtype}"
    table.row(case, seconds(took), f"{peak:.0f} MiB", ring.wanted)


def _measured_with_numbers(ring: Ring) -> tuple[float, float]:
    assert ring.ranks is not None, "the preset's number of devices is changed"
    topology = topology_with(ring.topology, {"system.sips.count": str(ring.ranks)})
    clocks: list[float] = []

    def worker(rank: int, torch: Any) -> None:
        tensor = torch.full((ring.elements,), rank + 1, dtype=ring.dtype)
        torch.distributed.barrier()
        clocks.append(time.process_time())  # the first one that is through, and then the first
        torch.distributed.all_reduce(tensor)
        torch.distributed.barrier()
        clocks.append(time.process_time())

    with RuntimeContext(GraphEngine(topology), ccl={}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ring.ranks)
    return clocks[ring.ranks] - clocks[0], _peak()


def levels(table: Table, rings: Sequence[Ring]) -> None:
    """How far messages are from queues."""
    for ring in rings:
        (exact, slow), (other, fast) = run(ring, "queue"), run(ring, "message")
        table.row(
            f"{ring.topology}, {exact.case}",
            f"{exact.time_ps / 1e6:,.3f} us",
            f"{other.time_ps / 1e6:,.3f} us",
            f"{other.time_ps / exact.time_ps - 1:+.1%}",
            seconds(slow),
            seconds(fast),
        )


def main() -> None:
    options = arguments(__doc__, repetitions=1, parts=("size", "numbers", "levels"))
    describe_machine()
    if "size" in options.only:
        heads = ["ring", "fidelity", "simulated", "CPU", "peak", "wanted"]
        size(Table("Large rings", heads, options.json), LARGE[:2] if options.quick else LARGE)
    if "numbers" in options.only:
        heads = ["ring with numbers", "CPU", "peak", "wanted"]
        ring = WITH_NUMBERS._replace(elements=1 << 16) if options.quick else WITH_NUMBERS
        numbers(Table("A ring with numbers", heads, options.json), ring)
    if "levels" in options.only:
        heads = ["ring", "queue", "message", "difference", "CPU, queue", "CPU, message"]
        levels(
            Table("Queues and messages", heads, options.json), GRID[: 3 if options.quick else None]
        )


if __name__ == "__main__":
    main()
