"""The conformance suite of stores, for every store there is."""

from collections.abc import Iterator

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, needs_etcd

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.embedded import EmbeddedConfig, EmbeddedStore, open_embedded
from rankwise.drivers.real.stores.etcd import EtcdStore
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.memory import MemoryStore
from rankwise.testing.conformance import STORE_BEHAVIOURS

REQUEST_TIMEOUT = Duration(60 * SECOND)


def prefix_for(name: str) -> str:
    """One store serves all behaviours, one after another."""
    return f"conformance/{name}/"


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_the_memory_store_keeps_what_is_expected(name: str) -> None:
    STORE_BEHAVIOURS[name](MemoryStore(SystemClock()).connect, prefix_for(name))


@pytest.fixture(scope="module", params=[1, 3], ids=["one-member", "three-members"])
def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), request.param) as cluster:
        yield cluster


@needs_etcd
@pytest.mark.system
@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_etcd_keeps_what_is_expected(name: str, etcd: EtcdCluster) -> None:
    config = EtcdConfig(endpoints=etcd.endpoints, request_timeout=REQUEST_TIMEOUT)
    STORE_BEHAVIOURS[name](lambda: EtcdStore(config), prefix_for(name))


@pytest.fixture(params=["127.0.0.1", "::1"], scope="module")
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    """The host's own client, and with it the server."""
    config = EmbeddedConfig(
        host=request.param, port=0, token=b"a token", request_timeout=REQUEST_TIMEOUT
    )
    try:
        opened = open_embedded(config, SystemClock())
    except ConfigError as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    with opened as store:
        yield store


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_the_embedded_store_keeps_what_is_expected(name: str, embedded: EmbeddedStore) -> None:
    assert embedded.server is not None
    host, port = embedded.server.address
    config = EmbeddedConfig(
        host=host, port=port, token=b"a token", request_timeout=REQUEST_TIMEOUT, is_host=False
    )
    STORE_BEHAVIOURS[name](lambda: open_embedded(config, SystemClock()), prefix_for(name))
