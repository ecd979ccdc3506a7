"""Parts of today's trainers on ranks without data: flex_attention, CUDA graphs, operators."""

import json
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

BEGIN = """
import torch
from torch import nn

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
"""

ATTENTION = """
import sys
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import torch.nn.functional as F

def is_before(b, h, q, k):
    return q >= k

q, k, v = (
    torch.randn(2, heads, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    for heads in (8, 2, 2)
)
mask = torch.compile(create_block_mask)(is_before, 2, None, 1024, 1024, device=device)
assert mask.kv_num_blocks.device == device
for _ in range(3):
    if IS_FLEXIBLE:
        y = torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y.sum().backward()
assert y.shape == q.shape and y.device == device
"""

GRAPH = """
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
x = torch.zeros(4096, 1024, device=device)
with torch.no_grad():
    model(x)
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
held = torch.cuda.memory_allocated() - before
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
tensor = x.numel() * 4
assert held == 2 * tensor, held  # its result, and a tensor on the way to it
graph.reset()
assert torch.cuda.memory_allocated() - before == tensor
"""

MANY_LAUNCHES = """
activations = nn.Sequential(*(nn.ReLU() for _ in range(64)))
x = torch.zeros(64, device=device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    activations(x)
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
"""

OVERLAPPED = """
import torch.distributed as dist

dist.init_process_group("nccl")
side = torch.cuda.Stream()
x, shards = torch.zeros(8192, 8192, device=device), torch.zeros(1 << 26, device=device)

def step():
    event = torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # each gathers into memory of its own, and gives it back
            whole = torch.empty(2 << 26, device=device)
            dist.all_gather_into_tensor(whole, shards)
            del whole
        event.record()
    y = x
    for _ in range(4):
        y = y @ x
    event.wait()
    dist.all_reduce(shards, async_op=True).wait()
    return y @ x

call = step
if IS_CAPTURED:
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    kept = torch.cuda.memory_allocated() - before
    assert kept < 3 * (8 << 26), kept  # one buffer of the gathers, and some of the products
    call = graph.replay
times = []
for _ in range(4):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    times.append(begin.elapsed_time(end))
print("milliseconds", *times)
"""

MESSAGES = """
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
x, got = torch.ones(2, device=device), torch.zeros(2, device=device)

def exchange():
    ends = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    dist.all_reduce(got)

graph = torch.cuda.CUDAGraph()
if rank == 0:
    with torch.cuda.graph(graph):
        exchange()
for _ in range(3):
    graph.replay() if rank == 0 else exchange()
group = dist.distributed_c10d._get_default_group()
assert group._get_sequence_number_for_group() == 3
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    late = dist.all_reduce(x, async_op=True)
late.wait()  # nothing has been replayed
"""

LOOKED_UP = """
table = torch.randn(4096, 64, device=device)
some = torch.randn(2048, device=device).long().abs() + 1
rows = torch.arange(2048, device=device).remainder(some)
assert table[rows].shape == (2048, 64)
assert table[rows.reshape(2, -1)].shape == (2, 1024, 64)
"""

PACKAGE = """
import torch

@torch.library.custom_op("of_package::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x
"""

TWO_RANKS = """
import sys
sys.path.insert(0, "installed")
import of_package
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
assert of_package.double(torch.ones(1)).item() == 2
dist.barrier()
"""


def predicted(
    preloaded: Preloaded, folder: Path, program: str, *options: str, machine: str = "h100-sxm"
) -> dict[str, Any]:
    """What is predicted of one rank without data."""
    path = write_program(folder, BEGIN + program)
    finished = preloaded.run(
        "run", f"--on=sim:{machine}", "--nproc-per-node=1", "--no-prefix", "--timing-only",
        f"--prediction={folder / 'p.json'}", *options, path, cwd=folder,
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    figures: dict[str, Any] = json.loads((folder / "p.json").read_text())
    return figures


def test_flex_attention_takes_what_causal_flash_attention_takes(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    flexible = predicted(preloaded, tmp_path, "IS_FLEXIBLE = True" + ATTENTION)
    flash = predicted(preloaded, tmp_path, "IS_FLEXIBLE = False" + ATTENTION)

    assert flexible["step_time_s"] == pytest.approx(flash["step_time_s"], rel=0.01)
    assert flexible["peak_active_bytes"] == pytest.approx(flash["peak_active_bytes"], rel=0.01)
    assert any("flex_attention" in each for each in flexible["remarks"])


def test_cuda_graph_without_data_holds_its_pool_and_not_every_tensor(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    predicted(preloaded, tmp_path, GRAPH)


def test_messages_of_a_cuda_graph_are_sent_by_its_replays_alone(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    path = write_program(tmp_path, BEGIN + MESSAGES)
    finished = preloaded.run(
        "run", "--on=sim:h100-sxm", "--nproc-per-node=2", "--timing-only", path, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr


def test_replay_of_a_cuda_graph_is_one_launch(preloaded: Preloaded, tmp_path: Path) -> None:
    replayed = predicted(preloaded, tmp_path, MANY_LAUNCHES)
    eager = predicted(
        preloaded, tmp_path, MANY_LAUNCHES.replace("graph.replay()", "activations(x)")
    )

    assert replayed["step_time_s"] < eager["step_time_s"] / 2


def test_replay_of_a_cuda_graph_overlaps_its_streams_as_eager_code_does(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    def times(*, is_captured: bool) -> list[float]:
        path = write_program(tmp_path, f"IS_CAPTURED = {is_captured}" + BEGIN + OVERLAPPED)
        finished = preloaded.run(
            "run", "--on=sim:h100-sxm", "--nproc-per-node=2", "--no-prefix", "--timing-only",
            path, cwd=tmp_path,
        )  # fmt: skip
        assert finished.code == 0, finished.stderr
        lines = [each for each in finished.stdout.splitlines() if each.startswith("milliseconds")]
        assert len(set(lines)) == 1
        return [float(each) for each in lines[0].split()[1:]]

    eager, replayed = times(is_captured=False), times(is_captured=True)

    assert replayed == pytest.approx(eager, rel=0.01)
    assert replayed[1:] == pytest.approx(replayed[:1] * 3, rel=0.01)


def test_index_by_unknown_numbers_has_the_shape_of_the_index(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    predicted(preloaded, tmp_path, LOOKED_UP)


def test_each_rank_has_the_operators_of_an_installed_package_that_it_imports_for_itself(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    record = tmp_path / "installed" / "of_package-1.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("of_package/__init__.py,,\n")
    (tmp_path / "installed" / "of_package").mkdir()
    (tmp_path / "installed" / "of_package" / "__init__.py").write_text(PACKAGE)
    program = write_program(tmp_path, TWO_RANKS)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", "--import-per-rank=of_package",
        program, cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
