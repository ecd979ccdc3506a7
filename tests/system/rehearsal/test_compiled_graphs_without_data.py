"""Compiled graphs under `--timing-only`: the kernels that inductor would make are priced."""

import json
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from running import Finished, write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

CHAIN = """
import torch


def chain(x):
    for _ in range(8):
        x = torch.sin(x) + 1
    return x


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4096, 4096)

    def forward(self, x):
        BROKEN
        return chain(self.linear(x))


layers = torch.nn.Sequential(*[Layer() for _ in range(3)]).to("cuda", torch.bfloat16)
for layer in layers if COMPILED else []:
    layer.compile(fullgraph=FULL)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, foreach=True)
for _ in range(3):
    layers(torch.ones(8192, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(tuple(layers[0].linear.weight.shape))
"""

CHECKPOINTED = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.Linear(256, 768)
        self.output = torch.nn.Linear(256, 256)

    def forward(self, x):
        heads = [x.view(2, 128, 4, 64).transpose(1, 2) for x in self.inputs(x).chunk(3, -1)]
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(attended.transpose(1, 2).reshape(2, 128, 256))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if SAVES_LITTLE else self.block(x)


model = torch.compile(Model().to("cuda", torch.bfloat16))
for _ in range(3):
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
"""


def run(
    preloaded: Preloaded, tmp_path: Path, *, compiled: bool, broken: str = "", full: bool = True
) -> tuple[Finished, dict[str, Any]]:
    program = (
        CHAIN.replace("COMPILED", str(compiled))
        .replace("BROKEN", broken)
        .replace("FULL", str(full))
    )
    finished, figures = predict(preloaded, tmp_path, program)
    assert finished.lines == ["(4096, 4096)"]
    return finished, figures


def predict(
    preloaded: Preloaded, tmp_path: Path, program: str, ranks: int = 1
) -> tuple[Finished, dict[str, Any]]:
    path = tmp_path / "p.json"
    finished = preloaded.run(
        "run", "--on=sim:h100-sxm", "--timing-only", f"--nproc-per-node={ranks}", "--no-prefix",
        f"--prediction={path}", write_program(tmp_path, program), cwd=tmp_path,
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    return finished, json.loads(path.read_text())


def test_fused_kernels_of_a_compiled_graph_move_their_bytes_once(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    _, eager = run(preloaded, tmp_path, compiled=False)
    _, compiled = run(preloaded, tmp_path, compiled=True)

    chain = 8192 * 4096 * 2 / (0.9 * 3.35e12)  # seconds for one pass over a tensor
    # Forward: 16 kernels that read and write become one. Backward: 8 cosines are computed from
    # saved results of sines, or from the input anew, in one kernel too.
    saved = (eager["step_time_s"] - compiled["step_time_s"]) / (3 * chain)
    assert saved > 2 * 16 - 4 + 2 * 8
    assert compiled["peak_active_bytes"] < 0.6 * eager["peak_active_bytes"]
    assert compiled["model_flops_per_step"] == eager["model_flops_per_step"]
    assert compiled["remarks"] == []
    assert not compiled["is_upper_bound"]
    assert "compiled graphs" in compiled["interval"]["extrapolated"]


def test_code_between_broken_graphs_is_an_upper_bound(preloaded: Preloaded, tmp_path: Path) -> None:
    finished, figures = run(
        preloaded, tmp_path, compiled=True, broken="torch._dynamo.graph_break()", full=False
    )

    assert figures["is_upper_bound"]
    assert "upper bound: torch.compile breaks graphs at some lines" in finished.stderr


def test_attention_in_a_checkpoint_of_a_compiled_model_is_computed_again(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    _, whole = predict(preloaded, tmp_path, CHECKPOINTED.replace("SAVES_LITTLE", "False"))
    _, again = predict(preloaded, tmp_path, CHECKPOINTED.replace("SAVES_LITTLE", "True"))

    assert not again["is_upper_bound"], again["remarks"]
    assert not whole["is_upper_bound"], whole["remarks"]
    assert again["model_flops_per_step"] == whole["model_flops_per_step"]
    assert again["hfu"] / again["mfu"] > 1.1 * whole["hfu"] / whole["mfu"]


SPLIT = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)
from torch.utils.checkpoint import checkpoint


class Perceptron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x):
        y = self.up(x)
        for _ in range(8):
            y = torch.sin(y) + 1
        return self.down(y)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.perceptron = torch.nn.LayerNorm(256), Perceptron()

    def forward(self, x):
        return x + self.perceptron(self.norm(x))


class Recomputed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


dist.init_process_group()
mesh = init_device_mesh("cuda", (2,))
layer = Layer().to("cuda")
rows = Shard(0)
parallelize_module(layer, mesh, {
    "norm": SequenceParallel(sequence_dim=0),
    "perceptron": PrepareModuleInput(
        input_layouts=(rows,), desired_input_layouts=(torch.distributed.tensor.Replicate(),)
    ),
    "perceptron.up": ColwiseParallel(),
    "perceptron.down": RowwiseParallel(output_layouts=rows),
})
model = Recomputed(layer)
if COMPILED:
    model.compile(fullgraph=True)
for _ in range(3):
    made = model(torch.ones(2048, 256, device="cuda", requires_grad=True))
    made.sum().backward()
    model.zero_grad()
"""


def test_compiled_layer_with_tensor_parallelism_is_fused_between_its_collectives(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    def predicted(compiled: str) -> dict[str, Any]:
        program = SPLIT.replace("COMPILED", compiled)
        return predict(preloaded, tmp_path, program, ranks=2)[1]

    eager, compiled = predicted("False"), predicted("True")

    assert not compiled["is_upper_bound"], compiled["remarks"]
    assert compiled["computing_s"] < 0.7 * eager["computing_s"]
    assert compiled["model_flops_per_step"] == eager["model_flops_per_step"]
    kinds = eager["exposed_communication_by_kind_s"].keys()
    assert {"all_gather", "reduce_scatter"} <= kinds
    assert compiled["exposed_communication_by_kind_s"].keys() == kinds
