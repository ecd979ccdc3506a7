"""How a member without data begins, beside real members and beside none."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_servers import find_etcd, free_ports, needs_etcd

from rankwise.base.errors import StoreUnavailable
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.opening import open_store
from rankwise.launch.cluster.etcd_beginning import Beginning, MemberAddress, find_beginning

pytestmark = [pytest.mark.system, needs_etcd]

SETTINGS = EtcdConfig(endpoints=())
PATIENCE_S = 60


def place(number: int, host: str, port: int) -> MemberAddress:
    return MemberAddress(f"m{number}", host, port, f"http://{host}:{port + 1}")


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def running(port: int, tmp_path: Path) -> Iterator[MemberAddress]:
    """The only member of its cluster, which has served."""
    program = find_etcd()
    assert program is not None
    own = place(1, "127.0.0.22", port)
    client_url = f"http://{own.host}:{own.port}"
    words = [
        program, "--name", own.name, "--data-dir", str(tmp_path / "data"), "--logger", "zap",
        "--listen-client-urls", client_url, "--advertise-client-urls", client_url,
        "--listen-peer-urls", own.peer_url, "--initial-advertise-peer-urls", own.peer_url,
        "--initial-cluster", f"{own.name}={own.peer_url}",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        with open_store(
            "etcd", f"{own.host}:{port}", {"request_timeout": f"{PATIENCE_S}"}, run_id=""
        ) as store:
            store.read("")
        yield own
    finally:
        process.kill()
        process.wait()


def test_beside_machines_where_no_member_runs_a_cluster_is_founded(port: int) -> None:
    places = [place(number, f"127.0.0.2{number}", port) for number in (1, 2, 3)]

    beginning = find_beginning(places, places[0], SETTINGS, None)

    assert beginning.state == "new"
    assert beginning.cluster == ",".join(f"{each.name}={each.peer_url}" for each in places)


def test_beside_machines_that_cannot_be_reached_no_cluster_is_founded(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _nobody_is_known)
    places = [place(number, f"host{number}.invalid", port) for number in (1, 2, 3)]

    with pytest.raises(StoreUnavailable, match="no other member can be reached"):
        find_beginning(places, places[0], SETTINGS, None)


def _nobody_is_known(*_: object, **__: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_member_whose_place_is_free_is_added_once(running: MemberAddress, port: int) -> None:
    """The second time it has ended between being added and its start."""
    own = place(0, "127.0.0.21", port)
    expected = Beginning("existing", f"m0={own.peer_url},m1={running.peer_url}")

    assert find_beginning([own, running], own, SETTINGS, None) == expected
    assert find_beginning([own, running], own, SETTINGS, None) == expected
