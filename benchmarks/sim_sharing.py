"""Collectives that meet: how far the level of messages is from queues, and what sharing costs.

- **grid**: two, three and eight all-reduces at once, on three machines, with equal and unequal
  lanes and sizes: the end of each one by queues and by messages.
- **flows**: a thousand transfers over shared wires, that begin at 64 instants and end one by one.
"""

import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from measuring import Table, arguments, describe_machine, seconds

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with
from rankwise.sim.ccl.fidelity import may_fill_pes, may_get_out_of_step
from rankwise.sim.hardware.flow_model import FlowTransfer
from rankwise.sim.hardware.links import Link
from rankwise.sim.hardware.quantities import MIB, Rate
from rankwise.sim.hardware.routing import sip_route
from rankwise.sim.kernel import Simulator


class Ring(NamedTuple):
    """One of the all-reduces: its ranks, its lanes, and the mebibytes of a rank."""

    ranks: tuple[int, ...]
    lanes: int
    size: int = 4


LINE = ("default", {"system.sips.graph": "mesh_2d", "system.sips.shape": "[1,4]"})
RING = ("default", dict[str, str]())
SWITCH = ("switch8", dict[str, str]())
TORUS = ("torus16", dict[str, str]())
Case = tuple[tuple[str, Mapping[str, str]], list[Ring]]
GRID: dict[str, Case] = {
    "line, 2 equal": (LINE, [Ring((0, 1), 32)] * 2),
    "line, 2: 4 and 32 lanes": (LINE, [Ring((0, 1), 4), Ring((0, 1), 32)]),
    "line, 2: 4 and 1 MiB": (LINE, [Ring((0, 1), 32), Ring((0, 1), 32, 1)]),
    "line, 3": (LINE, [Ring((0, 2), 32), Ring((0, 1), 32), Ring((1, 2), 32)]),
    "line, 3: unequal": (LINE, [Ring((0, 2), 32), Ring((0, 1), 8), Ring((1, 2), 4, 2)]),
    "line, 4": (LINE, [Ring((0, 2), 32), Ring((0, 1), 32), Ring((0, 1), 32), Ring((1, 2), 32)]),
    "line, 8: unequal": (LINE, [
        Ring((0, 1), 32, 1), Ring((0, 1), 8, 1), Ring((1, 2), 32, 2), Ring((0, 2), 32, 1),
        Ring((2, 3), 4, 1), Ring((1, 3), 32, 1), Ring((0, 3), 16, 1), Ring((2, 3), 32),
    ]),
    "ring, 2: 4 and 32 lanes": (RING, [Ring((0, 1, 2, 3), 4), Ring((0, 1, 2, 3), 32)]),
    "ring, 3": (RING, [Ring((0, 1, 2, 3), 32), Ring((0, 1), 32), Ring((2, 3), 32, 2)]),
    "switch, 2": (SWITCH, [Ring((0, 1, 2, 3), 32), Ring((2, 3, 4, 5), 32)]),
    "switch, 2: 4 lanes": (SWITCH, [Ring((0, 1), 4), Ring((0, 2), 4)]),
    "switch, 3: unequal": (SWITCH, [
        Ring((0, 1, 2, 3), 32), Ring((2, 3, 4, 5), 8), Ring((0, 5), 32, 2),
    ]),
    "switch, 7": (SWITCH, [Ring((0, rank), 32) for rank in range(1, 8)]),
    "switch, 8 of 4 ranks": (SWITCH, [
        Ring(tuple((first + step) % 8 for step in range(4)), 32) for first in range(8)
    ]),
    "torus, 2": (TORUS, [Ring((0, 1, 2, 3), 32), Ring((0, 2), 32)]),
    "torus, 3: unequal": (TORUS, [
        Ring((0, 1, 2, 3), 32), Ring((0, 2), 8, 2), Ring((1, 5), 16),
    ]),
    "torus, 8: unequal": (TORUS, [
        Ring((0, 1, 2, 3), 32), Ring((0, 2), 8, 2), Ring((1, 5), 16), Ring((0, 4, 8, 12), 32),
        Ring((4, 5, 6, 7), 4, 2), Ring((5, 9), 32), Ring((2, 6, 10, 14), 16, 2), Ring((3, 15), 32),
    ]),
    "torus, 6 on some ways": (TORUS, [
        Ring((0, 1, 5), 32), Ring((1, 2, 6), 32), Ring((0, 5, 10), 32), Ring((4, 5, 6, 2), 32),
        Ring((0, 1, 2, 6), 32), Ring((8, 5, 1), 32),
    ]),
    "torus, 2 of 16 ranks, 3 MiB": (TORUS, [Ring(tuple(range(16)), 32, 3)] * 2),
    "torus, 8: PEs of 8 and 16 lanes": (TORUS, [
        Ring((13, 0, 4), 32), Ring((9, 7, 5), 32, 2), Ring((4, 15, 2, 12), 8),
        Ring((4, 15, 1, 11), 8), Ring((3, 5, 6), 16, 2), Ring((15, 7, 13, 8), 16, 2),
        Ring((0, 1, 11, 6), 32, 2), Ring((15, 13, 14, 5), 8),
    ]),
    "torus, 3 of 4 lanes": (TORUS, [
        Ring((8, 11, 12, 3), 4), Ring((13, 11), 4, 2), Ring((0, 14, 13, 6), 32, 2),
    ]),
    "2 lanes on one PE, other wires": (LINE, [Ring((0, 1), 2), Ring((1, 2), 2)]),
    "4 lanes on one PE, other wires": (LINE, [Ring((0, 1), 4), Ring((1, 2), 4)]),
}  # fmt: skip


def durations(case: Case, fidelity: str) -> list[int]:
    """How long each of the all-reduces takes, in picoseconds, if all begin together."""
    (preset, fields), rings = case
    ccl = {
        "defaults": {"fidelity": fidelity},
        "algorithms": {
            f"ring{lanes}": {
                "module": "rankwise.sim.ccl.algorithms.ring_allreduce",
                "n_lanes": lanes,
            }
            for lanes in (2, 4, 8, 16, 32)
        },
    }
    engine = GraphEngine(topology_with(preset, fields), enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl) as context:

        def worker(rank: int, torch: Any) -> None:
            distributed = torch.distributed
            groups = [distributed.new_group(list(ring.ranks)) for ring in rings]
            tensors = [torch.empty(ring.size * MIB // 2, dtype="f16") for ring in rings]
            distributed.barrier()
            works = [
                distributed.all_reduce(
                    tensor, group=group, async_op=True, algorithm=f"ring{ring.lanes}"
                )
                for ring, group, tensor in zip(rings, groups, tensors, strict=True)
                if rank in ring.ranks
            ]
            for work in works:
                work.wait()

        ranks = 1 + max(max(ring.ranks) for ring in rings)
        context.multiprocessing.spawn(worker, args=(context,), nprocs=ranks)
    spans: dict[int, tuple[int, int]] = {}
    for each in engine.op_log:
        if each.kind == "all_reduce":
            group = int(each.name.partition("in group ")[2].split()[0])
            start, end = spans.get(group, (each.start, each.end))
            spans[group] = min(start, each.start), max(end, each.end)
    return [end - start for _, (start, end) in sorted(spans.items())]


def grid(table: Table, cases: Mapping[str, Case]) -> None:
    """How far messages are from queues."""
    for name, case in cases.items():
        exact, other = durations(case, "queue"), durations(case, "message")
        errors = [now / then - 1 for then, now in zip(exact, other, strict=True)]
        table.row(
            name,
            ", ".join(f"{each / 1e6:,.1f}" for each in exact),
            ", ".join(f"{each / 1e6:,.1f}" for each in other),
            f"{max(errors, key=abs):+.1%}",
            "queue" if _keeps_to_queues(case) else "message",
        )


def _keeps_to_queues(case: Case) -> bool:
    """Whether `auto` keeps to queues, since one of them could fill PEs or get out of step."""
    (preset, fields), rings = case
    ways = [_ways(case, ring) for ring in rings]
    if any(may_get_out_of_step(way, ways[:number] + ways[number + 1 :])
           for number, way in enumerate(ways)):  # fmt: skip
        return True
    spec = topology_with(preset, fields).machine
    counts = Counter(rank for ring in rings for rank in ring.ranks)
    # Besides these groups there is that of all ranks.
    fewest = min(ring.lanes for ring in rings)
    return any(
        may_fill_pes(spec, fewest, 1 + max(counts[rank] for rank in ring.ranks)) for ring in rings
    )


def _ways(case: Case, ring: Ring) -> list[set[tuple[int, int]]]:
    """The wires from each rank of a ring to the next one."""
    (preset, fields), _ = case
    sips, ranks = topology_with(preset, fields).machine.system.sips, ring.ranks
    pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return [set(pairwise([one, *sip_route(sips, one, other)])) for one, other in pairs]


def flows(table: Table, count: int) -> None:
    """What a thousand transfers cost that all meet."""
    simulator, random = Simulator(), Random(7)
    rate = Rate.of_gigabytes_per_second(50)
    wires = [Link(simulator, f"wire {number}", rate, 0) for number in range(count // 4)]
    for number in range(count):
        links = random.sample(wires, 4)
        loads = dict.fromkeys(links, MIB)
        simulator.call_at(
            number // 16 * 1_000_000,
            FlowTransfer,
            simulator,
            "transfer",
            loads,
            rate.time_for(MIB),
            (),
        )
    start = time.process_time()
    simulator.run()
    table.row(f"{count} transfers over {len(wires)} wires", seconds(time.process_time() - start))


def main() -> None:
    options = arguments(__doc__, repetitions=1, parts=("grid", "flows"))
    describe_machine()
    if "grid" in options.only:
        heads = ["meet", "queue, us", "message, us", "largest difference", "auto, if large"]
        cases = dict(list(GRID.items())[: 3 if options.quick else None])
        grid(Table("Collectives that meet", heads, options.json), cases)
    if "flows" in options.only:
        heads = ["transfers", "CPU"]
        flows(
            Table("Transfers that all meet", heads, options.json), 128 if options.quick else 1_024
        )


if __name__ == "__main__":
    main()
