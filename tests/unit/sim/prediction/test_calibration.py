"""From measurements to a machine, and from logs of nccl-tests to a fabric."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from rankwise.base.errors import ConfigError
from rankwise.cli.calibrate import calibrate
from rankwise.simranks.prediction.machines.calibration import (
    Attention,
    Elementwise,
    MeasuredCollective,
    MeasuredProduct,
    Measurements,
    machine_of,
    machine_text,
    with_collectives,
)
from rankwise.simranks.prediction.machines.catalogue import (
    find_machine,
    named_machine,
    parse_machine,
)
from rankwise.simranks.prediction.machines.fabric import FabricPrices
from rankwise.simranks.prediction.machines.nccl_logs import read_nccl_tests

MIB = 1 << 20
RATE, BANDWIDTH, START = 50e9, 10e9, 100e-6


def ideal() -> Measurements:
    """A processor of 50 GFLOPS and 10 GB/s, whose collectives take 100 us and 1 GB/s."""
    shapes = [(256, 512, 512), (512, 512, 1024), (1024, 1024, 1024)]
    return Measurements(
        device="a processor", software="torch", sms=1, memory_bytes=1 << 34, is_queueing=False,
        ranks=2, empty=1e-6, launches=dict.fromkeys(
            ("view", "plain", "attention", "foreach", "fsdp", "dtensor", "collective"), 2e-6
        ),
        products=[
            MeasuredProduct(dtype="f32", rows=m, inner=k, columns=n, seconds=2 * m * k * n / RATE)
            for m, k, n in shapes
        ],
        attention=[
            Attention(
                dtype="f32", batch=2, heads=4, length=512, width=64, is_backward=is_backward,
                seconds=seconds,
            )
            for is_backward, seconds in ((False, 0.02), (True, 0.05))
        ],
        elementwise=[
            Elementwise(name="copy", size=size, seconds=size / BANDWIDTH)
            for size in (MIB, 4 * MIB, 16 * MIB)
        ],
        collectives=[
            MeasuredCollective(
                kind="all_reduce", size=size, nodes=1, per_node=2, seconds=START + size / 1e9
            )
            for size in (1024, 65536, MIB, 16 * MIB)
        ],
    )  # fmt: skip


def nccl_log(times: dict[int, float], hosts: list[str]) -> str:
    ranks = [
        f"#  Rank {rank:2} Group  0 Pid   1{rank} on {host:>10} device {rank:2} [0x07] NVIDIA H100"
        for rank, host in enumerate(hosts)
    ]
    rows = [
        f"{size:12} {size // 4:12}     float     sum      -1 {time:8.2f}    0.10    0.18      0"
        f" {time:8.2f}    0.10    0.18      0"
        for size, time in times.items()
    ]
    return "\n".join(["# nccl-tests: all_reduce_perf", *ranks, "# out-of-place", *rows, "# done"])


def test_a_calibrated_processor_keeps_what_collectives_take_of_it() -> None:
    real = machine_of(replace(ideal(), shared=0.75), "mine")

    assert real.host.shared is not None
    assert real.host.shared.value == 0.75
    assert parse_machine(machine_text(real), "mine.yaml").host.shared == real.host.shared
    assert machine_of(ideal(), "mine").host.shared is None


def test_a_calibrated_machine_gives_what_was_measured() -> None:
    real = machine_of(ideal(), "mine")

    assert real.status == "calibrated"
    assert real.node_size == 2
    assert real.residuals["matrix"] < 0.05
    assert real.residuals["memory"] < 0.05
    assert real.residuals["attention"] < 0.05
    assert real.residuals["collectives"] < 0.25


def test_a_calibrated_machine_can_be_read_back(tmp_path: Path) -> None:
    text = machine_text(machine_of(ideal(), "mine"))
    path = tmp_path / "mine.yaml"
    path.write_text(text, "utf-8")

    real = find_machine(str(path))

    assert real is not None
    assert machine_text(real) == text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_device_that_is_its_host_takes_one_operation_at_a_time() -> None:
    assert machine_of(ideal(), "mine").host.queue == 1


def test_a_log_of_nccl_tests_says_how_many_ranks_and_nodes_there_were() -> None:
    points = read_nccl_tests(nccl_log({MIB: 90.0}, ["a"] * 8 + ["b"] * 8), "log")

    assert points == [
        MeasuredCollective(kind="all_reduce", size=MIB, nodes=2, per_node=8, seconds=90.0 * 1e-6)
    ]


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("hello", "no table of sizes and times"),
        (nccl_log({MIB: 90.0}, ["a"]), "no list of two or more ranks"),
    ],
)
def test_another_file_is_no_log_of_nccl_tests(text: str, lacking: str) -> None:
    with pytest.raises(ConfigError, match=lacking):
        read_nccl_tests(text, "some.log")


def test_a_fabric_is_fitted_to_a_log() -> None:
    slow = {size: 200 + size / 50e9 * 1e6 for size in (1024, MIB, 64 * MIB, 1024 * MIB)}
    points = read_nccl_tests(nccl_log(slow, ["a"] * 8), "slow.log")

    real = with_collectives(named_machine("a100-80gb"), points, "slow.log")

    parse_machine(machine_text(real), "again")
    seconds = FabricPrices(real, 8).time("all_reduce", 1024 * MIB, tuple(range(8))) / 1e12
    assert seconds == pytest.approx(slow[1024 * MIB] * 1e-6, rel=0.1)
    assert (real.status, real.validated) == ("calibrated", None)
    assert "slow.log" in real.sources["measured"]
    assert real.levels[1] == named_machine("a100-80gb").levels[1]


def test_calibrate_fits_a_published_log(tmp_path: Path) -> None:
    log, machine = tmp_path / "nccl.log", tmp_path / "mine.yaml"
    log.write_text(nccl_log({1024: 20.0, MIB: 40.0, 1024 * MIB: 5_000.0}, ["a"] * 8), "utf-8")

    result = CliRunner().invoke(
        calibrate, ["-o", str(machine), "--from", str(log), "--like", "h100-sxm"]
    )

    assert result.exit_code == 0, result.output
    assert "collectives" in result.output
    real = find_machine(str(machine))
    assert real is not None
    assert real.name == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-o", "machine.txt"], "ends with .yaml"),
        (["-o", "/none/machine.yaml"], "there is no folder /none"),
        (["-o", "machine.yaml", "--from", "x.log"], "--from needs --like MACHINE"),
        (["-o", "machine.yaml", "--like", "h100-sxm"], "--like needs --from LOG"),
        (["-o", "m.yaml", "--from", "none.log", "--like", "h200"], "none.log cannot be read"),
    ],
)
def test_calibrate_refuses_what_it_cannot_use(words: list[str], told: str) -> None:
    error = CliRunner().invoke(calibrate, words).exception

    assert isinstance(error, ConfigError)
    assert told in str(error)


def test_a_calibrated_processor_reads_factors_at_the_rate_that_flat_products_tell() -> None:
    rate = 4e9
    shapes = [(512, 512, 512), (1024, 1024, 1024), (16, 2048, 2048), (2048, 16, 2048)]
    measured = [
        MeasuredProduct(
            dtype="f32", rows=m, inner=k, columns=n,
            seconds=2 * m * k * n / RATE + 4 * k * (m + n) / rate + 4 * m * n / BANDWIDTH,
        )
        for m, k, n in shapes
    ]  # fmt: skip

    real = machine_of(replace(ideal(), products=measured), "mine")

    assert real.device.operands is not None
    assert real.device.operands["f32"].value == pytest.approx(4, rel=0.1)
    assert real.residuals["matrix"] < 0.05
    assert machine_of(replace(ideal(), is_queueing=True), "mine").device.operands is None


def test_a_calibrated_processor_has_rates_of_its_own_for_products_of_each_type() -> None:
    shapes = [(512, 512, 512), (1024, 1024, 1024), (16, 2048, 2048), (2048, 16, 2048)]
    rates = {"f32": (4, 50e9, 3e9), "bf16": (2, 400e9, 6e9)}
    measured = [
        MeasuredProduct(
            dtype=dtype, rows=m, inner=k, columns=n,
            seconds=(
                2 * m * k * n / rate + width * k * (m + n) / operands + width * m * n / BANDWIDTH
            ),
        )
        for dtype, (width, rate, operands) in rates.items()
        for m, k, n in shapes
    ]  # fmt: skip

    real = machine_of(replace(ideal(), products=measured), "mine")

    assert real.device.operands is not None
    assert real.device.operands["f32"].value == pytest.approx(3, rel=0.1)
    assert real.device.operands["bf16"].value == pytest.approx(6, rel=0.1)
    assert real.device.peak_tflops["f32"].value == pytest.approx(0.05, rel=0.1)
    assert real.device.peak_tflops["bf16"].value == pytest.approx(0.4, rel=0.1)
    assert real.residuals["matrix"] < 0.05


def test_a_calibrated_processor_keeps_how_late_ranks_come() -> None:
    real = machine_of(replace(ideal(), late=0.01), "mine")  # of a second

    assert real.host.late_us is not None
    assert real.host.late_us.value == pytest.approx(316.2, rel=0.001)  # of a millisecond
    assert parse_machine(machine_text(real), "mine.yaml").host.late_us is not None
    assert machine_of(ideal(), "mine").host.late_us is None


def test_the_collectives_of_a_calibrated_processor_are_those_of_gloo() -> None:
    assert machine_of(ideal(), "mine").collectives == "gloo"
    assert machine_of(replace(ideal(), is_queueing=True), "mine").collectives == "nccl"


def test_small_operations_do_not_tell_the_rate_of_the_memory() -> None:
    small = [Elementwise(name="copy", size=4096, seconds=1e-3)]

    real = machine_of(replace(ideal(), elementwise=[*ideal().elementwise, *small]), "mine")

    assert real.residuals["memory"] < 0.05


def test_a_calibrated_processor_keeps_the_rates_of_new_memory_and_functions() -> None:
    real = machine_of(replace(ideal(), new_pages=2.5e9, functions=1.5e9), "mine")

    again = parse_machine(machine_text(real), "mine.yaml")
    assert again.host.new_pages is not None
    assert again.host.new_pages.value == pytest.approx(2.5)
    assert again.device.functions is not None
    assert again.device.functions.value == pytest.approx(1.5)
