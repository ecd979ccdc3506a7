"""Operators of packages of PyPI against torch, from the packages' own files.

The packages are no dependency: `pip install --no-deps` of what the modules of
`benchmarks/programs/libraries` name, or a folder with them in `PYTHONPATH`, makes the tests run.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from running import run

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "programs" / "public_kernels.py"
PACKAGES = {
    "conch": ("conch",),
    "mlstm": ("mlstm_kernels",),
    "optimi": ("optimi",),
    "xformers": ("xformers",),
    "small": ("accelerated_scan", "cut_cross_entropy", "lion_pytorch", "sageattention"),
}

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.mark.parametrize("library", PACKAGES)
def test_operators_of_public_packages_have_the_numbers_of_torch(library: str) -> None:
    if missing := [each for each in PACKAGES[library] if find_spec(each) is None]:
        pytest.skip(
            f"not installed: {', '.join(missing)}; benchmarks/programs/libraries has the command"
        )

    done = run("sim", "run", "--triton", str(PROGRAM), "--", library)

    tried, _, right = done.lines[-1].removeprefix("all: ").removesuffix(" right").partition(" of ")
    assert tried == right != "0", done.stdout
