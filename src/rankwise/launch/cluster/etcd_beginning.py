"""How a member of the run's own etcd that has no data begins: with the others, or after them.

A member that has lost its data must not go on under its name as if it had just been founded: it
would vote again on what it has voted on before. So it asks the other two, at the peers' ports,
which answer without a quorum too:

- *no member runs there*, or *none knows of this member*: the cluster is being founded.
- *it has served before*: its place is removed and added again, under a new number, which has
  promised nothing. That needs the others' quorum, and etcd refuses it where it would cost them
  theirs, or while they have not known each other for five seconds: it is tried again.
- *its place is free*, since it ended between the two: it is added, or begins as what was added.
- *neither of the two can be reached, or one does not answer*: it waits. To found a cluster needs
  one of them as well.

One case remains: a member that comes back while both others are not running, though their machines
are, founds the cluster again together with the first that comes back with its data.
"""

import http.client
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rankwise.base.errors import StoreUnavailable
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.stores.etcd_members import EtcdConfig, Members
from rankwise.drivers.real.stores.names import Names
from rankwise.drivers.real.stores.patience import describe

PATIENCE_S = 1.0
"""An agent that is told to end waits for its question."""
_REQUEST_TIMEOUT = Duration(2 * SECOND)


class MemberAddress(NamedTuple):
    """Where a member is. Its peers reach it at the next port.

    Attributes:
        name, host, port: of the member.
        peer_url: as all members write it.
    """

    name: str
    host: str
    port: int
    peer_url: str


class Beginning(NamedTuple):
    """What etcd is told: `--initial-cluster-state` and `--initial-cluster`."""

    state: str
    cluster: str


class Listed(msgspec.Struct):
    """A member, as the others know it."""

    id: int
    name: str = ""
    peer_urls: list[str] = msgspec.field(name="peerURLs", default_factory=list)
    client_urls: list[str] = msgspec.field(name="clientURLs", default_factory=list)
    """Told by the member itself, once it has served."""


def find_beginning(
    places: Sequence[MemberAddress],
    own: MemberAddress,
    settings: EtcdConfig,
    tls: ssl.SSLContext | None,
) -> Beginning:
    """How the member at `own` begins, after its place has been made free if need be.

    Args:
        places: of all members.
        own: this one's, which has no data.
        settings: how the others are asked to change their members.
        tls: how they are asked who they are.

    Raises:
        StoreError: the others cannot be asked, or do not change their members, now.
    """
    listed = _listed_by_others([each for each in places if each is not own], tls)
    founding = Beginning("new", ",".join(f"{each.name}={each.peer_url}" for each in places))
    if listed is None:
        return founding
    known = next((each for each in listed if own.peer_url in each.peer_urls), None)
    if known is not None and known.name and not known.client_urls:
        return founding
    if known is None or known.client_urls:
        with_others = msgspec.structs.replace(
            settings,
            endpoints=tuple((each.host, each.port) for each in places if each is not own),
            request_timeout=_REQUEST_TIMEOUT,
        )
        members = Members(with_others)
        try:
            if known is not None:
                members.ask("/cluster/member/remove", {"ID": str(known.id)}, object, repeats=False)
            body = {"peerURLs": [own.peer_url]}
            members.ask("/cluster/member/add", body, object, repeats=False)
        finally:
            members.close()
    there = [each for each in listed if own.peer_url not in each.peer_urls]
    cluster = [(own.name, own.peer_url), *((each.name, each.peer_urls[0]) for each in there)]
    return Beginning("existing", ",".join(f"{name}={url}" for name, url in cluster))


def _listed_by_others(
    others: Sequence[MemberAddress], tls: ssl.SSLContext | None
) -> list[Listed] | None:
    """The members that another one knows; None if none of them runs.

    Raises:
        StoreUnavailable: one runs and does not answer, or none of the machines can be reached.
    """
    is_known, last_error = False, ""
    for other in others:
        try:
            sock = Names().connect(other.host, other.port + 1, PATIENCE_S)
        except ConnectionRefusedError:
            is_known = True
        except OSError as error:
            last_error = f"{other.peer_url}: {describe(error)}"
        else:
            return _listed_by(other, sock, tls)
    if is_known:
        return None
    raise StoreUnavailable(f"no other member can be reached: {last_error}")


def _listed_by(
    other: MemberAddress, sock: socket.socket, tls: ssl.SSLContext | None
) -> list[Listed]:
    connection = http.client.HTTPConnection(other.host, other.port + 1)
    connection.sock = sock
    try:
        if tls is not None:
            connection.sock = tls.wrap_socket(sock, server_hostname=other.host)
        connection.request("GET", "/members")
        return msgspec.json.decode(connection.getresponse().read(), type=list[Listed])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise StoreUnavailable(f"{other.peer_url} does not answer: {describe(error)}") from error
    finally:
        connection.close()
