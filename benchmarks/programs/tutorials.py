"""Triton's eleven tutorials, with sizes that a CPU can do, against torch.

    TRITON is a checkout of Triton:
    rankwise sim run --triton benchmarks/programs/tutorials.py -- TRITON/python/tutorials
    … rankwise sim run --triton benchmarks/programs/tutorials.py -- TRITON/python/tutorials 06 09

With `--topology default` on the simulated machine. The tutorials' texts are changed before they run:
sizes, and benchmarks, which are left out. The figures are in docs/sim/kernels.md.
"""

import importlib.util
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

BENCHMARK = re.compile(r"^(benchmark|bench_\w+)\.run\(.*\)$", re.MULTILINE)
_SIZES = ("[1024, 512, 256, 128]", "[256, 128]")
CHANGES: dict[str, list[tuple[str, str]]] = {
    "02": [("1823, 781", "183, 781")],
    "05": [("test_layer_norm(1151, 8192", "test_layer_norm(115, 819")],
    "07": [("98432", "9843")],
    "08": [(f"group_{size} = {_SIZES[0]}", f"group_{size} = {_SIZES[1]}") for size in "mnk"],
}
ENDS = {
    "07": "# %%\n#  Customize",  # from there on it looks for files of CUDA or AMD
    "08": "# only launch the kernel, no tensor prep",  # from there on it is a benchmark
}
near = torch.testing.assert_close


def loaded(folder: Path, number: str) -> Any:
    """A tutorial as a module, with smaller sizes and without its benchmarks."""
    (path,) = [each for each in folder.glob(f"{number}-*.py") if not each.stem.endswith("-cpu")]
    text = path.read_text(encoding="utf-8").split(ENDS.get(number, "\0"))[0]
    for old, new in CHANGES.get(number, ()):
        if old not in text:
            raise ValueError(f"{path} no longer has {old!r}")
        text = text.replace(old, new)
    cut = Path(tempfile.mkdtemp()) / f"tutorial_{number}.py"  # kernels are read from their file
    cut.write_text(BENCHMARK.sub("", text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(cut.stem, cut)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[cut.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def t01(m: Any) -> None:
    near(m.output_triton, m.output_torch)


def t02(m: Any) -> None:
    near(m.y_triton, m.y_torch)


def t03(m: Any) -> None:
    near(m.triton_output, m.torch_output, atol=1e-2, rtol=0)


def t04(m: Any) -> None:
    x, kept = torch.randn(999), torch.randint(0, 2, (999,))
    near(m.dropout(x, kept, 0.25), torch.where(kept > 0, x / 0.75, 0.0))
    one, other = m.seeded_dropout(x, 0.5, 123), m.seeded_dropout(x, 0.5, 512)
    near(m.seeded_dropout(x, 0.5, 123), one)
    assert 400 < (one != 0).sum() < 600
    assert (one != other).any()


def t05(m: Any) -> None:
    """It has a test of its own, with gradients, which has run by now."""


def t06(m: Any) -> None:
    for causal in (False, True):
        torch.manual_seed(20)
        q, k, v = ((torch.randn(1, 2, 256, 64) / 2).half().requires_grad_() for _ in range(3))
        out = m.attention(q, k, v, causal, 0.5, False)
        gradient = torch.randn_like(q) * 0.1
        out.backward(gradient)
        rows, keys, values = (each.detach().float().requires_grad_() for each in (q, k, v))
        scores = rows @ keys.transpose(2, 3) * 0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(256, 256).tril().bool(), float("-inf"))
        wanted = torch.softmax(scores, -1) @ values
        wanted.backward(gradient.float())
        for one, other in ((out, wanted), (q.grad, rows.grad), (k.grad, keys.grad),
                           (v.grad, values.grad)):  # fmt: skip
            near(one.detach().float(), other.detach(), atol=2e-2, rtol=0)


def t07(m: Any) -> None:
    near(m.output_triton, m.output_torch, atol=1e-6, rtol=1e-6)


def t08(m: Any) -> None:
    for a, b, c in zip(m.group_A, m.group_B, m.group_gemm_fn(m.group_A, m.group_B), strict=True):
        near(c, a @ b, atol=1e-1, rtol=1e-2)


def t09(m: Any) -> None:
    a, b = torch.randn(256, 128).half(), torch.randn(256, 128).half()
    for product in (
        m.matmul(a, b.T), m.matmul_persistent(a, b.T), m.matmul_tma(a, b, False),
        m.matmul_tma_persistent(a, b, False), m.matmul_descriptor_persistent(a, b, False),
    ):  # fmt: skip
        near(product.float(), a.float() @ b.float().T, atol=0.1, rtol=1e-2)


def t10(m: Any) -> None:
    for kind in ("nvfp4", "mxfp4", "mxfp8", "mixed"):
        m.validate_block_scaled(256, 256, 512, kind)
    for size in (16, 32):
        m.validate_block_scaled_amd(128, 128, 512, "mxfp4", size)


def t11(m: Any) -> None:
    x, y = torch.rand(5000), torch.rand(5000)
    for launches_early in (False, True):
        near(m.add(x, y, launches_early), x + y)


def main() -> None:
    folder, numbers = Path(sys.argv[1]), sys.argv[2:]
    right = 0
    numbers = numbers or [f"{number:02}" for number in range(1, 12)]
    for number in numbers:
        begun = time.process_time()
        try:
            torch.manual_seed(0)
            globals()[f"t{number}"](loaded(folder, number))
        except (Exception, SystemExit) as error:
            print(f"{number}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            traceback.print_exc(limit=-4)
        else:
            right += 1
            print(f"{number}: right, {time.process_time() - begun:.1f} s of CPU", flush=True)
    print(f"{right} of {len(numbers)} right")


if __name__ == "__main__":
    main()
