"""Handlers and stores that installed packages bring, as torchrun's users have them."""

import os
from pathlib import Path

import pytest
from etcd_servers import free_ports
from running import Running, start, write_program

pytestmark = pytest.mark.system

HANDLER = """
import copy

from rankwise.compat.torch.elastic.rendezvous.store_rendezvous import StoreRendezvousHandler


class MeadowHandler(StoreRendezvousHandler):
    def get_backend(self):
        return "meadow"


def creator():
    def create(params):
        inner = copy.copy(params)
        inner.backend = "embedded"
        return MeadowHandler(inner)
    return create


def open_pasture(backend, endpoint, settings, *, run_id):
    from rankwise.drivers.real.stores.opening import open_store
    return open_store("embedded", endpoint, settings, run_id=run_id)
"""
METADATA = "Metadata-Version: 2.1\nName: meadow\nVersion: 1\n"
ENTRY_POINTS = """
[torchrun.handlers]
meadow = meadow:creator
[rankwise.stores]
pasture = meadow:open_pasture
"""
HELLO = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds an installed package."""
    folder = tmp_path / "site"
    about = folder / "meadow-1.dist-info"
    about.mkdir(parents=True)
    (folder / "meadow.py").write_text(HANDLER)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def words(tmp_path: Path) -> list[str | Path]:
    script = write_program(tmp_path, HELLO)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    return ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "run", script]


@pytest.mark.parametrize("backend", ["meadow", "pasture"])
def test_two_nodes_meet_by_a_plug_in(package: Path, words: list[str | Path], backend: str) -> None:
    environment = {"PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}

    def node() -> Running:
        return start("run", "--rdzv-backend", backend, *words, environment=environment)

    with node() as one, node() as two:
        done = [one.finish(), two.finish()]

    assert [each.code for each in done] == [0, 0], done
    told = sorted(line.partition(":")[2] or line for each in done for line in each.lines)
    assert [line.strip() for line in told] == ["rank 0 of 2", "rank 1 of 2"]


def test_a_worker_that_fails_gives_its_exit_code(package: Path, tmp_path: Path) -> None:
    script = write_program(tmp_path, "import sys; sys.exit(7)", "fail.py")
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    words = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "last_call_timeout=1")

    with start(
        *("run", "--rdzv-backend", "meadow", *words, "--rdzv-id", "run", script),
        environment={"PYTHONPATH": str(package)},
    ) as node:
        done = node.finish()

    assert done.code == 7
    assert "fail.py FAILED" in done.stderr


def test_a_backend_that_nobody_brings_is_named(words: list[str | Path]) -> None:
    with start("run", "--rdzv-backend", "meadow", *words) as node:
        done = node.finish()

    assert done.code == 2
    assert "--rdzv-backend is 'meadow', expected one of static, c10d" in done.stderr
