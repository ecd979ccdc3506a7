"""`examples/README.md` is a promise: each of its commands shows what the table says."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from running import Running

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[3] / "examples"
ROW = re.compile(r"^\| \[([\w.]+)\]\(\1\) \| .+ \| `(.+)` \| `(.+)` \|$", re.MULTILINE)
ROWS = ROW.findall((EXAMPLES / "README.md").read_text())


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.torch,) if "import torch" in (EXAMPLES / name).read_text() else ()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(command, shown, id=name, marks=marks(name))
        for name, command, shown in ROWS
        if name.endswith(".py")  # tests/system/launch/test_notebooks.py runs the notebook
    ],
)
def test_an_example_shows_what_the_table_says(command: str, shown: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    with Running(
        "bash", "-c", command, environment={"PATH": path, "TMPDIR": str(tmp_path)}, cwd=EXAMPLES
    ) as running:
        done = running.finish()

    assert shown in done.stdout + done.stderr


def lines_of_code(path: Path) -> int:
    """All lines of a script; those of a notebook's code."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return sum(len(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return len(path.read_text().splitlines())


def test_every_example_is_in_the_table_and_small() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}]

    assert {name for name, _, _ in ROWS} == {path.name for path in files}
    assert {path.name: lines_of_code(path) for path in files if lines_of_code(path) >= 80} == {}
