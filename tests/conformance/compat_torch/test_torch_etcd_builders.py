"""Launchers' names for etcd, on a real etcd v3: ours alone, since torch needs etcd's v2."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from etcd_servers import free_ports, needs_etcd

from rankwise.compat.torch.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from rankwise.compat.torch.elastic.rendezvous.dynamic_rendezvous import create_handler
from rankwise.compat.torch.elastic.rendezvous.etcd_client import (
    Client,
    EtcdAlreadyExist,
    EtcdCompareFailed,
    EtcdException,
    EtcdKeyNotFound,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    create_rdzv_handler,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_rendezvous_backend import (
    EtcdRendezvousBackend,
    create_backend,
)
from rankwise.compat.torch.elastic.rendezvous.etcd_server import EtcdServer
from rankwise.compat.torch.elastic.rendezvous.etcd_store import EtcdStore

pytestmark = [pytest.mark.system, needs_etcd]

LONG_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    server = EtcdServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: EtcdServer) -> Iterator[Client]:
    client = server.get_client()
    yield client
    client.close()


def params_for(endpoint: str, nodes: int = 2) -> RendezvousParameters:
    return RendezvousParameters(
        "etcd-v2", endpoint, uuid.uuid4().hex, nodes, nodes, "127.0.0.1", join_timeout=60
    )


def test_a_client_writes_only_what_is_as_it_was_expected(client: Client) -> None:
    first = client.write("/a/b", "1", prevExist=False)
    with pytest.raises(EtcdAlreadyExist):
        client.write("/a/b", "2", prevExist=False)
    second = client.write("/a/b", "2", ttl=60, prevIndex=first.modifiedIndex)
    with pytest.raises(EtcdCompareFailed):
        client.write("/a/b", "3", prevIndex=first.modifiedIndex)
    with pytest.raises(EtcdCompareFailed):
        client.test_and_set("/a/b", "3", "1")

    assert client.test_and_set("/a/b", "3", "2").modifiedIndex > second.modifiedIndex
    assert client.get("/a/b").value == "3"
    client.delete("/a", recursive=True)
    with pytest.raises(EtcdKeyNotFound):
        client.read("/a/b")
    with pytest.raises(EtcdKeyNotFound):
        client.delete("/a")


def test_nodes_meet_over_a_backend_in_one_key(server: EtcdServer) -> None:
    params = params_for(server.get_endpoint())
    made = [create_backend(params) for _ in range(2)]
    handlers = [create_handler(store, backend, params) for backend, store in made]

    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=LONG_S))

    assert sorted(info.rank for info in infos) == [0, 1]
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    for handler, (_, store) in zip(handlers, made, strict=True):
        assert handler.get_backend() == "etcd-v2"
        assert handler.shutdown()
        store.client.close()


def test_a_state_of_somebody_elses_is_corrupt(client: Client) -> None:
    backend = EtcdRendezvousBackend(client, "run", "/corrupt")
    client.write("/corrupt/run", "x")

    with pytest.raises(RendezvousStateError, match="is corrupt"):
        backend.get_state()


def test_an_etcd_that_does_not_answer_is_a_connection_error() -> None:
    params = params_for(f"127.0.0.1:{free_ports(1)[0]}")

    with pytest.raises(RendezvousConnectionError, match="The connection to etcd has failed") as got:
        create_backend(params)

    assert isinstance(got.value.__cause__, EtcdException)


def test_the_older_handler_meets_again_and_again(server: EtcdServer) -> None:
    handler = create_rdzv_handler(params_for(server.get_endpoint(), nodes=1))

    first, second = handler.next_rendezvous(), handler.next_rendezvous()

    assert (handler.get_backend(), handler.use_agent_store) == ("etcd", False)
    assert (first.rank, first.world_size, second.rank, second.world_size) == (0, 1, 0, 1)
    assert second.bootstrap_store_info is not None
    assert second.bootstrap_store_info.master_addr == "127.0.0.1"
    first.store.set("key", "value")
    assert not second.store.check(["key"])
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.shutdown()
    assert handler.is_closed()


def test_nodes_of_the_older_rendezvous_tell_each_other_texts(client: Client) -> None:
    rendezvous = EtcdRendezvous(client, "/mine", "run", 1, 1, 60, 1)
    round_number, rank, size = rendezvous.rendezvous_barrier()

    rendezvous.store_extra_data(round_number, "key", "text")

    assert (rank, size) == (0, 1)
    assert rendezvous.load_extra_data(round_number, "key") == "text"
    with pytest.raises(LookupError):
        rendezvous.load_extra_data(round_number, "other", timedelta(milliseconds=50))
    rendezvous.rounds.leave()


def test_a_handler_needs_no_more_than_its_rendezvous(client: Client) -> None:
    handler = EtcdRendezvousHandler(EtcdRendezvous(client, "p", "only", 1, 1, 60, 1), None)

    assert handler.next_rendezvous().world_size == 1
    assert handler.get_run_id() == "only"
    assert handler.shutdown()


def test_a_store_counts_and_compares(client: Client) -> None:
    store = EtcdStore(client, "/store", timedelta(milliseconds=100))

    assert (store.add("n", 3), store.add("n", -1)) == (3, 2)
    assert client.get("/store/n").value == "2"
    with pytest.raises(LookupError, match="'never' was not set"):
        store.get("never")
