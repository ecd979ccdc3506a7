"""Collectives by messages between ranks that share nothing but a network.

There is a connection per pair, made and proved by `connecting`; each is read and written by this
rank's one thread, in operations only. A message is a head, which says what its sender is doing, and
the bytes of a span; how many there are, both ends know from their programs, which are those of
equal calls. That is why the head is compared before anything is believed: ranks that call different
things find out at their first message to each other.

A rank waits for one peer's message, or for room for its own. Either way it also sees the end of
that peer's connection, which the kernel of a machine tells when a process has ended, however; and
no wait without any progress is longer than the operation's patience, should a machine go silent. A
rank that gives up says so to all its peers behind its last message, and ends its half of the
connections: those that wait for it raise, give up, and tell theirs.
"""

import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from struct import Struct
from types import ModuleType

import numpy as np

from rankwise.base.errors import PeerDied
from rankwise.base.units import MILLISECOND, Duration
from rankwise.collectives import wording
from rankwise.collectives.calls import AgreedCall, read_header
from rankwise.collectives.ordered_reductions import Reduction
from rankwise.collectives.program_runner import ProgramRunner, fold_spans, steps_for
from rankwise.collectives.transport import Flat
from rankwise.core.collectives.algorithms import (
    direct_all_to_all,
    direct_allgather,
    direct_allreduce,
    direct_reduce_scatter,
    dissemination_barrier,
    exchange_allreduce,
    halving_doubling_allreduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from rankwise.core.collectives.player import Effect, Keep, Player, ProgramEnded, Transmit
from rankwise.core.collectives.program import Copy, Fold, Receive, Span, Task
from rankwise.core.matching import MemberCalls, next_number
from rankwise.drivers.real.segments import ABORT_REASON_BYTES, HEADER_BYTES

_HEAD = Struct(f"=4sQ{HEADER_BYTES}s")
_CALL, _GAVE_UP, _LOST_PEER = b"call", b"gone", b"lost"
_PIECE_BYTES = 1 << 18
"""So much is received before it is combined: it is still in the cache; measured."""
_SMALL_BYTES = 1 << 15
"""An all_reduce of two ranks is small up to here: one step with all bytes, not two with half."""
_FLOOD_BYTES = 1 << 18
"""Among more ranks, one is small if no rank receives more than this."""
_CHUNK_BYTES = 1 << 22
"""So much of a long array is taken at a time where scratch memory is needed."""
_PIECES_MAX = 64
"""So many pieces of messages are given to the kernel at once; it refuses more than 1,024."""
_POLL_MS_MAX = 1 << 30
_IS_OVER = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class PeerLink:
    """The connection to one peer."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.settimeout(0)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.peer = peer
        """Its rank in the job."""
        self.outgoing: deque[tuple[int, memoryview]] = deque()
        """What has not left: pieces of messages, by the numbers of these."""
        self.last_seen_in = wording.NOTHING_YET

    def push(self) -> list[int]:
        """Get rid of what the kernel takes; the numbers of messages of which nothing is left.

        Raises:
            OSError: the peer is gone.
        """
        gone = []
        while self.outgoing:
            try:
                some = islice(self.outgoing, _PIECES_MAX)
                sent = self.socket.sendmsg([piece for _, piece in some])
            except BlockingIOError:
                break
            while self.outgoing and sent >= len(self.outgoing[0][1]):
                number, piece = self.outgoing.popleft()
                sent -= len(piece)
                if not self.outgoing or self.outgoing[0][0] != number:
                    gone.append(number)
            if sent:
                number, piece = self.outgoing[0]
                self.outgoing[0] = (number, piece[sent:])
        return gone

    def keep(self, number: int) -> None:
        """Copy what has not left of a message."""
        for place, (each, piece) in enumerate(self.outgoing):
            if each == number:
                self.outgoing[place] = (number, memoryview(bytes(piece)))


class TcpTransport:
    """Collectives among ranks that each have a connection to each other.

    Args:
        position: this rank's place among them, from 0.
        ranks: their ranks in the job, by places.
        connections: one to each other, by places; they now belong to this object.
    """

    def __init__(
        self, position: int, ranks: Sequence[int], connections: Mapping[int, socket.socket]
    ) -> None:
        self.rank = position
        self.size = len(ranks)
        self._me = ranks[position]
        self._links = {place: PeerLink(each, ranks[place]) for place, each in connections.items()}
        self._calls = MemberCalls()
        self._doing = ""
        self._head = memoryview(b"")
        self._patience = Duration(0)
        self._incoming = bytearray(_HEAD.size)
        self._present_call = ""
        self._piece = np.empty(_PIECE_BYTES, np.uint8)
        self._player = Player(())
        self._effects: deque[Effect] = deque()
        self._programs = ProgramRunner(position, self.size, self._carry_out, self._elements_max)
        self._token = np.zeros(1, np.uint8)
        self._token_task = Task(position, self.size, elements=1)
        _open.add(self)

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._calls.begun

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Announce an operation; its number and text go before each of its messages."""
        number = next_number(self._calls.begun)
        self._head = memoryview(_HEAD.pack(_CALL, number, call.header))
        self._calls.begin(self._head)
        self._doing = call.numbered(number)
        self._present_call = wording.last_in(self._doing)
        self._patience = patience

    def run(
        self,
        algorithm: ModuleType,
        source: Flat,
        result: Flat,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> None:
        """Carry out an algorithm's collective, whichever it is."""
        if source.nbytes == 0:
            self.barrier()
        else:
            self._programs.run(algorithm, source, result, reduction, root)

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources in the order of the places; every rank gets the whole."""
        algorithm: ModuleType
        if self.size == 2 and source.nbytes > _SMALL_BYTES:
            algorithm = halving_doubling_allreduce  # of two, it is the order of the places
        elif source.nbytes * self.size <= _FLOOD_BYTES or source.nbytes <= _SMALL_BYTES:
            algorithm = exchange_allreduce
        else:
            algorithm = direct_allreduce
        self.run(algorithm, source, result, reduction)
        if reduction.divides:
            np.divide(result, self.size, out=result)

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources in the order of the places; place p gets the p-th part."""
        algorithm: ModuleType = ring_reduce_scatter if self.size == 2 else direct_reduce_scatter
        self.run(algorithm, source, result, reduction)
        if reduction.divides:
            np.divide(result, self.size, out=result)

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other."""
        self.run(direct_allgather, source, result)

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the p-th part of the source to place p."""
        self.run(direct_all_to_all, source, result)

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of place `root` to all."""
        self.run(tree_broadcast, source, result, root=root)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._carry_out(dissemination_barrier, self._token_task, self._token, None)

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell all peers that this rank gave up in an operation, and send nothing any more."""
        words = reason.encode()[:ABORT_REASON_BYTES].ljust(ABORT_REASON_BYTES, b"\0")
        kind = _LOST_PEER if lost_peer else _GAVE_UP
        farewell = _HEAD.pack(kind, self._calls.begun, b"") + words
        for link in self._links.values():
            try:
                if not link.outgoing:  # else it would be taken for a part of a message
                    link.socket.send(farewell)
                link.socket.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it is gone, or has room for nothing: the end of the connection tells
            finally:
                link.outgoing.clear()

    def close(self) -> None:
        """End all connections."""
        for link in self._links.values():
            link.socket.close()

    @staticmethod
    def _elements_max(algorithm: ModuleType, task: Task, itemsize: int) -> int:
        if not hasattr(algorithm, "scratch_elements"):
            return task.elements
        return max(1, _CHUNK_BYTES // itemsize)

    def _carry_out(
        self, algorithm: ModuleType, task: Task, workspace: Flat, reduction: Reduction | None
    ) -> None:
        """Do what the player says until it has finished."""
        self._player = Player(steps_for(algorithm, task))
        effects = self._effects
        effects.clear()
        effects.extend(self._player.begin())
        while True:
            while effects:
                effect = effects.popleft()
                if isinstance(effect, ProgramEnded):
                    return
                self._do(effect, workspace, reduction)
            self._wait(None)  # the program has ended, and messages have not left

    def _do(self, effect: Effect, workspace: Flat, reduction: Reduction | None) -> None:
        match effect:
            case Transmit(number, peer, span):
                link = self._links[peer]
                link.outgoing.append((number, self._head))
                link.outgoing.append((number, _bytes_of(workspace, span)))
                self._push(link)
            case Keep(number):
                for link in self._links.values():
                    link.keep(number)
            case Receive(peer, span, combines):
                link = self._links[peer]
                self._read_head(link)
                if combines:
                    assert reduction is not None, "only reductions combine"
                    self._combine(link, workspace[span.start : span.stop], reduction.ufunc)
                else:
                    self._read(link, _bytes_of(workspace, span), inside=True)
                self._effects.extend(self._player.received())
            case Copy(source, target):
                np.copyto(
                    workspace[target.start : target.stop], workspace[source.start : source.stop]
                )
            case Fold():
                assert reduction is not None, "only reductions fold"
                fold_spans(workspace, effect, reduction)
            case ProgramEnded():
                raise AssertionError("the loop that does effects ends there")

    def _combine(self, link: PeerLink, target: Flat, ufunc: np.ufunc) -> None:
        """Receive a message piece by piece, and combine each with its part of `target`."""
        piece = self._piece[: _PIECE_BYTES // target.itemsize * target.itemsize].view(target.dtype)
        for start in range(0, target.size, piece.size):
            mine = target[start : start + piece.size]
            incoming = piece[: mine.size]
            self._read(link, _bytes_of(incoming, Span(0, incoming.size)), inside=True)
            ufunc(mine, incoming, out=mine)

    def _read_head(self, link: PeerLink) -> None:
        self._read(link, memoryview(self._incoming), inside=False)
        if self._calls.agree_with(self._incoming):
            link.last_seen_in = self._present_call
            return
        kind, number, header = _HEAD.unpack(self._incoming)
        if kind in (_GAVE_UP, _LOST_PEER):
            words = bytearray(ABORT_REASON_BYTES)
            self._read(link, memoryview(words), inside=True)
            text = words.rstrip(b"\0").decode(errors="replace")
            raise wording.peers_gave_up(
                self._doing,
                self._me,
                [f"rank {link.peer} gave up: {text}"],
                because_of_death=kind == _LOST_PEER,
            )
        theirs = read_header(header, number)
        raise wording.mismatch(sorted([(self._me, self._doing), (link.peer, theirs)]))

    def _read(self, link: PeerLink, view: memoryview, *, inside: bool) -> None:
        """Fill `view` with what the peer sends; `inside` a message, of which a part was read."""
        while view:
            try:
                count = link.socket.recv_into(view)
            except BlockingIOError:
                self._wait(link)
                continue
            except OSError:
                count = 0
            if count == 0:
                raise self._lost(link, "has ended or given up" if inside else "has ended")
            view, inside = view[count:], True
            for other in self._links.values():  # ours must go on while theirs come
                if other.outgoing:
                    self._push(other)

    def _push(self, link: PeerLink) -> None:
        try:
            numbers = link.push()
        except OSError:
            raise self._lost(link, "has ended or given up") from None
        for number in numbers:
            self._effects.extend(self._player.sent(number))

    def _wait(self, link: PeerLink | None) -> None:
        """Sleep until `link` can be read, or something that waits to be sent could be."""
        poll = select.poll()
        pending = [each for each in self._links.values() if each.outgoing]
        for each in pending:
            poll.register(each.socket, select.POLLOUT | select.POLLRDHUP)
        if link is not None:
            events = select.POLLIN | select.POLLRDHUP | (select.POLLOUT if link.outgoing else 0)
            poll.register(link.socket, events)
        patience_ms = min(-(-self._patience // MILLISECOND), _POLL_MS_MAX)
        ready = dict(poll.poll(patience_ms))
        if not ready and patience_ms < _POLL_MS_MAX:
            missing = [link] if link is not None else pending
            raise wording.timed_out(
                self._doing,
                self._me,
                self._patience,
                [(it.peer, it.last_seen_in) for it in missing],
            )
        for each in pending:
            event = ready.get(each.socket.fileno(), 0)
            if event & select.POLLOUT:
                self._push(each)
            if event & _IS_OVER and each is not link:  # of `link`, there may be more to be read
                raise self._lost(each, "has ended or given up")

    def _lost(self, link: PeerLink, fate: str) -> PeerDied:
        return wording.peers_died(self._doing, self._me, [(link.peer, fate, link.last_seen_in)])


def _close_in_child() -> None:
    for transport in _open:
        transport.close()


_open: "weakref.WeakSet[TcpTransport]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
"""A child that outlives its parent would hold the connections open, and hide the parent's end."""


def _bytes_of(array: Flat, span: Span) -> memoryview:
    return array[span.start : span.stop].view(np.uint8).data
