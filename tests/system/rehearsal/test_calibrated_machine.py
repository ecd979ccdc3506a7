"""`rankwise calibrate` on this machine, and a run that is predicted on what it wrote."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

pytestmark = pytest.mark.system

PATIENCE_S = 900
"""Longer than a busy machine takes: nothing here depends on how long it took."""
PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weights = torch.randn(256, 256)
for _ in range(3):
    dist.all_reduce(weights @ weights)
dist.destroy_process_group()
"""


def rankwise(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankwise", *words],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.timeout(PATIENCE_S)
def test_a_run_is_predicted_on_the_machine_that_was_calibrated(tmp_path: Path) -> None:
    machine, program = str(tmp_path / "mine.yaml"), tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")

    calibrated = rankwise("calibrate", "-o", machine, "--seconds", "1", "--timeout", "10m")
    assert calibrated.returncode == 0, calibrated.stderr
    for kind in ("memory", "matrix", "attention", "attention_backward", "collectives"):
        assert kind in calibrated.stdout

    written = yaml.safe_load(Path(machine).read_text("utf-8"))
    assert set(written["device"]["operands_GBps"]) == {"bf16", "f32"}
    assert written["host"]["late_us"][0] > 0
    launches = written["host"]["launch_us"]
    assert launches["plain"][0] < launches["dtensor_update"][0] < launches["dtensor"][0]

    shown = rankwise("machines", machine)
    assert "calibrated" in shown.stdout
    assert "residual of matrix" in shown.stdout

    run = rankwise("run", "--on", f"sim:{machine}", "--nproc-per-node", "2", str(program))
    assert run.returncode == 0, run.stderr
    assert "predicted on mine, 2 of 2 devices" in run.stderr
    assert "interval" in run.stderr
