"""`--timing-only`: tensors have no data, and the time and the memory are those of real ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from running import Finished, write_program

import rankwise

pytestmark = [pytest.mark.torch, pytest.mark.system]

BEGIN = """
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, words=2048, width=128, depth=4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        tokens = torch.randint(0, 512, (4, 33), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def told(*words):
    print(*words, file=sys.stdout if rank == 0 else open("/dev/null", "w"))
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(Model().to(device), device_ids=[rank], bucket_cap_mb=1)
train(model, torch.optim.AdamW(model.parameters(), foreach=True))
"""

ACCUMULATED = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(
    Model(depth=3).to(device), device_ids=[rank], gradient_as_bucket_view=True
)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(3):
    with model.no_sync():
        model(torch.zeros(2, 8, dtype=torch.long, device=device)).sum().backward()
    model(torch.zeros(2, 8, dtype=torch.long, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""

FSDP2 = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

mesh = dist.init_device_mesh("cuda", (size,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = Model().to(device)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
train(model, torch.optim.AdamW(model.parameters(), foreach=True))
"""

CHECKPOINTED = """
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

mesh = dist.init_device_mesh("cuda", (size,))
model = Model(depth=4).to(device)
for layer in model.layers:
    layer.forward = (lambda of: lambda x: checkpoint(of, x, use_reentrant=False))(layer.forward)
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, torch.optim.AdamW(model.parameters(), foreach=True))
"""

FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

model = FullyShardedDataParallel(
    Model().to(device), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device
)
train(model, torch.optim.AdamW(model.parameters(), foreach=True))
"""

TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = dist.init_device_mesh("cuda", (size,))
model = Model().to(device)
for layer in model.layers:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(model, torch.optim.AdamW(model.parameters(), foreach=False))
"""

PIPELINE = """
first, last = rank == 0, rank == size - 1
stage = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(stage.parameters(), foreach=True)
for _ in range(3):
    x = torch.zeros(64, 256, device=device)
    if not first:
        dist.recv(x, rank - 1)
    x.requires_grad_()
    y = stage(x)
    if last:
        y.sum().backward()
    else:
        dist.send(y.detach(), rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    if not first:
        dist.send(x.grad, rank - 1)
    optimizer.step()
    optimizer.zero_grad()
"""

CLIPPED = """
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(3):
    tokens = torch.zeros(4, 32, dtype=torch.long, device=device)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens).float().logsumexp(-1).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
"""

PROGRAMS = {
    "ddp": DDP, "accumulated": ACCUMULATED, "fsdp2": FSDP2, "checkpointed": CHECKPOINTED,
    "fsdp1": FSDP1, "tensor parallel": TENSOR_PARALLEL, "pipeline": PIPELINE, "clipped": CLIPPED,
}  # fmt: skip


def predicted(
    preloaded: Preloaded, tmp_path: Path, program: str, *options: str, nprocs: int = 2
) -> dict[str, Any]:
    """The figures of a run that succeeds."""
    finished = simulated(preloaded, tmp_path, program, *options, nprocs=nprocs)
    assert finished.code == 0, finished.stderr
    figures: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    return figures


def simulated(
    preloaded: Preloaded, tmp_path: Path, program: str, *options: str, nprocs: int = 2
) -> Finished:
    path = write_program(tmp_path, BEGIN + program)
    return preloaded.run(
        "run", "--on=sim:switch8", f"--nproc-per-node={nprocs}", "--no-prefix",
        f"--prediction={tmp_path / 'p.json'}", *options, path, cwd=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_time_and_memory_without_data_are_those_of_real_tensors(
    name: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    real = predicted(preloaded, tmp_path, PROGRAMS[name], "--device=cuda")
    without = predicted(preloaded, tmp_path, PROGRAMS[name], "--timing-only")

    assert without["steps"] == real["steps"] == 2
    assert without["step_time_s"] == pytest.approx(real["step_time_s"], rel=0.01)
    assert without["peak_active_bytes"] == pytest.approx(real["peak_active_bytes"], rel=0.01)


VALUES = """
model = Model().to(device)
loss = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
labels = torch.tensor([3, -100, 5], device=device)
assert (labels != -100).sum().item() == 2, "numbers that are known are computed"
assert loss.is_cuda and loss.device == device and not torch.ones(1).is_cuda
assert not torch.isnan(loss)
print(f"loss {loss.item()}, {loss.tolist()}, {float(loss.detach().cpu().numpy())}")
"""

TRAINED = """
model = Model().to(device)
loss = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(f"loss {loss.item()}")
"""

SHAPED = """
weights = torch.nn.Linear(64, 64).to(device).weight
print(len(torch.nonzero(weights > 0)))
"""

LARGE = """
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
x = torch.zeros(1 << 20, 1024, device=device)
model(x)
"""

EQUAL = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(Model().to(device), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
told("begun")
train(model, optimizer)
"""

UNEQUAL = EQUAL.replace("train(model, optimizer)", "train(model, optimizer, steps=3 - (rank > 0))")

PASSED_ON = """
x = torch.zeros(1 << 16, device=device)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
torch.save(x, "x.pt")
"""


def test_unknown_number_is_a_default_and_is_reported(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = simulated(preloaded, tmp_path, VALUES, "--timing-only")
    figures = json.loads((tmp_path / "p.json").read_text())

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["loss 1.0, 1.0, 1.0"] * 2
    asked = [(each["what"], each["times"], each["got"]) for each in figures["values"]]
    assert ("bool", 2, [False, False]) in asked
    assert ("float", 6, [1.0] * 6) in asked
    assert all("program.py:" in each["place"] for each in figures["values"])


def test_recorded_numbers_are_those_of_the_run_with_real_tensors(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = f"torch.manual_seed(1)\n{TRAINED}"
    file = tmp_path / "values.json"
    real = simulated(
        preloaded, tmp_path, program, "--device=cuda", f"--record-values={file}", nprocs=1
    )

    without = simulated(preloaded, tmp_path, program, "--timing-only", f"--values={file}", nprocs=1)

    assert real.code == without.code == 0, real.stderr + without.stderr
    assert without.lines == real.lines != ["loss 1.0"]


def test_unknown_number_that_decides_a_shape_ends_the_run_at_its_line(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = simulated(preloaded, tmp_path, SHAPED, "--timing-only")
    constant = simulated(preloaded, tmp_path, SHAPED, "--timing-only", "--values=constant=7")

    assert finished.code == 1
    assert re.search(
        r"program\.py:\d+ asks for the length of the result of aten.nonzero", finished.stderr
    )
    assert constant.code == 0, constant.stderr
    assert constant.lines == ["7", "7"]


def test_full_device_ends_the_run_with_rank_module_and_line(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = simulated(preloaded, tmp_path, LARGE.replace("1 << 20", "1 << 23"), "--timing-only")
    figures = json.loads((tmp_path / "p.json").read_text())

    assert finished.code == 77, finished.stderr
    assert re.search(
        r"out of memory on rank [01]: 96\.0 of 79\.4 GiB, in 1 \(program\.py:\d+\)",
        finished.stderr,
    )
    assert figures["peak_active_bytes"] < figures["capacity_bytes"]


def test_equal_ranks_are_simulated_once_and_take_the_same_time(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    once = predicted(preloaded, tmp_path, EQUAL, "--timing-only", nprocs=8)
    each = predicted(preloaded, tmp_path, EQUAL, "--timing-only", "--every-rank", nprocs=8)

    assert (once["checked_ranks"], each["checked_ranks"]) == (2, 8)
    same = ("ranks", "steps", "step_time_s", "exposed_communication_s", "peak_active_bytes")
    assert [once[name] for name in same] == [each[name] for name in same]


@pytest.mark.parametrize(
    ("program", "difference"),
    [
        (PASSED_ON, r"rank 0 calls send with rank 1 \(.*program\.py:\d+ in <module>\); all 4 are"),
        (UNEQUAL, r"rank 0 computes aten\.\w+ of [\dx, ]+, rank \d has ended: 3 of 4 are"),
    ],
    ids=["messages", "operations"],
)
def test_more_ranks_run_if_they_differ_and_the_difference_is_named(
    program: str, difference: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    if program is UNEQUAL:  # without gradients to exchange: a rank that ends earlier is no deadlock
        program = program.replace(
            "DistributedDataParallel(Model().to(device)", "(Model().to(device)"
        )
        program = program.replace(", device_ids=[rank])", ")")
    finished = simulated(preloaded, tmp_path, program, "--timing-only", "--seed=1", nprocs=4)
    figures = json.loads((tmp_path / "p.json").read_text())

    assert finished.code == 0, finished.stderr
    assert re.search(f"ranks are not equal: {difference} run", finished.stderr)
    assert figures["checked_ranks"] == (4 if program is PASSED_ON else 3)
    assert not (tmp_path / "x.pt").exists()


def test_functions_are_predicted_without_data(tmp_path: Path) -> None:
    def train() -> bool:
        import torch  # noqa: PLC0415  # of the rank

        product = torch.zeros(1 << 15, 1 << 15, device="cuda") @ torch.zeros(1 << 15, device="cuda")
        return bool(product.is_cuda)

    results = rankwise.run(
        train, (), 2, on="sim:switch8", timing_only=True, prediction=tmp_path / "p.json"
    )

    assert results == [True, True]
    assert json.loads((tmp_path / "p.json").read_text())["peak_active_bytes"] > 4 << 30
