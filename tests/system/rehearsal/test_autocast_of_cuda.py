"""`torch.autocast("cuda")` on modelled devices casts what it casts on CUDA."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

PROGRAM = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("nccl")
x = torch.randn(4, 16, 64, device="cuda")
layer, norm = torch.nn.Linear(64, 64, device="cuda"), torch.nn.LayerNorm(64, device="cuda")
square = torch.nn.RMSNorm(64, device="cuda")
labels = torch.zeros(64, dtype=torch.long, device="cuda")
bf16, f32 = torch.bfloat16, torch.float32
with torch.autocast("cuda", bf16):
    h = layer(x)
    found = {
        "linear": h.dtype, "mv": torch.mv(x[0], x[0, 0]).dtype, "gelu": F.gelu(h).dtype,
        "pool": F.max_pool3d(h[None], 2).dtype,
        "attention": F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype,
        "layer_norm": norm(h).dtype, "rms_norm": square(h).dtype, "softmax": h.softmax(-1).dtype,
        "log_softmax": F.log_softmax(h, -1).dtype, "exp": h.exp().dtype, "pow": (h**2).dtype,
        "sum": h.sum().dtype, "norm": h.norm().dtype, "cumsum": h.cumsum(0).dtype,
        "cross_entropy": F.cross_entropy(h.flatten(0, 1), labels).dtype,
        "cat": torch.cat([h, x]).dtype,
    }
    expected = dict.fromkeys(("linear", "mv", "gelu", "pool", "attention"), bf16)
    assert found == {name: expected.get(name, f32) for name in found}, found
    (norm(h).sum() + square(h).sum() + h.softmax(-1).sum()).backward()
    try:
        F.binary_cross_entropy(torch.sigmoid(h), h)
    except RuntimeError as error:
        assert "binary_cross_entropy is refused under torch.autocast" in str(error)
assert layer.weight.grad.dtype is f32

print("as on CUDA")
"""


@pytest.mark.parametrize("mode", ["--timing-only", "--device=cuda"])
def test_autocast_casts_by_the_lists_of_cuda(
    mode: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, PROGRAM)

    finished = preloaded.run("run", "--on=sim:h100-sxm", "--no-prefix", mode, program, cwd=tmp_path)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["as on CUDA"]
    assert "Overriding a previously registered kernel" not in finished.stderr
