"""A host that launches, and a device that carries out: lanes, events, and who waits for whom."""

import pytest
from msgspec.structs import replace

from rankwise.sim.reporting.breakdown import COMPUTE
from rankwise.simranks.prediction.clocks import Passage, Prediction, PricedWork
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines import MachineTopology, open_machine
from rankwise.simranks.prediction.machines.description import Figure
from rankwise.simranks.prediction.queued_clocks import QueuedClock
from rankwise.simranks.prediction.summary import breakdown_of, figures_of, summary

US = 1_000_000


def clock_of(count: int = 1) -> tuple[Prediction, QueuedClock]:
    prediction = Prediction(open_machine("h100-sxm", per_node=count), count)
    clock = QueuedClock(prediction, 0, 0)
    prediction.clocks[0] = clock
    return prediction, clock


def work_of(microseconds: int, name: str = "aten.add") -> PricedWork:
    return PricedWork(DeviceOperation(name, "math", 1, 1, "f32"), microseconds * US)


def plain_launch(prediction: Prediction) -> int:
    topology = prediction.topology
    assert isinstance(topology, MachineTopology)
    return round(topology.real.host.launch_us.plain.value * US)


def passage_of(begins_at: int, ends_at: int) -> Passage:
    passage = Passage(None, 1, 0)
    passage.begins_at, passage.ends_at = begins_at, ends_at
    return passage


def test_the_host_goes_on_while_its_device_computes() -> None:
    prediction, clock = clock_of()
    for _ in range(3):
        clock.compute(work_of(100))

    assert clock.time == 3 * plain_launch(prediction)
    assert clock.latest == plain_launch(prediction) + 300 * US


def test_a_job_of_small_kernels_is_bound_by_its_host() -> None:
    prediction, clock = clock_of()
    for _ in range(3):
        for _ in range(50):
            clock.compute(work_of(1))
        clock.end_step()

    figures = figures_of(prediction)

    assert figures.time == 50 * plain_launch(prediction)
    assert figures.held_back_by[0] == "launch"
    assert figures.launch > 0.8
    words = " ".join(summary(prediction).split())
    assert "launches of kernels: the device waits for its host" in words


def test_a_job_of_large_kernels_is_not_bound_by_its_host() -> None:
    prediction, clock = clock_of()
    for _ in range(3):
        for _ in range(50):
            clock.compute(work_of(100))
        clock.end_step()

    figures = figures_of(prediction)

    assert figures.time == 5_000 * US
    assert (figures.computing, figures.launch, figures.held_back_by[0]) == (1, 0, "")


def test_the_host_waits_when_the_queue_is_full() -> None:
    prediction, clock = clock_of()
    topology = prediction.topology
    assert isinstance(topology, MachineTopology)
    for _ in range(topology.real.host.queue + 10):
        clock.compute(work_of(100))

    assert clock.time > 9 * 100 * US


def test_a_value_of_the_device_lets_the_host_wait() -> None:
    _, clock = clock_of()
    clock.compute(work_of(100))

    clock.synchronize()

    assert clock.time == clock.latest


def test_lanes_overlap_until_one_waits_for_the_other() -> None:
    prediction, clock = clock_of()
    side = clock.new_lane()
    clock.compute(work_of(100))
    clock.lane = side
    clock.compute(work_of(500))
    clock.lane = clock.default_lane
    clock.compute(work_of(50))
    assert clock.default_lane.ends_at == plain_launch(prediction) + 150 * US

    clock.wait_for_lane(side)

    assert clock.default_lane.ends_at == side.ends_at


def test_a_lane_waits_for_a_collective_and_the_host_goes_on() -> None:
    _, clock = clock_of()
    clock.compute(work_of(100))
    begun = clock.default_lane.ends_at
    host = clock.time

    clock.wait(passage_of(begun + 30 * US, begun + 80 * US))

    assert clock.time == host
    assert clock.default_lane.ends_at == begun + 80 * US
    assert (clock.account.waiting, clock.account.exposed) == (30 * US, 50 * US)


def test_a_collective_takes_its_share_of_a_processor_that_computes_meanwhile() -> None:
    topology = open_machine("h100-sxm", per_node=1)
    assert isinstance(topology, MachineTopology)
    shared = Figure(0.5, 0.2, next(iter(topology.real.sources)))
    real = replace(topology.real, host=replace(topology.real.host, shared=shared))
    prediction = Prediction(MachineTopology(real, nodes=1, per_node=1, source="mine"), 1)
    clock = QueuedClock(prediction, 0, 0)
    clock.compute(work_of(100))
    computed = clock.default_lane.ends_at
    passage = passage_of(computed - 60 * US, computed - 20 * US)

    clock.wait(passage)
    clock.wait(passage)

    assert clock.default_lane.ends_at == computed + 20 * US
    assert clock.account.exposed == 20 * US


def test_a_collective_begins_when_its_lane_has_got_there() -> None:
    _, clock = clock_of()
    clock.compute(work_of(1_000))

    assert clock.come(None, 1).came_at == clock.default_lane.ends_at


def test_operations_on_other_lanes_are_no_time_of_the_first() -> None:
    _, clock = clock_of()
    clock.lane = clock.new_lane()
    clock.compute(work_of(100))

    assert clock.account.computing == 0


def test_launches_cost_by_their_class() -> None:
    prediction, clock = clock_of()
    topology = prediction.topology
    assert isinstance(topology, MachineTopology)
    launch = topology.real.host.launch_us
    costs = []
    for name in (
        "aten.add",
        "aten._foreach_add_",
        "aten._flash_attention_forward",
        "fsdp.chunk_cat",
    ):
        before = clock.time
        clock.compute(work_of(1, name))
        costs.append((clock.time - before) / US)
    before = clock.time
    clock.note_subclass()
    costs.append((clock.time - before) / US)

    expected = (launch.plain, launch.foreach, launch.attention, launch.fsdp, launch.dtensor)
    assert costs == [each.value for each in expected]


def test_parts_of_a_device_name_what_it_waited_for() -> None:
    prediction, clock = clock_of()
    for _ in range(2):
        clock.compute(work_of(100))
        begun = clock.default_lane.ends_at
        passage = passage_of(begun + 30 * US, begun + 80 * US)
        passage.kind = "all_gather"
        side = clock.new_lane()
        clock.lane = side
        clock.wait(passage)
        clock.lane = clock.default_lane
        clock.wait_for_lane(side)
        clock.end_step()

    (rank,) = breakdown_of(prediction, "train.py").ranks

    spent = {(part.cause, part.kind): part.time_ps for part in rank.parts}
    assert spent["exposed communication", "all_gather"] == 50 * US
    assert spent["waiting for others", "all_gather"] == 30 * US
    assert spent["compute", "elementwise and others"] == 100 * US
    assert sum(spent.values()) == breakdown_of(prediction, "train.py").whole_ps


def test_host_launches_a_graph_once_and_none_of_its_collectives() -> None:
    _, clock = clock_of()
    clock.begin_capture()
    assert clock.captured is not None
    clock.captured += [clock.placed(lambda: clock.come(None, 1)) for _ in range(10)]
    replay = clock.end_capture()

    before = clock.time
    replay()
    whole, before = clock.time - before, clock.time
    clock.end_capture()()

    assert whole == clock.time - before
    clock.come(None, 1)
    assert clock.time > before + whole


def clock_of_processor(
    *, late_us: float | None = None, dtensor_update: float | None = None
) -> tuple[Prediction, QueuedClock]:
    topology = open_machine("h100-sxm", per_node=1)
    assert isinstance(topology, MachineTopology)
    host, source = topology.real.host, next(iter(topology.real.sources))

    def figure(value: float | None) -> Figure | None:
        return None if value is None else Figure(value, 0.3, source)

    launches = replace(host.launch_us, dtensor_update=figure(dtensor_update))
    host = replace(
        host, queue=1, new_pages=figure(2.0), late_us=figure(late_us), launch_us=launches
    )
    real = replace(topology.real, host=host)
    prediction = Prediction(MachineTopology(real, nodes=1, per_node=1, source="mine"), 1)
    return prediction, QueuedClock(prediction, 0, 0)


def test_a_processor_launches_nothing_while_it_computes() -> None:
    prediction, clock = clock_of_processor()
    host = plain_launch(prediction)

    clock.compute(work_of(100))
    clock.note_free()
    computed = clock.time
    clock.compute(work_of(100))

    assert computed > host + 100 * US
    assert clock.latest == computed + host + 100 * US


def test_a_processor_has_one_stream() -> None:
    _, clock = clock_of_processor()

    assert clock.new_lane() is clock.default_lane
    assert len(clock.stream_ends()) == 1


def test_a_processor_launches_nothing_while_it_waits_for_a_transfer() -> None:
    prediction, clock = clock_of_processor()

    clock.wait(passage_of(0, 100 * US))
    clock.compute(work_of(100))

    assert clock.latest == 200 * US + plain_launch(prediction)


def test_a_processor_maps_new_memory_and_uses_freed_memory_again() -> None:
    _, clock = clock_of_processor()
    block = object()

    clock.note_taken(block, 64_000)
    first = clock.latest
    clock.note_freed(block, 64_000)
    clock.note_taken(block, 64_000)

    assert first == 32_032_000  # with its header, at 2 GB/s
    assert clock.latest == first
    assert clock.account.computing == first
    assert clock.bill.others == {(COMPUTE, "new pages of memory", ""): first}


def test_the_memory_of_a_gpu_costs_its_allocator_nothing() -> None:
    _, clock = clock_of()

    clock.note_taken(object(), 2_000_000)

    assert clock.latest == 0


def test_the_last_rank_comes_late_by_the_root_of_what_ranks_have_computed() -> None:
    _, clock = clock_of_processor(late_us=300.0)

    clock.compute(work_of(1_000))
    first = clock.come(None, 1)
    computed = clock.latest
    clock.compute(work_of(4_000))
    second = clock.come(None, 1)

    assert first.came_at - computed == pytest.approx(300 * US, rel=0.01)
    assert second.came_at - clock.latest == pytest.approx(600 * US, rel=0.01)


def test_ranks_that_have_not_computed_since_they_met_come_at_the_same_time() -> None:
    _, clock = clock_of_processor(late_us=300.0)
    clock.compute(work_of(1_000))
    clock.come(None, 1)

    assert clock.come(None, 1).came_at == clock.latest


def test_lateness_of_other_ranks_is_waiting() -> None:
    _, clock = clock_of_processor(late_us=300.0)
    clock.compute(work_of(1_000))
    passage = clock.come(None, 1)
    passage.begins_at, passage.ends_at = passage.came_at, passage.came_at + 100 * US

    clock.wait(passage)

    assert clock.account.waiting == pytest.approx(300 * US, rel=0.01)
    assert clock.account.exposed == 100 * US


def test_an_optimizer_has_a_price_of_its_own_for_operations_on_dtensors() -> None:
    _, clock = clock_of_processor(dtensor_update=15.0)

    clock.note_subclass()
    in_layers = clock.time
    clock.is_updating = True
    clock.note_subclass()

    assert clock.time - in_layers == 15 * US
    assert in_layers > 15 * US


def test_a_collective_that_its_own_host_launches_late_is_no_imbalance() -> None:
    _, clock = clock_of()
    comm = clock.new_lane()
    clock.compute(work_of(1))
    idle_from, behind = clock.default_lane.ends_at, clock.account.behind
    clock.time += 50 * US
    clock.lane = comm
    passage = clock.come(None, 1)
    passage.begins_at, passage.ends_at = passage.came_at + 30 * US, passage.came_at + 100 * US

    clock.wait(passage)
    clock.lane = clock.default_lane
    clock.wait_for_lane(comm)

    assert clock.account.behind - behind == passage.came_at - idle_from
    assert clock.account.waiting == 30 * US
    assert clock.account.exposed == 70 * US


def test_a_collective_that_another_rank_comes_to_late_is_imbalance() -> None:
    _, clock = clock_of()
    clock.compute(work_of(500))
    passage = clock.come(None, 1)
    passage.begins_at, passage.ends_at = passage.came_at + 30 * US, passage.came_at + 100 * US
    behind = clock.account.behind

    clock.wait(passage)

    assert clock.account.waiting == 30 * US
    assert clock.account.behind == behind
