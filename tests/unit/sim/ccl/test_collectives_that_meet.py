"""Collectives that share links, by queues and by messages: ends within 5 %, and closed forms."""

from typing import Any

import pytest

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with

# Chunks as small as the machine would have them take most of the time, and change no law. On the
# fast wires of the switch, large ones would count: there the data are less instead.
LINE = ("default", {"system.sips.graph": "mesh_2d", "system.sips.shape": "[1,4]"}, 2_048)
SWITCH, TORUS = ("switch8", dict[str, str](), None), ("torus16", dict[str, str](), 2_048)
Machine = tuple[str, dict[str, str], int | None]
Ring = tuple[tuple[int, ...], int, int]


def ends_of(machine: Machine, rings: list[Ring], fidelity: str, *, elements: int = 0) -> list[int]:
    """How long each all-reduce takes: of (ranks, lanes, MiB), all begun at once.

    If `elements` are given, they are the size of all.
    """
    preset, fields, chunk = machine
    ccl: dict[str, Any] = {
        "defaults": {"fidelity": fidelity, **({"vc_chunk_size": chunk} if chunk else {})},
        "algorithms": {
            f"ring{lanes}": {
                "module": "rankwise.sim.ccl.algorithms.ring_allreduce",
                "n_lanes": lanes,
            }
            for _, lanes, _ in rings
        },
    }
    engine = GraphEngine(topology_with(preset, fields), enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl) as torch:

        def program(rank: int) -> None:
            distributed = torch.distributed
            groups = [distributed.new_group(list(ranks)) for ranks, _, _ in rings]
            tensors: list[Any] = [
                torch.empty(elements or size << 19, dtype="f16") for *_, size in rings
            ]
            distributed.barrier()
            works = [
                distributed.all_reduce(tensor, group=group, async_op=True, algorithm=f"ring{lanes}")
                for (ranks, lanes, _), group, tensor in zip(rings, groups, tensors, strict=True)
                if rank in ranks
            ]
            for work in works:
                work.wait()

        nprocs = 1 + max(max(ranks) for ranks, _, _ in rings)
        torch.multiprocessing.spawn(program, nprocs=nprocs)
    spans: dict[int, tuple[int, int]] = {}
    for each in engine.op_log:
        if each.kind == "all_reduce":
            group = int(each.name.partition("in group ")[2].split()[0])
            start, end = spans.get(group, (each.start, each.end))
            spans[group] = min(start, each.start), max(end, each.end)
    return [end - start for _, (start, end) in sorted(spans.items())]


@pytest.mark.parametrize(
    ("machine", "rings"),
    [
        pytest.param(LINE, [((0, 1), 4, 4), ((0, 1), 32, 4)], id="line, 2 of 4 and 32 lanes"),
        pytest.param(LINE, [((0, 1), 32, 4), ((0, 1), 32, 1)], id="line, 2 of 4 and 1 MiB"),
        pytest.param(
            LINE, [((0, 2), 32, 4), ((0, 1), 32, 4), ((1, 2), 32, 4)], id="line, 3 over two wires"
        ),
        pytest.param(LINE, [((0, 1), 2, 4), ((1, 2), 2, 4)], id="line, 2 on the same PEs alone"),
        pytest.param(
            LINE, [((0, 1), 4, 4), ((1, 2), 4, 4)], id="line, 2 of 4 lanes on the same PEs"
        ),
        pytest.param(
            SWITCH, [((0, 1, 2, 3), 32, 2), ((2, 3, 4, 5), 32, 2)], id="switch, 2 of 4 ranks"
        ),
        pytest.param(SWITCH, [((0, n % 7 + 1), 32, 1) for n in range(8)], id="switch, 8"),
        pytest.param(TORUS, [((0, 1, 2, 3), 32, 4), ((0, 2), 32, 4)], id="torus, 2"),
        pytest.param(
            TORUS, [((0, 1, 2, 3), 32, 4), ((0, 2), 8, 2), ((1, 5), 16, 4)], id="torus, 3 unequal"
        ),
    ],
)
def test_collectives_that_meet_end_as_by_queues_within_5_percent(
    machine: Machine, rings: list[Ring]
) -> None:
    exact, by_messages = ends_of(machine, rings, "queue"), ends_of(machine, rings, "message")

    assert len(exact) == len(rings)
    assert by_messages == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("elements", [1 << 17, 1 << 19], ids=["256 KiB", "1 MiB"])
def test_lanes_that_wait_for_a_full_wire_leave_the_wire_before_it_to_others(elements: int) -> None:
    """T is the time of a round alone. On the line 0-1-2, {0, 2} and twice {0, 1} share wire 0-1.

    So {0, 2} has a third of it, and {1, 2} two thirds of wire 1-2 (max-min fairness): its two
    rounds of T take 3 T, latencies as alone. Rank 2 learns of the full wire 1-0 one latency after
    the beginning. Until then, and until as much waits there as lasts for a latency, it sends at a
    half. With chunks of 256 bytes, 96 lanes take 491 ns for a turn, so three chunks of each of its
    32 lanes wait, and two are on their way at most: 0.8 us, whatever the size.
    """
    rings: list[Ring] = [((0, 2), 32, 0), ((0, 1), 32, 0), ((0, 1), 32, 0), ((1, 2), 32, 0)]
    line = (*LINE[:2], None)
    (alone,) = ends_of(line, rings[3:], "queue", elements=elements)

    together = ends_of(line, rings, "queue", elements=elements)[3]

    turn = elements * 20  # the bytes of a part, at 20 ps each
    buffered = 5 * 32 * 256 * 20
    assert turn <= together - alone <= turn + buffered
