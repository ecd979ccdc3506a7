"""Trains a decoder on tokens of one kind: what the published runs of foresight.py train.

A plain script: `torchrun --nproc-per-node 8 transformer.py --layers 32 ...`. Its flags are what
published frameworks differ in: norms of one kernel or of six, what is recomputed, how gradients are
reduced, and which optimiser steps.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)  # noqa: SLF001  # its name
SIZES = {
    "layers": 2, "hidden": 256, "heads": 4, "kv-heads": 4, "ffn": 1024, "vocab": 1024,
    "sequence": 256, "batch": 1, "accumulate": 1, "steps": 3,
}  # fmt: skip
CHOICES = {
    "norm": ("rms", "fused-rms", "layer"), "mlp": ("swiglu", "gelu"),
    "rotary": ("complex", "fused", "no"), "checkpoint": ("none", "selective", "full"),
    "parallel": ("fsdp", "ddp", "no"), "optimizer": ("foreach", "fused", "single"),
    "tie": ("no", "yes"), "masters": ("no", "yes"), "compile": ("no", "yes"),
    "float8": ("no", "yes"), "logits": ("kept", "freed"), "reshard": ("all", "but-last"),
}  # fmt: skip


def options(
    sizes: Mapping[str, int] = SIZES,
    choices: Mapping[str, Sequence[str]] = CHOICES,
    words: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Options of these names; the first choice is the default. `parallel.py` has others."""
    parser = argparse.ArgumentParser()
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    return parser.parse_args(words)


class FusedNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Stands for an RMS norm of one kernel each way, which moves what a layer norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.native_layer_norm(x, x.shape[-1:], weight, None, 1e-5)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        mean = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        mask = [True, True, False]
        made = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, mean, weight, None, mask
        )
        return made[0], made[1]


class Norm(nn.Module):  # type: ignore[misc]  # the same
    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return functional.layer_norm(x, x.shape[-1:], self.weight)
        if self.kind == "fused-rms":
            return FusedNorm.apply(x, self.weight)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


def rotated(x: Tensor, angles: Tensor, kind: str) -> Tensor:
    """Positions: by complex numbers in f32, or by one kernel that reads and writes once."""
    if kind == "complex":
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[: x.shape[1], None]).flatten(3).type_as(x)
    return x * 1.0 if kind == "fused" else x


def scale_of(x: Tensor, kind: torch.dtype) -> Tensor:
    """What a tensor is multiplied with to fill the range of a type."""
    return torch.finfo(kind).max / x.abs().max().float().clamp(min=1e-12)


def as_float8(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    most = torch.finfo(kind).max
    return (x.float() * scale).clamp(-most, most).to(kind)


def product(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
    """A product of two float8 matrices, the second one with its columns in a row of memory."""
    columns = right.t().contiguous().t()
    return torch._scaled_mm(  # noqa: SLF001  # its name
        left.contiguous(), columns, scale_a=of_left.reciprocal(), scale_b=of_right.reciprocal(),
        out_dtype=torch.bfloat16,
    )  # fmt: skip


FLOAT8, FLOAT8_OF_GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Product(torch.autograd.Function):  # type: ignore[misc]  # the same
    """A linear layer in float8: a scale for each tensor, found anew in each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        of_x, of_weight = scale_of(x, FLOAT8), scale_of(weight, FLOAT8)
        made = product(
            as_float8(flat, of_x, FLOAT8), as_float8(weight, of_weight, FLOAT8).t(), of_x, of_weight
        )
        return made.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_grad = scale_of(grad, FLOAT8_OF_GRADIENTS)
        of_x, of_weight = scale_of(x, FLOAT8), scale_of(weight, FLOAT8)
        small = as_float8(rows, of_grad, FLOAT8_OF_GRADIENTS)
        of_input = product(small, as_float8(weight, of_weight, FLOAT8), of_grad, of_weight)
        of_weights = product(small.t(), as_float8(flat, of_x, FLOAT8), of_grad, of_x)
        return of_input.view(x.shape), of_weights


class Float8Linear(nn.Linear):  # type: ignore[misc]  # the same
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Float8Product.apply(x, self.weight)
        return made


class Recomputed(nn.Module):  # type: ignore[misc]  # the same
    """A layer with its checkpointing, which are compiled as one."""

    def __init__(self, layer: nn.Module, call: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        made: Tensor = self.call(self.layer, x, angles)
        return made


class Layer(nn.Module):  # type: ignore[misc]  # the same
    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        linear = partial(Float8Linear if o.float8 == "yes" else nn.Linear, bias=False)
        self.o, self.size = o, o.hidden // o.heads
        self.norm_1, self.norm_2 = Norm(o.hidden, o.norm), Norm(o.hidden, o.norm)
        self.q, self.out = linear(o.hidden, o.hidden), linear(o.hidden, o.hidden)
        self.k, self.v = (linear(o.hidden, o.kv_heads * self.size) for _ in range(2))
        self.up, self.down = linear(o.hidden, o.ffn), linear(o.ffn, o.hidden)
        self.gate = linear(o.hidden, o.ffn) if o.mlp == "swiglu" else None

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (each(y).view(rows, length, -1, self.size) for each in (self.q, self.k, self.v))
        q, k = (rotated(each, angles, self.o.rotary) for each in (q, k))
        if times := self.o.heads // self.o.kv_heads - 1:
            wide = (rows, length, self.o.heads, self.size)
            k, v = (
                each[:, :, :, None].expand(-1, -1, -1, times + 1, -1).reshape(wide)
                for each in (k, v)
            )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.norm_2(x)
        z = self.up(y)
        z = functional.gelu(z) if self.gate is None else functional.silu(self.gate(y)) * z
        return x + self.down(z)


def selective() -> Any:
    """Selective checkpointing as in torchtitan.

    Attention is kept, each second product, and the sums of tensor parallelism. Products in float8
    count, since torchao's tensors call `mm`.
    """
    count = {False: 0, True: 0}

    def choose(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if function in PRODUCTS:
            count[context.is_recompute] += 1
            return KEEP if count[context.is_recompute] % 2 else AGAIN
        is_kept = any(part in str(function) for part in ("attention", "reduce_scatter"))
        return KEEP if is_kept else AGAIN

    return create_selective_checkpoint_contexts(choose)


def plainly(layer: nn.Module, *args: Tensor) -> Any:
    return layer(*args)


class Decoder(nn.Module):  # type: ignore[misc]  # the same
    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(o.vocab, o.hidden)
        self.layers = nn.ModuleList(Layer(o) for _ in range(o.layers))
        self.norm = Norm(o.hidden, o.norm)
        self.head = nn.Linear(o.hidden, o.vocab, bias=False)
        if o.tie == "yes":
            self.head.weight = self.embedding.weight
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        ways = {"full": again, "selective": partial(again, context_fn=selective)}
        self.call = ways.get(o.checkpoint, plainly)
        if o.compile == "yes":
            self.layers = nn.ModuleList(Recomputed(layer, self.call) for layer in self.layers)
            self.call = plainly
            for layer in self.layers:
                layer.compile(fullgraph=True)

    def forward(self, tokens: Tensor, angles: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.call(layer, x, angles)
        return self.head(self.norm(x))


def build(o: argparse.Namespace, device: str, mesh: Any) -> nn.Module:
    """The model as a rank holds it: f32 for FSDP, which computes in bf16, else bf16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if o.parallel == "fsdp" else torch.bfloat16)
    with torch.device(device):
        model: nn.Module = Decoder(o)
    torch.set_default_dtype(default)
    if o.parallel == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for each in model.layers:
            # torchtitan keeps the last layer, which backward needs first
            again = o.reshard == "all" or each is not model.layers[-1]
            fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    elif o.parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def forward(
    o: argparse.Namespace, model: nn.Module, tokens: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The loss, and logits in f32 if they live on in backward; torchtitan frees them before."""
    if o.logits == "freed":
        logits = model(tokens, angles)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()), None
    logits = model(tokens, angles).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens.flatten()), logits


def train(o: argparse.Namespace, device: str, mesh: Any = None) -> None:
    model = build(o, device, mesh)
    weights = list(model.parameters())
    stepped = weights
    if o.masters == "yes":  # weights and sums of gradients in f32 beside those of the model
        stepped = [each.detach().float() for each in weights]
        for each in stepped:
            each.grad = torch.zeros_like(each)
    optimizer = torch.optim.AdamW(
        stepped, foreach=o.optimizer == "foreach", fused=o.optimizer == "fused"
    )
    angles = torch.ones(o.sequence, o.hidden // o.heads // 2, dtype=torch.complex64, device=device)
    tokens = torch.zeros(o.batch, o.sequence, dtype=torch.int64, device=device)
    for _ in range(o.steps):
        for part in range(o.accumulate):
            if o.parallel == "ddp":
                model.require_backward_grad_sync = part == o.accumulate - 1
            loss, _logits = forward(o, model, tokens, angles)
            loss.backward()
            del _logits
            if o.masters == "yes":
                for each, weight in zip(stepped, weights, strict=True):
                    each.grad.add_(weight.grad)
                    weight.grad = None
        nn.utils.clip_grad_norm_(stepped, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=o.masters == "no")
        if o.masters == "yes":
            with torch.no_grad():
                for each, weight in zip(stepped, weights, strict=True):
                    weight.copy_(each)


def main() -> None:
    o = options()
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sharded = o.parallel == "fsdp"
    train(o, device, init_device_mesh(device, (dist.get_world_size(),)) if sharded else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
