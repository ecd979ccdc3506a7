"""A process that is no agent holds the port where the nodes are to meet."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import Running, run, write_program

from rankwise.drivers.real.stores.port_owner import PortOwner, port_owner

pytestmark = pytest.mark.system

SILENT = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""


@contextmanager
def stranger() -> Iterator[tuple[int, int]]:
    """A process that accepts connections and is silent: its port and its number."""
    with Running(sys.executable, "-c", SILENT) as running:
        yield int(running.wait_for("\n")), running.pid


@pytest.mark.parametrize("backend", ["static", "embedded"])
def test_run_ends_and_names_the_process_that_has_its_port(backend: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('ran')")
    with stranger() as (port, pid):
        where = {
            "static": ("--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"),
            "embedded": ("--rdzv-backend=embedded", f"--rdzv-endpoint=127.0.0.1:{port}"),
        }[backend]
        done = run("run", "--nnodes=2", "--rdzv-id=strangers", *where, script)

    assert done.code == 1, done.stderr
    assert f"the nodes cannot meet at 127.0.0.1:{port}: process {pid} of user " in done.stderr
    assert f"listens at port {port} of this machine, and is no agent of rankwise" in done.stderr


def test_owner_of_a_port_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        owner = port_owner(listener.getsockname()[1])

    assert owner is not None
    assert owner.pid == os.getpid()
    assert Path(owner.command.split()[0]).name.startswith("python")


def test_port_at_which_nobody_listens_has_no_owner() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        assert port_owner(bound.getsockname()[1]) is None


def test_agent_is_no_stranger_wherever_rankwise_is_installed() -> None:
    assert PortOwner("me", 1, "/opt/venv/bin/python /opt/venv/bin/rankwise run a.py").is_rankwise
    assert PortOwner("me", 1, "python -m rankwise run a.py").is_rankwise
    assert not PortOwner("me", 1, "python /home/me/rankwise/server.py").is_rankwise
