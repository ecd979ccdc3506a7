"""Machines that exist: their files, and what operations and collectives cost on them."""

import pytest
from msgspec.structs import replace

from rankwise.base.errors import ConfigError
from rankwise.launch.options import MACHINES as SHOWN
from rankwise.sim.faults.reading import read_chip_faults
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines import (
    MACHINES,
    MachineTopology,
    find_machine,
    open_machine,
)
from rankwise.simranks.prediction.machines.catalogue import named_machine, parse_machine
from rankwise.simranks.prediction.machines.description import FITTED_MAX, Figure, figures_of
from rankwise.simranks.prediction.machines.device import DevicePrices
from rankwise.simranks.prediction.machines.fabric import FabricPrices

H100 = named_machine("h100-sxm")
GLOO = replace(H100, collectives="gloo")
MIB = 1 << 20


def product(rows: int, inner: int, columns: int, dtype: str = "bf16") -> DeviceOperation:
    size = 2 * (rows * inner + inner * columns + rows * columns)
    shapes = ((rows, inner), (inner, columns))
    return DeviceOperation(
        "aten.mm", "gemm", 2 * rows * inner * columns, size, dtype, shapes=shapes
    )


def attention(name: str, flops: int, *, is_causal: bool) -> DeviceOperation:
    shapes = ((2, 32, 8192, 128),) * 3
    return DeviceOperation(
        f"aten.{name}", "gemm", flops, 4 * 2 * 32 * 8192 * 256, "bf16", shapes=shapes,
        is_causal=is_causal,
    )  # fmt: skip


def test_help_and_completion_name_the_machines_that_ship() -> None:
    assert SHOWN == MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_each_figure_has_a_source_and_an_uncertainty(name: str) -> None:
    real = named_machine(name)

    figures = figures_of(real)

    assert all(figure.source in real.sources and figure.within > 0 for _, figure in figures)
    assert {figure.source for _, figure in figures} == real.sources.keys()
    assert sum(path.startswith("device.fitted.") for path, _ in figures) <= FITTED_MAX
    assert real.name == name


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_the_topology_of_its_nodes(name: str) -> None:
    topology = open_machine(name, nodes=2, per_node=4)

    assert isinstance(topology, MachineTopology)
    assert (topology.name, topology.sip_count) == (name, 8)


def test_a_misspelled_machine_names_the_one_that_was_meant() -> None:
    for ask in (open_machine, named_machine):
        with pytest.raises(ConfigError, match="h100-sx'") as raised:
            ask("h100-sx")

        assert raised.value.hint == "did you mean h100-sxm?"


def test_presets_are_no_machines() -> None:
    assert find_machine("switch8") is None
    assert not isinstance(open_machine("switch8"), MachineTopology)


def test_a_node_has_no_more_ranks_than_devices() -> None:
    with pytest.raises(
        ConfigError, match="has 8 devices, and there are 9 ranks per node"
    ) as raised:
        open_machine("h100-sxm", nodes=1, per_node=9)

    assert "--nnodes 2 --nproc-per-node 8" in str(raised.value.hint)


def test_a_machine_takes_no_faults_of_chips() -> None:
    topology = open_machine("h100-sxm", per_node=2)

    with pytest.raises(ConfigError, match="no chips to give a fault to"):
        topology.with_faults(
            [each for _, each in read_chip_faults(["slow:pe=sip1.cube0.pe2,times=8"])]
        )


def test_a_wrong_field_of_a_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mine.yaml: .*sms"):
        parse_machine("name: x\ntitle: x\nstatus: calibrated\nsoftware: x\nsources: {}\n"
                      "device: {sms: none}\n", "mine.yaml")  # fmt: skip


def test_a_product_takes_whole_waves_of_tiles() -> None:
    prices = DevicePrices(H100.device)
    # 132 SMs: 11 x 12 tiles of 128 x 256 are one wave, one more row of tiles begins a second.
    whole = prices.time(product(11 * 128, 8192, 12 * 256))
    more = prices.time(product(12 * 128, 8192, 12 * 256))
    twice = prices.time(product(22 * 128, 8192, 12 * 256))

    assert 1.05 < more / whole <= 2.0
    assert twice == pytest.approx(2 * whole, rel=0.03)


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    prices = DevicePrices(H100.device)
    work = product(16, 8192, 8192)

    bandwidth = H100.device.bandwidth.value * H100.device.fitted.memory.value * 1e9
    kernel = H100.device.fitted.kernel_us.value * 1e-6

    assert prices.time(work) / 1e12 == pytest.approx(work.size / bandwidth + kernel, rel=0.25)
    assert prices.bound(work)[0] == "memory"


def test_products_in_f8_take_half_the_time_and_in_f32_longer() -> None:
    prices = DevicePrices(H100.device)
    half, full, single = (
        prices.time(product(8192, 8192, 8192, each)) for each in ("f8e4", "bf16", "f32")
    )

    assert full / half == pytest.approx(2, rel=0.1)
    assert single > 5 * full


def test_a_causal_mask_halves_attention() -> None:
    prices = DevicePrices(H100.device)
    flops = 4 * 2 * 32 * 8192 * 8192 * 128
    name = "_scaled_dot_product_flash_attention"
    whole = prices.time(attention(name, flops, is_causal=False))
    causal = prices.time(attention(name, flops, is_causal=True))
    backward = prices.time(attention(f"{name}_backward", flops, is_causal=False))

    assert whole / causal == pytest.approx(2, rel=0.05)
    assert backward > whole


def test_a_lookup_reads_the_rows_that_it_takes() -> None:
    prices = DevicePrices(H100.device)
    table, rows = (131_072, 4_096), (1, 1_024)
    taken = 2 * 1_024 * 4_096
    size = 2 * table[0] * table[1] + 8 * 1_024 + taken
    lookup = DeviceOperation("aten.embedding", "math", 1, size, "bf16", shapes=(table, rows))
    copy = DeviceOperation("aten.clone", "math", 1, 2 * taken, "bf16", shapes=((1_024, 4_096),))

    assert prices.time(lookup) == pytest.approx(prices.time(copy), rel=0.05)


def test_the_switch_reduces_what_is_large_and_rings_pass_on_elsewhere() -> None:
    fabric = FabricPrices(H100, per_node=8)
    a100 = FabricPrices(named_machine("a100-80gb"), per_node=8)

    def chosen(prices: FabricPrices, nodes: int) -> str:
        ways = prices.choices("all_reduce", 1024 * MIB, nodes, 8)
        return min(ways, key=lambda way: ways[way])

    assert chosen(fabric, nodes=1) == "multicast"
    assert chosen(a100, nodes=1) == "ring"
    assert chosen(fabric, nodes=2) == "tree"


def test_ranks_of_one_node_reach_each_other_at_its_rate() -> None:
    fabric = FabricPrices(H100, per_node=8)
    near = fabric.time("all_gather", 64 * MIB, tuple(range(8)))
    far = fabric.time("all_gather", 64 * MIB, tuple(range(0, 64, 8)))

    assert far > 5 * near
    assert fabric.message_time(0, 1, 64 * MIB) < fabric.message_time(0, 8, 64 * MIB)
    assert fabric.message_time(3, 3, MIB) == fabric.time("all_reduce", MIB, (5,)) == 0


def test_a_collective_takes_longer_with_more_bytes() -> None:
    fabric = FabricPrices(H100, per_node=8)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        times = [fabric.time(kind, 1 << power, tuple(range(32))) for power in range(4, 34)]

        assert times == sorted(times)


def test_a_processor_reads_the_factors_of_a_product_before_it_computes() -> None:
    operands = {"bf16": Figure(10.0, 0.1, next(iter(H100.sources)))}
    processor = replace(H100.device, operands=operands)
    large, flat = product(4096, 4096, 4096), product(16, 4096, 4096)

    added = DevicePrices(processor).time(large) - DevicePrices(H100.device).time(large)

    rate = H100.device.bandwidth.value * H100.device.fitted.memory.value * 1e9
    matrix = 2 * 4096 * 4096
    assert added == pytest.approx((2 * matrix / 10e9 + matrix / rate) * 1e12, rel=1e-6)
    assert DevicePrices(processor).time(flat) > matrix / 10e9 * 1e12


def test_gloo_reduces_and_scatters_by_an_all_reduce_of_a_copy() -> None:
    pair = (0, 1)
    gloo = FabricPrices(GLOO, 2)

    reduced = gloo.time("all_reduce", 64 * MIB, pair)
    scattered = gloo.time("reduce_scatter", 64 * MIB, pair)

    copied = 64 * MIB * 1.5 * 2
    rate = H100.device.bandwidth.value * H100.device.fitted.memory.value * 1e9
    assert scattered - reduced == pytest.approx(copied / rate * 1e12, rel=1e-6)


def test_gloo_gathers_by_a_ring_and_copies_to_and_from_a_buffer() -> None:
    pair, part = (0, 1), 32 * MIB
    gloo = FabricPrices(GLOO, 2)
    larger, smaller = (gloo.time("all_gather", size, pair) for size in (part, part // 2))

    level = H100.levels[0]
    link = level.bandwidth.value * level.reached.value * 1e9
    copying = H100.device.bandwidth.value * H100.device.fitted.memory.value * 1e9 / 2
    seconds = part / 2 / link + 3 * part / 2 / copying

    assert larger - smaller == pytest.approx(seconds * 1e12, rel=1e-6)


def test_functions_take_their_own_rate_on_a_processor() -> None:
    functions = Figure(1.0, 0.3, next(iter(H100.sources)))
    processor = DevicePrices(replace(H100.device, functions=functions))
    kernel = H100.device.fitted.kernel_us.value * 1e6

    def of(name: str) -> DeviceOperation:
        return DeviceOperation(f"aten.{name}", "math", 10**6, 8 * 10**6, "f32")

    assert processor.time(of("gelu")) == pytest.approx(1e9 + kernel, rel=1e-6)
    assert processor.time(of("exp_")) == pytest.approx(1e9 + kernel, rel=1e-6)
    assert processor.time(of("add")) == DevicePrices(H100.device).time(of("add"))
