import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

EXPENSIVE = (
    "torch",
    "numpy",
    "asyncio",
    "logging",
    "multiprocessing",
    "rich",
    "importlib.metadata",
)
SIMULATED = ("rankwise.sim", "rankwise.simranks.run")


def imported_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after a statement, without those of `site`."""
    source = (
        f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import rankwise",
        "import rankwise.cli.main",
        "import rankwise.cli.run",
        "import rankwise.cli.sim",
        "import rankwise.launch.run.supervision",
    ],
)
def test_launching_imports_nothing_expensive(statement: str) -> None:
    assert imported_by(statement).isdisjoint(EXPENSIVE)


def test_a_run_on_one_node_does_without_pathlib_and_what_that_brings() -> None:
    supervised = imported_by("import rankwise.cli.run_job, rankwise.launch.run.supervision")

    assert supervised.isdisjoint({"pathlib", "urllib.parse", "ipaddress"})


@pytest.mark.parametrize(
    "module",
    [
        "rankwise.compat.torch.elastic.multiprocessing",
        "rankwise.compat.torch.elastic.multiprocessing.errors",
        "rankwise.compat.torch.elastic.events",
        "rankwise.compat.torch.elastic.metrics",
        "rankwise.collectives",
    ],
)
def test_torchs_names_and_collectives_do_without_torch(module: str) -> None:
    assert "torch" not in imported_by(f"import {module}")


def test_importing_the_package_loads_nothing_but_itself() -> None:
    assert imported_by("import rankwise") == {"rankwise"}


def test_a_run_imports_no_codec_and_makes_no_dataclasses() -> None:
    words = ["run", "--standalone", "--nproc-per-node", "1", "--no-python", "true"]
    imported = imported_by(f"from rankwise.cli.main import invoke; invoke({words})")

    assert imported.isdisjoint({"dataclasses", "encodings.idna", "string"})


LOADED_BY_A_RUN = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, flush=True))  # the command ends without a flush
from rankwise.cli.main import main
main(["run", "--nproc-per-node=2", *sys.argv[1:]])
"""


def loaded_by_run(*words: str) -> set[str]:
    """The modules that a run of two ranks has loaded, which print nothing."""
    source = [sys.executable, "-c", LOADED_BY_A_RUN, *words]
    done = subprocess.run(source, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_run_on_processes_loads_nothing_of_simulated_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()

    loaded = loaded_by_run(str(tmp_path / "program.py"))

    assert "rankwise.launch.run.process_run_host" in loaded
    assert [name for name in loaded if name.startswith(SIMULATED)] == []
