"""The collectives as numpy users see them: arrays in, arrays out, errors that name ranks.

Every operation takes anything that `numpy.asarray` takes, leaves it alone, and returns a new
array; or fills and returns `out` when it is given, which may be the argument itself to work in
place. All ranks call the same operations in the same order, with arrays of equal shape and dtype.

Promises of an operation:

- The result is the same on all ranks, to the bit, and independent of timing (`reductions`).
- It ends. A peer that dies, leaves an operation with an error, or stays away longer than the
  timeout makes it raise `PeerDied`, `CollectiveError` or `CollectiveTimeout`, which name the peer
  and what it was doing last. Ranks that call different things all raise `CollectiveError`.
- After such an error the ranks no longer agree on where they are, so the communicator refuses
  everything from then on. A wrong argument is noticed before anything has happened and breaks
  nothing.

A communicator belongs to the process that made it: in a forked child it refuses everything. It
may be used from any thread, by one at a time.
"""

import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankwise.base.errors import CollectiveError, ConfigError, LocalProtocolError, PeerDied
from rankwise.base.units import SECOND, Duration, duration_from_seconds
from rankwise.collectives.calls import AgreedCall, describe
from rankwise.collectives.ordered_reductions import ReductionName, find_reduction
from rankwise.collectives.transport import Flat, Transport
from rankwise.core.matching import next_number
from rankwise.drivers.real.worker.call_ring import (
    DONE,
    FAILED,
    CallRing,
    RingGroup,
    line_outside,
    stamp_of,
)

Array = NDArray[Any]

DEFAULT_TIMEOUT = Duration(300 * SECOND)
_SECONDS_MAX = 1e9
"""Thirty years: what is longer means "for ever", which an operation must not take."""

_BEGIN_ANEW = (
    "the ranks no longer agree on where they are: end them all and start again; a tree of workers "
    "does so with close() and init()"
)

_alive: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _disown_in_child() -> None:
    for communicator in _alive:
        communicator.refuse("this process was forked from the one that it belongs to")


os.register_at_fork(after_in_child=_disown_in_child)


def patience_from_seconds(seconds: object, name: str) -> Duration:
    """Convert a user's timeout; `name` is what the user knows it as.

    Raises:
        ConfigError: it is not a number of seconds after which something can end.
    """
    try:
        number = float(seconds)  # type: ignore[arg-type]  # that is what is found out
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < _SECONDS_MAX:
        raise ConfigError(
            f"{name} is {seconds!r}, expected a number of seconds, more than 0 and less than 1e9"
        )
    return duration_from_seconds(number)


class Communicator:
    """The ranks of one world, as seen from one of them; a context manager that closes itself."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: Duration = DEFAULT_TIMEOUT,
        ring: CallRing | None = None,
    ) -> None:
        """Communicate over `transport`, which now belongs to this object.

        `timeout` is how long an operation waits for a peer that does not come. In `ring`, the agent
        can read what this rank is doing.
        """
        self._transport = transport
        self._timeout = timeout
        self._rank = transport.rank
        self._size = transport.size
        self._number = transport.begun
        """That of the latest operation: the transport counts them."""
        self._busy = threading.Lock()
        self._refusal = ""
        self._has_given_up = False
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._entries = None
        if ring is not None:
            self._entries = Entries(ring, range(transport.size))
        _alive.add(self)

    @property
    def rank(self) -> int:
        """This process's number among all ranks, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def all_reduce(
        self, array: ArrayLike, op: ReductionName = "sum", out: Array | None = None
    ) -> Array:
        """Combine the arrays of all ranks element by element; every rank gets the result.

        `op` is sum, mean, max, min or prod, computed in the arrays' own dtype: integers wrap
        around, booleans are or-ed by sum and and-ed by prod, mean is for floats only.
        """
        source = np.asarray(array)
        reduction = find_reduction("all_reduce", op, source.dtype)
        call = describe("all_reduce", source.dtype, source.shape, op=op)
        return self._fill(
            call, source, source.shape, out,
            lambda flat, result: self._transport.all_reduce(flat, result, reduction),
            aligned=True,
        )  # fmt: skip

    def reduce_scatter(
        self, array: ArrayLike, op: ReductionName = "sum", out: Array | None = None
    ) -> Array:
        """Combine the arrays of all ranks, and give to rank r the r-th row of the result.

        `array` has one row per rank: its shape is `(size, …)`, and the result's is what follows.
        `op` is as for `all_reduce`.
        """
        source = np.asarray(array)
        self._check_rows("reduce_scatter", source)
        reduction = find_reduction("reduce_scatter", op, source.dtype)
        call = describe("reduce_scatter", source.dtype, source.shape, op=op)
        return self._fill(
            call, source, source.shape[1:], out,
            lambda flat, result: self._transport.reduce_scatter(flat, result, reduction),
        )  # fmt: skip

    def all_gather(self, array: ArrayLike, out: Array | None = None) -> Array:
        """Stack the arrays of all ranks: row r of the result, of shape `(size, …)`, is rank r's."""
        source = np.asarray(array)
        self._check_copyable("all_gather", source)
        call = describe("all_gather", source.dtype, source.shape)
        return self._fill(
            call, source, (self._size, *source.shape), out, self._transport.all_gather
        )

    def all_to_all(self, array: ArrayLike, out: Array | None = None) -> Array:
        """Give row r of the array to rank r; row r of the result is what rank r gave to this one.

        `array` has one row per rank: its shape is `(size, …)`, and the result's is the same.
        """
        source = np.asarray(array)
        self._check_copyable("all_to_all", source)
        self._check_rows("all_to_all", source)
        call = describe("all_to_all", source.dtype, source.shape)
        return self._fill(call, source, source.shape, out, self._transport.all_to_all)

    def broadcast(self, array: ArrayLike, root: int = 0, out: Array | None = None) -> Array:
        """Return the array of rank `root` on every rank.

        The others' `array` says what they expect, by its shape and dtype; its values do not
        matter. `broadcast(x, out=x)` receives in place.
        """
        source = np.asarray(array)
        self._check_copyable("broadcast", source)
        root = self._checked_root(root)
        call = describe("broadcast", source.dtype, source.shape, root=root)
        return self._fill(
            call, source, source.shape, out,
            lambda flat, result: self._transport.broadcast(flat, result, root),
            aligned=True,
        )  # fmt: skip

    def barrier(self, timeout: float | None = None) -> None:
        """Return when all ranks have called it.

        `timeout` in seconds replaces the communicator's own, this time.
        """
        patience = self._timeout
        if timeout is not None:
            patience = patience_from_seconds(timeout, "barrier: timeout")
        self._run(describe("barrier"), self._transport.barrier, patience)

    def close(self) -> None:
        """Let go of the transport. Peers that wait for this rank are not told."""
        if os.getpid() == self._owner_pid and not self._is_closed:
            self._transport.close()
            self._is_closed = True
            self.refuse("it is closed")

    def refuse(self, reason: str) -> None:
        """Make every further operation raise, for this reason; the first reason stays."""
        self._refusal = self._refusal or reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self._rank} of {self._size}>"

    def _fill(
        self,
        call: AgreedCall,
        source: Array,
        shape: tuple[int, ...],
        out: Array | None,
        move: Callable[[Flat, Flat], None],
        *,
        aligned: bool = False,
    ) -> Array:
        """Run `move` from the flat source to the flat result, and return the result.

        `aligned` says that element i of the result depends on element i of the sources only, so
        that a result which is the source needs no copy.
        """
        flat_source = source.reshape(-1)
        if out is None:
            result = np.empty(shape, source.dtype)
            flat_result = result.reshape(-1)
            self._run(call, lambda: move(flat_source, flat_result), self._timeout)
            return result
        self._check_out(call, out, shape, source.dtype)
        contiguous = out.flags.c_contiguous
        flat_result = out.reshape(-1) if contiguous else np.empty(out.size, out.dtype)
        in_place = aligned and out is source  # told apart first, since looking takes microseconds
        if not in_place and np.may_share_memory(flat_source, flat_result):
            same = flat_source.ctypes.data == flat_result.ctypes.data
            if not (aligned and same):
                flat_source = flat_source.copy()
        self._run(call, lambda: move(flat_source, flat_result), self._timeout)
        if not contiguous:
            out[...] = flat_result.reshape(shape)
        return out

    def _run(self, call: AgreedCall, operation: Callable[[], None], patience: Duration) -> None:
        if not self._busy.acquire(blocking=False):
            raise LocalProtocolError(
                f"rank {self._rank} called {call.numbered(next_number(self._number))} while "
                f"another thread is in operation #{self._number}",
                hint="use a communicator from one thread at a time",
            )
        try:
            if self._refusal:
                raise CollectiveError(
                    f"rank {self._rank} cannot do {call.numbered(next_number(self._number))}: "
                    f"{self._refusal}",
                    hint=_BEGIN_ANEW if self._has_given_up else None,
                )
            self._number = next_number(self._transport.begun)
            entry = -1 if self._entries is None else self._entries.begin(call)
            stage = FAILED
            try:
                self._transport.begin(call, patience)
                operation()
                stage = DONE
            except BaseException as error:
                self._give_up(call, error)
                raise
            finally:
                if self._entries is not None:
                    self._entries.end(entry, stage)
        finally:
            self._busy.release()

    def _give_up(self, call: AgreedCall, error: BaseException) -> None:
        words = f"{type(error).__name__} in {call.numbered(self._number)}"
        self.refuse(f"it is of no use after {words}")
        self._has_given_up = True
        if not isinstance(error, CollectiveError):
            words += f": {error}"
        self._transport.withdraw(words, lost_peer=isinstance(error, PeerDied))

    def _checked_root(self, root: object) -> int:
        try:
            number = operator.index(root)  # type: ignore[arg-type]  # that is what is found out
        except TypeError:
            number = -1
        if not 0 <= number < self._size:
            raise ConfigError(
                f"broadcast: root is {root!r}, expected a whole number, 0 to {self._size - 1}"
            )
        return number

    def _check_rows(self, name: str, source: Array) -> None:
        if source.ndim == 0 or source.shape[0] != self._size:
            raise ConfigError(
                f"{name}: the array has shape {source.shape}, expected "
                f"({self._size}, …): one row per rank",
                hint=f"array.reshape({self._size}, -1, ...) makes rows of equal parts",
            )

    @staticmethod
    def _check_copyable(name: str, source: Array) -> None:
        if source.dtype.hasobject:
            raise ConfigError(
                f"{name}: arrays of dtype {source.dtype} hold Python objects, which cannot be sent"
            )

    def _check_out(
        self, call: AgreedCall, out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        what = call.numbered(next_number(self._number))
        if not isinstance(out, np.ndarray):
            raise ConfigError(f"{what}: out is a {type(out).__name__}, expected a numpy array")
        if out.shape != shape or out.dtype != dtype:
            raise ConfigError(
                f"{what}: out has shape {out.shape} and dtype {out.dtype}, "
                f"expected {shape} and {dtype}"
            )
        if not out.flags.writeable:
            raise ConfigError(f"{what}: out cannot be written")


KEY = "rankwise.collectives"
_HERE = (__file__.removesuffix("communicator.py"),)
_KNOWN_MAX = 1024


class Entries:
    """Enters the operations of one communicator, which all ranks share."""

    def __init__(self, ring: CallRing, ranks: Iterable[int]) -> None:
        members = tuple(ranks)
        self._ring = ring
        self._group: RingGroup | None = ring.add_group(KEY, "", len(members), members)
        self._known: dict[tuple[AgreedCall, str, int], bytes] = {}

    def begin(self, call: AgreedCall) -> int:
        """Enter an operation; return where, for `end`."""
        line = line_outside(2, _HERE)
        key = (call, *line)
        stamp = self._known.get(key)
        if stamp is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            stamp = stamp_of(self._group, call.signature.checksum, call.fields, line)
            self._known[key] = stamp
        return self._ring.begin(self._group, stamp)

    def end(self, entry: int, stage: int) -> None:
        """Enter how an operation has ended."""
        self._ring.end(entry, stage)
