import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("cli_reference.py", "cli"),
        ("python_reference.py", "python-reference"),
        ("python_reference.py health", "health"),
        ("python_reference.py journal", "journal"),
    ],
)
def test_the_references_are_current(command: str, page: str) -> None:
    tool, *words = command.split()
    done = subprocess.run(
        [sys.executable, f"tools/{tool}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    written = f"docs/{page}.md"
    assert (ROOT / written).read_text() == done.stdout, (
        f"write it anew: python tools/{command} > {written}"
    )
