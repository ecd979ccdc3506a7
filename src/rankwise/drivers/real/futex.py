"""A 32-bit word in shared memory that processes sleep on, with the kernel as its atomics.

Python has no atomic read-modify-write and no memory fence. Linux has both behind one system call:
`FUTEX_WAKE_OP` adds to a word *atomically*, in the kernel, and wakes sleepers in the same breath.
So a `FutexWord` may have many writers, all of them through `add`, and no count is lost; plain
stores to it are forbidden.

Memory model. A store of a process before `add` is visible to a process that has seen the sum:

- The kernel's addition is a locked instruction on x86-64, and a store-release followed by
  `dmb ish` on aarch64: earlier stores of the caller cannot pass it.
- `look` is a plain aligned 32-bit load, which no machine tears. Under x86's total store order later
  loads stay behind it. aarch64 may satisfy them early, so there `look` is followed by a system call
  with a full barrier in it (`FUTEX_WAKE` on a word without sleepers: the kernel must order the
  caller's stores against its own look for sleepers).
- `sleep` compares and falls asleep under the kernel's lock, so an `add` either comes first and
  makes it return at once, or finds the sleeper and wakes it. The waker's stores are visible to
  the woken.

The futexes are shared ones: the kernel finds sleepers by the page behind the address, so every
process may have the segment mapped elsewhere.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable
from functools import cache, partial
from mmap import mmap
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration, Instant, after

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAKE, _WAKE_OP, _WAIT_BITSET = 1, 5, 9
_ANY_BIT = ctypes.c_long(-1)
_EVERYBODY = 0x7FFFFFFF
_ADD, _SHIFTED_ARGUMENT = 1, 8
# WAKE_OP could also wake the sleepers of the word when its old value equals a constant; -1 is a
# value that means nothing here, and a sleeper woken for nothing looks again and sleeps on.
_NEVER_EQUAL = 0xFFF

_BriefCall = Callable[[], int]
_TimeSpecification = ctypes.c_int64 * 2


def _encode_addition(argument: int, *, shifted: bool = False) -> int:
    operation = _ADD | (_SHIFTED_ARGUMENT if shifted else 0)
    encoded = operation << 28 | argument << 12 | _NEVER_EQUAL
    return encoded - (1 << 32) if encoded >= 1 << 31 else encoded


@cache
def _system_calls() -> tuple[int, Any, Any]:
    """The number of the system call, and two ways to make it: one that sleeps, one that is brief.

    A call that sleeps lets other Python threads run meanwhile (CDLL). One that returns at once
    keeps the interpreter's lock (PyDLL), since getting it back may take milliseconds.
    """
    machine = os.uname().machine
    if machine not in _FUTEX_NUMBERS:
        raise ConfigError(
            f"shared memory between workers needs the futex system call, whose number is "
            f"known here for {' and '.join(_FUTEX_NUMBERS)}; this machine is {machine}"
        )
    sleeping = ctypes.CDLL(None, use_errno=True).syscall
    brief = ctypes.PyDLL(None, use_errno=True).syscall
    sleeping.restype = brief.restype = ctypes.c_long
    return _FUTEX_NUMBERS[machine], sleeping, brief


class FutexWord:
    """One such word, at `offset` in `memory`; it wraps around at 2**32.

    `memory` stays mapped until `release`. The word at `quiet_offset` never has a sleeper; it may be
    shared by all.

    Attributes:
        awaited: tells what its sleeper waits for, to those who show it: simulated ranks.
    """

    RING_BIT = 20
    """`ring` adds 1 << 20: the value changes, the count in the bits below does not."""

    def __init__(self, memory: mmap, offset: int, quiet_offset: int) -> None:
        self._cell = ctypes.c_uint32.from_buffer(memory, offset)
        self._quiet_cell = ctypes.c_uint32.from_buffer(memory, quiet_offset)
        self._address = ctypes.addressof(self._cell)
        self._quiet_address = ctypes.addressof(self._quiet_cell)
        self.awaited: Callable[[], str] | None = None
        self._needs_fence = os.uname().machine != "x86_64"
        self._prepare_calls()

    @property
    def address(self) -> int:
        """Where it is in this process."""
        return self._address

    def _prepare_calls(self) -> None:
        """Convert all arguments now, which otherwise takes as long as the call itself."""
        number, sleeping, brief = _system_calls()
        word, quiet = self._address, self._quiet_address
        one, ring = _encode_addition(1), _encode_addition(self.RING_BIT, shifted=True)

        def prepared(address: int, operation: int, wakes: int, addition: int) -> _BriefCall:
            arguments = (number, address, operation, wakes, 0, word, addition)
            return partial(brief, *map(ctypes.c_long, arguments))

        self._call_add = prepared(quiet, _WAKE_OP, 1, one)
        self._call_add_and_wake = prepared(word, _WAKE_OP, _EVERYBODY, one)
        self._call_ring = prepared(word, _WAKE_OP, _EVERYBODY, ring)
        self._call_wake = prepared(word, _WAKE, _EVERYBODY, 0)
        self._call_fence = prepared(quiet, _WAKE, 1, 0)
        self._call_sleep = partial(sleeping, *map(ctypes.c_long, (number, word, _WAIT_BITSET)))

    @staticmethod
    def now() -> Instant:
        """The present instant on the clock that deadlines of sleeps are on."""
        return Instant(time.monotonic_ns())

    @classmethod
    def deadline_after(cls, patience: Duration) -> Instant:
        """The deadline of a sleep that begins now."""
        return after(cls.now(), patience)

    def look(self) -> int:
        """The value now. Loads that come later see at least what its writers had stored."""
        value = self._cell.value
        self.fence()
        return value

    def fence(self) -> None:
        """Keep the caller's loads and stores on their side of this point."""
        if self._needs_fence:
            self._call_fence()

    def fence_stores(self) -> None:
        """Let others see what was stored before this point before anything is loaded after it.

        No machine promises that by itself, not even x86.
        """
        self._call_fence()

    def add(self) -> None:
        """Add one and wake no sleeper. A full memory barrier."""
        if self._call_add() < 0:
            raise self._refused("FUTEX_WAKE_OP")

    def add_and_wake(self) -> None:
        """Add one and wake all sleepers. A full memory barrier."""
        if self._call_add_and_wake() < 0:
            raise self._refused("FUTEX_WAKE_OP")

    def ring(self) -> None:
        """Change the value above its count and wake all sleepers, so that they look around."""
        if self._call_ring() < 0:
            raise self._refused("FUTEX_WAKE_OP")

    def wake(self) -> None:
        """Wake all sleepers."""
        self._call_wake()

    def sleep(self, seen: int, deadline: Instant) -> None:
        """Sleep while the value is `seen`, until woken, or `deadline`, from `deadline_after`.

        May return early for no reason at all (a signal handler ran, another wake-up): the caller
        looks again, at the word and at the clock.
        """
        # Its own for each sleep: several threads may sleep on one word.
        until = _TimeSpecification(*divmod(deadline, SECOND))
        status = self._call_sleep(ctypes.c_long(seen), ctypes.byref(until), None, _ANY_BIT)
        if status < 0 and ctypes.get_errno() not in (
            errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT
        ):  # fmt: skip
            raise self._refused("FUTEX_WAIT_BITSET")

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped; the word is unusable afterwards."""
        # The views that held the mapping in place go; a stray call would now fault in the kernel,
        # which answers EFAULT, instead of touching memory that belongs to other code.
        del self._cell, self._quiet_cell
        self._address = self._quiet_address = 0
        self._prepare_calls()

    @staticmethod
    def _refused(operation: str) -> OSError:
        code = ctypes.get_errno()
        return OSError(code, f"the kernel refused {operation}: {os.strerror(code)}")
