"""Communicators of ranks that have nothing in common but a path: init, windows, barrier, destroy.

In a tree the parent makes the windows before its chips exist (`CommHandle.within`). Ranks without
a tree meet (`CommHandle.meet`), each knowing its number, how many there are, and a path. Nothing
is created at the path: it only names an abstract socket address derived from it,
which the kernel forgets with its owner.

    rank                                  host: whichever rank came first
    ────                                  ────
    bind the address: taken               bind the address: mine
    Hello(rank, count) + a channel ─────> note it; refuse doubles and other counts
                       <───────────────── Welcome(pids), when all have come
    Windows(size, …)   ─────────────────> wait for all; refuse different sizes
                       <───────────────── WindowsGranted + the region's descriptor

Binding is the election: of all who try, the kernel lets one. A hello is one datagram, which carries
an end of a socket pair, the rank's channel; so no rank has to wait until another listens. A channel
at its end means that the other side is gone. Both sides look at the credentials that the kernel
attaches, and ignore processes of other users.

Every wait ends: the host's deadline names who has not come, and a death is told to all. From
the moment that the windows exist, each rank watches the others' processes (`PeerWatch`).
"""

import errno
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

import msgspec

from rankwise.base.errors import (
    CollectiveError,
    CollectiveTimeout,
    LocalProtocolError,
    PeerDied,
    RankwiseError,
    RemoteProtocolError,
    TreeValueError,
    WindowError,
)
from rankwise.base.units import SECOND, Duration, Instant, after, between, format_duration
from rankwise.base.wording import ranks_in_words
from rankwise.collectives.communicator import patience_from_seconds
from rankwise.drivers.real.windows import RANKS_MAX, PeerWatch, WindowRegion
from rankwise.drivers.real.windows.in_process_communicators import (
    IN_PROCESS_COMMUNICATORS,
    CommunicatorMember,
    different_windows,
)
from rankwise.workers.domains import DomainSpec
from rankwise.workers.member import Member

DEFAULT_TIMEOUT_S = 120.0
_MESSAGE_BYTES_MAX = 1 << 17
_CREDENTIALS = struct.Struct("3i")
_FDS = struct.Struct("i")


class RankHello(msgspec.Struct, frozen=True, tag="Hello"):
    """A rank has come, and sends its channel along."""

    rank: int
    count: int


class WorldWelcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """All have come; their processes by rank."""

    pids: tuple[int, ...]


class Windows(msgspec.Struct, frozen=True, tag=True):
    """A rank wants windows of this size, and so many signals."""

    size: int
    signals: int = 0


class WindowsGranted(msgspec.Struct, frozen=True, tag=True):
    """Here they are; the descriptor comes along."""


class WindowsRefused(msgspec.Struct, frozen=True, tag=True):
    """It will come to nothing, for all of them."""

    kind: str
    message: str


Message = RankHello | WorldWelcome | Windows | WindowsGranted | WindowsRefused
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode

_REFUSALS: dict[str, type[RankwiseError]] = {
    kind.__name__: kind
    for kind in (
        CollectiveError,
        CollectiveTimeout,
        PeerDied,
        RemoteProtocolError,
        TreeValueError,
        WindowError,
    )
}


class CommHandle:
    """A rank's communicator, from init to destroy."""

    def __init__(self, rank: int, count: int, *, timeout: Duration) -> None:
        self.rank = rank
        self.size = count
        self._timeout = timeout
        self._pids: tuple[int, ...] = ()
        self._host: socket.socket | None = None  # a rank's channel to the host
        self._channels: dict[int, socket.socket] = {}  # the host's channels to the ranks
        self._region: WindowRegion | None = None
        self._owns_region = False
        self._member: Member | None = None
        self._watch: PeerWatch | None = None
        self._member_in_process: CommunicatorMember | None = (
            None  # of ranks that share this process
        )
        self._destroyed = False

    @classmethod
    def meet(
        cls,
        rank: int,
        nranks: int,
        rootinfo_path: str | os.PathLike[str],
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Meet the other ranks at a path; returns when all have come.

        Args:
            rank: this process's number, from 0; each rank has its own.
            nranks: how many there are.
            rootinfo_path: the same for all. Nothing is created there.
            timeout: seconds for this and for `alloc_windows`.

        Raises:
            CollectiveTimeout: not all have come; it names who is missing.
            PeerDied: one that had come is gone.
            ConfigError: an argument is wrong, two are the same rank, or they disagree on `nranks`.
        """
        if not 1 <= nranks <= RANKS_MAX:
            raise TreeValueError(f"nranks is {nranks}, expected between 1 and {RANKS_MAX}")
        if not 0 <= rank < nranks:
            raise TreeValueError(f"rank is {rank}, expected 0 to {nranks - 1}")
        handle = cls(rank, nranks, timeout=patience_from_seconds(timeout, "timeout"))
        deadline = after(_now(), handle._timeout)
        try:
            path, patience = os.fspath(rootinfo_path), handle._timeout
            handle._member_in_process = IN_PROCESS_COMMUNICATORS.meet(rank, nranks, path, patience)
            if handle._member_in_process is None:
                handle._meet(_socket_address(rootinfo_path), deadline)
        except BaseException:
            handle.destroy()
            raise
        return handle

    @classmethod
    def within(cls, region: WindowRegion, rank: int, timeout: float = DEFAULT_TIMEOUT_S) -> Self:
        """The communicator of ranks whose windows exist already; the region stays the caller's.

        `alloc_windows` then hands out what is there. The maker of the region watches the ranks.
        """
        patience = patience_from_seconds(timeout, "timeout")
        handle = cls(rank, region.rank_count, timeout=patience)
        region.window_offset(rank)  # refuses a rank that does not exist
        handle._region = region
        return handle

    def alloc_windows(self, size: int) -> int:
        """Give every rank a window of `size` bytes; all ranks call it, with the same size.

        Returns:
            Where the region begins in this process; `rankwise.workers.Member` and peers' windows
            are found through `member`.

        Raises:
            ConfigError: sizes differ, or the windows that exist are smaller.
            CollectiveTimeout, PeerDied: a rank did not come, or is gone.
            WindowError: the system has no memory for them.
        """
        return self._alloc(size).address

    def alloc_domain(self, spec: DomainSpec) -> Member:
        """Give every rank the windows of a domain, with its buffers and signals.

        All ranks call it, with the same domain, whose ranks are theirs.

        Returns:
            This rank in the domain, which ends with the communicator.

        Raises:
            ConfigError: domains differ, or this one has other ranks.
            CollectiveTimeout, PeerDied: a rank did not come, or is gone.
            WindowError: the system has no memory for them.
        """
        if spec.ranks != tuple(range(self.size)):
            raise TreeValueError(
                f"domain {spec.name!r} has ranks {', '.join(map(str, spec.ranks))}, and the "
                f"communicator has ranks 0 to {self.size - 1}"
            )
        self._alloc(spec.window_bytes, spec)
        return self.member

    def _alloc(self, size: int, spec: DomainSpec | None = None) -> WindowRegion:
        self._check_usable()
        if self._member is not None:
            raise LocalProtocolError(
                f"rank {self.rank} has windows already", hint="destroy the communicator first"
            )
        if self._region is None:
            wish = Windows(size, 0 if spec is None else len(spec.signals))
            self._region = self._agree_on_windows(wish, after(_now(), self._timeout))
            self._owns_region = True
        elif size > self._region.window_bytes:
            raise TreeValueError(
                f"windows of {size} bytes are wanted, but those of {self._region.name!r} have "
                f"{self._region.window_bytes}",
                hint="give window_size when the tree is built",
            )
        self._member = Member.join(self._region, self.rank, spec)
        if self._pids:
            others = {rank: pid for rank, pid in enumerate(self._pids) if rank != self.rank}
            self._watch = PeerWatch(self._region, others)
            self._watch.start_thread()
            self._close_channels()
        return self._region

    @property
    def member(self) -> Member:
        """This rank with its windows."""
        self._check_usable()
        if self._member is None:
            raise LocalProtocolError(
                f"rank {self.rank} has no windows yet", hint="call alloc_windows first"
            )
        return self._member

    @property
    def local_window_base(self) -> int:
        """Where this rank's window begins in this process."""
        return self.member.region.window_address(self.rank)

    @property
    def window_size(self) -> int:
        """Size of each window in bytes."""
        return self.member.region.window_bytes

    def barrier(self, timeout: float | None = None) -> None:
        """Return when all ranks have called it; see `rankwise.collectives.barrier`."""
        self.member.barrier(timeout)

    def destroy(self) -> None:
        """Leave at once: memory that others still use stays theirs. A second call does nothing."""
        self._destroyed = True
        if self._watch is not None:
            self._watch.close()
        if self._member is not None:
            self._member.close()
        self._close_channels()
        if self._region is not None and self._owns_region:
            self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _check_usable(self) -> None:
        if self._destroyed:
            raise LocalProtocolError(f"the communicator of rank {self.rank} is destroyed")

    def _close_channels(self) -> None:
        for channel in (*self._channels.values(), *([self._host] if self._host else ())):
            channel.close()
        self._channels.clear()
        self._host = None

    def _meet(self, address: bytes, deadline: Instant) -> None:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as point:
                point.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                try:
                    point.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    self._receive_all(point, deadline)
                    return
                if self._come_to(point, address, deadline):
                    return

    def _come_to(self, point: socket.socket, address: bytes, deadline: Instant) -> bool:
        """Tell the host that this rank has come; False if it is not there any more."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._host = ours
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            try:
                point.connect(address)
                _send(point, RankHello(self.rank, self.size), deadline, theirs.fileno())
            except ConnectionRefusedError:
                ours.close()
                self._host = None
                return False
            except TimeoutError:
                raise self._late("meeting the other ranks") from None
        welcome = self._read_from_host(deadline, "meeting the other ranks")
        if not isinstance(welcome, WorldWelcome):
            raise RemoteProtocolError(f"expected to be welcome, but got {welcome}")
        self._pids = welcome.pids
        return True

    def _receive_all(self, point: socket.socket, deadline: Instant) -> None:
        """Be the host: wait for all ranks, then welcome them."""
        pids = {self.rank: os.getpid()}
        try:
            while len(pids) < self.size:
                self._wait_for_word([point], deadline, pids)
                hello, fd, pid = _receive(point, deadline)
                if hello is None:
                    continue
                channel = socket.socket(fileno=fd) if fd is not None else None
                if not isinstance(hello, RankHello) or channel is None:
                    raise RemoteProtocolError(f"process {pid} says {hello}, expected a hello")
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                # Refused or not, it is told whether all have joined.
                key = hello.rank if hello.rank not in pids else -1 - len(self._channels)
                self._channels[key] = channel
                self._check_hello(hello, pid, pids)
                pids[hello.rank] = pid
        except RankwiseError as error:
            self._refuse_all(error)
            raise
        self._pids = tuple(pids[rank] for rank in range(self.size))
        for rank in sorted(self._channels):
            self._tell(rank, WorldWelcome(self._pids), deadline)

    def _check_hello(self, hello: RankHello, pid: int, pids: dict[int, int]) -> None:
        if hello.count != self.size:
            raise TreeValueError(
                f"process {pid} is rank {hello.rank} of {hello.count}, but process {os.getpid()} "
                f"is rank {self.rank} of {self.size}: they meet at the same path"
            )
        if hello.rank in pids:
            raise TreeValueError(
                f"rank {hello.rank} is claimed by process {pids[hello.rank]} and by process {pid}"
            )

    def _agree_on_windows(self, wish: Windows, deadline: Instant) -> WindowRegion:
        if self._member_in_process is not None:
            return self._member_in_process.agree(wish.size, wish.signals)
        if self._host is not None:
            # If the host has gone, what it said before is still to be read.
            with suppress(BrokenPipeError):
                _send(self._host, wish, deadline)
            granted = self._read_from_host(deadline, "allocating windows")
            assert isinstance(granted, WindowRegion), "the descriptor came along"
            return granted
        try:
            wishes = self._read_wishes(wish, deadline)
            if len(set(wishes.values())) > 1:
                raise different_windows(
                    {rank: (each.size, each.signals) for rank, each in wishes.items()}
                )
            region = WindowRegion.create("comm", self.size, wish.size, signal_count=wish.signals)
        except RankwiseError as error:
            self._refuse_all(error)
            raise
        assert region.fd is not None, "it was just made"
        for rank in sorted(self._channels):
            self._tell(rank, WindowsGranted(), deadline, region.fd)
        return region

    def _read_wishes(self, wish: Windows, deadline: Instant) -> dict[int, Windows]:
        wishes = {self.rank: wish}
        while len(wishes) < self.size:
            waiting = [self._channels[rank] for rank in self._channels if rank not in wishes]
            for channel in self._wait_for_word(waiting, deadline, wishes):
                rank = next(rank for rank, c in self._channels.items() if c is channel)
                message, _, _ = _receive(channel, deadline)
                if message is None:
                    raise PeerDied(f"rank {rank} is gone")
                if not isinstance(message, Windows):
                    raise RemoteProtocolError(f"rank {rank} says {message}, expected a size")
                wishes[rank] = message
        return wishes

    def _wait_for_word(
        self, expected: list[socket.socket], deadline: Instant, present: Iterable[int]
    ) -> list[socket.socket]:
        """Wait for any of `expected`; raise when one that had come goes, or time is over."""
        wait = select.poll()
        channels = {channel.fileno(): rank for rank, channel in self._channels.items()}
        wanted = {channel.fileno(): channel for channel in expected}
        for fd in {**channels, **wanted}:
            wait.register(fd, select.POLLIN if fd in wanted else 0)
        events = wait.poll(max(0.0, between(_now(), deadline) / (SECOND / 1000)))
        readable = [wanted[fd] for fd, event in events if fd in wanted and event & select.POLLIN]
        if readable:
            return readable
        for fd, _ in events:
            raise PeerDied(f"rank {channels[fd]} joined the communicator, and has ended")
        missing = ranks_in_words(set(range(self.size)).difference(present))
        raise CollectiveTimeout(
            f"{missing} did not join the communicator of {self.size} ranks within "
            f"{format_duration(self._timeout)}"
        )

    def _read_from_host(self, deadline: Instant, what: str) -> "Message | WindowRegion":
        assert self._host is not None, "only ranks other than the host read from it"
        try:
            message, fd, pid = _receive(self._host, deadline)
        except TimeoutError:
            raise self._late(what) from None
        if isinstance(message, WindowsRefused):
            raise _REFUSALS.get(message.kind, CollectiveError)(message.message)
        if message is None:
            raise PeerDied(f"{what}: the rank that hosts the communicator has ended")
        if isinstance(message, WindowsGranted):
            if fd is None:
                raise TreeValueError(
                    f"{what}: the windows of process {pid} could not be handed over",
                    hint="raise the limit of open files (ulimit -n)",
                )
            return WindowRegion.attach(fd)
        return message

    def _late(self, what: str) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{what} took rank {self.rank} longer than {format_duration(self._timeout)}"
        )

    def _tell(self, rank: int, message: Message, deadline: Instant, fd: int | None = None) -> None:
        try:
            _send(self._channels[rank], message, deadline, fd)
        except (BrokenPipeError, ConnectionResetError):
            # It has died; the next wait for it finds out, and can say what for.
            return

    def _refuse_all(self, error: RankwiseError) -> None:
        refusal = WindowsRefused(type(error).__name__, error.message)
        for rank in sorted(self._channels):
            self._tell(rank, refusal, after(_now(), Duration(SECOND)))


def _socket_address(path: str | os.PathLike[str]) -> bytes:
    """The abstract address that belongs to a path, and to this user."""
    whole = os.path.realpath(path)
    digest = hashlib.blake2b(f"{os.getuid()}:{whole}".encode(), digest_size=16).hexdigest()
    return f"\0rankwise-comm-{digest}".encode()


def _now() -> Instant:
    return Instant(time.monotonic_ns())


def _send(
    channel: socket.socket, message: Message, deadline: Instant, fd: int | None = None
) -> None:
    channel.settimeout(max(1e-9, between(_now(), deadline) / SECOND))
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FDS.pack(fd))]
    channel.sendmsg([_encode(message)], rights)


def _receive(channel: socket.socket, deadline: Instant) -> tuple[Message | None, int | None, int]:
    """A message, the descriptor that came along, and the sender's process.

    None instead of a message at the end of a channel, and for what another user has sent.
    """
    channel.settimeout(max(1e-9, between(_now(), deadline) / SECOND))
    room = socket.CMSG_SPACE(_FDS.size) + socket.CMSG_SPACE(_CREDENTIALS.size)
    # The kernel tells once that the other side went without reading; what it had said comes after.
    with suppress(ConnectionResetError):
        return _read(channel.recvmsg(_MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC))
    return _read(channel.recvmsg(_MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC))


def _read(
    received: tuple[bytes, list[tuple[int, int, bytes]], int, Any],
) -> tuple[Message | None, int | None, int]:
    body, attached, _, _ = received
    fd, pid, uid = None, 0, -1
    for _, kind, content in attached:
        if kind == socket.SCM_RIGHTS:
            (fd,) = _FDS.unpack_from(content)
        elif kind == socket.SCM_CREDENTIALS:
            pid, uid, _ = _CREDENTIALS.unpack_from(content)
    if not body or uid != os.getuid():
        if fd is not None:
            os.close(fd)
        return None, None, pid
    try:
        return _decode(body), fd, pid
    except msgspec.DecodeError as error:
        if fd is not None:
            os.close(fd)
        raise RemoteProtocolError(f"process {pid} sent no message of ours: {error}") from error
