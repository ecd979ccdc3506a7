"""Check on a machine with one GPU what rankwise says of GPUs; prints a table for docs/gpu.md.

    python tools/gpu_check.py > checked.md     # under eight minutes; exit code 1 if a check fails

It needs torch for CUDA and nvidia-ml-py, and runs real programs under `rankwise run`: one that runs
out of memory, one whose kernel fails, one that hangs in a synchronization, one with NCCL.
"""

import datetime as dt
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.gpus import require_gpus

PATIENCE_S = 90.0
RANKWISE = (sys.executable, "-m", "rankwise")

OUT_OF_MEMORY = """
import torch
kept = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(4)]
kept.append(torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
"""
LATE_ERROR = """
import torch
table = torch.zeros(4, device="cuda")
table[torch.tensor([7], device="cuda")] += 1
print(table.sum().item())
"""
SYNCHRONIZES = """
import torch
torch.cuda._sleep(1 << 62)
torch.cuda.synchronize()
"""
NCCL = """
import json, time, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from rankwise.drivers.real.worker.torch_calls import recorded_groups
dist.init_process_group("nccl")
since, x = time.time_ns(), torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
torch.cuda._sleep(1 << 33)
dist.all_reduce(x)
groups = json.loads(recorded_groups(c10d, 0, since))
print([(call["operation"], call["is_over"]) for group in groups for call in group["calls"]])
"""
HOLDS = """
import time, torch
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("holds", flush=True)
time.sleep(600)
"""


class Check:
    """One row: what is checked, and what came out."""

    def __init__(self, what: str, run: Callable[[Path], str]) -> None:
        self.what = what
        self._run = run
        self.found = ""
        self.is_right = False

    def run(self, folder: Path) -> None:
        """Run it; what it returns is what was found, and an AssertionError tells what was not."""
        try:
            self.found, self.is_right = self._run(folder), True
        except (AssertionError, subprocess.TimeoutExpired, ConfigError) as error:
            self.found = str(error)


def _launched(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(text)
    command = (*RANKWISE, "run", "--standalone", "--nproc-per-node", "1", *options, str(script))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, check=False
    )


def _expect(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in: {text[-2000:]}"
    return found[0].strip()


def _figures(_: Path) -> str:
    reading = require_gpus().read()[0]
    names = ("memory_bytes", "utilisation", "temperature_c", "ecc_errors")
    missing = [name for name in names if getattr(reading, name) is None]
    assert "memory_bytes" not in missing, "NVML does not tell the memory"
    slow = ", ".join(reading.throttled_ns) or "none"
    return f"not told: {', '.join(missing) or 'none'}; times of slow clocks: {slow}"


def _out_of_memory(folder: Path) -> str:
    told = _launched(folder, OUT_OF_MEMORY).stderr
    _expect(r"gpu memory: +1024\S* .+ more wanted; GPU 0 has", told)
    return _expect(r"other tensors 4 GiB[^\n]*", told)


def _late_error(folder: Path) -> str:
    return _expect(r"CUDA_LAUNCH_BLOCKING=1 the[^\n]*", _launched(folder, LATE_ERROR).stderr)


def _synchronizes(folder: Path) -> str:
    told = _launched(folder, SYNCHRONIZES, "--hang-timeout", "10").stderr
    return _expect(r"[^\n]*its GPU[^\n]*", told)


def _nccl(folder: Path) -> str:
    done = _launched(folder, NCCL, "--no-prefix")
    return _expect(
        r"\[\('all_reduce', True\), \('all_reduce', False\)\]", done.stdout + done.stderr
    )


def _node_check(folder: Path) -> str:
    done = _launched(folder, "print('took part')", "--node-check", "gpu")
    return _expect(r"took part", done.stdout + done.stderr)


def _top(folder: Path) -> str:
    script = folder / "holds.py"
    script.write_text(HOLDS)
    command = (*RANKWISE, "run", "--standalone", "--rdzv-id", "gpu-check", "--nproc-per-node", "1")
    with subprocess.Popen(
        (*command, "--no-prefix", str(script)), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None, "it was made with a pipe"
        try:
            assert run.stdout.readline().strip() == "holds", "the program did not start"
            told = subprocess.run(
                (*RANKWISE, "top", "--once", "--json", "gpu-check"),
                capture_output=True, text=True, timeout=PATIENCE_S, check=True,
            ).stdout  # fmt: skip
        finally:
            run.terminate()
    (worker,) = json.loads(told)["workers"]
    assert (worker["gpu_bytes"] or 0) >= 1 << 30, f"gpu_bytes is {worker['gpu_bytes']}"
    return f"{worker['gpu_bytes'] >> 20} MiB, {worker['gpu_celsius']} °C"


CHECKS = (
    Check("figures that NVML tells of this card", _figures),
    Check("`rankwise top`: memory of a rank's process", _top),
    Check("out of memory: numbers and holders", _out_of_memory),
    Check("an error of a kernel is told as asynchronous", _late_error),
    Check("a rank that hangs in `torch.cuda.synchronize` waits for its GPU", _synchronizes),
    Check("NCCL's recorder: a call on the GPU is not over", _nccl),
    Check("`--node-check gpu`", _node_check),
)


@click.command()
def main() -> None:
    """Check all; print a Markdown table."""
    try:
        card = require_gpus().read()[0].name
    except (ConfigError, IndexError) as error:
        raise click.ClickException(f"{error}; this needs a machine with a GPU") from error
    click.echo(f"Checked on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} with one {card}:\n")
    click.echo("| what | found |\n| --- | --- |")
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as folder:
            check.run(Path(folder))
        verdict = check.found if check.is_right else f"**wrong**: {check.found}"
        click.echo(f"| {check.what} | {' '.join(verdict.replace('|', '/').split())} |")
    sys.exit(0 if all(check.is_right for check in CHECKS) else 1)


if __name__ == "__main__":
    main()
