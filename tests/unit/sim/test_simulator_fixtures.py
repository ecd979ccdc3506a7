"""The pytest plug-in, as a project's tests use it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise
from rankwise.testing import simulator_fixtures


def test_fixtures_give_the_default_machine_and_its_mapping(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from rankwise.sim import GraphEngine, RuntimeContext\n"
        "def test_mine(rankwise_topology, rankwise_spec):\n"
        "    topology, spec = rankwise_topology, rankwise_spec\n"
        "    assert topology.topology_obj.spec == spec\n"
        "    count = spec['system']['sips']['count']\n"
        "    with RuntimeContext(engine=GraphEngine(topology.topology_obj), spec=spec) as torch:\n"
        "        ran = []\n"
        "        torch.multiprocessing.spawn(ran.append, nprocs=count)\n"
        "    assert ran == [0, 1, 2, 3]\n"
    )
    # Named, and so known in an installation that is older than the plug-in, too.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin = "rankwise.testing.simulator_fixtures"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "."],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout


def test_a_failure_on_a_simulated_rank_is_shown_without_our_frames(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(rankwise_ranks):\n"
        "    def divide():\n"
        "        1 / 0\n"
        "    rankwise_ranks(divide, nprocs=2)\n"
    )
    plugin = "rankwise.testing.simulator_fixtures"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "."],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert "root cause: rank 0 failed: ZeroDivisionError" in done.stdout
    assert f'File "{tmp_path}/test_mine.py", line 3' in done.stdout
    assert "raise_unless_succeeded" not in done.stdout


def test_a_fault_that_never_occurs_is_a_warning_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(rankwise_ranks):\n"
        "    rankwise_ranks(lambda: 1, nprocs=2, faults='kill:rank=1@collective=20')\n"
    )
    plugin = "rankwise.testing.simulator_fixtures"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "."],
        cwd=tmp_path, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    missed = "UserWarning: the fault never occurred: rank 1 gets SIGKILL at operation #20"
    assert missed in done.stdout


def test_a_fault_that_never_occurred_before_a_failure_is_a_note_of_the_failure() -> None:
    with pytest.raises(rankwise.WorkersFailed) as caught:
        rankwise.run(_divide, nprocs=2, on="sim", faults="kill:rank=1@collective=20")

    missed = "the fault never occurred: rank 1 gets SIGKILL at operation #20"
    assert any(note.startswith(missed) for note in caught.value.__notes__)


def _divide() -> None:
    _ = 1 / 0


def test_the_plugin_brings_no_general_names_into_other_peoples_tests() -> None:
    fixtures = [name for name, it in vars(simulator_fixtures).items() if is_fixture(it)]

    assert sorted(fixtures) == ["rankwise_ranks", "rankwise_spec", "rankwise_topology"]


def is_fixture(thing: object) -> bool:
    return type(thing).__name__ == "FixtureFunctionDefinition"
