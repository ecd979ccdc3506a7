"""Tokens, model flops and MFU of a prediction."""

import json
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

TRANSFORMER = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYERS, HEADS, WIDTH, WORDS, BATCH, LENGTH = 3, 4, 64, 512, 2, 32
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device="cuda"))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=REENTRANT) if CHECKPOINTS else layer(x)
        return self.head(x)


model = Model().to("cuda", torch.bfloat16)
if dist.get_world_size() > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    for _ in range(2):  # parts of a batch
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")
        model(tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(tokens)
"""

TENSOR_PARALLEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
torch.cuda.set_device(dist.get_rank())
model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64)).to("cuda")
plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
parallelize_module(model, mesh["tensor"], plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for _ in range(3):
    model(torch.zeros(4, 32, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LAYERS, HEADS, WIDTH, WORDS, TOKENS, LENGTH = 3, 4, 64, 512, 2 * 2 * 32, 32
WEIGHTS = LAYERS * 12 * WIDTH * WIDTH + WIDTH * WORDS
FORMULA = 6 * WEIGHTS + 12 * LAYERS * WIDTH * LENGTH
"""Flops per token: of weights 6 N, of attention 12 L H Q T."""


def figures_of(
    preloaded: Preloaded, tmp_path: Path, program: str, *options: str, nprocs: int = 4
) -> dict[str, Any]:
    finished = preloaded.run(
        "run", "--on=sim:h100-sxm", f"--nproc-per-node={nprocs}", "--no-prefix",
        f"--prediction={tmp_path / 'p.json'}", *options, write_program(tmp_path, program),
        cwd=tmp_path,
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    found: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    return found


def plain(checkpoints: str = "False, False") -> str:
    return f"CHECKPOINTS, REENTRANT = {checkpoints}\n{TRANSFORMER}"


@pytest.mark.parametrize("mode", ["--timing-only", "--device=cuda"])
def test_model_flops_of_a_transformer_are_those_of_the_closed_form(
    mode: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    # Forward without gradients is no training: it is left out of the tokens, not of the flops.
    program = plain().replace("    with torch.no_grad():\n        model(tokens)\n", "")

    found = figures_of(preloaded, tmp_path, program, mode)

    assert found["tokens_per_step"] == 4 * TOKENS
    assert found["model_flops_per_step"] == 4 * TOKENS * FORMULA
    assert found["tokens_per_s"] == pytest.approx(4 * TOKENS / found["step_time_s"])
    peak = 989e12 * found["step_time_s"]
    assert found["mfu"] == pytest.approx(TOKENS * FORMULA / peak, rel=1e-3)
    low, high = (found["mfu_interval"][end] for end in ("low", "high"))
    assert low < found["mfu"] < high
    assert low == pytest.approx(TOKENS * FORMULA / 989e12 / found["interval"]["high_s"], rel=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_counts_in_hfu_alone(
    reentrant: bool, preloaded: Preloaded, tmp_path: Path
) -> None:
    found = figures_of(preloaded, tmp_path, plain(f"True, {reentrant}"), "--timing-only", nprocs=1)
    without = figures_of(preloaded, tmp_path, plain(), "--timing-only", nprocs=1)

    assert found["tokens_per_step"] == without["tokens_per_step"] == TOKENS
    assert found["model_flops_per_step"] == without["model_flops_per_step"]
    blocks = TOKENS * LAYERS * (2 * 12 * WIDTH * WIDTH + 4 * LENGTH * WIDTH)
    repeated = (found["hfu"] - found["mfu"]) * found["step_time_s"] * 989e12
    scores = TOKENS * LAYERS * 2 * LENGTH * WIDTH
    last = 0 if reentrant else TOKENS * LAYERS * 8 * WIDTH * WIDTH  # its result is not needed
    assert repeated == pytest.approx(blocks - last + scores, rel=1e-3)


def test_tokens_of_tensor_parallel_ranks_count_once(preloaded: Preloaded, tmp_path: Path) -> None:
    found = figures_of(preloaded, tmp_path, TENSOR_PARALLEL, "--timing-only")

    assert found["tokens_per_step"] == 2 * 4 * 32
    assert "groups of some ranks" in found["interval"]["extrapolated"]


def test_tokens_per_step_can_be_given(preloaded: Preloaded, tmp_path: Path) -> None:
    found = figures_of(
        preloaded, tmp_path, plain(), "--timing-only", "--tokens-per-step=1000", nprocs=1
    )

    assert found["tokens_per_s"] == pytest.approx(1000 / found["step_time_s"])
