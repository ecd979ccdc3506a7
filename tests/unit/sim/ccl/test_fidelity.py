"""How exactly a collective is simulated: what is chosen, and how far the levels differ."""

import sys
from functools import partial
from time import process_time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import ConfigError, SimulationError
from rankwise.base.units import Duration
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import BenchSession, BenchSettings, topology_with
from rankwise.sim.ccl.algorithm_modules import algorithm_module
from rankwise.sim.ccl.algorithms import ring_allreduce
from rankwise.sim.ccl.configuration import QueueLayout, load_configuration
from rankwise.sim.ccl.fidelity import level_of, may_fill_pes, may_get_out_of_step
from rankwise.sim.ccl.message_errors import RecordedCase, known_error, recorded_errors
from rankwise.sim.ccl.message_execution import MessageExecution
from rankwise.sim.ccl.message_pes import Elements, Lanes
from rankwise.sim.ccl.plan import CollectiveRequest, plan, requested
from rankwise.sim.faults.vocabulary import FaultOfChip, Jitter, KillLink
from rankwise.sim.hardware import HardwareMachine, load_topology
from rankwise.sim.hardware.faults import ChipFaults
from rankwise.sim.hardware.specification import MachineSpec
from rankwise.sim.kernel import Simulator, Steps

LINE = load_topology("default").machine.system.sips
Ran = tuple[int, str, dict[str, int]]


def ran(
    collective: str,
    elements: int,
    fidelity: str,
    *,
    topology: str = "default",
    defaults: dict[str, Any] | None = None,
    algorithm: str | None = None,
) -> Ran:
    """The simulated time of one ring, on which level it ran, and the bytes of the wires."""
    ccl = {"defaults": {**(defaults or {}), "fidelity": fidelity}}
    engine = GraphEngine(topology, enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl) as torch:
        size = int(torch.spec["system"]["sips"]["count"])

        def program(_rank: int) -> None:
            distributed = torch.distributed
            if collective == "all_reduce":
                distributed.all_reduce(torch.zeros(elements), algorithm=algorithm)
            elif collective == "all_gather":
                distributed.all_gather(torch.zeros(size * elements), torch.zeros(elements))
            else:
                distributed.reduce_scatter(torch.zeros(elements), torch.zeros(size * elements))

        torch.multiprocessing.spawn(program, nprocs=size)
        times = [(each.start, each.end) for each in engine.op_log if each.kind == collective]
    (level,) = engine.machine.fidelities.values()
    carried = {
        link.name: link.bytes_carried
        for link in engine.machine.links
        if "->" in link.name and "host" not in link.name
    }
    start, end = min(start for start, _ in times), max(end for _, end in times)
    return end - start, level, carried


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("elements", [1 << 10, 1 << 17])
@pytest.mark.parametrize("topology", ["default", "switch8"])
def test_messages_take_as_long_as_queues_within_3_percent(
    collective: str, elements: int, topology: str
) -> None:
    exact, level, _ = ran(collective, elements, "queue", topology=topology)
    by_messages, other_level, _ = ran(collective, elements, "message", topology=topology)

    assert (level, other_level) == ("queue", "message")
    assert by_messages == pytest.approx(exact, rel=0.03)


def test_messages_put_the_same_bytes_on_the_wires() -> None:
    _, _, exact = ran("all_reduce", 1 << 16, "queue")
    _, _, by_messages = ran("all_reduce", 1 << 16, "message")

    wires = [name for name in exact if name.startswith("sip") and "cube" not in name]
    data = {f"sip{rank}->sip{(rank + 1) % 4}": 2 * 3 * (1 << 16) // 4 * 4 for rank in range(4)}
    assert {name: by_messages.get(name, 0) for name in data} == data
    returned = 6 * 16 * 16  # a ring's credits go the other way, over other wires
    assert all(exact[name] <= data.get(name, 0) + returned for name in wires)


def test_a_small_ring_is_a_kernel_a_larger_one_queues_and_a_large_one_messages() -> None:
    levels = [ran("all_reduce", elements, "auto")[1] for elements in (1 << 12, 1 << 18, 1 << 23)]

    assert levels == ["kernel", "queue", "message"]


@pytest.mark.parametrize(
    ("fields", "homes", "level"),
    [
        ({}, (0, 1, 2, 3), "message"),
        ({"n_slots": 8}, (0, 1, 2, 3), "queue"),
        ({"vc_chunk_size": 512}, (0, 1, 2, 3), "queue"),
        ({"n_slots": 8, "fidelity": "message"}, (0, 1, 2, 3), "message"),
        ({}, (0, 0, 1, 1), "queue"),
        ({"fidelity": "kernel"}, (0, 1, 2, 3), "kernel"),
    ],
)
def test_auto_uses_messages_where_they_are_known_to_be_close(
    fields: dict[str, Any], homes: tuple[int, ...], level: str
) -> None:
    algorithm = load_configuration({"defaults": fields}).algorithm("all_reduce")
    planned = plan(requested(algorithm, "all_reduce", 1 << 24, 0, homes, LINE))

    assert level_of(algorithm, ring_allreduce, planned, 4, 32) == level


@pytest.mark.parametrize(
    ("preset", "lanes", "groups", "fills"),
    [
        ("default", 4, 1, False),
        ("default", 4, 2, True),
        ("default", 8, 2, False),
        ("default", 32, 3, False),
        ("torus16", 8, 2, False),
        ("torus16", 8, 3, True),
        ("torus16", 16, 8, False),
        ("switch8", 8, 2, True),
        ("switch8", 32, 8, False),
    ],
)
def test_collectives_on_few_lanes_that_could_meet_may_fill_their_pes(
    preset: str, lanes: int, groups: int, *, fills: bool
) -> None:
    assert may_fill_pes(load_topology(preset).machine, lanes, groups) == fills


def test_groups_that_could_be_under_way_at_once_are_counted_by_device() -> None:
    counts: list[tuple[int, ...]] = []
    with RuntimeContext(engine=GraphEngine("default", enable_data=False), ccl={}) as torch:

        def program(rank: int) -> None:
            distributed = torch.distributed
            count, world = distributed.groups_on_a_device, distributed.world
            before = count(world)
            one, other, _ = (distributed.new_group(each) for each in ([0, 1], [1, 2], [3]))
            one_after_the_other = count(one)
            distributed.barrier(async_op=True).wait()
            beside_each_other = count(one)
            distributed.all_reduce(torch.empty(1 << 20, dtype="f16"))
            if not rank:
                counts.append((before, one_after_the_other, beside_each_other, count(other)))

        torch.multiprocessing.spawn(program, nprocs=4)

    assert counts == [(1, 1, 2, 3)]


@pytest.mark.parametrize(("lanes", "level"), [(4, "queue"), (32, "message")])
def test_auto_uses_queues_where_collectives_on_few_lanes_could_meet(lanes: int, level: str) -> None:
    algorithm = load_configuration({}).algorithm("all_reduce")
    planned = plan(requested(algorithm, "all_reduce", 1 << 24, 0, (0, 1), LINE))
    spec = load_topology("default").machine

    def choose(groups: int) -> str:
        fills = partial(may_fill_pes, spec, lanes, groups)
        return level_of(algorithm, ring_allreduce, planned, 4, lanes, is_disturbed=fills)

    assert (choose(1), choose(2)) == ("message", level)


@pytest.mark.parametrize(
    ("ring", "others", "expected"),
    [
        pytest.param("ab", [], False, id="alone"),
        pytest.param("ab", ["cd"], False, id="over other wires"),
        pytest.param("ab", ["ab", "ba"], False, id="over the same wires"),
        pytest.param("ab", ["bc"], True, id="on one of two ways"),
        pytest.param("ab", ["abcd"], True, id="all of its ways, some of the other's"),
        pytest.param("ab", ["ab", "bc"], True, id="through one on the same wires"),
    ],
)
def test_rings_get_out_of_step_where_their_ways_meet_different_ones(
    ring: str, others: list[str], *, expected: bool
) -> None:
    def ways(names: str) -> list[set[str]]:
        return [{name} for name in names]

    assert may_get_out_of_step(ways(ring), [ways(each) for each in others]) == expected


@pytest.mark.parametrize(("groups", "is_async", "level"), [
    ([[0, 2], [0, 1], [0, 1], [1, 2]], True, "message"),
    ([[0, 1, 2, 3], [0, 1]], True, "queue"),
    ([[0, 1, 2, 3], [0, 1]], False, "message"),
    ([[0, 1], [3, 4]], True, "message"),
    ([[0, 1], [3, 2, 4]], False, "message"),
    ([[0, 1, 2], [3, 2, 4]], False, "message"),
    ([[0, 1, 3], [2, 4]], False, "queue"),
], ids=str)  # fmt: skip
def test_auto_uses_queues_where_a_ring_could_get_out_of_step(
    groups: list[list[int]], level: str, *, is_async: bool
) -> None:
    line = topology_with("default", {"system.sips.graph": "mesh_2d", "system.sips.count": "5",
                                     "system.sips.shape": "[1, 5]"})  # fmt: skip
    engine = GraphEngine(line, enable_data=False, time_limit=10_000_000)
    with RuntimeContext(engine=engine, ccl={}) as torch:

        def program(rank: int) -> None:
            made = [torch.distributed.new_group(members) for members in groups]
            if rank in groups[0]:
                tensor = torch.empty(1 << 25, dtype="f16")
                work = torch.distributed.all_reduce(tensor, group=made[0], async_op=is_async)
                if is_async:
                    work.wait()

        with pytest.raises(SimulationError):
            torch.multiprocessing.spawn(program, nprocs=5)

    assert list(engine.machine.fidelities.values()) == [level]


@pytest.mark.parametrize(("narrow", "level"), [(4, "queue"), (16, "message"), (0, "message")])
def test_wide_collective_keeps_to_queues_where_a_narrow_one_could_fill_its_pes(
    narrow: int, level: str
) -> None:
    ring = {"module": "rankwise.sim.ccl.algorithms.ring_allreduce"}
    algorithms = {"wide": ring} | ({"narrow": {**ring, "n_lanes": narrow}} if narrow else {})
    # The level is chosen before the first instant; what follows takes seconds by queues.
    engine = GraphEngine("default", enable_data=False, time_limit=10_000_000)
    with RuntimeContext(engine=engine, ccl={"algorithms": algorithms}) as torch:

        def program(rank: int) -> None:
            groups = [torch.distributed.new_group(members) for members in ([0, 1], [1, 2])]
            if rank < 2:
                tensor = torch.empty(1 << 25, dtype="f16")
                torch.distributed.all_reduce(
                    tensor, group=groups[0], algorithm="wide", async_op=True
                ).wait()

        with pytest.raises(SimulationError):
            torch.multiprocessing.spawn(program, nprocs=3)

    assert engine.machine.fidelities == {"wide": level}


@pytest.mark.parametrize(
    ("faults", "level"),
    [
        ([Jitter(percent=20)], "message"),
        ([Jitter(percent=15), Jitter(percent=15)], "queue"),
        ([Jitter(percent=100)], "queue"),
        ([KillLink(link="sip0->sip1", at=Duration(1_000))], "queue"),
    ],
)
def test_auto_uses_queues_under_strong_jitter_and_where_a_link_dies(
    faults: list[FaultOfChip], level: str
) -> None:
    algorithm = load_configuration({}).algorithm("all_reduce")
    planned = plan(requested(algorithm, "all_reduce", 1 << 24, 0, (0, 1, 2, 3), LINE))
    of_machine = ChipFaults(faults, load_topology("default").machine)

    assert level_of(algorithm, ring_allreduce, planned, 4, 32, faults=of_machine) == level


OTHERS = (
    "tree_allreduce", "halving_doubling_allreduce", "recursive_doubling_allreduce",
    "hierarchical_allreduce", "direct_allreduce",
)  # fmt: skip


@pytest.mark.parametrize("algorithm", OTHERS)
def test_programs_are_timed_by_messages_when_that_is_asked_for(algorithm: str) -> None:
    exact, level, wires = ran("all_reduce", 1 << 17, "queue", algorithm=algorithm)
    by_messages, other_level, loads = ran("all_reduce", 1 << 17, "message", algorithm=algorithm)

    assert (level, other_level) == ("queue", "message")
    assert by_messages == pytest.approx(exact, rel=0.1)
    # Queues also send credits.
    data = {name: size for name, size in loads.items() if size and "->" in name}
    assert data
    assert all(size <= wires[name] <= 1.1 * size for name, size in data.items())


def test_auto_keeps_programs_to_queues_where_the_error_of_messages_is_not_recorded() -> None:
    assert ran("all_reduce", 1 << 21, "auto", algorithm="direct_allreduce", defaults={
        "slot_size": 1 << 16, "n_lanes": 1,
    })[1] == "queue"  # fmt: skip


def of_switch(ranks: int, fields: dict[str, str] | None = None) -> MachineSpec:
    changed = {"system.sips.count": str(ranks), **(fields or {})}
    return topology_with("switch8", changed).machine


RINGS = {"ring_allreduce"}
SHAPES = {8: "[2, 4]", 16: "[4, 4]"}


def preset_of(case: RecordedCase) -> MachineSpec:
    changed = {"system.sips.count": str(case.ranks)}
    if case.machine == "torus16":
        changed["system.sips.shape"] = SHAPES[case.ranks]
    return topology_with(case.machine, changed).machine


@pytest.mark.parametrize(
    ("name", "machine", "lanes", "level"),
    [
        ("recursive_doubling_allreduce", of_switch(8), 32, "message"),
        ("recursive_doubling_allreduce", of_switch(8), 64, "queue"),
        ("recursive_doubling_allreduce", of_switch(4), 32, "queue"),
        ("recursive_doubling_allreduce", of_switch(8, {"pe.dma.setup_ns": "21"}), 32, "queue"),
    ],
)
def test_auto_uses_messages_for_programs_among_cases_with_recorded_errors_below_3_percent(
    name: str, machine: MachineSpec, lanes: int, level: str
) -> None:
    algorithm = load_configuration({}).algorithm("all_reduce", name)
    homes = tuple(range(machine.system.sips.count))
    planned = plan(requested(algorithm, "all_reduce", 1 << 26, 0, homes, machine.system.sips))
    module = algorithm_module(algorithm.module)

    assert level_of(algorithm, module, planned, 4, lanes, machine=machine) == level


@pytest.mark.parametrize("name", sorted({each.algorithm for each in recorded_errors()} - RINGS))
def test_auto_uses_messages_exactly_where_the_recorded_error_of_a_program_is_below_3_percent(
    name: str,
) -> None:
    collective = "all_to_all" if "all_to_all" in name else "all_reduce"
    algorithm = load_configuration({}).algorithm(collective, name)
    module = algorithm_module(algorithm.module)

    for case, error in recorded_errors().items():
        if case.algorithm != name or case.size < 1 << 20 or case.ranks > 16:
            continue
        machine = preset_of(case)
        homes, elements = tuple(range(case.ranks)), 1 << 26
        planned = plan(requested(algorithm, collective, elements, 0, homes, machine.system.sips))
        level = level_of(algorithm, module, planned, 4, case.lanes, machine=machine)
        assert level == ("message" if error < 0.03 else "queue"), case


def test_recorded_errors_of_rings_are_below_3_percent_since_auto_does_not_look_them_up() -> None:
    errors = [error for case, error in recorded_errors().items() if case.algorithm in RINGS]

    assert errors
    assert max(errors) < 0.03


def test_errors_between_recorded_cases_are_the_largest_around_them() -> None:
    recorded = recorded_errors()
    name, size = "halving_doubling_allreduce", 1 << 20
    around = [RecordedCase(name, "switch8", ranks, 2, size) for ranks in (8, 16)]

    assert known_error(name, of_switch(12), 12, 2, 1 << 22) == max(recorded[c] for c in around)
    assert known_error(name, of_switch(128), 128, 2, size) is None
    assert known_error(name, of_switch(8), 8, 2, 4096) is None


@pytest.mark.parametrize("algorithm", OTHERS)
def test_a_program_by_messages_gives_the_same_numbers(algorithm: str) -> None:
    def sums(fidelity: str) -> list[list[float]]:
        found: list[list[float]] = []

        def worker(rank: int, torch: Any) -> None:
            x = torch.full((37,), rank + 0.1, dtype="f16")
            torch.distributed.all_reduce(x, algorithm=algorithm)
            found.append(x.tolist())

        ccl = {"defaults": {"fidelity": fidelity}}
        with RuntimeContext(engine=GraphEngine("default"), ccl=ccl) as torch:
            torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4)
        return found

    assert sums("message") == sums("queue")


def test_halving_doubling_among_256_ranks_costs_little_by_messages() -> None:
    began = process_time()
    engine = GraphEngine(topology_with("switch8", {"system.sips.count": "256"}), enable_data=False)

    def worker(_rank: int, torch: Any) -> None:
        x = torch.empty(1 << 18, dtype="f32")
        torch.distributed.all_reduce(x, algorithm="halving_doubling_allreduce")

    with RuntimeContext(engine=engine, ccl={"defaults": {"fidelity": "message"}}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=256)
        took = torch.now

    bytes_time = 2 * 255 / 256 * (1 << 20) / 0.45
    assert bytes_time + 16 * 1_000_000 < took < 1.3 * (bytes_time + 16 * 1_000_000)
    assert process_time() - began < 6


@pytest.mark.parametrize("elements", [1, 3, 5, 4_097])
def test_numbers_do_not_depend_on_the_level(elements: int) -> None:
    def sums(fidelity: str) -> list[list[float]]:
        found = []
        with RuntimeContext(
            engine=GraphEngine("default"), ccl={"defaults": {"fidelity": fidelity}}
        ) as torch:

            def program(rank: int) -> None:
                values = np.arange(elements, dtype=np.float32) / 7 + rank / 3
                tensor = torch.from_numpy(values)
                torch.distributed.all_reduce(tensor)
                found.append(tensor.numpy().tolist())

            torch.multiprocessing.spawn(program, nprocs=4)
        return found

    assert sums("kernel") == sums("queue") == sums("message")


def test_one_rank_has_nothing_to_send() -> None:
    with RuntimeContext(
        engine=GraphEngine("default"), ccl={"defaults": {"fidelity": "message"}}
    ) as torch:

        def program(_rank: int) -> None:
            tensor = torch.full((8,), 3)
            torch.distributed.all_reduce(tensor)
            assert tensor.numpy().tolist() == [3] * 8

        torch.multiprocessing.spawn(program, nprocs=1)


def test_ranks_that_share_devices_are_timed_by_messages_when_that_is_asked_for() -> None:
    with RuntimeContext(
        engine=GraphEngine("default"), ccl={"defaults": {"fidelity": "message"}}
    ) as torch:

        def program(rank: int) -> None:
            tensor = torch.full((64,), rank)
            torch.distributed.all_reduce(tensor)
            assert tensor.numpy().tolist() == [28] * 64

        torch.multiprocessing.spawn(program, nprocs=8)


def test_group_on_one_device_is_timed_by_messages() -> None:
    with RuntimeContext(
        engine=GraphEngine("default"), ccl={"defaults": {"fidelity": "message"}}
    ) as torch:

        def program(rank: int) -> None:
            group = torch.distributed.new_group([0, 1, 2, 3])
            if rank < 4:
                tensor = torch.full((1 << 12,), rank)
                torch.distributed.all_reduce(tensor, group=group, algorithm="direct_allreduce")
                assert tensor.numpy()[0] == 6

        torch.multiprocessing.spawn(program, nprocs=16)


def ends_of(delays: list[int]) -> list[int]:
    """When the ranks of a ring by messages are done, if each comes after its delay."""
    simulator = Simulator()
    machine = HardwareMachine(simulator, load_topology("default"))
    planned = plan(CollectiveRequest(ring_allreduce.__name__, "all_reduce", 4, 1 << 14))
    ring = MessageExecution(
        machine,
        planned,
        [Lanes(sip, (0, 1)) for sip in range(4)],
        QueueLayout(n_slots=8, vc_chunk_size=256),
        Elements(4, "f32", "add"),
    )
    ends = [0] * 4

    def steps(rank: int) -> Steps:
        yield delays[rank]
        yield from ring.rank_steps(rank)
        ends[rank] = simulator.now

    for rank in range(4):
        simulator.process(steps(rank))
    simulator.run()
    return ends


def test_a_collective_by_messages_waits_for_the_rank_that_comes_last() -> None:
    (together,) = set(ends_of([0, 0, 0, 0]))

    assert ends_of([0, 7_000_000, 0, 3_000_000]) == [7_000_000 + together] * 4


def two_at_once(fidelity: str) -> int:
    """The time of two groups' large rings over the same wires, in opposite groups of streams."""
    engine = GraphEngine("default", enable_data=False)
    with RuntimeContext(engine=engine, ccl={"defaults": {"fidelity": fidelity}}) as torch:

        def program(_rank: int) -> None:
            distributed = torch.distributed
            other = distributed.new_group()
            tensors = torch.zeros(1 << 18), torch.zeros(1 << 18)
            works = [
                distributed.all_reduce(tensors[0], async_op=True),
                distributed.all_reduce(tensors[1], group=other, async_op=True),
            ]
            for work in works:
                work.wait()

        torch.multiprocessing.spawn(program, nprocs=4)
        times = [(each.start, each.end) for each in engine.op_log if each.kind == "all_reduce"]
    return max(end for _, end in times) - min(start for start, _ in times)


def test_two_collectives_by_messages_share_their_wires() -> None:
    alone, _, _ = ran("all_reduce", 1 << 18, "message")

    together = two_at_once("message")
    assert together == pytest.approx(2 * alone, rel=0.05)
    assert together == pytest.approx(two_at_once("queue"), rel=0.03)


@pytest.mark.parametrize(
    ("configuration", "message", "hint"),
    [
        ({"defaults": {"fidelity": "mesage"}}, "x: defaults.fidelity: there is no 'mesage'", None),
        ({"defaults": {"fidelity": 3}}, "x: defaults.fidelity: ", None),
        (
            {"algorithms": {"tree_broadcast": {"fidelity": "kernel"}}},
            "x: algorithms.tree_broadcast.fidelity: tree_broadcast cannot be simulated",
            "it can as auto, queue, message",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    configuration: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_configuration(configuration, name="x")

    assert str(caught.value).startswith(message)
    assert hint is None or caught.value.hint == hint


def test_a_kernel_alone_runs_as_one_whatever_is_asked_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel() -> None: ...

    module = ModuleType("kernel_alone")
    module.COLLECTIVE, module.kernel = "all_reduce", kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernel_alone", module)
    entry = {"module": "kernel_alone"}

    of_all = {"defaults": {"fidelity": "message"}, "algorithms": {"own": entry}}
    assert load_configuration(of_all).algorithms["own"].fidelity == "message"
    with pytest.raises(ConfigError, match="is a kernel alone, without program"):
        load_configuration({"algorithms": {"own": {**entry, "fidelity": "queue"}}})


def test_the_result_says_what_was_chosen(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def result_of(**fields: str) -> Any:
        settings = BenchSettings(program="ccl_allreduce", has_data=False, fields=fields)
        (result,) = BenchSession(settings).run().results
        return result

    assert result_of().fidelity == "kernel"
    assert result_of(fidelity="queue").fidelity == "queue"
    named = {"ccl.algorithms.ring_allreduce_tcm.fidelity": "message"}
    assert result_of(**named).fidelity == "message"


def test_a_thousand_ranks_take_seconds() -> None:
    before = process_time()
    fields = {"system.sips.count": "1024", "elements": "65536"}
    settings = BenchSettings(program="ccl_allreduce", has_data=False, fields=fields)
    (result,) = BenchSession(settings).run().results

    assert result.fidelity == "message"
    assert result.time_ps == pytest.approx(1_062_000_000, rel=0.01)
    assert process_time() - before < 20
