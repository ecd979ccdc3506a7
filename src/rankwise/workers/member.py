"""A rank of a domain: its own window, the windows of its peers, and how they tell each other.

    m = Member.join(region, rank, spec)
    m["x"]                                      # this rank's buffer, a numpy array
    m.peer(2)["x"]                              # rank 2's, the same memory, nothing copied
    m.put("x", row, to=2, at=3, signal="go")    # copy, then signal
    m.wait("go", ge=1, timeout=5)               # sleep until it has come
    m.barrier(timeout=5)                        # and every operation of rankwise.collectives

One-sided operations need nothing from the peer: `put` and `get` are copies by this rank alone.
Order makes them safe: a rank that has seen a signal, or has left a barrier, sees everything that
was put before it. Nothing else orders accesses to a window.

A wait ends. It returns when the signal is as wanted; raises `PeerDied` when a rank of the domain
has died (unless it had left before) or all others have left; raises `CollectiveTimeout` at its
deadline, and names those of whom nothing has come. It sleeps in between and never spins.

After a collective has failed, its ranks may stand at different places. One-sided operations can
still be used after a wait or a barrier has failed: what survivors hold in their windows is there.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from mmap import mmap
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankwise.base.errors import CollectiveTimeout, LocalProtocolError, PeerDied, TreeValueError
from rankwise.base.units import Duration, format_duration
from rankwise.base.wording import ranks_in_words
from rankwise.collectives.communicator import DEFAULT_TIMEOUT, Communicator, patience_from_seconds
from rankwise.drivers.real.windows.region import Presence, WindowRegion
from rankwise.drivers.real.windows.shared_signals import MODULUS, SignalBoard
from rankwise.workers.domains import DomainSpec
from rankwise.workers.errors import UnknownName
from rankwise.workers.window_transport import WindowTransport

Array = NDArray[Any]
_LEFT = bytes([Presence.LEFT])
SignalOp = Literal["add", "set"]
SignalGiven = str | tuple[str, int] | tuple[str, int, SignalOp]


class Window(Mapping[str, Array]):
    """One rank's window: its buffers as numpy arrays, zero copy."""

    def __init__(self, region: WindowRegion, rank: int, spec: DomainSpec) -> None:
        """Make the arrays."""
        start = region.window_offset(rank)
        self._name = spec.name
        self._arrays: dict[str, Array] = {
            buffer.name: np.frombuffer(
                region.memory, buffer.dtype, math.prod(buffer.shape), start + buffer.offset
            ).reshape(buffer.shape)
            if buffer.nbytes
            else np.empty(buffer.shape, buffer.dtype)
            for buffer in spec.buffers
        }
        self.rank = rank
        self.whole: NDArray[np.uint8] = (
            np.frombuffer(region.memory, np.uint8, region.window_bytes, start)
            if region.window_bytes
            else np.empty(0, np.uint8)
        )
        """The whole window as bytes, buffers or not."""

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            known = ", ".join(map(repr, self._arrays)) or "none"
            raise UnknownName(f"domain {self._name!r} has no buffer {name!r}; it has {known}")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<Window of rank {self.rank} of {self._name!r}: {', '.join(self._arrays)}>"


class Member(Communicator):
    """A rank of a domain, from when it joins until it leaves; a context manager that leaves.

    Belongs to the process that has joined: a forked child is refused. Signals and waits may come
    from any thread; collectives, `barrier` among them, from one thread at a time.
    """

    def __init__(self, region: WindowRegion, rank: int, spec: DomainSpec) -> None:
        """Use `join`, which checks that both fit together."""
        super().__init__(WindowTransport(region, rank, os.getpid()), timeout=spec.timeout)
        self.name = spec.name
        self.region = region
        self._windows = [Window(region, r, spec) for r in range(region.rank_count)]
        # What the common case of a put needs, without a call: rank 2's "x" is [2]["x"].
        self._arrays = {window.rank: dict(window) for window in self._windows}
        self._signals = {name: index for index, name in enumerate(spec.signals)}
        self._board = SignalBoard(
            region.signal_cells, region.doorbells, rank, region.layout.signal_count
        )
        self._doorbell = region.doorbells[rank]
        self._memory = region.memory
        deaths = region.layout.segment.deaths
        self._death_bytes = [deaths + 4 * r for r in range(region.rank_count)]
        self._deaths = slice(deaths, deaths + 4 * region.rank_count)
        self._nobody_dead = bytes(4 * region.rank_count)
        presences = region.layout.presences
        self._presences = slice(presences, presences + 4 * region.rank_count)
        self._gone = ""
        self._leaving = threading.Lock()
        region.set_presence(rank, Presence.JOINED)

    @classmethod
    def join(cls, region: WindowRegion, rank: int, spec: DomainSpec | None = None) -> Self:
        """Become a rank of the domain that lies in `region`, which stays the caller's.

        Without a `spec` the windows have no buffers, only bytes (`window`), and no signals.

        Raises:
            ConfigError: the rank does not exist, or spec and region do not fit together.
            LocalProtocolError: the rank is taken already.
        """
        if spec is None:
            spec = DomainSpec(
                name=region.name,
                ranks=tuple(range(region.rank_count)),
                window_bytes=region.window_bytes,
                timeout=DEFAULT_TIMEOUT,
            )
        region.window_offset(rank)  # refuses a rank that does not exist
        found = (region.rank_count, region.window_bytes)
        if found != (spec.size, spec.window_bytes):
            raise TreeValueError(
                f"domain {spec.name!r} has {spec.size} ranks and windows of {spec.window_bytes} "
                f"bytes, but the region {region.name!r} has {found[0]} and {found[1]}"
            )
        if len(spec.signals) > region.layout.signal_count:
            raise TreeValueError(
                f"domain {spec.name!r} has {len(spec.signals)} signals, but the region "
                f"{region.name!r} has room for {region.layout.signal_count}"
            )
        return cls(region, rank, spec)

    @classmethod
    def join_at(cls, memory: mmap, spec: DomainSpec, rank: int) -> Self:
        """Become a rank of the domain that another process has placed in memory that both share.

        Raises:
            ConfigError: there is no such region, or it is another's.
            LocalProtocolError: the rank is taken already.
        """
        return cls.join(WindowRegion.find(memory, spec.offset), rank, spec)

    @property
    def window(self) -> Window:
        """This rank's own window."""
        return self.peer(self.rank)

    def __getitem__(self, name: str) -> Array:
        """This rank's buffer of that name."""
        return self.peer(self.rank)[name]

    def peer(self, rank: int) -> Window:
        """A rank's window, to read and to write in place.

        When its contents may be touched is between the ranks: signals and barriers order accesses.
        """
        self._check_usable()
        return self._windows[self._checked_rank(rank)]

    def put(
        self,
        name: str,
        source: ArrayLike,
        to: int,
        at: int = 0,
        signal: SignalGiven | None = None,
    ) -> None:
        """Copy `source` into rows `at`, `at + 1`, … of a peer's buffer; then signal, if told to.

        Args:
            name: the buffer.
            source: rows of it: its dtype and its shape, but for the first dimension.
            to: whose buffer.
            at: the first row.
            signal: a name, or name and value, which is added; or name, value and "set".

        Raises:
            ConfigError: a name, rank, dtype, shape or place is wrong; nothing was copied.
            PeerDied: the peer has ended.
        """
        array = source if type(source) is np.ndarray else np.asarray(source)
        whole = self._arrays[to].get(name) if to in self._arrays else None
        if whole is None or at or array.shape != whole.shape or array.dtype != whole.dtype:
            whole = self._rows(name, to, at, array.shape, array.dtype)
        given = None if signal is None else self._checked_signal(signal)
        self._check_usable()
        self._check_alive(to)
        np.copyto(whole, array)
        if given is not None:
            self._give(to, *given)

    def get(
        self,
        name: str,
        source: int,
        at: int = 0,
        count: int | None = None,
        out: Array | None = None,
    ) -> Array:
        """Copy rows `at`, `at + 1`, … of the buffer of rank `source`.

        Args:
            name: the buffer.
            source: whose buffer.
            at: the first row.
            count: how many rows; all that follow, if neither this nor `out` says it.
            out: an array to fill and return, of the buffer's dtype and its shape, but for the
                first dimension.

        Raises:
            ConfigError: a name, rank, dtype, shape or place is wrong; nothing was copied.
        """
        whole = self.peer(source)[name]
        if out is None:
            rows = whole.shape[:1] if count is None else (count,)
            if count is None and whole.ndim:
                rows = (max(whole.shape[0] - at, 0),)
            out = np.empty((*rows, *whole.shape[1:]), whole.dtype)
        elif not isinstance(out, np.ndarray):
            raise TreeValueError(f"out is a {type(out).__name__}, expected a numpy array")
        elif not out.flags.writeable:
            raise TreeValueError("out cannot be written")
        np.copyto(out, self._rows(name, source, at, out.shape, out.dtype))
        return out

    def signal(self, name: str, to: int, value: int = 1, op: SignalOp = "add") -> None:
        """Raise a signal of a peer, which sees everything that this rank has put before.

        "add" never loses a count, even if others add at the same time. "set" makes it
        `value`; if another rank adds at the same moment, that counts either on top or not at all.

        Raises:
            ConfigError: a name, rank, value or op is wrong.
            PeerDied: the peer has ended.
        """
        index, value = self._signal_index(name), self._checked_value(name, value)
        self._check_op(name, op)
        self._checked_rank(to)
        self._check_usable()
        self._check_alive(to)
        self._give(to, index, value, op)

    def value(self, name: str) -> int:
        """What a signal of this rank is now."""
        self._check_usable()
        return self._board.value(self._signal_index(name))

    def wait(
        self,
        name: str,
        ge: int | None = None,
        eq: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Sleep until a signal of this rank is at least `ge`, or exactly `eq`; return its value.

        Without either, until it is at least 1. `timeout` is in seconds; the domain's own, if it is
        not given.

        Raises:
            PeerDied: a rank of the domain has died, or all others have left, and the signal is not
                as wanted.
            CollectiveTimeout: the time is over; the message says of whom nothing has come.
            ConfigError: an argument is wrong.
        """
        self._check_usable()
        signal = self._signal_index(name)
        if ge is not None and eq is not None:
            raise TreeValueError(
                f"wait for {name!r}: both ge={ge} and eq={eq}, expected one of them"
            )
        wanted = self._checked_value(name, eq if eq is not None else 1 if ge is None else ge)
        patience = self._timeout
        if timeout is not None:
            patience = patience_from_seconds(timeout, f"wait for {name!r}: timeout")
        is_reached = wanted.__eq__ if eq is not None else wanted.__le__

        def awaited() -> str:
            return f"signal {name!r} {'==' if eq is not None else '>='} {wanted}"

        def describe() -> str:
            return f"wait for {awaited()}"

        self._doorbell.awaited = lambda: f"{awaited()} of {self.name!r}: {self._standing(signal)}"
        value = self._board.wait(
            signal,
            is_reached,
            partial(self._look_for_the_lost, describe),
            self._doorbell.now,
            self._doorbell.deadline_after(patience),
        )
        if value is None:
            raise self._late(describe(), signal, patience)
        return value

    def close(self) -> None:
        """Leave the domain. From now on only collectives fail without this rank."""
        with self._leaving:
            if self._gone or os.getpid() != self._owner_pid:
                return
            self._gone = "it has left"
        self.region.set_presence(self.rank, Presence.LEFT)
        super().close()
        # The owner of the memory may want to unmap it; arrays that the user has keep it mapped.
        self._windows.clear()
        self._arrays.clear()

    def refuse(self, reason: str) -> None:
        """Make every further collective raise; in a forked child, everything."""
        super().refuse(reason)
        if os.getpid() != self._owner_pid:
            self._gone = self._gone or reason

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<Member rank {self.rank} of {self.size} of {self.name!r}>"

    def _give(self, to: int, signal: int, value: int, op: SignalOp) -> None:
        if op == "add":
            self._board.add(signal, to, value)
        else:
            self._board.set(signal, to, value)

    def _rows(
        self, name: str, rank: int, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:
        """Rows of a rank's buffer that an array of this shape and dtype can be copied to."""
        whole = self.peer(rank)[name]
        if dtype != whole.dtype:
            raise TreeValueError(
                f"the array has dtype {dtype}, but buffer {name!r} of {self.name!r} {whole.dtype}",
                hint=f"convert it with astype({whole.dtype.name!r})",
            )
        if not whole.ndim:
            if shape or at:
                raise TreeValueError(
                    f"the array has shape {shape} at {at}, but buffer {name!r} of {self.name!r} "
                    f"has shape () and begins at 0"
                )
            return whole
        if not shape or shape[1:] != whole.shape[1:]:
            rest = "".join(f", {size}" for size in whole.shape[1:]) or ","
            raise TreeValueError(
                f"the array has shape {shape}, but buffer {name!r} of {self.name!r} has shape "
                f"{whole.shape}: expected (rows{rest})"
            )
        end = at + shape[0]
        if not 0 <= at <= end <= whole.shape[0]:
            raise TreeValueError(
                f"{shape[0]} rows from row {at} on do not lie in buffer {name!r} of "
                f"{self.name!r}, which has {whole.shape[0]}"
            )
        return whole[at:end]

    def _checked_rank(self, rank: Any) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self._size:
            raise TreeValueError(
                f"rank is {rank!r}, expected 0 to {self._size - 1}: domain {self.name!r} has "
                f"{self._size} ranks"
            )
        return rank

    def _signal_index(self, name: str) -> int:
        index = self._signals.get(name)
        if index is None:
            known = ", ".join(map(repr, self._signals)) or "none"
            raise UnknownName(f"domain {self.name!r} has no signal {name!r}; it has {known}")
        return index

    def _checked_signal(self, given: SignalGiven) -> tuple[int, int, SignalOp]:
        name: Any
        value: Any
        op: Any = "add"
        match given:
            case str():
                return self._signal_index(given), 1, "add"
            case (name, value):
                pass
            case (name, value, op):
                pass
            case _:
                raise TreeValueError(
                    f"signal is {given!r}, expected a name, (name, value) or (name, value, op)"
                )
        self._check_op(name, op)
        return self._signal_index(name), self._checked_value(name, value), op

    @staticmethod
    def _check_op(name: str, op: str) -> None:
        if op not in {"add", "set"}:
            raise TreeValueError(f"signal {name!r}: op is {op!r}, expected 'add' or 'set'")

    @staticmethod
    def _checked_value(name: str, value: object) -> int:
        if isinstance(value, np.integer):
            value = int(value)
        if not isinstance(value, int) or not 0 <= value < MODULUS:
            raise TreeValueError(
                f"signal {name!r}: the value is {value!r}, expected a whole number, "
                f"0 to {MODULUS - 1}"
            )
        return value

    def _check_usable(self) -> None:
        if self._gone:
            raise LocalProtocolError(
                f"rank {self.rank} cannot use domain {self.name!r}: {self._gone}"
            )

    def _check_alive(self, rank: int) -> None:
        if self._memory[self._death_bytes[rank]]:
            raise PeerDied(f"rank {rank} of {self.name!r} {self.region.fate_of(rank)}")

    def _look_for_the_lost(self, describe: Callable[[], str]) -> None:
        """Raise if the wait that is described cannot end; called before each sleep."""
        self._check_usable()
        presences = self._memory[self._presences]
        if self._memory[self._deaths] == self._nobody_dead and _LEFT not in presences:
            return
        dead = [
            rank
            for rank in range(self._size)
            if self.region.is_dead(rank) and presences[4 * rank] != Presence.LEFT
        ]
        told = f"{describe()} cannot end on rank {self.rank} of {self.name!r}"
        if dead:
            fates = "; ".join(f"rank {rank} {self.region.fate_of(rank)}" for rank in dead)
            raise PeerDied(f"{told}: {fates}")
        others = [presences[4 * rank] for rank in range(self._size) if rank != self.rank]
        if others and set(others) == {Presence.LEFT}:
            raise PeerDied(f"{told}: all others have left")

    def _late(self, what: str, signal: int, patience: Duration) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{what} timed out on rank {self.rank} of {self.name!r} after "
            f"{format_duration(patience)}: {self._standing(signal)}"
        )

    def _standing(self, signal: int) -> str:
        """How far a signal has come, and who has not added to it."""
        added = self._board.added(signal)
        silent = [rank for rank in range(self._size) if not added[rank] and rank != self.rank]
        nothing = f"; nothing was added by {ranks_in_words(silent)}" if silent else ""
        absent = [r for r in silent if self.region.presence(r) is Presence.ABSENT]
        missing = f"; {ranks_in_words(absent)} never joined" if absent else ""
        return f"it is {self._board.value(signal)}{nothing}{missing}"
