"""A process that is no agent holds the port where the nodes are to meet."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import Running, run, write_program

from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.embedded import EmbeddedConfig, open_embedded
from rankwise.drivers.real.stores.port_owner import port_owner, refuse_stranger
from rankwise.launch.control.addresses import socket_name

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


@pytest.mark.parametrize(
    "backend", ["static", "embedded", pytest.param("c10d", marks=pytest.mark.torch)]
)
def test_run_ends_and_names_the_process_that_has_its_port(backend: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('ran')")
    with stranger() as (port, pid):
        where = {
            "static": ("--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"),
            "embedded": ("--rdzv-backend=embedded", f"--rdzv-endpoint=127.0.0.1:{port}"),
            "c10d": ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        }[backend]
        done = run("run", "--nnodes=2", "--rdzv-id=strangers", *where, script)

    assert done.code == 1, done.stderr
    assert f"the nodes cannot meet at 127.0.0.1:{port}: process {pid} of user " in done.stderr
    assert f"listens at port {port} of this machine, and is not an agent of rankwise" in done.stderr


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


SPEAKS = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("encrypts", ["true", "false"])
def test_one_that_speaks_is_named_at_once(encrypts: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('ran')")
    with Running(sys.executable, "-c", SPEAKS) as running:
        port = int(running.wait_for("\n"))
        where = ("--rdzv-backend=embedded", f"--rdzv-endpoint=127.0.0.1:{port}")
        conf = f"--rdzv-conf=encrypts={encrypts}"
        done = run("run", "--nnodes=2", "--rdzv-id=strangers", *where, conf, script)

        assert done.code == 1, done.stderr
        assert f"the nodes cannot meet at 127.0.0.1:{port}: process {running.pid} " in done.stderr


def test_who_serves_a_store_is_no_stranger_whatever_its_command_is() -> None:
    config = EmbeddedConfig(host="127.0.0.1", port=0, token=b"t", is_host=True, encrypts=False)
    with open_embedded(config, SystemClock()) as store:
        assert store.server is not None
        port = store.server.address[1]
        owner = port_owner(port)

        assert owner is not None
        assert owner.is_rankwise
        refuse_stranger("127.0.0.1", port)


def test_process_with_a_control_socket_is_no_stranger() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as control,
    ):
        control.bind(socket_name("a", os.getpid()))
        owner = port_owner(listener.getsockname()[1])

    assert owner is not None
    assert owner.is_rankwise


def test_one_that_has_the_word_in_its_command_is_a_stranger(tmp_path: Path) -> None:
    program = write_program(tmp_path, SILENT, "rankwise")
    # A long command is shown in part: the word must not depend on how long the folders' names are.
    with Running(sys.executable, program.name, "run", cwd=tmp_path) as running:
        owner = port_owner(int(running.wait_for("\n")))

    assert owner is not None
    assert "rankwise" in owner.command
    assert not owner.is_rankwise
