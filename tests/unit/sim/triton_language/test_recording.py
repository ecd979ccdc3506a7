"""Launches that are recorded and repeated, where only time is simulated."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import TimeLimit
from rankwise.sim.hardware.commands import KernelLaunch, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.triton.execution import OutOfBounds
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner
from rankwise.sim.triton.machine_launch import _SHARED

SCALE = 2


def scale(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    for start in range(tl.program_id(0) * B, n, 4 * B):
        i = start + tl.arange(0, B)
        value = tl.load(x + i, mask=i < n)
        for _ in range(SCALE):
            value = value + value
        tl.store(o + i, value, mask=i < n)


def looks_first(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    shift = tl.load(x)
    i = tl.arange(0, B)
    total = tl.sum(tl.load(x + i))
    if total + shift > 1000.0:
        total = total * 2
    tl.store(o + tl.program_id(0), total + n)


def matmul(a: Any, b: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, n, B):
        total = tl.dot(tl.load(a + i * n + k + j), tl.load(b + (k + i) * n + j), total)
    tl.store(o + i * n + tl.program_id(0) * B + j, total)


class Devices:
    """The four devices of a machine, each with arrays of 4,096 f32, or numbers."""

    def __init__(self, *, enable_data: bool, dtype: str = "float32", **options: Any) -> None:
        self.engine = GraphEngine("default", enable_data, **options)
        self.arrays: list[list[DevicePointer]] = []
        for sip in range(4):
            # Other addresses on each device: a record has to be moved to where the memory is.
            self.engine.space(sip).reserve(4_096 * (sip + 1))
            self.arrays.append([self._array(sip, dtype) for _ in range(3)])

    def _array(self, sip: int, dtype: str) -> DevicePointer:
        size = 4_096 * np.dtype(dtype).itemsize
        address = self.engine.space(sip).reserve(size)
        self.engine.wait(self.engine.submit(MmuMap(sip=sip, address=address, size=size)))
        return DevicePointer(address, dtype, 4_096)

    def launch(self, kernel: Callable[..., Any], count: int, *args: Any, **meta: Any) -> int:
        """Launch on all devices at once, with the first arrays of each; when all are done."""
        handles = [
            self.engine.submit(
                KernelLaunch(
                    sip=sip, runner=KernelRunner(meta), kernel_fn=kernel,
                    kernel_args=(*arrays[:count], *args), num_programs=8,
                )
            )
            for sip, arrays in enumerate(self.arrays)
        ]  # fmt: skip
        for handle in handles:
            self.engine.wait(handle)
        return self.engine.now

    @property
    def records(self) -> list[Any]:
        """What is kept of launches; None of one that could not be recorded."""
        return list(_SHARED[self.engine.machine].recordings._kept.values())


@pytest.mark.parametrize(
    ("kernel", "arrays", "args"),
    [(scale, 2, (500,)), (looks_first, 2, (7,)), (matmul, 3, (64,))],
)
def test_a_repeated_record_takes_the_time_of_real_programs_and_leaves_their_log(
    kernel: Callable[..., Any], arrays: int, args: tuple[Any, ...]
) -> None:
    real, timed = Devices(enable_data=True), Devices(enable_data=False)

    for devices in (real, timed):
        for _ in range(2):
            devices.launch(kernel, arrays, *args, B=16)

    assert timed.engine.op_log.encode() == real.engine.op_log.encode()
    assert len(timed.records) == 1
    assert timed.records[0] is not None


def test_what_a_kernel_knows_decides_whether_a_record_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(enable_data=False)

    devices.launch(scale, 2, 500, B=16)
    devices.launch(scale, 2, 501, B=16)
    devices.launch(scale, 2, 500, B=32)
    start = devices.engine.now
    before = devices.launch(scale, 2, 500, B=16) - start
    monkeypatch.setattr("test_recording.SCALE", 30)
    after = devices.launch(scale, 2, 500, B=16) - start - before

    assert len(devices.records) == 4
    assert after > before


def test_a_kernel_that_mentions_what_may_change_unseen_is_recorded_each_time() -> None:
    devices = Devices(enable_data=False)
    seen: list[int] = []

    def remembers(x: Any) -> None:
        seen.append(1)
        tl.load(x + tl.arange(0, 16))

    for _ in range(2):
        devices.launch(remembers, 1)

    assert devices.records == []
    assert len(seen) == 2 * 4 * 8


def test_few_records_are_kept() -> None:
    devices = Devices(enable_data=False)

    for n in range(100, 120):
        devices.launch(scale, 2, n, B=16)

    assert len(devices.records) == 16


def counts(x: Any) -> None:
    tl.atomic_add(x, 1)


def says(_x: Any) -> None:
    tl.device_print("program", tl.program_id(0))


def reads_what_it_stores(x: Any) -> None:
    tl.store(x + 1 + tl.program_id(0), 3)
    tl.load(x + 1 + tl.arange(0, 8))


def knows_where(x: Any) -> None:
    tl.store(x, x.to(tl.int64).to(tl.int32))


def looks_until_it_changes(x: Any) -> None:
    if tl.program_id(0) == 0:
        tl.atomic_xchg(x, 1)
    while tl.load(x, volatile=True) == 0:
        pass


@pytest.mark.parametrize(
    "kernel", [counts, says, reads_what_it_stores, knows_where, looks_until_it_changes]
)
def test_programs_that_look_at_others_or_at_addresses_run_as_they_are(
    kernel: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    devices = Devices(enable_data=False, dtype="int32")

    for _ in range(2):
        devices.launch(kernel, 1)

    assert devices.records == [None]
    if kernel is says:
        assert capsys.readouterr().out.count("program") == 2 * 4 * 8


def test_a_kernel_without_end_still_meets_the_limit_of_simulated_time() -> None:
    devices = Devices(enable_data=False, time_limit=10**7)

    def never_ends(x: Any) -> None:
        while True:
            tl.load(x + tl.arange(0, 16))

    with pytest.raises(TimeLimit):
        devices.launch(never_ends, 1)


def test_what_is_wrong_with_a_kernel_is_said_without_data_too() -> None:
    devices = Devices(enable_data=False)

    with pytest.raises(OutOfBounds, match=r'kernel "matmul".*buffer "a"'):
        devices.launch(matmul, 3, 128, B=64)
