"""`elastic_launch` with one or two agents on one etcd: ours alone, since torch needs etcd's v2."""

import multiprocessing
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, needs_etcd

from rankwise.base.units import SECOND
from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError
from rankwise.compat.torch.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
    node_rounds,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_server import EtcdServer
from rankwise.compat.torch.elastic.rendezvous.registry import get_rendezvous_handler
from rankwise.compat.torch.elastic.rendezvous.store_rendezvous import StoreRendezvousHandler
from rankwise.compat.torch.launcher import LaunchConfig, elastic_launch

pytestmark = [pytest.mark.system, needs_etcd]

LONG_S = 90.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def endpoint(cluster: EtcdCluster) -> str:
    return ",".join(f"{host}:{port}" for host, port in cluster.endpoints)


def config_for(endpoint: str, **changes: Any) -> LaunchConfig:
    fields: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 2,
        "nproc_per_node": 2,
        "run_id": str(uuid.uuid4()),
        "rdzv_backend": "etcd",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"last_call_timeout": 1},
        "max_restarts": 0,
    }
    return LaunchConfig(**fields | changes)


def rank_and_size() -> tuple[int, int]:
    import os  # noqa: PLC0415  # in the worker

    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fail_on_rank_1() -> None:
    if rank_and_size()[0] == 1:
        raise KeyError("rank 1")


def launch(config: LaunchConfig) -> dict[int, Any]:
    return elastic_launch(config, rank_and_size)()


def test_one_agent_runs_alone(endpoint: str) -> None:
    assert launch(config_for(endpoint)) == {0: (0, 2), 1: (1, 2)}


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_two_agents_share_the_ranks(endpoint: str, backend: str) -> None:
    config = config_for(endpoint, min_nodes=2, rdzv_backend=backend)

    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        both = [pool.submit(launch, config) for _ in range(2)]
        values = [agent.result(LONG_S) for agent in both]

    assert values[0] | values[1] == {rank: (rank, 4) for rank in range(4)}
    assert sorted(min(value) for value in values) == [0, 2]


def test_a_worker_that_fails_is_an_exception(endpoint: str) -> None:
    with pytest.raises(ChildFailedError) as raised:
        elastic_launch(config_for(endpoint), fail_on_rank_1)()

    assert set(raised.value.failures) == {1}


def test_a_handler_meets_again_and_again(endpoint: str) -> None:
    handler = get_rendezvous_handler(
        RendezvousParameters("etcd", endpoint, str(uuid.uuid4()), 1, 1, join_timeout=60)
    )

    first = handler.next_rendezvous()
    first.store.set("key", "value")
    second = handler.next_rendezvous()

    assert (first.rank, first.world_size) == (second.rank, second.world_size) == (0, 1)
    assert first.store.get("key") == b"value"
    assert not second.store.check(["key"])
    assert second.store.add("count", 3) == 3
    assert second.store.add("count", -1) == 2
    assert second.store.compare_set("new", "", "a") == b"a"
    assert second.store.compare_set("new", "b", "c") == b"a"
    assert second.store.compare_set("none", "b", "c") == b"b"
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


def test_nodes_that_never_come_are_waited_for_no_longer_than_asked(endpoint: str) -> None:
    handler = get_rendezvous_handler(
        RendezvousParameters("etcd", endpoint, str(uuid.uuid4()), 2, 2, timeout=5)
    )

    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes are ready"):
        handler.next_rendezvous()

    handler.shutdown()


def test_a_run_that_was_closed_admits_nobody(endpoint: str) -> None:
    run_id = str(uuid.uuid4())
    first = get_rendezvous_handler(
        RendezvousParameters("etcd", endpoint, run_id, 1, 2, last_call_timeout=1)
    )
    first.next_rendezvous()
    late = get_rendezvous_handler(
        RendezvousParameters("etcd", endpoint, run_id, 1, 2, last_call_timeout=1)
    )

    first.set_closed()
    first.shutdown()

    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    late.shutdown()


def test_an_id_that_has_served_is_refused_and_no_result_is_made_up(endpoint: str) -> None:
    config = config_for(endpoint, max_nodes=1)
    assert launch(config) == {0: (0, 2), 1: (1, 2)}

    for _ in range(2):
        with pytest.raises(RendezvousClosedError, match=r"had succeeded before .* another run_id"):
            launch(config)


def test_whoever_comes_later_knows_that_those_who_left_were_done(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rounds, "DONE_PATIENCE_S", 0.0)
    params = RendezvousParameters("etcd", endpoint, str(uuid.uuid4()), 2, 2, join_timeout=60)
    handlers = [get_rendezvous_handler(params) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        meetings = pool.map(lambda handler: handler.next_rendezvous(), handlers)
        assert {meeting.rank for meeting in meetings} == {0, 1}
    late = get_rendezvous_handler(params)

    # One of them leads, and each leaves before anybody can have written that all are done.
    for handler in handlers:
        assert handler.shutdown()

    with pytest.raises(RendezvousGracefulExitError, match="have finished without this one"):
        late.next_rendezvous()
    late.shutdown()


@pytest.mark.parametrize("backend", ["etcd", "c10d", "embedded"])
def test_settings_of_other_backends_mean_nothing(endpoint: str, backend: str) -> None:
    if backend == "c10d":
        pytest.importorskip("torch")
    settings: dict[str, Any] = {
        "is_host": True,
        "store_type": "tcp",
        "etcd_prefix": "/a",
        "protocol": "http",
    }
    place = endpoint if backend == "etcd" else "localhost:0"
    handler = get_rendezvous_handler(
        RendezvousParameters(backend, place, str(uuid.uuid4()), 1, 1, join_timeout=60, **settings)
    )

    meeting = handler.next_rendezvous()

    assert (meeting.rank, meeting.world_size) == (0, 1)
    meeting.store.set("key", "value")
    assert meeting.store.get("key") == b"value"
    handler.shutdown()


def test_a_setting_of_nobodys_is_refused(endpoint: str) -> None:
    handler = get_rendezvous_handler(
        RendezvousParameters("etcd", endpoint, str(uuid.uuid4()), 1, 1, protocl="http")
    )

    with pytest.raises(ValueError, match="the backend etcd has no setting protocl"):
        handler.next_rendezvous()

    handler.shutdown()


def test_the_last_call_is_as_long_as_torchs(endpoint: str) -> None:
    # Agents that are started by hand, or import torch first, come many seconds after each other.
    plain = StoreRendezvousHandler(RendezvousParameters("etcd", endpoint, "run", 1, 2))
    short = StoreRendezvousHandler(
        RendezvousParameters("etcd", endpoint, "run", 1, 2, last_call_timeout=2)
    )

    for handler, seconds in ((plain, 30), (short, 2)):
        config = handler._rounds.config
        assert config.last_call == config.last_call_min == seconds * SECOND
        handler.shutdown()


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho no disk today >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(program))
    server = EtcdServer(str(tmp_path / "data"))

    with pytest.raises(RuntimeError, match="exit code 3: no disk today"):
        server.start(num_retries=2)

    assert not (tmp_path / "data").exists()


def test_a_server_runs_until_it_is_stopped(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path / "data"))

    server.start()
    host, port = server.get_host(), server.get_port()
    assert server.get_endpoint() == f"{host}:{port}"
    with socket.create_connection((host, port), timeout=30):
        pass
    with pytest.raises(RuntimeError, match="runs already"):
        server.start()
    server.stop()
    server.stop()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=30)
    assert not (tmp_path / "data").exists()


def test_an_embedded_store_needs_nothing_installed(tmp_path: Path) -> None:
    config = config_for("localhost:0", rdzv_backend="embedded", max_nodes=1)

    assert elastic_launch(config, rank_and_size)() == {0: (0, 2), 1: (1, 2)}
    assert list(tmp_path.iterdir()) == []
