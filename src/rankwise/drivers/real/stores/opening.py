"""From a backend's name, an endpoint and settings to a store.

The names are torchrun's: `static` and `embedded` mean a store in one of the agents; `etcd` and
`etcd-v2` both mean etcd v3; `c10d` means torch's TCPStore. Any other name is looked up among the
entry points of the group `rankwise.stores`: a function with the arguments of `open_store`.

Nothing is sent yet. A server that this process must be itself listens already, if its endpoint is
an address; one at a name, and torch's store, which can only be made by waiting for its server, are
opened by the first call. Settings are texts, as `--rdzv-conf` has them, in our spelling or in
torch's; `store_settings.py` lists them.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.base.units import SECOND, Duration, duration_from_seconds
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.addresses import is_literal
from rankwise.drivers.real.stores.connections import endpoint_text, split_endpoint
from rankwise.drivers.real.stores.store_settings import (
    C10D_SETTINGS,
    EMBEDDED_SETTINGS,
    ETCD_SETTINGS,
    TORCH_SPELLINGS,
)
from rankwise.ports.store import Store

if TYPE_CHECKING:
    from rankwise.drivers.real.stores.embedded import EmbeddedConfig
    from rankwise.drivers.real.stores.etcd_members import EtcdConfig

OPENING_PATIENCE = Duration(2 * SECOND)
"""How long a call waits for a store that is still being opened."""

ConfigT = TypeVar("ConfigT", "EmbeddedConfig", "EtcdConfig")

TOKEN_VARIABLE = "RANKWISE_STORE_TOKEN"  # noqa: S105  # the variable's name
PASSWORD_VARIABLE = "RANKWISE_ETCD_PASSWORD"  # noqa: S105  # the same
ETCD_PORT = 2379
EMBEDDED_PORT = 29400
C10D_PORT = 29400


def open_store(backend: str, endpoint: str, settings: Mapping[str, str], *, run_id: str) -> Store:
    """A client of the store that `backend` and `endpoint` mean; the caller closes it.

    Args:
        backend: see the module's text.
        endpoint: `HOST`, `HOST:PORT`, `[IPV6]:PORT`; for etcd several of them between commas.
        settings: what else is to be known, as texts.
        run_id: without another token, it is what an embedded store's nodes know of each other.

    Raises:
        ConfigError: there is no such backend, or a setting cannot be used.
    """
    match backend:
        case "etcd" | "etcd-v2":
            return _open_etcd(endpoint, _checked(settings, ETCD_SETTINGS, backend))
        case "static" | "embedded":
            settings = _checked(settings, EMBEDDED_SETTINGS, backend)
            return _open_embedded(endpoint, settings, run_id)
        case "c10d":
            return _open_c10d(endpoint, _checked(settings, C10D_SETTINGS, backend), run_id)
        case _:
            return _plugged_in(backend)(backend, endpoint, settings, run_id=run_id)


def host_and_port(endpoint: str, default_port: int) -> tuple[str, int]:
    """The host and the port of an endpoint; see `split_endpoint`."""
    host, port = split_endpoint(endpoint)
    return host, default_port if port is None else port


def _open_etcd(endpoint: str, settings: Mapping[str, str]) -> Store:
    from rankwise.drivers.real.stores.etcd import EtcdStore  # noqa: PLC0415  # http takes ms
    from rankwise.drivers.real.stores.etcd_members import EtcdConfig  # noqa: PLC0415  # the same

    endpoints = tuple(host_and_port(one, ETCD_PORT) for one in endpoint.split(",") if one.strip())
    if not endpoints:
        raise ConfigError(
            "etcd has no endpoint",
            hint="give --rdzv-endpoint HOST:PORT, or several of them between commas",
        )
    protocol = settings.get("protocol", "https" if "https://" in endpoint else "http").lower()
    if protocol not in ("http", "https"):
        raise ConfigError(f"--rdzv-conf: protocol is {protocol!r}, expected http or https")
    for name in ("cacert", "cert", "key"):
        _check_file(name, settings.get(name))
    for name, needed in (("key", "cert"), ("password", "user")):
        if name in settings and needed not in settings:
            raise ConfigError(f"--rdzv-conf: {name} is given without {needed}, expected both")
    config = EtcdConfig(
        endpoints=endpoints,
        use_tls=protocol == "https",
        cacert=settings.get("cacert"),
        cert=settings.get("cert"),
        key=settings.get("key"),
        user=settings.get("user"),
        password=settings.get("password", os.environ.get(PASSWORD_VARIABLE)),
    )
    return EtcdStore(_with_timeout(config, settings))


def _open_embedded(endpoint: str, settings: Mapping[str, str], run_id: str) -> Store:
    from rankwise.drivers.real.stores.embedded import EmbeddedConfig, open_embedded, with_encryption  # noqa: PLC0415  # sockets take ms

    host, port = host_and_port(endpoint, EMBEDDED_PORT)
    config = EmbeddedConfig(
        host=host,
        port=port,
        token=token_of(settings, run_id).encode(),
        is_host=_truth(settings, "is_host"),
        encrypts=_truth(settings, "encrypts"),
    )
    config = _with_timeout(config, settings)
    if (linger := _seconds(settings, "linger")) is not None:
        config = msgspec.structs.replace(config, linger=linger)
    config = with_encryption(config)
    if is_literal(host) or host == "localhost":
        return open_embedded(config, SystemClock())
    from rankwise.drivers.real.stores.deferred import DeferredStore  # noqa: PLC0415  # for names

    # Whether this machine has that name may take name servers long to tell.
    who = f"the embedded store at {endpoint_text(host, port)}"
    return DeferredStore(lambda: open_embedded(config, SystemClock()), who, OPENING_PATIENCE)


def token_of(settings: Mapping[str, str], run_id: str) -> str:
    """What the nodes of the run know of each other."""
    if "token" in settings and "token_file" in settings:
        raise ConfigError("--rdzv-conf: token and token_file are both given, expected one of them")
    path = settings.get("token_file")
    if path is None:
        return settings.get("token") or os.environ.get(TOKEN_VARIABLE) or run_id
    _check_file("token_file", path)
    with open(path, encoding="utf-8") as file:
        token = file.read().strip()
    if not token:
        raise ConfigError(f"--rdzv-conf: token_file is {path!r}, which is empty, expected a token")
    return token


def _open_c10d(endpoint: str, settings: Mapping[str, str], run_id: str) -> Store:
    # torch itself is only imported when the store is opened.
    from rankwise.drivers.real.stores.c10d import (  # noqa: PLC0415  # takes ms
        C10dConfig,
        open_c10d,
        open_file,
        preparing,
        require_torch,
    )
    from rankwise.drivers.real.stores.deferred import DeferredStore  # noqa: PLC0415  # the same

    store_type = settings.get("store_type", "tcp").lower()
    if store_type == "file":
        return open_file(endpoint, run_id, SystemClock())
    if store_type != "tcp":
        raise ConfigError(f"--rdzv-conf: store_type is {store_type!r}, expected tcp or file")
    host, port = host_and_port(endpoint, C10D_PORT)
    config = C10dConfig(host=host, port=port, namespace=run_id, is_host=_truth(settings, "is_host"))
    if (timeout := _seconds(settings, "read_timeout")) is not None:
        config = msgspec.structs.replace(config, connect_timeout=timeout)
    if (linger := _seconds(settings, "linger")) is not None:
        config = msgspec.structs.replace(config, linger=linger)
    require_torch()
    who = f"torch's TCPStore at {host}:{port}"
    return DeferredStore(
        lambda: open_c10d(config, SystemClock()), who, OPENING_PATIENCE, preparing=preparing
    )


def _checked(settings: Mapping[str, str], known: Collection[str], backend: str) -> dict[str, str]:
    """The settings under our spelling of their names.

    Raises:
        ConfigError: one of them means nothing to the backend.
    """
    checked: dict[str, str] = {}
    for given, value in settings.items():
        name = TORCH_SPELLINGS.get(given, given)
        if name in checked:
            raise ConfigError(f"--rdzv-conf: {name} is given twice, in two spellings")
        checked[name] = value
        if name not in known:
            raise ConfigError(
                f"--rdzv-conf: the backend {backend} has no setting {given}",
                hint=hint_on_name(name, known, "it knows"),
            )
    return checked


def _check_file(name: str, path: str | None) -> None:
    if path is not None and not os.path.isfile(path):
        raise ConfigError(f"--rdzv-conf: {name} is {path!r}, and there is no such file")


def _seconds(settings: Mapping[str, str], name: str) -> Duration | None:
    text = settings.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(
            f"--rdzv-conf: {name} is {text!r}, expected more than 0 and less than 1e6 seconds"
        )
    return duration_from_seconds(seconds)


def _with_timeout(config: ConfigT, settings: Mapping[str, str]) -> ConfigT:
    """The configuration with the time that a request may take.

    torch's `read_timeout` can only shorten it: it is 60 seconds there, in which no lease could be
    renewed if a server were silent.
    """
    if (timeout := _seconds(settings, "read_timeout")) is not None:
        timeout = min(timeout, config.request_timeout)
        config = msgspec.structs.replace(config, request_timeout=timeout)
    if (timeout := _seconds(settings, "request_timeout")) is not None:
        config = msgspec.structs.replace(config, request_timeout=timeout)
    return config


def _truth(settings: Mapping[str, str], name: str) -> bool | None:
    text = settings.get(name)
    meanings = {
        **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
        **dict.fromkeys(("0", "false", "f", "no", "n"), False),
    }
    if text is None:
        return None
    if text.strip().lower() not in meanings:
        raise ConfigError(f"--rdzv-conf: {name} is {text!r}, expected true or false")
    return meanings[text.strip().lower()]


def _plugged_in(backend: str) -> Callable[..., Store]:
    from importlib.metadata import entry_points  # noqa: PLC0415  # only for unusual names

    for point in entry_points(group="rankwise.stores", name=backend):
        opened: Callable[..., Store] = point.load()
        return opened
    raise ConfigError(
        f"--rdzv-backend is {backend!r}, expected static, embedded, etcd, c10d, or the name of a "
        "store that an installed package brings (entry points rankwise.stores)"
    )
