"""Every variable of torch in which ranks could leave something for each other has a verdict."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "variables_of_libraries.py"


def found(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.torch
def test_every_variable_of_the_installed_torch_has_a_verdict() -> None:
    pytest.importorskip("torch")

    done = found()

    assert done.returncode == 0, f"{done.stdout}\nsee docs/development/variables-of-libraries.md"
    assert int(done.stderr.split()[0]) > 50


def test_variable_without_a_verdict_is_found(tmp_path: Path) -> None:
    package = tmp_path / "library"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from functools import cache\n"
        "constant = {1: 2}\nseen = {}\ncount = 0\n"
        "class Plan:\n    kept = {}\n"
        "@cache\ndef of(x): return x\n"
        "def change():\n    global count\n    count = 1\n    seen[1] = 2\n"
        "    Plan.kept['a'] = 1\n    Plan.last = 3\n"
    )

    done = found(str(package))

    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "library:Plan.kept", "library:Plan.last", "library:count", "library:of", "library:seen",
    ]  # fmt: skip
