"""GPUs as NVML tells of them: figures, reasons, and whose they are."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import FakeGpu, FakeGpus, needs_compiler

from rankwise.base.errors import ConfigError
from rankwise.drivers.real import gpus as gpus_module
from rankwise.drivers.real.gpus import GpuReading, Gpus, GpuUse, open_gpus, require_gpus, uses_of
from rankwise.launch.cluster import gpu_fitness
from rankwise.launch.cluster.gpu_fitness import trouble_of, wrong_products

pytest.importorskip("pynvml")
pytestmark = needs_compiler
MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpus]:
    fake = FakeGpus(tmp_path_factory.mktemp("nvml"))
    yield fake
    fake.close()


@pytest.fixture
def fake(library: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    library.load(monkeypatch)
    library.set([FakeGpu()])
    return library


def test_figures_of_a_gpu_are_read(fake: FakeGpus) -> None:
    fake.set(
        [FakeGpu(thermal_ns=5, power_ns=7, ecc=2, reasons=0x24, processes=((11, 512), (12, -1)))]
    )

    assert require_gpus().read() == [
        GpuReading(
            index=0,
            uuid="GPU-fake-0",
            name="Fake-H100",
            memory_bytes=1024 * MIB,
            memory_bytes_max=81_559 * MIB,
            utilisation=0.87,
            temperature_c=64,
            throttled_by=("thermal", "power cap"),
            throttled_ns={"thermal": 5, "power cap": 7},
            ecc_errors=2,
            processes={11: 512 * MIB, 12: None},
        )
    ]


def test_figures_that_a_card_does_not_have_are_none(fake: FakeGpus) -> None:
    fake.set([FakeGpu(thermal_ns=-1, power_ns=-1, ecc=-1)])

    (reading,) = require_gpus().read()

    assert (reading.throttled_ns, reading.ecc_errors) == ({}, None)


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x01, ()),
        (0x20, ("thermal",)),
        (0x48, ("thermal",)),
        (0x88, ("power brake",)),
        (0x08, ("hardware",)),
        (0x04, ("power cap",)),
    ],
)
def test_reasons_of_slow_clocks(fake: FakeGpus, bits: int, reasons: tuple[str, ...]) -> None:
    fake.set([FakeGpu(reasons=bits)])

    assert require_gpus().read()[0].throttled_by == reasons


def test_memory_is_that_of_a_ranks_session_on_all_its_gpus(fake: FakeGpus) -> None:
    own, session = os.getpid(), os.getsid(0)
    fake.set(
        [
            FakeGpu(busy=10, celsius=40, processes=((own, 100), (999_999, 7))),
            FakeGpu(busy=90, celsius=70, reasons=0x20, thermal_ns=3, processes=((own, 20),)),
            FakeGpu(busy=99),
        ]
    )

    uses = uses_of(require_gpus().read(), [session, 999_999])

    assert uses == {
        session: GpuUse(
            gpus=(0, 1),
            memory_bytes=120 * MIB,
            utilisation=0.9,
            temperature_c=70,
            throttled_by=("thermal",),
            throttled_ns=3,
            ecc_errors=0,
        )
    }


def test_processes_of_another_namespace_are_not_taken_for_ours(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a container, the number of a process in NVML may be that of another process.
    monkeypatch.setattr(gpus_module, "_INITIAL_NAMESPACE", "pid:[1]")
    fake.set([FakeGpu(processes=((os.getpid(), 100),))])

    assert uses_of(require_gpus().read(), [os.getsid(0)]) == {}


def test_process_that_was_given_one_gpu_is_on_it(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus_module, "_INITIAL_NAMESPACE", "pid:[1]")
    fake.set([FakeGpu(), FakeGpu(celsius=71)])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"read line <{fifo}"], environment)
    with fifo.open("w") as release:
        use = uses_of(require_gpus().read(), [pid])[pid]
        release.write("\n")
    os.waitpid(pid, 0)

    assert (use.gpus, use.memory_bytes, use.temperature_c) == ((1,), None, 71)


def test_xid_is_told_with_its_gpu(fake: FakeGpus) -> None:
    fake.set([FakeGpu(), FakeGpu()])
    wait = Gpus(__import__("pynvml")).wait_for_xid()
    assert wait is not None

    fake.report_xid(1, 79)
    xid = wait()

    assert xid is not None
    assert (xid.gpu, xid.number) == (1, 79)


def test_machine_without_a_driver_has_no_gpus(
    fake: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.set([])

    with pytest.raises(ConfigError, match="GPUs cannot be read: NVML"):
        require_gpus()
    assert open_gpus() is None
    monkeypatch.setenv("RANKWISE_GPUS", "0")
    assert open_gpus() is None


def test_node_check_names_the_first_gpu_that_cannot_be_used(fake: FakeGpus) -> None:
    def told(*gpus: FakeGpu) -> list[str]:
        fake.set(gpus)
        return list(trouble_of(require_gpus().read()))

    assert told(FakeGpu(), FakeGpu(reasons=0x04)) == []
    assert told(FakeGpu(total=100, used=80, processes=((4711, 80),))) == [
        "GPU 0 has 20 MiB of 100 MiB free; it is in use by 4711"
    ]
    assert told(FakeGpu(), FakeGpu(ecc=2)) == [
        "GPU 1 has had 2 uncorrectable memory errors: reset it"
    ]
    assert told(FakeGpu(reasons=0x20)) == [
        "GPU 0 is throttled (thermal): check its cooling and power"
    ]


@pytest.mark.torch
def test_matrix_product_has_a_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu_fitness, "SIZES", (64, 256))
    device = torch.device("cpu")

    assert not wrong_products(torch, device)
    right = torch.Tensor.__matmul__

    def flawed(left: Any, other: Any) -> Any:
        product = right(left, other)
        if product.dtype is torch.float32:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flawed)
    assert "float32 is off by" in wrong_products(torch, device)
