"""Meetings through a store with torch's methods: gather, barrier, and who is missing.

The store is duck-typed: `set`, `get`, `add`, `wait`, `multi_get`, `timeout`, `set_timeout`. What
such a store raises when it has waited for too long is torch's `DistStoreError`, a `RuntimeError`;
stores of rankwise raise `StoreTimeout`, which is one too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rankwise.base.errors import StoreError

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_NUM_MEMBERS = "/num_members"
_LAST_MEMBER_CHECKIN = "/last_member"
_TRACE = "/TRACE"
_TRACING_GATE = "/TRACING_GATE"
_MAX_TRACE_MISSING_RANKS = 16
_NO_VALUE = "<val_ignored>"


def __getattr__(name: str) -> Any:
    """`DistStoreError`, which torch's own stores raise; torch is imported only on request."""
    if name != "DistStoreError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.distributed import DistStoreError  # noqa: PLC0415  # see above

    return DistStoreError


class StoreTimeout(StoreError, RuntimeError):
    """A key that was waited for did not come in time."""


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Give a store another timeout for a while, in seconds; it gets its own back in any case."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of `<prefix>0` to `<prefix><world_size - 1>`.

    Rank 0 returns when all others have them too: it may own the store.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    last_key = _check_in(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last_key])
    return values


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Hand one's own bytes to all others and receive theirs, in the order of the ranks.

    A prefix serves once: what was written stays in the store.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until `world_size` members have come. A prefix serves once.

    Args:
        store: where they meet.
        world_size: how many come.
        key_prefix: begins the keys of this meeting.
        barrier_timeout: seconds to wait.
        rank: the own number; with it, a timeout's message says who is missing.
        rank_tracing_decoder: from a number to words for it, such as the host's name.
        trace_timeout: seconds that rank 0 looks for the missing ones.

    Raises:
        RuntimeError: a rank did not come in time; torch's stores raise its `DistStoreError`.
    """
    assert rank is not None or rank_tracing_decoder is None, "Tracing requires rank information"
    with store_timeout(store, barrier_timeout):
        last_key = _check_in(store, world_size, key_prefix)
        try:
            store.wait([last_key])
        except RuntimeError as error:
            if rank is None:
                raise
            missing = _missing_ranks(
                store, world_size, key_prefix, rank, rank_tracing_decoder or str, trace_timeout
            )
            if missing is None:
                raise
            raise type(error)(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
                f"(world_size={world_size}, missing_ranks=[{', '.join(missing)}], "
                f"timeout={barrier_timeout})"
            ) from None


def _check_in(store: Any, world_size: int, key_prefix: str) -> str:
    """Come to a meeting without waiting; return the key that the last one to come sets."""
    last_key = key_prefix + _LAST_MEMBER_CHECKIN
    if store.add(key_prefix + _NUM_MEMBERS, 1) == world_size:
        store.set(last_key, _NO_VALUE)
    return last_key


def _missing_ranks(
    store: Any,
    world_size: int,
    key_prefix: str,
    rank: int,
    decode: Callable[[int], str],
    trace_timeout: float,
) -> Iterable[str] | None:
    """The ranks that have not come: rank 0 finds out, the others refer to it; None without it."""
    store.set(f"{key_prefix}{rank}{_TRACE}", _NO_VALUE)
    gate = key_prefix + _TRACING_GATE
    if rank != 0:
        try:
            store.wait([gate])
        except RuntimeError:
            return None
        return [f"[<check rank 0 ({decode(0)}) for missing rank info>]"]
    missing: set[str] = set()
    for other in range(1, world_size):
        if len(missing) >= _MAX_TRACE_MISSING_RANKS:
            break
        # A rank that is not there when the first patience has passed counts as absent.
        patience = timedelta(milliseconds=1) if missing else timedelta(seconds=trace_timeout)
        try:
            store.wait([f"{key_prefix}{other}{_TRACE}"], patience)
        except RuntimeError:
            missing.add(decode(other))
    store.set(gate, _NO_VALUE)
    return missing
