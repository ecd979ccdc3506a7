"""`rankwise sim run --triton` and pytest's `--rankwise-triton`: programs that know only Triton."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import run, write_program

pytestmark = pytest.mark.system

SCRIPT = """
import sys

import numpy as np
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n and offsets >= 0
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


n = int(sys.argv[1])
x = np.arange(n, dtype=np.float32)
double[(triton.cdiv(n, 128),)](x, n, BLOCK=128)
print(__name__, (x == 2 * np.arange(n)).all())
sys.exit(n % 10)
"""


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    script = write_program(tmp_path, SCRIPT)

    done = run("sim", "run", "--triton", script, "300")

    assert done.lines == ["__main__ True"], done.stderr
    assert done.code == 0


def test_a_script_runs_on_a_machine_and_takes_simulated_time(tmp_path: Path) -> None:
    script = write_program(tmp_path, SCRIPT)
    trace = tmp_path / "trace.json"

    done = run(
        "sim", "run", "--triton", "--topology=pod64", f"--trace={trace}", script, "--", "300"
    )

    assert done.lines[0] == "__main__ True", done.stderr
    assert done.lines[1].startswith("simulated time: ")
    assert '"double"' in trace.read_text()


def test_the_script_decides_the_exit_code(tmp_path: Path) -> None:
    assert run("sim", "run", "--triton", write_program(tmp_path, SCRIPT), "203").code == 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sweep=n=1,2"], "--sweep has no meaning with --triton"),
        (["--timing-only", "--topology=default"], "--timing-only has no meaning with --triton"),
        (["--trace=trace.json"], "--trace needs a machine, and --triton alone has none"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: list[str], complaint: str, tmp_path: Path
) -> None:
    done = run("sim", "run", "--triton", *options, write_program(tmp_path, SCRIPT), "3")

    assert complaint in done.stderr
    assert done.code == 2


def test_arguments_without_triton_are_refused(tmp_path: Path) -> None:
    done = run("sim", "run", write_program(tmp_path, "def run(torch): ..."), "3")

    assert "takes no arguments" in done.stderr
    assert done.code == 2


@pytest.mark.torch
def test_a_script_for_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def gather(table, out, BLOCK: tl.constexpr):\n"
        "    which = tl.program_id(0)\n"
        "    source = tl.load(table + which).to(tl.pointer_type(tl.float32))\n"
        "    i = tl.arange(0, BLOCK)\n"
        "    tl.store(out + which * BLOCK + i, tl.load(source + i))\n"
        "parts = [torch.full((4,), float(n), device='cuda') for n in range(3)]\n"
        "table = torch.tensor([part.data_ptr() for part in parts], device='cuda')\n"
        "out = torch.empty(12).cuda()\n"
        "assert out.is_cuda\n"
        "assert torch.cuda.get_device_properties(0).multi_processor_count > 0\n"
        "with torch.cuda.device(0), torch.cuda._DeviceGuard(out.device.index):\n"
        "    pass\n"
        "gather[(3,)](table, out, BLOCK=4)\n"
        "print(out.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4)\n"
        "from torch.utils import _triton\n"
        "print(_triton.has_triton(), _triton.has_triton_package())\n"
        "print(eval('has_triton(), has_triton_package()', vars(_triton)))  # as torch asks itself\n"
        "assert torch.cuda.device(0).idx == 0 == torch._C._cuda_getCurrentRawStream(0)\n"
        "x = torch.ones(2, 2, device='cuda', requires_grad=True)\n"
        "def product(): return (x @ x).dtype\n"
        "with torch.autocast('cuda'): print(product(), torch.is_autocast_enabled())\n"
        "with torch.autocast('cuda', torch.bfloat16, enabled=True):\n"
        "    print(product(), torch.get_autocast_dtype('cuda'))\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False): print(product())\n"
        "class Doubled(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    @torch.amp.custom_fwd(device_type='cuda')\n"
        "    def forward(ctx, x): return x @ x\n"
        "    @staticmethod\n"
        "    @torch.amp.custom_bwd(device_type='cuda')\n"
        "    def backward(ctx, dy):\n"
        "        print((dy @ dy).dtype)\n"
        "        return torch.full((2, 2), 2.0, device='cuda')\n"
        "with torch.autocast('cuda'): y = Doubled.apply(x)\n"
        "y.sum().backward()\n"
        "print(x.grad.tolist())\n",
    )

    done = run("sim", "run", "--triton", script)

    assert done.lines == [
        "True", "True True", "(False, False)", "torch.float16 True",
        "torch.bfloat16 torch.bfloat16", "torch.float32", "torch.float16",
        "[[2.0, 2.0], [2.0, 2.0]]",
    ], done.stderr  # fmt: skip


NAMES_A_DEVICE = """
import torch, triton, triton.language as tl

print(torch.ones(2).device, torch.cuda.is_available(), torch.cuda.get_device_capability())
device = torch.device("cuda")  # from here on
x = torch.ones(4, device=device, requires_grad=True)
print(x.device, x.device.type, x.is_cpu, x.get_device(), x.device == torch.empty_like(x).device)
print(torch.cuda.is_available(), torch.cuda.get_device_name(), torch.cuda.get_device_capability())
print(triton.runtime.driver.active.get_active_torch_device())


@triton.jit
def double(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x, device=x.device)
        double[(1,)](x, out)
        return out

    @staticmethod
    def backward(ctx, dy):
        assert dy.device == x.device and dy.device.type == "cuda"
        out = torch.zeros(4, device=dy.device).to(dy.device)
        double[(1,)](dy.contiguous(), out)
        return out


layer = torch.nn.Linear(4, 4).to(device)
optimizer = torch.optim.AdamW(layer.parameters())
layer(Doubled.apply(x)).sum().backward()
optimizer.step()
print(x.grad.device, x.grad.shape)
torch.testing.assert_close(x.detach().cpu(), torch.ones(4))
print(x.detach().cpu().numpy().sum())
"""


@pytest.mark.torch
def test_a_script_that_names_cuda_has_the_modelled_device_of_simulated_ranks(
    tmp_path: Path,
) -> None:
    done = run("sim", "run", "--triton", write_program(tmp_path, NAMES_A_DEVICE))

    assert done.lines == [
        "cpu False (0, 0)", "cuda:0 cuda False 0 True", "True modelled CUDA device (9, 0)",
        "cuda:0", "cuda:0 torch.Size([4])", "4.0",
    ], done.stderr  # fmt: skip


POINTERS = """
import gc, torch, triton, triton.language as tl

@triton.jit
def gather(table, out, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    source = tl.load(table + which).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(out + which * BLOCK + i, tl.load(source + i))

base = torch.arange(400.0).repeat_interleave(64)
gc.collect()  # views are younger
views = [base[64 * row:64 * row + 64] for row in range(2)]
others = torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64)
table = torch.tensor([each.data_ptr() for each in (*views, base[128:], base)])
out = torch.empty(4 * 64)
gather[(4,)](table, out, BLOCK=64)
print(out[::64].tolist())
"""


@pytest.mark.torch
@pytest.mark.parametrize("machine", [(), ("--topology", "default")])
def test_kernels_follow_pointers_to_views_beside_tensors_that_they_could_not_take(
    machine: tuple[str, ...], tmp_path: Path
) -> None:
    script = write_program(tmp_path, POINTERS)

    done = run("sim", "run", "--triton", *machine, script)

    assert done.lines[0] == "[0.0, 1.0, 2.0, 0.0]", done.stderr


@pytest.mark.torch
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a C++ compiler")
def test_what_torch_compiles_runs_beside_emulated_kernels(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        "import torch, torch._inductor.config, triton\n"
        # Without looking for what this processor could do better, which takes it ten seconds.
        "torch._inductor.config.cpp.simdlen = 1\n"
        "torch._inductor.config.cpp_cache_precompile_headers = False\n"
        "more = torch.compile(lambda x: x + 1)\n"
        "print(more(torch.zeros(3, device='cuda')).tolist())\n",
    )

    done = run("sim", "run", "--triton", script)

    assert done.lines == ["[1.0, 1.0, 1.0]"], done.stderr


def test_tests_of_kernels_run_under_pytest(tmp_path: Path) -> None:
    tests = tmp_path / "test_kernel.py"
    tests.write_text(
        SCRIPT.partition("n = int")[0]
        + """
def test_doubling():
    x = np.ones(5)
    double[(1,)](x, 5, BLOCK=8)
    assert x.tolist() == [2] * 5
"""
    )
    (tmp_path / "conftest.py").write_text("import triton\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]

    with_option = subprocess.run(
        [*command, "--rankwise-triton"], capture_output=True, text=True, timeout=200, check=False
    )
    without = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert "1 passed" in with_option.stdout, with_option.stdout + with_option.stderr
    if importlib.util.find_spec("triton") is None:
        assert "No module named 'triton'" in without.stdout + without.stderr
    else:  # the real one, as torch's usual build brings it along: it has no GPU
        assert "1 failed" in without.stdout, without.stdout + without.stderr


def test_tests_that_are_skipped_for_want_of_a_gpu_are_told(tmp_path: Path) -> None:
    tests = tmp_path / "test_kernel.py"
    tests.write_text(
        """
import pytest, triton
has_gpu = False
is_emulated = triton.jit.__module__.startswith("rankwise")

@pytest.mark.skipif(not has_gpu, reason="needs CUDA")
def test_kernel():
    raise AssertionError

@pytest.mark.skipif(not has_gpu, reason="slow")
def test_other():
    raise AssertionError

@pytest.mark.skipif(not (has_gpu or is_emulated), reason="needs CUDA")
def test_emulated_kernel():
    pass
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]

    done = subprocess.run(
        [*command, "--rankwise-triton"], capture_output=True, text=True, timeout=200, check=False
    )

    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "rankwise: skipped for want of a GPU: 1 test; torch.cuda.is_available()" in done.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--triton", "x.py", "--n", "5"), "arguments of the script come after --: x.py -- --n …"),
        (("x.py", "--n", "5"), "parameters of the program are set with --set n=VALUE"),
    ],
)
def test_an_option_of_the_script_is_told_where_to_go(words: tuple[str, ...], hint: str) -> None:
    done = run("sim", "run", *words)

    assert done.code == 2
    assert f"no such option '--n'; {hint}" in done.stderr


CHECKED = """
import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

WIDTH = tl.constexpr(8)
LIMIT = 8


@triton.constexpr_function
def half(n):
    return n // 2


@triton.jit
def helper(x):
    return libdevice.exp(x) + LIMIT


@triton.jit
def fine(p, n, scale, K: tl.constexpr = half(16)):
    i = tl.arange(0, K)
    tl.store(p + i, tl.load(p + i, mask=i < n) * scale + half(K))


@triton.jit
def bad(p, n, K: tl.constexpr):
    i = tl.arange(0, K)
    tl.store(p + i, helper(tl.load(p + i, mask=i < n)))


x = np.zeros(8, np.float32)
fine[(1,)](x, 7, 2.0, K=WIDTH)
fine[(1,)](x, 1, 2.0)
print("taken", flush=True)
bad[(1,)](x, 7, K=8)
print("never")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("machine", [(), ("--topology=default",)])
def test_what_tritons_own_front_end_refuses_fails_with_its_line(
    tmp_path: Path, machine: tuple[str, ...]
) -> None:
    script = write_program(tmp_path, CHECKED)

    done = run("sim", "run", "--triton", "--check-compile", *machine, script)

    line = CHECKED.splitlines().index("    return libdevice.exp(x) + LIMIT") + 1
    assert done.lines == ["taken"], done.stderr
    assert f'kernel "bad": {script}:{line}: Triton ' in done.stderr
    assert "Cannot access global variable LIMIT" in done.stderr
    assert done.code == 1


def test_compile_checks_are_about_scripts_of_kernels(tmp_path: Path) -> None:
    done = run("sim", "run", "--check-compile", write_program(tmp_path, CHECKED))

    assert "--check-compile is for kernels of a script: add --triton" in done.stderr
    assert done.code == 2
