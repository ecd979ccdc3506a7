"""A client of etcd v3 with the calls of python-etcd's that torch's rendezvous makes.

etcd's older protocol, which python-etcd speaks, is gone from etcd 3.6 and off in those before. The
keys are the same texts; a key's index is the revision that wrote it.
"""

from contextlib import suppress
from typing import NamedTuple

from rankwise.base.errors import LeaseLost, RankwiseError, StoreError
from rankwise.base.keys import (
    ABSENT,
    Conflict,
    Entry,
    LeaseId,
    Put,
    Revision,
    Transaction,
    Unchanged,
)
from rankwise.base.units import SECOND, Duration
from rankwise.compat.torch.elastic.rendezvous.api import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.utils import parse_rendezvous_endpoint
from rankwise.drivers.real.stores.opening import open_store
from rankwise.ports.store import Store

__all__ = [
    "Client",
    "EtcdAlreadyExist",
    "EtcdCompareFailed",
    "EtcdException",
    "EtcdKeyNotFound",
    "EtcdResult",
    "create_client",
]

ETCD_PORT = 2379
READ_TIMEOUT_S = 60


def _also_of_python_etcd(name: str) -> tuple[type[Exception], ...]:
    """The exception of python-etcd with that name; nothing where the package is not installed.

    Programs that catch its exceptions go on as they are.
    """
    # Whatever it raises: python-etcd does not import with every version of what it needs, and it is
    # only there for its names.
    with suppress(Exception):
        import etcd  # noqa: PLC0415  # it is not needed, and often not there

        kind = getattr(etcd, name, None)  # another package may have that name
        if isinstance(kind, type) and issubclass(kind, Exception):
            return (kind,)
    return ()


class EtcdException(RankwiseError, *_also_of_python_etcd("EtcdException")):  # type: ignore[misc]
    """A call of the client could not be carried out.

    Where python-etcd is installed, it and its siblings are caught by the names there, too.
    """


class EtcdKeyNotFound(EtcdException, *_also_of_python_etcd("EtcdKeyNotFound")):  # type: ignore[misc]
    """There is no such key."""


class EtcdAlreadyExist(EtcdException, *_also_of_python_etcd("EtcdAlreadyExist")):  # type: ignore[misc]
    """The key should not have existed."""


class EtcdCompareFailed(EtcdException, *_also_of_python_etcd("EtcdCompareFailed")):  # type: ignore[misc]
    """The key is not as it should have been."""


class EtcdResult(NamedTuple):
    """A key: its value, and the revision that wrote it."""

    key: str
    value: str
    modifiedIndex: int  # noqa: N815  # python-etcd's name


class Client:
    """Reads and writes keys of an etcd.

    Args:
        host, port: one of its members.
        protocol: `http` or `https`.
        read_timeout: seconds that a call may take; more than 2 are as good as 2.
        cert, ca_cert: the client's certificate and its key, and the authority's.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = ETCD_PORT,
        *,
        protocol: str = "http",
        read_timeout: float = READ_TIMEOUT_S,
        cert: tuple[str, str] | None = None,
        ca_cert: str | None = None,
    ) -> None:
        settings = {"protocol": protocol, "read_timeout": str(read_timeout)}
        if cert is not None:
            settings["cert"], settings["key"] = cert
        if ca_cert is not None:
            settings["cacert"] = ca_cert
        self.read_timeout = read_timeout
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._settings = settings
        self._store = self.open_store()
        self._leases: dict[int, LeaseId] = {}

    @property
    def store(self) -> Store:
        """The store beneath it, for calls that etcd's older protocol does not have."""
        return self._store

    def open_store(self) -> Store:
        """Another connection to the same etcd; the caller closes it."""
        return open_store("etcd", self.endpoint, self._settings, run_id="")

    def close(self) -> None:
        """Close the connection."""
        self._store.close()

    def read(self, key: str) -> EtcdResult:
        """Read a key.

        Raises:
            EtcdKeyNotFound: there is none.
            EtcdException: etcd does not answer.
        """
        return _result(self._entry(key))

    get = read

    def write(
        self,
        key: str,
        value: str,
        ttl: int | None = None,
        *,
        prevExist: bool | None = None,  # noqa: N803  # python-etcd's name
        prevIndex: int | None = None,  # noqa: N803  # the same
    ) -> EtcdResult:
        """Write a key.

        Args:
            key: the key.
            value: its value.
            ttl: how many seconds it lives, unless it or another of ours with this ttl is written.
            prevExist: whether it must exist already; None does not ask.
            prevIndex: by which revision it must have been written; None does not ask.

        Raises:
            EtcdAlreadyExist, EtcdCompareFailed, EtcdKeyNotFound: it is not as it must be.
            EtcdException: etcd does not answer; it may have been written.
        """
        conditions: tuple[Unchanged, ...] = ()
        if prevExist is False:
            conditions = (Unchanged(key, ABSENT),)
        elif prevIndex is not None:
            conditions = (Unchanged(key, Revision(prevIndex)),)
        elif prevExist:
            conditions = (Unchanged(key, self._entry(key).revision),)
        try:
            put = Put(key, value.encode(), None if ttl is None else self._lease(ttl))
            result = self._store.commit(Transaction(conditions=conditions, puts=(put,)))
        except StoreError as error:
            raise EtcdException(str(error)) from error
        if isinstance(result, Conflict):
            kind = EtcdAlreadyExist if prevExist is False else EtcdCompareFailed
            raise kind(f"the key {key!r} is not as it was expected")
        return EtcdResult(key, value, result.revision)

    set = write

    def test_and_set(
        self, key: str, value: str, prev_value: str, ttl: int | None = None
    ) -> EtcdResult:
        """Write a key if it has a certain value; raises as `write` does."""
        entry = self._entry(key)
        if entry.value != prev_value.encode():
            raise EtcdCompareFailed(f"the key {key!r} is not as it was expected")
        return self.write(key, value, ttl, prevIndex=entry.revision)

    def delete(
        self,
        key: str,
        recursive: bool = False,
        dir: bool = False,  # noqa: A002, ARG002  # python-etcd's name; directories are prefixes
    ) -> None:
        """Delete a key, or all keys below it.

        Raises:
            EtcdKeyNotFound: there is none.
            EtcdException: etcd does not answer.
        """
        try:
            found = self._store.read(key).entries
            keys = [e.key for e in found if e.key == key or (recursive and _is_below(e.key, key))]
            if not keys:
                raise EtcdKeyNotFound(f"there is no key {key!r}")
            self._store.commit(Transaction(deletes=tuple(keys)))
        except StoreError as error:
            raise EtcdException(str(error)) from error

    def _entry(self, key: str) -> Entry:
        try:
            entries = self._store.read(key).entries
        except StoreError as error:
            raise EtcdException(str(error)) from error
        for entry in entries:
            if entry.key == key:
                return entry
        raise EtcdKeyNotFound(f"there is no key {key!r}")

    def _lease(self, ttl: int) -> LeaseId:
        """The lease of all our keys that live so long, renewed."""
        lease = self._leases.get(ttl)
        if lease is not None:
            try:
                self._store.renew_lease(lease)
            except LeaseLost:
                pass  # nothing was written for so long
            else:
                return lease
        lease = self._leases[ttl] = self._store.grant_lease(Duration(ttl * SECOND))
        return lease


def create_client(params: RendezvousParameters) -> Client:
    """Make a client of `endpoint`.

    Settings: `protocol`, `read_timeout`; and for https, in the spellings of both of torch's
    backends, `cert` or `ssl_cert`, `key` or `ssl_cert_key`, `cacert` or `ca_cert`.

    Raises:
        ValueError: one of them cannot be used.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=ETCD_PORT)
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    protocol = params.get("protocol", "http").strip().lower()
    if protocol not in ("http", "https"):
        raise ValueError("The protocol must be HTTP or HTTPS.")
    cert = params.get("ssl_cert") or params.get("cert")
    key = params.get("ssl_cert_key") or params.get("key")
    return Client(
        host,
        port,
        protocol=protocol,
        read_timeout=read_timeout,
        # A file may hold both.
        cert=None if cert is None else (cert, key or cert),
        ca_cert=params.get("ca_cert") or params.get("cacert"),
    )


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _result(entry: Entry) -> EtcdResult:
    return EtcdResult(entry.key, entry.value.decode(), entry.revision)
