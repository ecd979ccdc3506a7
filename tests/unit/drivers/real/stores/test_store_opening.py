"""From names and texts to a store: what is understood, and what is said of the rest."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError, StoreUnavailable
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.stores.deferred import DeferredStore
from rankwise.drivers.real.stores.embedded import EmbeddedStore
from rankwise.drivers.real.stores.encryption import encryption_lack
from rankwise.drivers.real.stores.etcd import EtcdStore
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.in_process import MemoryClient
from rankwise.drivers.real.stores.opening import host_and_port, open_store


def etcd_config(endpoint: str, **settings: str) -> EtcdConfig:
    with open_store("etcd", endpoint, settings, run_id="run") as store:
        assert isinstance(store, EtcdStore)
        return store._members.config


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    """A file that is there, and holds nothing of use."""
    path = tmp_path / "certificate.pem"
    path.write_text("nothing")
    return str(path)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("host", ("host", 7)),
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("[fd00::1]", ("fd00::1", 7)),
        ("fd00::1", ("fd00::1", 7)),
        (" https://host:2379/ ", ("host", 2379)),
    ],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(endpoint: str, expected: tuple[str, int]) -> None:
    assert host_and_port(endpoint, 7) == expected


@pytest.mark.parametrize("endpoint", ["", ":1", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_endpoint_is_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST or HOST:PORT"):
        host_and_port(endpoint, 7)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_both_names_of_torch_for_etcd_mean_etcd(backend: str) -> None:
    with open_store(backend, "a,b:1", {}, run_id="run") as store:
        assert isinstance(store, EtcdStore)
        assert store._members.config.endpoints == (("a", 2379), ("b", 1))


def test_etcd_takes_its_settings_in_both_spellings() -> None:
    config = etcd_config("a", user="u", password="p", read_timeout="1.5", protocol="HTTPS")

    assert config == EtcdConfig(
        endpoints=(("a", 2379),),
        use_tls=True,
        user="u",
        password="p",
        request_timeout=Duration(3 * SECOND // 2),
    )


@pytest.mark.parametrize("name", ["cacert", "ca_cert", "cert", "ssl_cert"])
def test_a_file_that_holds_no_certificate_is_named(name: str, certificate: str) -> None:
    with pytest.raises(ConfigError, match=r"certificate\.pem.* cannot be used"):
        etcd_config("a", **{name: certificate})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "ftp"}, "protocol is 'ftp', expected http or https"),
        ({"cacert": "/nowhere.pem"}, "cacert is '/nowhere.pem', and there is no such file"),
        ({"key": "/etc/passwd"}, "key is given without cert"),
        ({"password": "p"}, "password is given without user"),
        ({"read_timeout": "0"}, "read_timeout is '0', expected more than 0 and less"),
        ({"read_timeout": "inf"}, "read_timeout is 'inf', expected .* less than 1e6 seconds"),
        ({"request_timeout": "soon"}, "request_timeout is 'soon', expected more than 0 and less"),
        ({"cacert": "a", "ca_cert": "b"}, "cacert is given twice"),
        ({"protocl": "http"}, r"the backend etcd has no setting protocl \(did you mean protocol"),
        ({"zzz": "1"}, r"the backend etcd has no setting zzz \(it knows protocol, cacert"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_what_was_expected(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        etcd_config("a", **settings)


def test_torchs_long_read_timeout_does_not_outlast_a_lease() -> None:
    assert etcd_config("a", read_timeout="60").request_timeout == 2 * SECOND
    assert etcd_config("a", request_timeout="60").request_timeout == 60 * SECOND


def test_etcd_needs_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="etcd has no endpoint"):
        etcd_config(" , ")


@pytest.mark.parametrize("backend", ["static", "embedded"])
def test_a_store_is_served_here_if_the_endpoint_is(backend: str) -> None:
    with open_store(backend, "127.0.0.1:0", {"linger": "1"}, run_id="run") as store:
        assert isinstance(store, EmbeddedStore)
        assert store.server is not None
        assert store.read("").entries == ()


def test_store_is_served_here_once_the_process_that_had_the_port_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        store = open_store("embedded", endpoint, {}, run_id="run")

    with store:
        assert isinstance(store, EmbeddedStore)
        assert store.read("").entries == ()
        assert store.server is not None
        with open_store("embedded", endpoint, {}, run_id="run") as client:
            assert client.read("").entries == ()


@pytest.mark.skipif(encryption_lack() is None, reason="this Python can encrypt")
def test_who_must_encrypt_and_cannot_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"encrypts is true, and Python 3\.1[12] needs"
    ) as refused:
        open_store("embedded", "127.0.0.1:0", {"encrypts": "true"}, run_id="run")

    assert refused.value.hint is not None
    assert "pip install 'rankwise[tls]'" in refused.value.hint


@pytest.mark.parametrize(("given", "expected"), [("no", False), (None, encryption_lack() is None)])
def test_a_store_encrypts_where_it_can_unless_it_is_told_not_to(
    given: str | None, expected: bool
) -> None:
    settings = {} if given is None else {"encrypts": given}
    with open_store("embedded", "127.0.0.1:0", settings, run_id="run") as store:
        assert isinstance(store, EmbeddedStore)
        assert store.encrypts is expected


def test_at_a_name_this_process_asks_nobody_before_it_has_to() -> None:
    store = open_store("embedded", "store.invalid:29400", {}, run_id="run")
    with store:
        assert isinstance(store, DeferredStore)


def test_who_is_told_not_to_serve_does_not() -> None:
    settings = {"is_host": "False", "read_timeout": "0.05"}
    with open_store("embedded", "127.0.0.1:1", settings, run_id="run") as store:
        assert isinstance(store, EmbeddedStore)
        assert store.server is None
        with pytest.raises(StoreUnavailable):
            store.read("")


def test_the_token_is_given_as_text_in_a_file_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")

    def token(**settings: str) -> bytes:
        with open_store("embedded", "127.0.0.1:0", settings, run_id="run") as store:
            assert isinstance(store, EmbeddedStore)
            return store._config.token

    assert token() == b"run"
    assert token(token="spoken") == b"spoken"
    assert token(token_file=str(path)) == b"secret"
    monkeypatch.setenv("RANKWISE_STORE_TOKEN", "inherited")
    assert token() == b"inherited"
    with pytest.raises(ConfigError, match="both given"):
        token(token="a", token_file=str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty, expected a token"):
        token(token_file=str(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_host": "maybe"}, "is_host is 'maybe', expected true or false"),
        ({"linger": "-1"}, "linger is '-1', expected more than 0 and less"),
        ({"cacert": "a"}, "the backend embedded has no setting cacert"),
    ],
)
def test_an_embedded_store_refuses_settings_that_it_cannot_use(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store("embedded", "127.0.0.1:0", settings, run_id="run")


def test_c10d_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ConfigError) as error:
        open_store("c10d", "127.0.0.1:0", {}, run_id="run")

    assert "pip install 'rankwise[torch]'" in str(error.value)
    assert "--rdzv-backend embedded" in str(error.value)


def test_c10d_knows_two_types_of_store() -> None:
    with pytest.raises(ConfigError, match="store_type is 'hash', expected tcp or file"):
        open_store("c10d", "127.0.0.1:0", {"store_type": "hash"}, run_id="run")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that brings a store."""
    metadata = tmp_path / "bringer-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bringer\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rankwise.stores]\nmine = bringer:open_mine\n")
    (tmp_path / "bringer.py").write_text(
        "from rankwise.drivers.real.clock import SystemClock\n"
        "from rankwise.drivers.real.stores.in_process import MemoryStore\n"
        "def open_mine(backend, endpoint, settings, *, run_id):\n"
        "    assert (backend, endpoint, settings, run_id) == ('mine', 'e', {'a': 'b'}, 'run')\n"
        "    return MemoryStore(SystemClock()).connect()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("bringer", None)


@pytest.mark.usefixtures("plugin")
def test_another_name_is_looked_up_among_installed_packages() -> None:
    with open_store("mine", "e", {"a": "b"}, run_id="run") as store:
        assert isinstance(store, MemoryClient)


def test_a_name_that_nobody_knows_is_shown_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="--rdzv-backend is 'zookeeper', expected static"):
        open_store("zookeeper", "e", {}, run_id="run")
