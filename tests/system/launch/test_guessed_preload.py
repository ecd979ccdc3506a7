"""What rankwise preloads on a guess never makes a job fail; what the user asks for is refused."""

import os
from pathlib import Path

import pytest
from running import Finished, run, write_program

pytestmark = pytest.mark.system

IN_SERVER = "import os\nif 'RANK' not in os.environ: "
BAD_MODULES = {
    "starts a thread": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='busy-bee', daemon=True).start()\n"
    ),
    "leaves": IN_SERVER + "os._exit(3)",
    "leaves politely": IN_SERVER + "raise SystemExit(3)",
    "crashes": IN_SERVER + "os.kill(os.getpid(), 11)",
}


def run_importing(module_text: str, tmp_path: Path, *options: str) -> Finished:
    """Run a script that imports, from site-packages, a module with this text."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    write_program(packages, module_text, "badmodule.py")
    script = write_program(tmp_path, "import json\nimport badmodule\nprint('ran', flush=True)\n")
    return run(
        "run",
        "--nproc-per-node=3",
        "--start-method=forkserver",
        *options,
        script,
        environment={"PYTHONPATH": str(packages)},
    )


@pytest.mark.parametrize("kind", BAD_MODULES)
def test_a_guess_that_goes_wrong_costs_nothing_but_time(kind: str, tmp_path: Path) -> None:
    done = run_importing(BAD_MODULES[kind], tmp_path)

    assert done.code == 0, done.stderr
    assert sorted(done.lines) == [f"[default{rank}]:ran" for rank in range(3)]


def test_a_module_that_crashes_its_workers_too_fails_as_they_do(tmp_path: Path) -> None:
    done = run_importing("import os\nos._exit(7)", tmp_path)

    assert done.code == 7
    assert "exit code 7" in done.stderr


def test_threads_of_a_module_that_was_asked_for_are_refused(tmp_path: Path) -> None:
    done = run_importing(BAD_MODULES["starts a thread"], tmp_path, "--preload=badmodule")

    assert done.code == 1
    assert "cannot fork while other threads run in it (busy-bee)" in done.stderr


def test_a_module_that_was_asked_for_and_ends_the_server_is_named(tmp_path: Path) -> None:
    done = run_importing(BAD_MODULES["leaves"], tmp_path, "--preload=badmodule")

    assert done.code == 1
    assert "the fork server has ended with exit code 3 while it imported badmodule" in done.stderr


def test_a_guess_is_preloaded_when_nothing_speaks_against_it(tmp_path: Path) -> None:
    done = run_importing("import os\nprint('imported by', os.getpid(), flush=True)", tmp_path)

    assert done.code == 0
    assert len([line for line in done.lines if "imported by" in line]) == 1, os.linesep.join(
        done.lines
    )
