"""`--on sim:h100-sxm`: programs on a machine whose hosts and devices have clocks of their own."""

import json
import re
from pathlib import Path

import pytest
from running import run, write_program

pytest.importorskip("torch")

pytestmark = pytest.mark.system

STREAMS = """
import time, torch
begin, end, side_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
side = torch.cuda.Stream()
large = torch.ones(1 << 22, device="cuda")
def work(times):
    for _ in range(times):
        large.add_(1)
torch.cuda.synchronize()
begin.record()
host = time.perf_counter()
work(20)
launched = time.perf_counter() - host
with torch.cuda.stream(side):
    side.wait_event(begin)
    work(20)
    side_end.record()
end.record()
torch.cuda.synchronize()
waited = time.perf_counter() - host
device, beside = begin.elapsed_time(end) / 1e3, begin.elapsed_time(side_end) / 1e3
float(large[0])
asked = time.perf_counter() - host
print(f"host {launched:.6f} device {device:.6f} side {beside:.6f} waited {waited:.6f}")
assert launched < device / 2, "the host waits for each operation"
assert beside < 1.5 * device, "streams do not overlap"
assert waited >= device, "synchronize does not wait"
assert asked >= waited
"""

SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(65536, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_streams_overlap_and_events_tell_the_time_of_the_device(tmp_path: Path) -> None:
    program = write_program(tmp_path, STREAMS)

    finished = run(
        "run", "--on", "sim:h100-sxm", "--device", "cuda", "--virtual-clock", str(program)
    )

    assert finished.code == 0, finished.stderr
    assert "host 0.000" in finished.stdout


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        ("a100-80gb", "NVIDIA A100-SXM4-80GB (8, 0) 108"),
        ("h100-sxm", "NVIDIA H100 80GB HBM3 (9, 0) 132"),
    ],
)
def test_cuda_names_the_device_of_the_machine(machine: str, told: str, tmp_path: Path) -> None:
    program = """
import torch
sms = torch.cuda.get_device_properties(0).multi_processor_count
print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(), sms)
"""
    path = write_program(tmp_path, program)

    finished = run("run", "--on", f"sim:{machine}", "--device", "cuda", str(path))

    assert finished.code == 0, finished.stderr
    assert told in finished.stdout


def test_gathers_of_fsdp_hide_behind_products(tmp_path: Path) -> None:
    program, path = write_program(tmp_path, SHARDED), tmp_path / "p.json"

    finished = run(
        "run", "--on", "sim:h100-sxm", "--nnodes", "2", "--nproc-per-node", "2", "--timing-only",
        "--prediction", str(path), str(program),
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    told = json.loads(path.read_text())
    assert told["communication_s"] > 0
    assert told["exposed_communication_s"] < 0.8 * told["communication_s"]
    interval = told["interval"]
    assert interval["low_s"] < told["step_time_s"] < interval["high_s"]
    assert interval["extrapolated"] == ["matrix products in f32"]
    assert re.search(r"interval +\d", finished.stderr)
