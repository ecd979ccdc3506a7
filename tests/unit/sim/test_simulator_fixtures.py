"""The pytest plug-in, as a project's tests use it."""

import os
import subprocess
import sys
from pathlib import Path


def test_fixtures_give_the_default_machine_and_its_mapping(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from rankwise.sim import GraphEngine, RuntimeContext\n"
        "def test_mine(topology, spec):\n"
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
