"""How the ranks of several nodes find each other: all connect to rank 0 first.

The store has told all agents where rank 0's node is, and which port the agent there has reserved.
Next to that one, which is the program's, it listens on another, and hands the socket to rank 0. So
a rank that is early waits in the kernel's queue, and does not have to try again. Every rank
connects, says who it is and where it listens, and is told the same of all. Then the ranks with one
number on their nodes connect to each other: that on a later node calls, that on an earlier one
answers.

Both ends of every connection prove that they know the round's key, which the agents make from the
run's token and the number of the round: what is left of an earlier round can neither enter a later
one nor be taken for a part of it. Strangers are hung up on. The messages after that are neither
sealed nor secret, as with gloo and NCCL.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from hmac import compare_digest
from struct import Struct
from typing import TypeVar

import msgspec

from rankwise.base.errors import CollectiveError, CollectiveTimeout
from rankwise.base.units import SECOND, Duration
from rankwise.collectives import wording
from rankwise.core.matching import missing
from rankwise.drivers.real.stores.embedded_protocol import NONCE_BYTES, Secret, new_nonce
from rankwise.drivers.real.stores.names import Names

_Words = TypeVar("_Words")
_LENGTH = Struct("!I")
_PROOF_BYTES = 32
_WORDS_BYTES_MAX = 1 << 24
_ENDED = 0
_STRANGERS_S_MAX = 30.0
"""A process that connects may take so long to say who it is."""


class RankEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has been told of itself and of rank 0.

    Attributes:
        rank, size: its number among all ranks, and how many there are.
        node, local_rank, local_size: its node's number, and its place on the node.
        address, port: where rank 0 listens.
        key: what only the ranks of this round know.
        listener_fd: of rank 0, the socket that listens there.
    """

    rank: int
    size: int
    node: int
    local_rank: int
    local_size: int
    address: str
    port: int
    key: bytes
    listener_fd: int = -1


class RankAddress(msgspec.Struct, frozen=True):
    """What all ranks learn of one: who it is, and where it listens; nowhere (0) if it has ended."""

    rank: int
    node: int
    local_rank: int
    local_size: int
    address: str
    port: int


class Connector:
    """Connects one rank; `doing` is the operation that wants it."""

    def __init__(self, here: RankEndpoint, doing: str, patience: Duration) -> None:
        self._here = here
        self._doing = doing
        self._patience = patience
        self._deadline = time.monotonic() + patience / SECOND
        self.places: tuple[RankAddress, ...] = ()

    def connect(self) -> dict[int, socket.socket]:
        """Connect to all ranks that have this one's number on their nodes; by nodes.

        If nodes have different numbers of ranks, only their first ranks are connected.

        Raises:
            PeerDied: rank 0 or one of those has ended.
            CollectiveTimeout: a rank has not come.
            CollectiveError: rank 0 cannot be reached, or is of another round.
        """
        here = self._here
        with ExitStack() as stack:
            if here.rank == 0:
                entrance = stack.enter_context(socket.socket(fileno=here.listener_fd))
                listener = stack.enter_context(_listener("", entrance.family))
                self.places = self._receive_all(entrance, listener.getsockname()[1])
            else:
                connection = stack.enter_context(self._call(here.address, here.port, 0))
                own = connection.getsockname()[0]
                listener = stack.enter_context(_listener(own, connection.family))
                self.places = self._introduce(connection, own, listener.getsockname()[1])
            for place in self.places:
                if place.port == _ENDED:
                    raise self._died(place.rank)
            return self._connect_rail(listener)

    def tell_end(self) -> None:
        """In the place of this rank, which has ended: let no other one wait for it to come."""
        here = self._here
        with (
            suppress(CollectiveError, OSError),
            self._call(here.address, here.port, 0) as connection,
        ):
            _say(connection, _place_of(here, "", _ENDED))

    @property
    def is_even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len({place.local_size for place in self.places}) == 1

    def _receive_all(self, entrance: socket.socket, port: int) -> tuple[RankAddress, ...]:
        """As rank 0: wait for all ranks, or until one has ended; tell those that have come."""
        here = self._here
        places = {0: _place_of(here, here.address, port)}
        connections: dict[int, socket.socket] = {}
        with ExitStack() as stack:
            is_complete = True
            while is_complete and len(places) < here.size:
                absent = missing(range(here.size), places)
                connection = stack.enter_context(self._accept(entrance, absent))
                place = self._receive(connection, RankAddress)
                if place is not None and place.rank in absent:
                    places[place.rank] = place
                    is_complete = place.port != _ENDED
                    if is_complete:
                        connections[place.rank] = connection
            everywhere = tuple(places[rank] for rank in sorted(places))
            for rank, connection in connections.items():
                try:
                    _say(connection, everywhere)
                except OSError:
                    raise self._died(rank) from None
        return everywhere

    def _introduce(self, connection: socket.socket, own: str, port: int) -> tuple[RankAddress, ...]:
        """As any other rank: tell rank 0, and wait for what it knows of all."""
        try:
            _say(connection, _place_of(self._here, own, port))
            connection.settimeout(self._seconds_left())
            places = msgspec.json.decode(_read_words(connection), type=tuple[RankAddress, ...])
        except TimeoutError:
            raise self._timeout([0]) from None
        except OSError:
            raise self._died(0) from None
        return places

    def _connect_rail(self, listener: socket.socket) -> dict[int, socket.socket]:
        here, number = self._here, self._here.local_rank
        if not self.is_even and number != 0:
            return {}
        rail = {each.node: each for each in self.places if each.local_rank == number}
        connections: dict[int, socket.socket] = {}
        with ExitStack() as stack:
            for node in range(here.node):
                place = rail[node]
                connection = stack.enter_context(self._call(place.address, place.port, place.rank))
                connections[node] = connection
                try:
                    _say(connection, here.node)
                except OSError:
                    raise self._died(place.rank) from None
            while len(connections) < len(rail) - 1:
                absent = missing((node for node in rail if node != here.node), connections)
                ranks = [rail[node].rank for node in absent]
                connection = stack.enter_context(self._accept(listener, ranks))
                caller = self._receive(connection, int)
                if caller is not None and caller in absent:
                    connections[caller] = connection
            # Those that were hung up on stay behind, and are closed.
            return {node: each.dup() for node, each in connections.items()}

    def _call(self, address: str, port: int, rank: int) -> socket.socket:
        """A connection to a rank that has proved to be of this round."""
        try:
            connection = Names().connect(address, port, self._seconds_left())
        except TimeoutError:
            raise self._timeout([rank]) from None
        except ConnectionRefusedError:
            # It listened before this rank knew of its port, and does so for as long as it lives.
            fate = f"has ended ({address} port {port} refuses connections)"
            raise wording.peers_died(
                self._doing,
                self._here.rank,
                [(rank, fate, wording.NOTHING_YET)],
                hint=f"if rank {rank} runs, a firewall rejects them",
            ) from None
        except OSError as error:
            raise CollectiveError(
                f"{self._doing}: rank {self._here.rank} cannot reach rank {rank} at "
                f"{address} port {port}: {error.strerror or error}",
                hint="check that it is running, and that firewalls let the nodes reach each other",
            ) from error
        try:
            nonce = new_nonce()
            connection.sendall(nonce)
            theirs = _read(connection, NONCE_BYTES)
            secret = Secret(self._here.key, nonce, theirs)
            is_known = compare_digest(_read(connection, _PROOF_BYTES), secret.server_proof)
            connection.sendall(secret.client_proof)
        except TimeoutError:
            connection.close()
            raise self._timeout([rank]) from None
        except OSError:
            connection.close()
            raise self._died(rank) from None
        if not is_known:
            connection.close()
            raise CollectiveError(
                f"{self._doing}: the process that listens at {address} port {port} is not "
                f"rank {rank} of this round: its key is not that of rank {self._here.rank}",
                hint="give all nodes of a run the same run id and token",
            )
        return connection

    def _accept(self, listener: socket.socket, missing: Sequence[int]) -> socket.socket:
        """The next connection, which may be a stranger's."""
        try:
            listener.settimeout(self._seconds_left())
            connection, _ = listener.accept()
        except TimeoutError:
            raise self._timeout(missing) from None
        connection.settimeout(_STRANGERS_S_MAX)
        return connection

    def _receive(self, connection: socket.socket, kind: type[_Words]) -> _Words | None:
        """The message of a process with the key; None if a stranger connects."""
        try:
            theirs, own = _read(connection, NONCE_BYTES), new_nonce()
            secret = Secret(self._here.key, theirs, own)
            connection.sendall(own + secret.server_proof)
            if not compare_digest(_read(connection, _PROOF_BYTES), secret.client_proof):
                return None
            return msgspec.json.decode(_read_words(connection), type=kind)
        except (OSError, msgspec.MsgspecError):
            return None

    def _seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 1e-3)

    def _died(self, rank: int) -> CollectiveError:
        fate = (rank, "has ended", wording.NOTHING_YET)
        return wording.peers_died(self._doing, self._here.rank, [fate])

    def _timeout(self, missing: Sequence[int]) -> CollectiveTimeout:
        return wording.timed_out(
            self._doing,
            self._here.rank,
            self._patience,
            [(rank, wording.NOTHING_YET) for rank in missing],
        )


def places_by_node(places: Sequence[RankAddress]) -> Mapping[int, list[RankAddress]]:
    """The places of each node, in the order of ranks."""
    nodes: dict[int, list[RankAddress]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    return nodes


def _place_of(here: RankEndpoint, address: str, port: int) -> RankAddress:
    return RankAddress(here.rank, here.node, here.local_rank, here.local_size, address, port)


def _listener(address: str, family: int) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AddressFamily(family), backlog=4096)


def _say(connection: socket.socket, words: object) -> None:
    encoded = msgspec.json.encode(words)
    connection.sendall(_LENGTH.pack(len(encoded)) + encoded)


def _read_words(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _WORDS_BYTES_MAX:
        raise ConnectionError(
            f"the other side sent {length} bytes, expected {_WORDS_BYTES_MAX} at most"
        )
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        more = connection.recv(count - len(read))
        if not more:
            raise ConnectionError("the connection has ended")
        read += more
    return read
