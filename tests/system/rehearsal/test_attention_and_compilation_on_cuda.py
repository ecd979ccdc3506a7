"""Modelled CUDA devices: kernels that a program chooses, split sequences, inductor."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import run, write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

RING = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard, set_rotate_method,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))


def attend(tensors):
    for each in tensors:
        each.requires_grad_()
    attended = F.scaled_dot_product_attention(*tensors, is_causal=True)
    attended.square().sum().backward()
    for each in tensors:
        each.requires_grad_(False)
    return [attended.detach(), *(each.grad for each in tensors)]


for rotation, kernel in (
    ("allgather", SDPBackend.FLASH_ATTENTION), ("alltoall", SDPBackend.EFFICIENT_ATTENTION),
):
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 32, 16, device="cuda") for _ in range(3)]
    parts = [each.clone() for each in whole]
    set_rotate_method(rotation)
    with sdpa_kernel(kernel):
        expected = attend(whole)
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            found = attend(parts)
            lengths = [each.shape[2] for each in found]
            found = context_parallel_unshard(mesh, found, [2] * 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    print(lengths)
"""

CHOSEN = """\
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

x = torch.randn(1, 2, 8, 4, device="cuda")
expected = F.scaled_dot_product_attention(x, x, x)
for kernel in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(kernel):
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), expected)
        print(torch.backends.cuda.flash_sdp_enabled())
print(torch.backends.cuda.flash_sdp_enabled())
"""

FSDP_AND_TENSOR_PARALLEL = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
)

WIDTH, HEADS, WORDS = 32, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.words(tokens))))


def parallel(model, mesh):
    split, whole = Shard(1), Replicate()
    return parallelize_module(model, mesh, {
        "words": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "block.norm": SequenceParallel(),
        **{
            f"block.{name}": ColwiseParallel(input_layouts=split)
            for name in ("query", "key", "value")
        },
        "block.out": RowwiseParallel(output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, output_layouts=whole),
    })


def train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    tokens = torch.arange(24, device=device).view(2, 12) % WORDS
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
expected = train(Model(), "cpu")
for shard in (
    lambda model: FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True),
    lambda model: fully_shard(model, mesh=mesh["dp"]),
):
    torch.manual_seed(0)
    found = train(shard(parallel(Model().to("cuda"), mesh["tp"])), "cuda")
    print(all(abs(one - other) < 2e-4 for one, other in zip(found, expected)))
"""

COMPILED = """\
import torch
import torch._inductor.config

torch._inductor.config.cpp.simdlen = 1  # or the compiler is asked what this processor can do
torch._inductor.config.cpp_cache_precompile_headers = False
ones = torch.ones(2, device="cuda")
try:
    torch.compile(lambda x: (x * 2 + 1).relu())(ones)
except Exception as error:
    print("CppCompileError" in str(error))
import triton

# From here on programs find the emulator, and torch nothing.
print(torch.compile(lambda x: x * 3, backend="eager")(ones).tolist())
"""


def simulated(preloaded: Preloaded, program: str, tmp_path: Path, ranks: int = 2) -> list[str]:
    finished = preloaded.run(
        "run", "--on=sim", "--device=cuda", f"--nproc-per-node={ranks}", "--no-prefix",
        write_program(tmp_path, program),
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    return finished.lines


def test_split_sequences_attend_as_the_whole_does(preloaded: Preloaded, tmp_path: Path) -> None:
    assert simulated(preloaded, RING, tmp_path) == ["[16, 16, 16, 16]"] * 4


def test_kernels_of_cuda_that_a_program_chooses_attend(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    lines = simulated(preloaded, CHOSEN, tmp_path, 1)

    assert lines == ["False", "False", "False", "True"]


def test_model_in_two_dimensions_trains_as_on_one_device(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    assert simulated(preloaded, FSDP_AND_TENSOR_PARALLEL, tmp_path, 4) == ["True"] * 8


def test_inductor_calls_a_compiler_for_the_cpu_and_finds_no_triton(tmp_path: Path) -> None:
    # A real one takes minutes on a busy machine: that it is called tells enough.
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\ncase $1 in -*version) echo 'g++ 12.2.0' ;; *) exit 1 ;; esac\n")
    compiler.chmod(0o755)

    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=1", "--no-prefix",
        write_program(tmp_path, COMPILED),
        environment={"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip

    assert finished.lines == ["True", "[3.0, 3.0]"], finished.stderr


ONE_KERNEL = """\
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
torch.manual_seed(0)
heads = torch.nn.MultiheadAttention(64, 4, batch_first=True).to("cuda").eval()
tokens = torch.randn(2, 32, 64, device="cuda")


def took(compute):
    begun = time.perf_counter_ns()
    compute()
    return time.perf_counter_ns() - begun


with torch.no_grad():
    alone = took(lambda: heads(tokens, tokens, tokens, need_weights=False))
    by_name = took(lambda: torch._native_multi_head_attention(
        tokens, tokens, tokens, 64, 4, heads.in_proj_weight, heads.in_proj_bias,
        heads.out_proj.weight, heads.out_proj.bias, need_weights=False,
    ))
assert abs(alone - by_name) <= 1, (alone, by_name)
torch.compile(heads, backend="aot_eager", fullgraph=True)(tokens, tokens, tokens)

values, weight = torch.randn(4, 8, 64), torch.randn(64)
leaves = [values.clone().requires_grad_(), weight.clone().requires_grad_()]
expected = torch.rms_norm(leaves[0], (64,), leaves[1], 1e-5)
expected.square().sum().backward()
for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
    whole = distribute_tensor(values, mesh, [placement]).requires_grad_()
    scale = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    normed = torch.rms_norm(whole, (64,), scale, 1e-5)
    normed.square().sum().backward()
    parts = (expected, *(each.grad for each in leaves))
    for one, other in zip((normed, whole.grad, scale.grad), parts):
        torch.testing.assert_close(one.full_tensor(), other)
    with torch.no_grad():
        local = whole.to_local()
        if placement != Shard(2):  # which moves the parts together before
            kernel = took(lambda: torch.rms_norm(local, (64,), scale.to_local(), 1e-5))
            distributed = took(lambda: torch.rms_norm(whole, (64,), scale, 1e-5))
            assert abs(kernel - distributed) <= 1, (placement, kernel, distributed)
"""


def test_attention_in_inference_and_rms_norm_of_dtensors_take_the_time_of_one_kernel(
    tmp_path: Path,
) -> None:
    program = str(write_program(tmp_path, ONE_KERNEL))

    finished = run(
        "run", "--on=sim:switch8", "--virtual-clock", "--device=cuda", "--nproc-per-node=2", program
    )

    assert finished.code == 0, finished.stderr


OFFLOADED = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard,
)

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
own = torch.ones(4)
pinned = own.pin_memory()
assert pinned.is_pinned() and pinned[1:].is_pinned() and torch.empty(2, pin_memory=True).is_pinned()
assert not own.is_pinned() and own.data_ptr() != pinned.data_ptr()
narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
x = torch.arange(32.0, device="cuda").view(4, 8) / 32


def losses(shard):
    torch.manual_seed(0)
    model = shard(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield round(loss.item(), 6)


def sharded(**options):
    return list(losses(lambda model: fully_shard(model, **options)))


plain = list(losses(lambda model: FullyShardedDataParallel(model.cuda())))
assert plain[0] > plain[-1], plain
offloaded = losses(lambda model: FullyShardedDataParallel(model, cpu_offload=CPUOffload(True)))
assert list(offloaded) == plain
for pins in (True, False):
    assert sharded(offload_policy=CPUOffloadPolicy(pin_memory=pins)) == plain, pins
assert sharded(mp_policy=narrow, offload_policy=CPUOffloadPolicy()) == sharded(mp_policy=narrow)
"""


def test_parameters_that_are_offloaded_train_as_those_on_the_device(tmp_path: Path) -> None:
    program = str(write_program(tmp_path, OFFLOADED))

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", program)

    assert finished.code == 0, finished.stderr
