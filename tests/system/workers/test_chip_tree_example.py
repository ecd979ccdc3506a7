"""`examples/chip_tree.py`, as a reader would run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples" / "chip_tree.py"


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_four_chips_multiply_add_up_and_predict_when_they_are_done(tmp_path: Path) -> None:
    done = run_example("--trace", str(tmp_path / "trace.json"))

    assert done.returncode == 0, done.stderr
    assert "4 chips in 2 workers are up" in done.stdout
    assert "largest difference from numpy's product on any chip" in done.stdout
    assert "us of simulated time" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["name"] == "multiply_and_add_up"]
    assert len(tasks) == 4
    assert all(event["dur"] > 0 for event in tasks)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("raise", "ArithmeticError: the last chip was told to fail"),
        ("kill", "WorkerDied: chip 1 of worker 1 was killed by SIGKILL"),
        ("bootstrap", "BootstrapRefused: chip 1 of worker 1 bootstrap failed: UnknownName"),
    ],
)
def test_its_failures_name_the_root_cause_first(failure: str, told: str) -> None:
    done = run_example("--fail", failure)

    assert done.returncode == 1
    assert done.stderr.startswith(told), done.stderr
    assert "raceback" not in done.stderr
