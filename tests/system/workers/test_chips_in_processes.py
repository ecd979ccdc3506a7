"""Chips in processes of their own, which meet at a path: no tree above them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("no_leftovers")]

PROGRAM = """
import json, os, signal, sys

import numpy as np

import rankwise.sim.triton.language as tl
from rankwise.base.errors import PeerDied
from rankwise.sim import triton
from rankwise.workers import (
    ArgDirection, ChipBootstrapConfig, ChipBufferSpec, ChipCallable, ChipCommBootstrapConfig,
    ChipWorker, ContinuousTensor, DataType, TaskArgs,
)

rank, count, path, platform, deed = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]


@triton.jit
def add(x, y, out, n):
    at = tl.arange(0, 128)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


IN, OUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.SCALAR
callable_ = ChipCallable.build([IN, IN, OUT, SCALAR], "add", add, grid=1)
buffers = [ChipBufferSpec(name, "float32", 100, "window", 400) for name in "xy"]
config = ChipBootstrapConfig(ChipCommBootstrapConfig(rank, count, path, 4096), buffers)

worker = ChipWorker()
worker.init(platform)
result = worker.bootstrap_context(rank, config)
handle = 1
own = np.full(100, rank + 1, np.float32)
x, y = (
    ContinuousTensor.make(pointer, (100,), DataType.FLOAT32, child_memory=True)
    for pointer in result.buffer_ptrs
)
worker.copy_to(x.data, own.ctypes.data, own.nbytes)
if deed == "die" and rank == count - 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    worker.comm_barrier(handle, timeout=60)
except PeerDied as error:
    print(json.dumps({"died": str(error)}))
    worker.shutdown_bootstrap()
    worker.finalize()
    sys.exit()

# The windows of all ranks are where the table says; the next one's x lies at its beginning.
table = np.frombuffer(bytes(memoryview(
    (__import__("ctypes").c_char * (16 + 8 * count)).from_address(result.device_ctx)
)), np.uint64)
next_base = int(table[2 + (rank + 1) % count])
peers = ContinuousTensor.make(next_base, (100,), DataType.FLOAT32, child_memory=True)
args = TaskArgs()
for tensor in (x, peers, y):
    args.add_tensor(tensor)
args.add_scalar(100)
took_ns = worker.run(callable_, args)
sums = worker.comm_member(handle).all_reduce(np.float64(rank))
got = np.empty(100, np.float32)
worker.copy_from(got.ctypes.data, y.data, 400)
worker.comm_barrier(handle)
worker.shutdown_bootstrap()
worker.finalize()
print(json.dumps({"values": sorted(set(got.tolist())), "took_ns": took_ns, "sum": float(sums)}))
"""


def run_chips(folder: Path, count: int, platform: str, deed: str) -> list[dict[str, Any] | None]:
    """What each chip has printed; None for one that has not ended well."""
    program = folder / "chip.py"
    program.write_text(PROGRAM)
    chips = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(count), str(folder / "meeting"),
             platform, deed],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    told: list[dict[str, Any] | None] = []
    for chip in chips:
        output, errors = chip.communicate(timeout=100)
        assert chip.returncode in (0, -9), errors
        told.append(json.loads(output) if chip.returncode == 0 else None)
    return told


@pytest.mark.parametrize("platform", ["host", "sim"])
def test_chips_of_several_processes_compute_on_each_others_windows(
    tmp_path: Path, platform: str
) -> None:
    told = run_chips(tmp_path, 3, platform, "work")

    assert [chip["values"] for chip in told if chip] == [[3.0], [5.0], [4.0]]
    assert [chip["sum"] for chip in told if chip] == [3.0] * 3
    assert all((chip["took_ns"] > 0) == (platform == "sim") for chip in told if chip)


def test_a_chip_that_is_killed_lets_its_peers_know_and_they_come_down_in_peace(
    tmp_path: Path,
) -> None:
    told = run_chips(tmp_path, 2, "host", "die")

    assert told[1] is None
    assert told[0] is not None
    assert "rank 1" in told[0]["died"]
