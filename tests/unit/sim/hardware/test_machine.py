from collections.abc import Generator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware import HardwareMachine, IpcQueue, load_topology
from rankwise.sim.hardware.topology import parse_topology
from rankwise.sim.kernel import Future, Simulator

Steps = Generator[Any, Any, Any]


def machine(preset: str = "default") -> HardwareMachine:
    return HardwareMachine(Simulator(), load_topology(preset))


def wait(delay: int) -> Steps:
    yield delay


def time_of(machine: HardwareMachine, steps: Future | Steps) -> int:
    start = machine.simulator.now
    until = steps if isinstance(steps, Future) else machine.simulator.process(steps)
    machine.simulator.run(until)
    return machine.simulator.now - start


def test_a_copy_between_sips_takes_latency_plus_size_over_bandwidth() -> None:
    model = machine()
    source, destination = model.sip(0).cube(0).hbm(0), model.sip(1).cube(0).hbm(0)

    time = time_of(model, model.start_transfer(source, destination, 1 << 20))

    latency_ns = 100 + 500 + 100
    assert time == latency_ns * 1_000 + (1 << 20) * 20  # 50 GB/s: 20 ps per byte


def test_doubling_the_bandwidth_of_an_idle_link_changes_nothing() -> None:
    tree = deepcopy(load_topology("default").spec)
    tree["system"]["sips"]["link"]["bandwidth_GBps"] = 20  # slower than the memories at its ends
    times = {}
    for name, field in [("host", "host"), ("used", "sips")]:
        for factor in (1, 2):
            changed = deepcopy(tree)
            changed["system"][field]["link"]["bandwidth_GBps"] *= factor
            model = HardwareMachine(Simulator(), parse_topology(yaml.safe_dump(changed), name))
            source, destination = model.sip(0).cube(0).hbm(0), model.sip(1).cube(0).hbm(0)
            times[name, factor] = time_of(model, model.start_transfer(source, destination, 1 << 20))

    assert times["host", 2] == times["host", 1]
    assert times["used", 2] < times["used", 1]


def test_a_dma_from_the_channel_beside_a_pe_does_not_use_the_crossbar() -> None:
    model = machine()
    pe = model.sip(0).pe(3)

    time = time_of(model, pe.start_dma(1 << 16))

    assert time == (20 + 100 + 2) * 1_000 + (1 << 16) * 20
    assert pe.port_in.bytes_carried == pe.port_out.bytes_carried == 0


def test_a_copy_within_one_channel_reads_and_writes_through_its_port() -> None:
    model = machine()
    channel = model.sip(0).cube(0).hbm(0)

    assert time_of(model, model.start_transfer(channel, channel, 1_000)) == 100_000 + 2 * 1_000 * 20


@pytest.mark.parametrize("preset", ["default", "torus16", "pod64", "switch8"])
def test_any_two_places_of_a_system_are_connected(preset: str) -> None:
    model = machine(preset)
    last_sip, last_cube = model.topology.sip_count - 1, model.sip(0).cube_count - 1
    places = [
        model.host,
        model.sip(0).pe(0).tcm,
        model.sip(0).cube(last_cube).hbm(1),
        model.sip(last_sip).cube(last_cube).pe(7).tcm,
        model.sip(last_sip // 2).cube(0).hbm(0),
    ]
    for source in places:
        for destination in places:
            if source is not destination:
                path = model.path(source, destination)
                assert len(set(path)) == len(path) > 0
                time_of(model, model.start_transfer(source, destination, 100))


def test_places_that_do_not_exist_are_refused_by_name() -> None:
    model = machine()

    with pytest.raises(ConfigError, match="system default has no SIP 4: they are 0 to 3"):
        model.sip(4)
    with pytest.raises(ConfigError, match=r"sip0\.cube1 has no PE 8"):
        model.sip(0).cube(1).pe(8)


def test_a_large_gemm_reaches_the_roofline() -> None:
    model = machine()
    m = n = k = 4_096

    time = model.sip(0).pe(0).gemm_engine.request(m, n, k, "f16")

    roofline = 2 * m * n * k * 1_000 // 2_048  # 2,048 flops per cycle of a nanosecond
    assert roofline <= time <= 1.05 * roofline


def test_a_gemm_is_rounded_up_to_tiles_and_pays_its_start_up() -> None:
    model = machine()
    pe = model.sip(0).pe(0)

    time = pe.gemm_engine.request(1, 17, 1, "f16")

    assert time == 32_000 + 2 * 16 * 32 * 16 * 1_000 // 2_048
    assert pe.gemm_engine.flops == 2 * 17


def test_costly_operations_and_other_dtypes_take_longer() -> None:
    model = machine()
    pe = model.sip(0).pe(0)

    def cost(operation: str, dtype: str) -> int:
        return pe.math_engine.duration(64_000, operation, dtype) - 4_000

    assert cost("add", "f32") == 1_000_000
    assert cost("exp", "f32") == 4_000_000
    assert cost("add", "f16") == 500_000
    assert cost("add", "f64") == 2_000_000, "not in the topology: half of f32"
    assert cost("add", "i16") == 500_000, "not in the topology: an integer type scales"
    with pytest.raises(ConfigError, match="knows no dtype 'f3'"):
        cost("add", "f3")


def test_engines_work_side_by_side_and_no_resource_is_over_100_percent() -> None:
    model = machine()
    pe = model.sip(0).pe(0)
    simulator = model.simulator
    for _ in range(3):
        simulator.process(wait(pe.gemm_engine.request(64, 64, 64, "f16")))
        simulator.process(wait(pe.math_engine.request(4_096, "add", "f16")))
        pe.start_dma(1 << 14)

    simulator.run()

    use = model.utilisation()
    assert all(0 <= share <= 1 for share in use.values())
    work = sum(each.busy for each in model.servers) + sum(each.busy for each in model.links)
    assert simulator.now < work
    assert use["sip0.cube0.pe0.gemm"] == pe.gemm_engine.busy / simulator.now


def queue_between(model: HardwareMachine, **options: Any) -> IpcQueue:
    return IpcQueue(model, model.sip(0).pe(0), model.sip(1).pe(0), **options)


def test_messages_come_in_order_with_their_data() -> None:
    model = machine()
    queue, seen = queue_between(model), []

    def sender() -> Steps:
        for number, size in enumerate([4_096, 16, 2_048, 16, 4_000, 1]):
            yield from queue.send(size, number)

    def receiver() -> Steps:
        for _ in range(6):
            slot = yield queue.receive()
            seen.append((slot.payload, slot.size))
            queue.free()

    model.simulator.process(sender())
    model.simulator.process(receiver())
    model.simulator.run()

    assert seen == [(0, 4_096), (1, 16), (2, 2_048), (3, 16), (4, 4_000), (5, 1)]
    assert (queue.messages_sent, queue.bytes_sent) == (6, 10_177)


@pytest.mark.parametrize("backpressure", ["sleep", "spin"])
def test_a_slow_receiver_holds_up_its_sender_by_no_more_than_the_slots(backpressure: Any) -> None:
    model = machine()
    queue = queue_between(model, slots=2, backpressure=backpressure)
    sent, received = [], []

    def sender() -> Steps:
        for number in range(5):
            yield from queue.send(64, number)
            sent.append(model.simulator.now)

    def receiver() -> Steps:
        for _ in range(5):
            yield 10_000_000
            received.append((yield queue.receive()).payload)
            queue.free()

    model.simulator.process(sender())
    model.simulator.process(receiver())
    model.simulator.run()

    assert received == [0, 1, 2, 3, 4]
    assert sent[1] < 10_000_000 < sent[2] < 20_000_000 < sent[3] < 30_000_000 < sent[4]


def test_a_queue_that_does_not_fit_its_memory_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"512 slots of 4096 bytes do not fit into sip1\.cube0"):
        queue_between(machine(), slots=512)


def test_a_message_larger_than_a_slot_is_refused() -> None:
    model = machine()

    with pytest.raises(ConfigError, match="5000 bytes does not fit a slot of 4096"):
        time_of(model, queue_between(model).send(5_000))
