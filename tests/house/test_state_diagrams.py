import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_state_diagrams_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/state_diagrams.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert (ROOT / "docs" / "development" / "state-machines.md").read_text() == done.stdout, (
        "write it anew: python tools/state_diagrams.py > docs/development/state-machines.md"
    )
