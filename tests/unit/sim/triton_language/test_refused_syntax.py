"""Statements, conditions and products that Triton's compiler refuses are refused with their line.

The verdicts are those of `ASTSource.make_ir` of Triton 3.9.
"""

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.sim.triton.execution import KernelError

HEAD = """\
import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

@triton.jit
def kernel(p, n, N: tl.constexpr):
"""
REFUSED = {
    "try: x = 1\nexcept: pass": "takes no `try`",
    "x = 1\ndel x": "takes no `del`",
    "global z\nz = 1": "takes no `global`",
    "f = lambda x: x": "takes no `lambda`",
    "def f(x): return x": "takes no function inside of a kernel",
    "class A: pass": "takes no class inside of a kernel",
    "for i in range(2): tl.store(p, i)\nelse: tl.store(p, 1)": "takes no `else` of a loop",
    "a = b = 1": "takes no assignment to several targets",
    "a, *b = (1, 2, 3)": r"takes no `\*` on the left",
    "d = {1: 2}": "takes no dictionary",
    "if n and n > 1: tl.store(p, 1)": "`and` is for int1, not int32",
    "if n > 1 or n: tl.store(p, 1)": "`or` is for int1, not int32",
    "if not n: tl.store(p, 1)": "`not` is for int1, not int32",
    "while n and n < 3: n = n + 1": "`and` is for int1, not int32",
    "x = 1 if not n else 2": "`not` is for int1, not int32",
    "a = tl.zeros((16, 8), tl.float16)\ntl.dot(a, tl.trans(a))": "8 has to be 16 or more for fp16",
    "a = tl.zeros((16, 4), tl.float32)\ntl.dot(a, tl.trans(a))": "4 has to be 8 or more for fp32",
    "a = tl.zeros((16, 16), tl.int8)\ntl.dot(a, tl.trans(a))": "16 has to be 32 or more for int8",
}
ACCEPTED = (
    "if n > 1 and n < 9: tl.store(p, 1)",
    "if not (n > 9): tl.store(p, 1)",
    "if N is not None and N > 3: tl.store(p, 1)",
    "while n > 0 and n < 3: n = n + 1\ntl.store(p, n)",
    "if N > 9:\n    try: pass\n    except: pass",
    "x = 1 if n > 2 or n < 1 else 2\ntl.store(p, x)",
    "a = tl.zeros((16, 8), tl.float32)\ntl.dot(a, tl.trans(a))",
)


def kernel_of(body: str, folder: Path) -> Any:
    file = folder / "written_kernel.py"
    file.write_text(HEAD + textwrap.indent(body, "    ") + "\n")
    spec = importlib.util.spec_from_file_location("written_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@pytest.mark.parametrize("body", REFUSED)
def test_what_the_front_end_of_triton_refuses_is_refused_with_its_line(
    body: str, tmp_path: Path
) -> None:
    kernel = kernel_of(body, tmp_path)

    with pytest.raises(KernelError, match=rf"written_kernel\.py:\d+.*{REFUSED[body]}"):
        kernel[(1,)](np.zeros(64, np.int32), 5, N=4)


@pytest.mark.parametrize("body", ACCEPTED)
def test_what_the_front_end_of_triton_takes_runs(body: str, tmp_path: Path) -> None:
    kernel_of(body, tmp_path)[(1,)](np.zeros(64, np.int32), 5, N=4)


def test_condition_evaluates_both_sides_as_on_a_device(tmp_path: Path) -> None:
    out = np.zeros(64, np.int32)
    kernel = kernel_of("if (n > 9) and (tl.atomic_add(p, 1) > 5): tl.store(p + 1, 1)", tmp_path)

    kernel[(1,)](out, 5, N=4)

    assert out[:2].tolist() == [1, 0]
