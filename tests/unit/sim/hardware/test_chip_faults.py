"""Faults of chips: what they do to the times of parts and collectives, on every level."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.faults.reading import read_chip_faults, read_faults_of_run
from rankwise.sim.faults.vocabulary import Kill, Late, SlowPart
from rankwise.sim.hardware import load_topology
from rankwise.sim.hardware.faults import Unreachable, checked_faults
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.kernel import Steps
from rankwise.sim.runtime.multiprocessing import SpawnException


def machine_with(*words: str, topology: str = "default") -> Topology:
    machine = load_topology(topology)
    return machine.with_faults(checked_faults(read_chip_faults(words), machine))


@cache
def time_of_ring(fidelity: str, elements: int, *words: str) -> int:
    """Picoseconds of an all-reduce among four ranks, and how many levels it ran on."""
    engine = GraphEngine(machine_with(*words), enable_data=False)
    with RuntimeContext(engine, ccl={"defaults": {"fidelity": fidelity}}) as torch:

        def program(_rank: int) -> None:
            torch.distributed.all_reduce(torch.zeros(elements, dtype="f16"))

        torch.multiprocessing.spawn(program, nprocs=4)
    assert list(engine.machine.fidelities.values()) == [fidelity]
    times = [(each.start, each.end) for each in engine.op_log if each.kind == "all_reduce"]
    return max(end for _, end in times) - min(start for start, _ in times)


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["slow:link=sip0-sip1,times=4"], 2.2),
        (["slow:pe=sip1.cube0.pe2,times=8"], 1.0),
        (["jitter:percent=20,seed=3"], 1.05),
        (["kill:link=sip1-sip2"], 1.1),
        (["kill:link=sip1-sip2,at=8us"], 1.1),
    ],
)
def test_a_fault_takes_as_long_on_every_level_within_3_percent(
    words: Sequence[str], least: float
) -> None:
    healthy = time_of_ring("queue", 1 << 16)
    by_kernels, by_queues, by_messages = (
        time_of_ring(level, 1 << 16, *words) for level in ("kernel", "queue", "message")
    )

    assert by_queues > least * healthy
    assert by_kernels == pytest.approx(by_queues, rel=0.03)
    assert by_messages == pytest.approx(by_queues, rel=0.03)


def test_a_link_that_dies_half_way_costs_less_than_one_that_was_dead() -> None:
    for level in ("queue", "message"):
        times = [
            time_of_ring(level, 1 << 16, *words)
            for words in ((), ("kill:link=sip1-sip2,at=8us",), ("kill:link=sip1-sip2",))
        ]
        assert times == sorted(set(times)), level


def test_all_ranks_get_on_where_the_way_round_is_much_quicker() -> None:
    words = "slow:link=sip1->sip2,times=1000000", "kill:link=sip1->sip2,at=20us"
    assert time_of_ring("message", 1 << 18, *words) < 10**9


@pytest.mark.parametrize("times", [1_000, 1_000_000])
def test_a_gigabyte_over_a_link_that_is_very_slow_takes_as_long_as_that_link_does(
    times: int,
) -> None:
    """Products of bytes and picoseconds have more than 63 bits here."""
    took = time_of_ring("message", 1 << 29, f"slow:link=sip1->sip2,times={times}")

    link = load_topology("default").machine.system.sips.fastest_link
    assert took == pytest.approx(6 * times * link.rate.time_for(1 << 28), rel=0.02)


def test_what_has_begun_when_a_link_dies_arrives_and_what_begins_then_takes_another_way() -> None:
    def end_of_two_copies(*words: str) -> list[int]:
        engine = GraphEngine(machine_with(*words))
        machine, simulator = engine.machine, engine.simulator
        ends = []

        def steps(begin: int) -> Steps:
            yield begin
            yield machine.start_transfer(machine.sip(0).pe(0), machine.sip(1).pe(0), 1 << 20)
            ends.append(simulator.now - begin)

        simulator.process(steps(0))
        simulator.process(steps(100_000_000))
        simulator.run()
        return ends

    healthy, after = end_of_two_copies("kill:link=sip0->sip1,at=2us")
    assert healthy == end_of_two_copies()[0]
    assert after == healthy + 2 * 500_000  # by two more wires


def test_without_any_way_left_the_run_fails_and_names_the_dead_links() -> None:
    dead = [f"kill:link=sip0-sip{other}" for other in (1, 3)]
    with pytest.raises(
        SpawnException, match=r"^there is no way from sip0 to sip1: dead are"
    ) as told:
        time_of_ring("queue", 1 << 10, *dead)

    assert isinstance(told.value.__cause__, Unreachable)
    assert told.value.failures == ()  # no rank is to blame


def test_a_kernel_on_a_slow_pe_takes_as_many_times_as_long() -> None:
    engines = {
        words: GraphEngine(machine_with(*words)).machine.sip(0)
        for words in ((), ("slow:pe=sip0.cube1.pe2,times=2.5",))
    }
    well, slow = (sip.cube(1).pe(2) for sip in engines.values())

    for work in ((64, 64, 64, "f16"), (512, 16, 128, "f32")):
        assert slow.gemm_engine.duration(*work) == -(-well.gemm_engine.duration(*work) * 5 // 2)
    assert slow.dma_engine.rate.time_for(1 << 20) == well.dma_engine.rate.time_for(5 << 19)
    others = [sip.cube(1).pe(3).tcm_port.rate for sip in engines.values()]
    assert others[0] == others[1]


def test_jitter_is_decided_by_the_seed_and_by_the_name_of_the_part() -> None:
    def rates(*words: str) -> list[float]:
        machine = GraphEngine(machine_with(*words)).machine
        return [float(machine.sip(sip).pe(0).dma_engine.rate) for sip in range(4)]

    well, one, again, other = (
        rates(),
        rates("jitter:percent=10,seed=1"),
        rates("jitter:percent=10,seed=1"),
        rates("jitter:percent=10,seed=2"),
    )
    assert one == again != other
    assert len(set(one)) == len(one)
    assert all(0.9 < slow / fast <= 1 for slow, fast in zip(one, well, strict=True))


def test_devices_with_faults_are_no_images_of_each_other() -> None:
    assert not GraphEngine(machine_with("jitter:percent=1")).replicas.are_allowed
    assert GraphEngine(machine_with()).replicas.are_allowed


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("slow:link=sip0-sip2,times=2", "has no link 'sip0->sip2'"),
        ("slow:link=sip0,times=2", "has no link 'sip0'"),
        ("slow:link=sip0.cube0-cube3,times=2", "has no link 'sip0.cube0->cube3'"),
        ("slow:pe=sip0.cube0.pe8,times=2", "has no PE 'sip0.cube0.pe8'"),
        ("slow:pe=sip0.pe1,times=2", "has no PE 'sip0.pe1'"),
        ("slow:times=2", "slow needs link=… or pe=…"),
        ("slow:link=sip0-sip1,pe=sip0.cube0.pe0,times=2", "slow needs link=… or pe=…"),
        ("slow:link=sip0-sip1,times=0.5", "times is 0.5, expected 1 to 1,000,000"),
        ("slow:pe=sip00.cube0.pe0,times=2", "has no PE 'sip00.cube0.pe0'"),
        ("slow:link=sip01-sip0,times=2", "has no link 'sip01->sip0'"),
        ("slow:link=sip0-sip1,times=fast", "times is 'fast', expected a number"),
        ("slow:link=sip0-sip1", "slow of a chip needs times (as in slow:link=sip0-sip1,times=4)"),
        ("kill:link=sip0-sip1,link=sip1-sip2", "link is given twice (give two faults)"),
        ("slow", "expected one of slow, jitter, kill, as in slow:link=sip0-sip1,times=4"),
        ("kill:link=host-sip0", "has no link between SIPs 'host->sip0'"),
        ("kill:link=sip0-sip1,at=3", "at is '3', expected a duration with its unit"),
        ("jitter:percent=-1", "percent is -1, expected 0 to 10,000"),
        ("kill:node=1", "this is a fault of a node, and here only chips have faults (rankwise"),
        ("late:rank=1,by=1s", "this is a fault of a rank, and here only chips have faults"),
    ],
)
def test_what_is_no_fault_of_the_machine_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        machine_with(word)

    assert str(caught.value).startswith(f"--faults {word}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("part", ["link=sip0-sip1", "pe=sip0.cube0.pe0"])
def test_faults_of_one_part_are_limited_together(part: str) -> None:
    machine_with(f"slow:{part},times=1000", f"slow:{part},times=1000")

    with pytest.raises(ConfigError, match=r"^--faults slow.*times=1001: .*1,001,000 times as long"):
        machine_with(f"slow:{part},times=1000", f"slow:{part},times=1001")


def test_wires_inside_of_devices_and_to_the_host_can_be_slow() -> None:
    words = ["slow:link=sip0.cube0-cube1,times=2", "slow:link=host->sip3,times=2"]
    faults = machine_with(*words).faults

    assert faults is not None
    slow = ("sip0.cube0->cube1", "sip0.cube1->cube0", "host->sip3")
    assert [faults.times(part) for part in (*slow, "sip3->host")] == [2, 2, 2, 1]
    assert [faults.is_inside(sip) for sip in (0, 3)] == [True, False]


def test_a_switch_has_links_too() -> None:
    machine = GraphEngine(machine_with("slow:link=sip3-switch,times=2", topology="switch8")).machine

    ordinary, _ = machine.sip_links(0, 1)
    slow, _ = machine.sip_links(3, 1)
    assert slow.rate.time_for(1 << 20) == 2 * ordinary.rate.time_for(1 << 20)


def test_faults_of_chips_are_refused_where_there_are_ranks_only() -> None:
    words = ["slow:link=sip0-sip1,times=2"]
    with pytest.raises(ConfigError, match="of a chip, and these ranks have no machine") as caught:
        read_faults_of_run(words, 1)

    assert "--on sim:MACHINE" in str(caught.value.hint)


def test_links_to_the_host_are_refused_where_copies_take_no_time() -> None:
    with pytest.raises(ConfigError, match="link=sip1-host,times=2: copies between host and device"):
        read_faults_of_run(["slow:link=sip1-host,times=2"], 1, has_machine=True)


def test_one_file_tells_of_ranks_and_of_chips(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(
        "faults:\n  - {what: slow, link: sip0-sip1, times: 4}\n"
        "  - {what: late, rank: 1, by: 5 us}\n  - {what: kill, rank: none}\n"
    )
    with pytest.raises(ConfigError, match=r"faults.yaml: faults\[2\]: rank is 'none', expected a"):
        read_faults_of_run([str(file)], 2, has_machine=True)
    file.write_text(file.read_text().replace("none", "0"))

    faults, ((_, of_chip),) = read_faults_of_run([str(file)], 2, has_machine=True)
    assert faults == (Late(rank=1, by=Duration(5_000)), Kill(rank=0))
    assert of_chip == SlowPart(link="sip0-sip1", times=4)


def test_faults_can_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(
        "faults:\n  - {what: slow, link: sip0-sip1, times: 4}\n  - {what: jitter, percent: 5}\n"
    )
    faults = machine_with(str(file)).faults

    assert faults is not None
    assert 4 <= faults.times("sip0->sip1") <= 4.2


def test_what_is_wrong_in_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("faults:\n  - {what: jitter, percent: 5}\n  - {what: slow, times: 2}\n")

    with pytest.raises(ConfigError, match=r"faults\.yaml: faults\[1\]: slow needs link"):
        machine_with(str(file))
