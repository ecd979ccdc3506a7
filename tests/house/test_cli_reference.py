import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_command_line_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/cli_reference.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert (ROOT / "docs" / "cli.md").read_text() == done.stdout, (
        "write it anew: python tools/cli_reference.py > docs/cli.md"
    )
