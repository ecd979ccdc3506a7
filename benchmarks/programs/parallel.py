"""Trains a decoder in layouts of several dimensions: tensor, pipeline and data parallel.

A plain script: `torchrun --nproc-per-node 8 parallel.py --tp 2 --pp 2 --layers 32 ...`. The ranks
of a tensor-parallel group are neighbours, then come those of data parallelism, then the stages.
Norms and residuals are split by the sequence, as in torchtitan and Megatron, if `--split` is not
`tensors`. Data parallelism is FSDP2, or what frameworks of ZeRO's first stage do: gradients in f32
are scattered after the last microbatch, each rank updates its share, and weights are gathered.
"""

import argparse
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformer import (
    FLOAT8,
    FLOAT8_OF_GRADIENTS,
    Float8Linear,
    FusedNorm,
    Recomputed,
    as_float8,
    options,
    plainly,
    product,
    rotated,
    scale_of,
    selective,
)

SIZES = {
    "layers": 4, "hidden": 256, "heads": 4, "kv-heads": 4, "ffn": 1024, "vocab": 1024,
    "sequence": 256, "batch": 1, "microbatches": 1, "steps": 3, "tp": 1, "pp": 1,
    "stages-per-rank": 1,
}  # fmt: skip
CHOICES = {
    "checkpoint": ("none", "selective", "full", "scores"), "data": ("fsdp", "zero1", "replicate"),
    "norm": ("rms", "fused-rms", "layer"), "rotary": ("complex", "fused", "no"),
    "mlp": ("swiglu", "gelu"), "attention": ("flash", "softmax"), "split": ("sequence", "tensors"),
    "schedule": ("1F1B", "Interleaved1F1B", "GPipe"), "compile": ("no", "yes"),
    "float8": ("no", "yes"), "cut": ("layers", "products"), "reshard": ("all", "but-last"),
}  # fmt: skip


class Norm(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An RMS norm; of a DTensor each rank norms its own rows."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        if self.kind == "layer":
            return functional.layer_norm(x, x.shape[-1:], self.weight)
        if self.kind == "fused-rms" and isinstance(x, DTensor):  # each rank norms its own rows
            local = FusedNorm.apply(
                x.to_local(), self.weight.to_local(grad_placements=[Replicate()])
            )
            return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
        if self.kind == "fused-rms":
            return FusedNorm.apply(x, self.weight)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


def shared_scale(x: Tensor, kind: torch.dtype, group: str) -> Tensor:
    """The scale of a tensor of which each rank of a group has a part."""
    return collectives.all_reduce(scale_of(x, kind), "min", group)


def gathered(x: Tensor, kind: torch.dtype, group: str) -> Tensor:
    """The rows of all ranks of a group, which travel as bytes."""
    return collectives.all_gather_tensor(x.view(torch.uint8), 1, group).view(kind)


class Float8Columns(torch.autograd.Function):  # type: ignore[misc]  # the same
    """Rows are gathered in float8, and multiplied by the columns that a rank has of each weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, *weights: Tensor) -> tuple[Tensor, ...]:
        """Gather the rows, and multiply them."""
        of_x = shared_scale(x, FLOAT8, group)
        rows = gathered(as_float8(x, of_x, FLOAT8), FLOAT8, group)
        ctx.save_for_backward(rows, of_x, *weights)
        ctx.group = group
        made = []
        for weight in weights:
            of_weight = scale_of(weight, FLOAT8)
            columns = as_float8(weight, of_weight, FLOAT8).t()
            made.append(product(rows.flatten(0, 1), columns, of_x, of_weight))
        return tuple(each.view(*rows.shape[:-1], -1) for each in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scatter the sums of what the ranks have for the rows."""
        rows, of_x, *weights = ctx.saved_tensors
        of_input: Any = 0.0
        of_weights = []
        for grad, weight in zip(grads, weights, strict=True):
            of_grad = shared_scale(grad, FLOAT8_OF_GRADIENTS, ctx.group)
            small = as_float8(grad.flatten(0, 1), of_grad, FLOAT8_OF_GRADIENTS)
            of_weight = scale_of(weight, FLOAT8)
            of_input += product(small, as_float8(weight, of_weight, FLOAT8), of_grad, of_weight)
            of_weights.append(product(small.t(), rows.flatten(0, 1), of_grad, of_x))
        whole = of_input.view(rows.shape)
        return collectives.reduce_scatter_tensor(whole, "sum", 1, ctx.group), None, *of_weights


class Float8Rows(torch.autograd.Function):  # type: ignore[misc]  # the same
    """A rank has rows of a weight; sums are scattered, and gradients gathered in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, weight: Tensor) -> Tensor:
        """Multiply, and scatter the sums."""
        of_x, of_weight = shared_scale(x, FLOAT8, group), scale_of(weight, FLOAT8)
        small = as_float8(x.flatten(0, 1), of_x, FLOAT8)
        ctx.save_for_backward(small, of_x, weight)
        ctx.group = group
        made = product(small, as_float8(weight, of_weight, FLOAT8).t(), of_x, of_weight)
        return collectives.reduce_scatter_tensor(made.view(*x.shape[:-1], -1), "sum", 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the gradients of all rows, and multiply them."""
        small, of_x, weight = ctx.saved_tensors
        of_grad = shared_scale(grad, FLOAT8_OF_GRADIENTS, ctx.group)
        rows = gathered(
            as_float8(grad, of_grad, FLOAT8_OF_GRADIENTS), FLOAT8_OF_GRADIENTS, ctx.group
        )
        of_weight = scale_of(weight, FLOAT8)
        flat = rows.flatten(0, 1)
        of_input = product(flat, as_float8(weight, of_weight, FLOAT8), of_grad, of_weight)
        return of_input.view(*rows.shape[:-1], -1), None, product(flat.t(), small, of_grad, of_x)


class Split(nn.Module):  # type: ignore[misc]  # the same
    """Linear layers whose weights are split over a group, in the type of the options."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.in_float8 = o.float8 == "yes" and o.tp > 1
        self.linear = partial(
            Float8Linear if o.float8 == "yes" and o.tp == 1 else nn.Linear, bias=False
        )
        self.group = ""

    def columns(self, y: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
        """What layers make of the same rows, each rank its columns."""
        if self.in_float8:
            weights = [each.weight.to_local() for each in layers]
            made: Sequence[Tensor] = Float8Columns.apply(y.to_local(), self.group, *weights)
            return made
        return [each(y) for each in layers]

    def rows(self, y: Tensor, layer: nn.Linear) -> Tensor:
        """What a layer makes of the columns of all ranks."""
        if self.in_float8:
            return Float8Rows.apply(y, self.group, layer.weight.to_local())
        return layer(y)


def with_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose scores are tensors: a product, a softmax with its mask, and dropout."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return functional.dropout(scores.softmax(-1), 0.1) @ v


class Attention(Split):
    """Attention of the heads that a rank has."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__(o)
        self.o, self.size = o, o.hidden // o.heads
        self.q, self.out = self.linear(o.hidden, o.hidden), self.linear(o.hidden, o.hidden)
        self.k, self.v = (self.linear(o.hidden, o.kv_heads * self.size) for _ in range(2))

    def forward(self, y: Tensor, angles: Tensor) -> Tensor:
        """Attend to earlier tokens."""
        made = self.columns(y, self.q, self.k, self.v)
        rows, length, _ = made[0].shape
        q, k, v = (each.view(rows, length, -1, self.size) for each in made)
        q, k = (rotated(each, angles, self.o.rotary) for each in (q, k))
        if times := q.shape[2] // k.shape[2] - 1:
            wide = (rows, length, q.shape[2], self.size)
            k, v = (
                each[:, :, :, None].expand(-1, -1, -1, times + 1, -1).reshape(wide)
                for each in (k, v)
            )
        y = self.attended(*(each.transpose(1, 2) for each in (q, k, v)))
        return self.rows(y.transpose(1, 2).reshape(rows, length, -1), self.out)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention itself."""
        if self.o.attention == "flash":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.o.checkpoint == "scores":
            made: Tensor = checkpoint(with_softmax, q, k, v, use_reentrant=False)
            return made
        return with_softmax(q, k, v)


class Network(Split):
    """The perceptron of a layer."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__(o)
        self.up, self.down = self.linear(o.hidden, o.ffn), self.linear(o.ffn, o.hidden)
        self.gate = self.linear(o.hidden, o.ffn) if o.mlp == "swiglu" else None

    def forward(self, y: Tensor) -> Tensor:
        """Two products, and one that gates."""
        if self.gate is None:
            (up,) = self.columns(y, self.up)
            return self.rows(functional.gelu(up), self.down)
        up, gate = self.columns(y, self.up, self.gate)
        return self.rows(functional.silu(gate) * up, self.down)


class Layer(nn.Module):  # type: ignore[misc]  # the same
    """Attention and a perceptron, with their norms."""

    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(o.hidden, o.norm), Norm(o.hidden, o.norm)
        self.attention, self.network = Attention(o), Network(o)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.norm_1(x), angles)
        return x + self.network(self.norm_2(x))


def blocks_of(o: argparse.Namespace, stage: int, stages: int) -> list[str]:
    """The blocks of a stage, in the order of the forward pass.

    Cut by layers, each stage has as many as the next, and the last one has the head as well. Cut
    by products, as nanotron does, a stage ends with the block that takes the work over its share.
    """
    names = ["embedding", *["layer"] * o.layers, "norm", "head"]
    if o.cut == "layers":
        first, last = (o.layers * each // stages for each in (stage, stage + 1))
        start = first + 1 if stage > 0 else 0
        return names[start : len(names) if stage == stages - 1 else last + 1]
    work = {"layer": o.hidden * (2 * o.hidden * (1 + o.kv_heads / o.heads) + 3 * o.ffn)}
    work["head"] = o.hidden * o.vocab
    share = (o.layers * work["layer"] + work["head"]) / stages
    found, done, at = [], 0.0, 0
    for name in names:
        if at == stage:
            found.append(name)
        done += work.get(name, 0.0)
        # The last block may take the sum over the share of the last stage by rounding alone.
        if done > share * (at + 1) and at < stages - 1:
            at += 1
    return found


class Part(nn.Module):  # type: ignore[misc]  # the same
    """The layers of a stage, and the embedding or the head at the ends."""

    def __init__(self, o: argparse.Namespace, stage: int, stages: int) -> None:
        super().__init__()
        blocks = blocks_of(o, stage, stages)
        self.embedding = nn.Embedding(o.vocab, o.hidden) if "embedding" in blocks else None
        self.layers = nn.ModuleList(Layer(o) for each in blocks if each == "layer")
        self.norm = Norm(o.hidden, o.norm) if "norm" in blocks else None
        self.head = nn.Linear(o.hidden, o.vocab, bias=False) if "head" in blocks else None
        self.is_last = stage == stages - 1
        self.columns: DeviceMesh | None = None
        self.angles = torch.ones(
            o.sequence, o.hidden // o.heads // 2, dtype=torch.complex64, device=device_type()
        )
        draws = o.attention == "softmax"  # for dropout
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)
        ways = {"full": again, "selective": partial(again, context_fn=selective)}
        self.call = ways.get(o.checkpoint, plainly)

    def be_compiled(self) -> None:
        """Compile each layer with its checkpointing."""
        self.layers = nn.ModuleList(Recomputed(layer, self.call) for layer in self.layers)
        self.call = plainly
        for layer in self.layers:
            layer.compile(fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        """The layers of the stage."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = self.call(layer, x, self.angles)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        if self.columns is not None and self.head is None:  # a tensor of one rank has arrived
            x = DTensor.from_local(x, self.columns, (Shard(-1),), run_check=False)
        return x


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def split_tensors(o: argparse.Namespace, part: Part, mesh: DeviceMesh) -> None:
    """Tensor parallelism of a stage, with sequence parallelism of what lies between."""
    rows: Any = Shard(1) if o.split == "sequence" else Replicate()
    ends: dict[str, Any] = {}
    if part.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if part.head is not None:
        ends["head"] = ColwiseParallel(
            input_layouts=rows, output_layouts=Shard(-1), use_local_output=not part.is_last
        )
    if part.norm is not None and o.split == "sequence":
        ends["norm"] = SequenceParallel()
    if part.is_last:
        part.columns = mesh
    parallelize_module(part, mesh, ends)
    names = {"attention": ("q", "k", "v"), "network": ("up", "gate")}
    for layer in part.layers:
        plan: dict[str, Any] = {
            f"{kind}.{name}": ColwiseParallel()
            for kind, columns in names.items()
            for name in columns
            if getattr(getattr(layer, kind), name) is not None
        }
        for name in ("attention.out", "network.down"):
            plan[name] = RowwiseParallel(output_layouts=rows)
        if o.split == "sequence":
            plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
        if o.float8 == "no":  # else rows are gathered in that type
            plan["attention"] = PrepareModuleInput(
                input_layouts=(rows, None), desired_input_layouts=(Replicate(), None)
            )
            plan["network"] = PrepareModuleInput(
                input_layouts=(rows,), desired_input_layouts=(Replicate(),)
            )
        parallelize_module(layer, mesh, plan)
        layer.attention.group = layer.network.group = mesh.get_group().group_name


def build(o: argparse.Namespace, stage: int, stages: int, mesh: DeviceMesh) -> Part:
    """A stage as a rank holds it: f32 for FSDP, which computes in bf16, else bf16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if o.data == "fsdp" else torch.bfloat16)
    with torch.device("meta"):
        part = Part(o, stage, stages)
    torch.set_default_dtype(default)
    if o.tp > 1:
        split_tensors(o, part, mesh["tp"])
    if o.compile == "yes":
        part.be_compiled()
    if o.data == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard = partial(fully_shard, mesh=mesh["dp"], mp_policy=policy)
        for each in part.layers:
            # torchtitan keeps the last layer, which backward needs first
            again = o.reshard == "all" or each is not part.layers[-1]
            shard(each, reshard_after_forward=again and o.pp == 1)
        shard(part, reshard_after_forward=o.pp == 1)
    part.to_empty(device=device_type())
    return part


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1).float(), wanted.flatten())


class Sharing:
    """Masters, their gradients and an optimizer's state: all of them, or a share of each rank."""

    def __init__(self, o: argparse.Namespace, parts: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        self.weights = [
            (each.to_local() if isinstance(each, DTensor) else each).detach()
            for part in parts
            for each in part.parameters()
        ]
        self.parameters = [each for part in parts for each in part.parameters()]
        self.group = mesh["dp"].get_group()
        self.size = mesh["dp"].size()
        self.is_shared = o.data == "zero1" and self.size > 1
        self.sums = [torch.zeros_like(each, dtype=torch.float32) for each in self.weights]
        shares = self.size if self.is_shared else 1
        self.masters = [
            torch.zeros(-(-each.numel() // shares), dtype=torch.float32, device=each.device)
            for each in self.weights
        ]
        # A stage with the loss alone has no weights; torch takes an empty group, not an empty list.
        self.optimizer = torch.optim.AdamW([{"params": self.masters}], fused=True)

    def step(self) -> None:
        """Sum gradients over the ranks, and update."""
        for total, master in zip(self.sums, self.masters, strict=True):
            if self.is_shared:
                master.grad = torch.empty_like(master)
                dist.reduce_scatter_tensor(master.grad, total.view(-1), group=self.group)
            else:
                if self.size > 1:
                    dist.all_reduce(total, group=self.group)
                master.grad = total.view(-1)
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        for total, master, weight in zip(self.sums, self.masters, self.weights, strict=True):
            if self.is_shared:
                dist.all_gather_into_tensor(
                    weight.view(-1), master.to(weight.dtype), group=self.group
                )
            else:
                weight.view(-1).copy_(master)
            total.zero_()
            master.grad = None


class Adding:
    """Adds gradients in f32 as soon as a weight has one."""

    def __init__(self, sharing: Sharing) -> None:
        sums = zip(sharing.parameters, sharing.sums, strict=True)
        for parameter, total in sums:
            parameter.register_post_accumulate_grad_hook(partial(self.add, total))

    @staticmethod
    def add(total: Tensor, parameter: Tensor) -> None:
        """Add the gradient of a weight to its sum."""
        grad = parameter.grad
        if isinstance(grad, DTensor):  # that of an embedding in rows has all rows
            grad = grad.redistribute(placements=parameter.placements).to_local()
        total.add_(grad)
        parameter.grad = None


def train(o: argparse.Namespace) -> None:
    size = dist.get_world_size()
    shape = (o.pp, size // o.pp // o.tp, o.tp)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("pp", "dp", "tp"))
    stages = o.pp * o.stages_per_rank
    place = mesh["pp"].get_local_rank()
    numbers = range(place, stages, o.pp)
    parts = [build(o, number, stages, mesh) for number in numbers]
    sharing = None if o.data == "fsdp" else Sharing(o, parts, mesh)
    if sharing is not None:
        Adding(sharing)
    weights = [each for part in parts for each in part.parameters()]
    optimizer = torch.optim.AdamW(weights, foreach=True) if sharing is None else None
    device = torch.device(device_type())
    tokens = torch.zeros(o.batch * o.microbatches, o.sequence, dtype=torch.int64, device=device)
    with contextlib.ExitStack() as stack:
        if o.tp > 1:
            stack.enter_context(loss_parallel())
        step = (
            pipelined(o, parts, numbers, mesh, tokens) if o.pp > 1 else plain(o, parts[0], tokens)
        )
        for _ in range(o.steps):
            step()
            if sharing is not None:
                sharing.step()
            elif optimizer is not None:
                nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()


def plain(o: argparse.Namespace, part: Part, tokens: Tensor) -> Any:
    def step() -> None:
        for index, each in enumerate(tokens.split(o.batch)):
            if o.data == "fsdp" and o.microbatches > 1:
                part.set_requires_gradient_sync(index == o.microbatches - 1)
            loss_of(part(each), each).backward()

    return step


def pipelined(
    o: argparse.Namespace, parts: Sequence[Part], numbers: range, mesh: DeviceMesh, tokens: Tensor
) -> Any:
    device, count = tokens.device, numbers.stop
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(part, number, count, device, group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = get_schedule_class(o.schedule)
    is_several = o.stages_per_rank > 1
    schedule = kind(stages if is_several else stages[0], o.microbatches, loss_fn=loss_of)
    is_first, is_last = numbers[0] == 0, numbers[-1] == count - 1

    def step() -> None:
        schedule.step(
            *([tokens] if is_first else []),
            **({"target": tokens} if is_last else {}),
            return_outputs=False,
        )

    return step


def main() -> None:
    o = options(SIZES, CHOICES)
    dist.init_process_group()
    train(o)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
