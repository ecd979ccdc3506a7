"""Launches that are images of each other: nobody can tell from times, logs or parts."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, TimeLimit
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches import tp_mlp
from rankwise.sim.hardware.commands import CommandHandle, Copy, KernelLaunch, MemoryWrite, MmuMap
from rankwise.sim.hardware.topology import Topology, load_topology, parse_topology
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner

SIPS = 4
ELEMENTS = 1 << 14


def scale(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    for start in range(tl.program_id(0) * B, n, 4 * B):
        i = start + tl.arange(0, B)
        value = tl.load(x + i, mask=i < n)
        tl.store(o + i, value + value, mask=i < n)


def by_columns(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    """Touches many channels with each access, a few bytes of each."""
    i = tl.arange(0, B)[:, None] * 128 + tl.arange(0, 8)[None, :] + tl.program_id(0) * 8
    total = tl.dot(tl.load(x + i), tl.load(x + tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)))
    tl.store(o + i, total + n)


def counts(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    tl.atomic_add(o + tl.arange(0, B), tl.load(x + tl.arange(0, B)) * n)


FAILING = """
from rankwise.sim.hardware.cost_models import TableCosts


class Failing(TableCosts):
    def math(self, elements, operation, dtype):
        raise LookupError("no price of an add")
"""


class Devices:
    """A machine whose SIPs have two arrays each, in the same places."""

    def __init__(
        self,
        *,
        replicas: bool,
        places: int = 8,
        later: Iterable[int] = (),
        topology: Topology | str = "default",
        time_limit: int | None = None,
    ) -> None:
        self.engine = GraphEngine(topology, enable_data=False, time_limit=time_limit)
        self.engine.replicas.are_allowed = replicas
        spec = self.engine.topology.machine
        channels = range(min(places, spec.cube.pes.count))
        size = ELEMENTS * 4
        mapped = tuple((size // len(channels), 0, pe) for pe in channels)
        self.arrays: list[list[DevicePointer]] = []
        for sip in range(SIPS):
            space = self.engine.space(sip)
            if sip in later:
                space.reserve(4_096)
            addresses = [space.reserve(size) for _ in range(2)]
            self.arrays.append([DevicePointer(at, "float32", ELEMENTS) for at in addresses])
            for address in addresses:
                granule = 512 if places > 1 else 0
                command = MmuMap(
                    sip=sip, address=address, size=size, places=mapped, interleave=granule
                )
                self.engine.submit(command)
        self.engine.run()

    def launch(self, kernel: Callable[..., Any], sips: Iterable[int] = range(SIPS), n: int = 3_000,
               stream: int = 0) -> list[CommandHandle]:  # fmt: skip
        handles = []
        for sip in sips:
            command = KernelLaunch(
                sip=sip, runner=KernelRunner({"B": 64}), kernel_fn=kernel, stream=stream,
                kernel_args=(*self.arrays[sip], n), num_programs=4,
            )  # fmt: skip
            handles.append(self.engine.submit(command))
        return handles

    def write(self, sip: int, size: int, stream: int = 0) -> None:
        address = self.arrays[sip][0].address
        self.engine.submit(MemoryWrite(sip=sip, address=address, size=size, stream=stream))

    def copy(self, sip: int, to: int, size: int, stream: int = 0) -> None:
        self.engine.submit(
            Copy(
                sip=sip, address=self.arrays[sip][1].address, destination_sip=to, size=size,
                destination=self.arrays[to][0].address, stream=stream,
            )
        )  # fmt: skip


def all_that_is_known(engine: GraphEngine) -> dict[str, Any]:
    machine = engine.machine
    parts: list[Any] = [*machine.links, *machine.servers]
    # Only the order of what is logged at the same instant may be another.
    logged = Counter(replace(each, number=0) for each in engine.op_log)
    ends = [each.end for each in engine.op_log]
    assert ends == sorted(ends)
    return {
        "now": engine.now,
        "parts": {each.name: (each.busy, each.amount) for each in parts},
        "turns": {
            pe.name: pe.dma_turn for sip in range(SIPS) for pe in machine.sip(sip).pes_in_use()
        },
        "log": logged,
    }


def check_same(engine: GraphEngine, other: GraphEngine) -> None:
    here, there = all_that_is_known(engine), all_that_is_known(other)
    assert here["now"] == there["now"]
    for what in ("parts", "turns", "log"):
        differ = [
            key for key in here[what] | there[what] if here[what].get(key) != there[what].get(key)
        ]
        assert not differ, what


def check_equal(done: Callable[[Devices], object], **how: Any) -> int:
    """Do it with images and without; how many there were."""
    with_images, without = Devices(replicas=True, **how), Devices(replicas=False, **how)
    for devices in (with_images, without):
        done(devices)
        devices.engine.run()
    check_same(with_images.engine, without.engine)
    assert without.engine.replicas.count == 0
    return with_images.engine.replicas.count


@pytest.mark.parametrize(
    ("kernel", "places", "simulated"),
    [(scale, 1, 1), (scale, 8, 1), (by_columns, 1, 1), (by_columns, 8, 3)],
)
def test_equal_launches_are_simulated_once(
    kernel: Callable[..., Any], places: int, simulated: int
) -> None:
    """Also one after the other, unless a device's turns among its channels have changed."""

    def done(devices: Devices) -> None:
        for _ in range(3):
            devices.launch(kernel)

    assert check_equal(done, places=places) == 3 * SIPS - simulated


def test_launches_beside_a_transfer_are_simulated_and_others_have_images() -> None:
    def done(devices: Devices) -> None:
        devices.copy(0, to=1, size=ELEMENTS * 4, stream=1)
        devices.launch(scale)

    assert check_equal(done) == SIPS - 3


def test_launch_that_begins_in_the_wave_of_a_write_to_its_device_is_simulated() -> None:
    """The write begins when the launches do, and meets that on its own SIP."""

    def done(devices: Devices) -> None:
        devices.launch(scale, [0, 1])
        devices.write(2, 4_096, stream=1)
        devices.launch(scale, [2, 3])

    assert check_equal(done) == SIPS - 2


@pytest.mark.parametrize(
    ("launches", "replicas"),
    [
        pytest.param([(scale, [0, 1, 2], 3_000), (scale, [3], 3_001)], 2, id="another argument"),
        pytest.param([(scale, [0, 1, 2], 3_000), (by_columns, [3], 3_000)], 2, id="another kernel"),
        pytest.param([(scale, [0, 1], 3_000), (scale, [2, 3], 3_001)], 2, id="two kinds"),
        pytest.param([(counts, [0, 1, 2, 3], 3)], 0, id="no recording"),
        pytest.param([(scale, [0], 3_000)], 0, id="alone"),
    ],
)
def test_launches_that_differ_are_simulated(launches: list[Any], replicas: int) -> None:
    def done(devices: Devices) -> None:
        for kernel, sips, n in launches:
            devices.launch(kernel, sips, n)

    assert check_equal(done) == replicas


def test_arrays_at_other_addresses_are_simulated() -> None:
    assert check_equal(lambda devices: devices.launch(scale), later=[2]) == SIPS - 2


def test_two_launches_at_once_on_one_device_are_simulated() -> None:
    def done(devices: Devices) -> None:
        devices.launch(scale)
        devices.launch(scale, stream=1)

    assert check_equal(done) == 0


def test_a_device_that_has_done_more_before_is_no_image() -> None:
    """Its next DMA lets another memory stand for the others."""

    def done(devices: Devices) -> None:
        devices.launch(by_columns, [1])
        devices.engine.run()
        devices.launch(by_columns)
        devices.engine.run()
        devices.launch(scale)

    # The first launch is the original of all that find their device as it did.
    assert check_equal(done) == (SIPS - 1) + (SIPS - 2)


@pytest.mark.parametrize("after", [510_000, 700_000, 1_000_000])
@pytest.mark.parametrize("touched", [0, 1])
def test_launch_that_is_touched_on_its_way_is_simulated_from_its_beginning(
    after: int, touched: int
) -> None:
    """By a write from the host, to the original and to an image."""

    def done(devices: Devices) -> None:
        devices.launch(scale)
        devices.engine.simulator.run(until=devices.engine.now + after - 500_000)
        devices.write(touched, 65_536, stream=1)

    assert check_equal(done) == (SIPS - 2 if touched else 0)


def staggered(devices: Devices, kernel: Callable[..., Any] = scale) -> None:
    """Let the launch of each device begin at an instant of its own."""
    for sip in range(SIPS):
        devices.write(sip, 4_096 * sip + 64)
    devices.launch(kernel)


@pytest.mark.parametrize("kernel", [scale, by_columns])
def test_equal_launches_that_begin_at_different_instants_are_simulated_once(
    kernel: Callable[..., Any],
) -> None:
    assert check_equal(lambda devices: staggered(devices, kernel)) == SIPS - 1


def test_launch_is_the_image_of_one_that_ended_long_ago() -> None:
    def done(devices: Devices) -> None:
        for sip in range(SIPS):
            devices.launch(scale, [sip])
            devices.engine.run()

    assert check_equal(done) == SIPS - 1


@pytest.mark.parametrize("source", range(SIPS))
@pytest.mark.parametrize("after", [600_000, 900_000, 1_500_000])
def test_copy_between_devices_lets_the_launches_on_both_be_simulated(
    source: int, after: int
) -> None:
    def done(devices: Devices) -> None:
        staggered(devices)
        devices.engine.simulator.run(until=devices.engine.now + after)
        devices.copy(source, (source + 1) % SIPS, 32_768, stream=1)

    check_equal(done)


def test_a_caller_who_stops_at_an_instant_may_ask_for_more() -> None:
    def done(devices: Devices) -> None:
        devices.launch(scale)
        start = devices.engine.now
        devices.engine.simulator.run(until=start + 700_000)
        devices.write(1, 65_536, stream=1)

    check_equal(done)


@pytest.mark.parametrize("seed", range(16))
def test_nobody_can_tell_from_a_random_program(seed: int) -> None:
    def done(devices: Devices) -> None:
        chance = random.Random(seed)
        for _ in range(12):
            stream = chance.choice([0, 0, 0, 1])
            match chance.randrange(7):
                case 6:
                    devices.engine.simulator.run(
                        until=devices.engine.now + chance.randrange(400_000, 3_000_000)
                    )
                case 0:
                    sips = chance.sample(range(SIPS), 2)
                    devices.copy(sips[0], sips[1], chance.randrange(64, 16_384), stream)
                case 1:
                    devices.write(chance.randrange(SIPS), chance.randrange(64, 65_536), stream)
                case 2:
                    devices.engine.run()
                case _:
                    kernel = chance.choice([scale, scale, by_columns, counts])
                    devices.launch(kernel, n=chance.choice([3_000, 1_000]), stream=stream)

    check_equal(done)


def test_launches_between_transfers_have_images() -> None:
    def done(devices: Devices) -> None:
        for _ in range(4):
            devices.launch(scale)
            devices.launch(by_columns)
            devices.engine.run()
            devices.write(1, 512)
            devices.engine.run()

    assert check_equal(done) == 8 * (SIPS - 1)


@pytest.mark.parametrize("replicas", [True, False])
def test_what_fails_in_the_one_that_is_simulated_fails_in_all(
    replicas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model of a plug-in fails when the machine asks it, in the middle of a launch."""
    (tmp_path / "failing_lab.py").write_text(FAILING)
    (tmp_path / "failing_lab-1.dist-info").mkdir()
    points = "[rankwise.cost_models]\nfailing = failing_lab:Failing\n"
    (tmp_path / "failing_lab-1.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = load_topology("default").spec
    spec["pe"]["cost_model"] = "failing"
    devices = Devices(replicas=replicas, topology=parse_topology(yaml.safe_dump(spec), "lab"))

    handles = devices.launch(scale)

    for handle in handles:
        with pytest.raises(ConfigError, match=r"failed in math.*no price of an add"):
            devices.engine.wait(handle)
    assert devices.engine.replicas.count == 0, "each fails by itself"


@pytest.mark.parametrize("replicas", [True, False])
def test_the_limit_of_time_holds_for_images(replicas: bool) -> None:
    devices = Devices(replicas=replicas, time_limit=1_700_000)

    handles = devices.launch(scale)

    with pytest.raises(TimeLimit, match=r"exceeds its limit of 1.7 us"):
        devices.engine.wait(handles[2])


def test_ranks_of_a_model_have_images_and_the_same_times() -> None:
    engines = []
    for replicas in (True, False):
        engines.append(engine := GraphEngine("switch8", enable_data=False))
        engine.replicas.are_allowed = replicas
        with RuntimeContext(engine, ccl={}) as torch:
            tp_mlp.run(torch, tokens=32, hidden=64, inner=256)

    check_same(*engines)
    assert [engine.replicas.count > 0 for engine in engines] == [True, False]
