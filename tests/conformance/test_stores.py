"""The conformance suite of stores, for every store there is."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, free_ports, needs_etcd

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores import c10d
from rankwise.drivers.real.stores.c10d import C10dConfig, C10dStore, open_c10d
from rankwise.drivers.real.stores.embedded import EmbeddedConfig, EmbeddedStore, open_embedded
from rankwise.drivers.real.stores.etcd import EtcdStore
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.in_process import MemoryStore
from rankwise.drivers.real.stores.one_value import OneValueStore
from rankwise.testing.conformance import STORE_BEHAVIOURS, check_store

REQUEST_TIMEOUT = Duration(60 * SECOND)


def prefix_for(name: str) -> str:
    """One store serves all behaviours, one after another."""
    return f"conformance/{name}/"


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_the_memory_store_keeps_what_is_expected(name: str) -> None:
    STORE_BEHAVIOURS[name](MemoryStore(SystemClock()).connect, prefix_for(name))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@needs_etcd
@pytest.mark.system
@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_etcd_keeps_what_is_expected(name: str, etcd: EtcdCluster) -> None:
    config = EtcdConfig(endpoints=etcd.endpoints, request_timeout=REQUEST_TIMEOUT)
    STORE_BEHAVIOURS[name](lambda: EtcdStore(config), prefix_for(name))


@pytest.fixture(scope="module")
def three_members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """They hold no election just because this machine is busy: it would cost a transaction."""
    patient = ("--heartbeat-interval", "300", "--election-timeout", "3000")
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 3, extra=patient) as cluster:
        yield cluster


@needs_etcd
@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in STORE_BEHAVIOURS if "lease" not in name])
def test_several_members_keep_what_is_expected(name: str, three_members: EtcdCluster) -> None:
    """Leases are etcd's leader's, and so the same as with one member, but longer here."""
    config = EtcdConfig(endpoints=three_members.endpoints, request_timeout=REQUEST_TIMEOUT)
    STORE_BEHAVIOURS[name](lambda: EtcdStore(config), prefix_for(name))


@pytest.fixture(
    params=[("127.0.0.1", None), ("::1", False)],
    ids=["127.0.0.1-encrypted-if-possible", "::1-in-the-clear"],
    scope="module",
)
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    """The host's own client, and with it the server."""
    host, encrypts = request.param
    config = EmbeddedConfig(
        host=host, port=0, token=b"a token", encrypts=encrypts, request_timeout=REQUEST_TIMEOUT
    )
    try:
        opened = open_embedded(config, SystemClock())
    except ConfigError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with opened as store:
        yield store


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_the_embedded_store_keeps_what_is_expected(name: str, embedded: EmbeddedStore) -> None:
    assert embedded.server is not None
    host, port = embedded.server.address
    config = EmbeddedConfig(
        host=host,
        port=port,
        token=b"a token",
        encrypts=embedded.encrypts,
        request_timeout=REQUEST_TIMEOUT,
        is_host=False,
    )
    STORE_BEHAVIOURS[name](lambda: open_embedded(config, SystemClock()), prefix_for(name))


@pytest.fixture(scope="module")
def tcp_store() -> Iterator[int]:
    """The port of a TCPStore, served and reaped in this process."""
    pytest.importorskip("torch")
    config = C10dConfig(host="127.0.0.1", port=free_ports(1)[0], namespace="run", is_host=True)
    with open_c10d(config, SystemClock()):
        yield config.port


@pytest.mark.torch
@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_a_log_in_torchs_tcp_store_keeps_what_is_expected(
    name: str, tcp_store: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than any behaviour waits: who waits inside torch must be woken by what happens.
    monkeypatch.setattr(c10d, "SLICE", timedelta(seconds=600))
    config = C10dConfig(host="127.0.0.1", port=tcp_store, namespace="run", is_host=False)
    STORE_BEHAVIOURS[name](lambda: open_c10d(config, SystemClock()), prefix_for(name))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "PrefixStore"])
def test_a_log_in_another_store_of_torch_keeps_what_is_expected(kind: str, tmp_path: Path) -> None:
    distributed: Any = pytest.importorskip("torch.distributed")
    shared = distributed.HashStore()
    make: Callable[[], Any] = {
        "HashStore": lambda: shared,
        "FileStore": lambda: distributed.FileStore(str(tmp_path / "store")),
        "PrefixStore": lambda: distributed.PrefixStore("p", shared),
    }[kind]
    with C10dStore(make(), namespace="run", clock=SystemClock(), reaps=True):
        check_store(lambda: C10dStore(make(), namespace="run", clock=SystemClock()))


class SharedValue:
    """A value with a counter for a token, for all clients of this process; as simple as can be."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._state: tuple[bytes, int] | None = None

    def get_state(self) -> tuple[bytes, Any] | None:
        with self._lock:
            return self._state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        with self._lock:
            has_set = token == (None if self._state is None else self._state[1])
            if has_set:
                self._state = (state, 0 if token is None else token + 1)
            assert self._state is not None
            return (*self._state, has_set)


class TaciturnValue(SharedValue):
    """The same, but it never says what became of a write: torch's tests have such a backend."""

    def set_state(self, state: bytes, token: Any = None) -> None:
        super().set_state(state, token)


@pytest.fixture(scope="module", params=[SharedValue, TaciturnValue])
def shared_value(request: pytest.FixtureRequest) -> SharedValue:
    value: SharedValue = request.param()
    return value


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_a_store_in_one_value_keeps_what_is_expected(name: str, shared_value: SharedValue) -> None:
    STORE_BEHAVIOURS[name](
        lambda: OneValueStore(
            shared_value,
            who="a shared value",
            clock=SystemClock(),
            request_timeout=REQUEST_TIMEOUT,
        ),
        prefix_for(name),
    )
