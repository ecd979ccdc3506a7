"""Trains two models in four layouts on two ranks of a CPU.

    torchrun --nproc-per-node 2 layouts.py fsdp2 decoder

Rank 0 prints the seconds of each step but the first, and those of its CPU time in them. This is
what foresight_pairs.py measures, and predicts. No product or attention of these models has a shape
that `rankwise calibrate` measures.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

LAYOUTS = ("ddp", "fsdp2", "tp", "pipeline")
MODELS = ("mlp", "decoder")
MICROBATCHES = 4
WORDS = 3072


class Wide(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A layer of the perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(896),
            nn.Linear(896, 2688),
            nn.Linear(2688, 896),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Block(nn.Module):  # type: ignore[misc]  # the same
    """A layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(576), nn.LayerNorm(576)
        self.q, self.k, self.v, self.out = (nn.Linear(576, 576) for _ in range(4))
        self.up, self.down = nn.Linear(576, 2304), nn.Linear(2304, 576)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        y = self.norm_1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, 72)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def layers_of(model: str) -> list[nn.Module]:
    """The model as a sequence, of an even number of parts that take about as long."""
    if model == "mlp":
        return [Wide() for _ in range(4)]
    blocks = [Block() for _ in range(4)]
    return [nn.Sequential(nn.Embedding(WORDS, 576), blocks[0]), *blocks[1:3],
            nn.Sequential(blocks[3], nn.Linear(576, WORDS))]  # fmt: skip


def batch_of(model: str) -> tuple[Tensor, Tensor]:
    """What goes in, and what should come out."""
    if model == "mlp":
        return torch.randn(96, 896), torch.randn(96, 896)
    return torch.randint(0, WORDS, (4, 48)), torch.randint(0, WORDS, (4, 48))


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    if wanted.is_floating_point():
        return functional.mse_loss(out, wanted)
    return functional.cross_entropy(out.flatten(0, 1), wanted.flatten())


def sharded(layout: str, layers: list[nn.Module]) -> nn.Module:
    """The whole model on each rank, as its layout has it."""
    network: nn.Module = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "fsdp2":
        for each in layers:
            fully_shard(each, mesh=mesh)
        fully_shard(network, mesh=mesh)
    elif layout == "tp":
        ways: dict[str, Any] = {
            "q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel,
            "out": RowwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel,
        }  # fmt: skip
        plan = {
            name: ways[name.rpartition(".")[2]]()
            for name, _ in network.named_modules()
            if name.rpartition(".")[2] in ways
        }
        parallelize_module(network, mesh, plan)
    else:
        network = nn.parallel.DistributedDataParallel(network)
    return network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers, (given, wanted) = layers_of(options.model), batch_of(options.model)
    if options.layout == "pipeline":
        part = len(layers) // size
        network: nn.Module = nn.Sequential(*layers[rank * part : (rank + 1) * part])
        stage = PipelineStage(network, rank, size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)
    else:
        network = sharded(options.layout, layers)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, foreach=False)
    seconds, of_cpu = [], []
    for _ in range(options.steps):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        if options.layout == "pipeline":
            schedule.step(*([given] if rank == 0 else []), **({"target": wanted} if rank else {}))
        else:
            loss_of(network(given), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        of_cpu.append(time.process_time() - cpu_begun)
    if rank == 0:
        print(json.dumps([seconds[1:], of_cpu[1:]]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
