"""What `torch.cuda` tells of memory: what the prediction counts."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

PROGRAM = """\
import os
import torch

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(1 << 18, device="cuda")
y = x * 2  # in the same segment of 2 MiB
z = torch.ones(8 << 20, device="cuda")  # a segment of its own, of 32 MiB
del y, z
MIB = 1 << 20


def told():
    free, total = torch.cuda.mem_get_info()
    assert total == torch.cuda.get_device_properties(0).total_memory
    assert torch.accelerator.get_memory_info() == (free, total)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.peak"] == torch.cuda.max_memory_allocated()
    asked = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return [total - free, *(getattr(torch.cuda, name)() for name in asked)]


print([each // MIB for each in told()])
torch.cuda.reset_peak_memory_stats()
print([each // MIB for each in told()])
torch.cuda.empty_cache()
print([each // MIB for each in told()])
other = torch.device("cuda", 1 - torch.cuda.current_device())
with torch.cuda.device(other):
    assert isinstance(torch.cuda.device(other), torch.cuda.device)
print(torch.cuda.memory_allocated(other), torch.cuda.memory_summary().count("1024 KiB") > 0)
"""


def answers(preloaded: Preloaded, where: str, tmp_path: Path) -> list[str]:
    finished = preloaded.run(
        "run", where, "--device=cuda", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, PROGRAM),
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    return finished.lines


def test_queries_tell_what_the_prediction_counts(preloaded: Preloaded, tmp_path: Path) -> None:
    lines = answers(preloaded, "--on=sim:switch8", tmp_path)

    # Used of the device, then allocated, its peak, reserved and its peak.
    # The segment of 2 MiB stays: a block of it is in use.
    one = ["[34, 1, 34, 34, 34]", "[34, 1, 1, 34, 34]", "[2, 1, 1, 2, 34]", "0 True"]
    assert lines == one * 2


def test_devices_look_empty_without_a_prediction(preloaded: Preloaded, tmp_path: Path) -> None:
    assert answers(preloaded, "--on=sim", tmp_path) == [*["[0, 0, 0, 0, 0]"] * 3, "0 False"] * 2
