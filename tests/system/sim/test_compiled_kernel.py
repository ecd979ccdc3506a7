"""The kernel does the same when it is compiled: its tests pass, and runs leave the same bytes."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATIENCE_S = 280
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
HEADER = Path(sysconfig.get_path("include"), "Python.h")

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or not HEADER.exists(), reason="there is no C compiler"
    ),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("mypyc", "setuptools"))), reason="there is no mypyc"
    ),
]


def run(*words: str, **added: str) -> str:
    """What a command that succeeds writes."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **added},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a copy of the package whose kernel is compiled, soon and not well."""
    folder = tmp_path_factory.mktemp("compiled")
    run("tools/compile_kernel.py", str(folder), "0", PYTHONWARNINGS="default")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", folder, ignore=ignore, dirs_exist_ok=True)
    return str(folder)


def test_the_compiled_modules_are_the_ones_that_are_imported(compiled: str) -> None:
    told = run(
        "-c",
        "from rankwise.sim.hardware import engines, links\n"
        "from rankwise.sim.kernel import futures, resources, simulator\n"
        "for each in futures, simulator, resources, engines, links: print(each.__file__)",
        PYTHONPATH=compiled,
    )

    files = told.splitlines()
    assert len(files) == 5
    assert all(each.startswith(compiled) and not each.endswith(".py") for each in files)


def test_the_tests_of_kernel_and_hardware_pass_on_the_compiled_one(compiled: str) -> None:
    told = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("tests/unit/sim/kernel", "tests/unit/sim/hardware"),
        PYTHONPATH=compiled,
    )

    assert " passed" in told
    assert "skipped" not in told


def test_runs_leave_the_same_bytes_on_the_compiled_one(compiled: str) -> None:
    run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        "tests/system/sim/determinism/test_determinism.py::"
        "test_runs_leave_the_bytes_that_they_leave_on_every_other_machine",
        PYTHONPATH=compiled,
    )
