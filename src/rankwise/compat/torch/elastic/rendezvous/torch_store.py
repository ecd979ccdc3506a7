"""A store of rankwise with the methods of torch's stores, for the nodes of one round.

Values are bytes; a text is encoded. A key is waited for with a watch, not asked for again and
again. Counters are texts of digits, as torch's are. Everything lies under one prefix, and stays
until the store forgets it.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rankwise.base.keys import ABSENT, Committed, Entry, Put, Transaction, Unchanged
from rankwise.base.units import SECOND, Duration
from rankwise.compat.torch.elastic.utils.store import StoreTimeout
from rankwise.ports.store import Store

DEFAULT_TIMEOUT = timedelta(seconds=300)


class TorchStore:
    """`set`, `get`, `add`, `wait` and the others over keys that begin with `prefix`."""

    def __init__(self, store: Store, prefix: str, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._store = store
        self._prefix = prefix
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait unless they are told."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Let `get` and `wait` wait for so long."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys at once."""
        puts = tuple(
            Put(self._prefix + key, _bytes(value)) for key, value in zip(keys, values, strict=True)
        )
        self._store.commit(Transaction(puts=puts))

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it has one.

        Raises:
            StoreTimeout: it has had none for the whole timeout; it is a RuntimeError.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, as soon as all have one; raises as `get` does."""
        self.wait(keys)
        return [self._known(key) for key in keys]

    def add(self, key: str, num: int) -> int:
        """Add to a counter, which begins at 0; return what it is then."""
        while True:
            entry = self._entry(key)
            count = num + (0 if entry is None else int(entry.value))
            if self._replace(key, entry, str(count).encode()):
                return count

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`, or if there is none and none is expected.

        Returns:
            The value of the key now; `expected`, as torch does, if there is none but one is
            expected.
        """
        while True:
            entry = self._entry(key)
            if entry is None and expected:
                return _bytes(expected)
            if entry is not None and entry.value != _bytes(expected):
                return entry.value
            if self._replace(key, entry, _bytes(desired)):
                return _bytes(desired)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            StoreTimeout: one has had none for the whole timeout; it is a RuntimeError.
        """
        patience = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + patience.total_seconds()
        missing = dict.fromkeys(keys)
        while missing:
            key = next(iter(missing))
            if not self._wait_for(key, deadline):
                raise StoreTimeout(
                    f"{key!r} was not set within {patience.total_seconds():g} s",
                    hint="is a node missing?",
                )
            del missing[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value now."""
        return all(self._entry(key) is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; say whether there was one."""
        was_there = self._entry(key) is not None
        self._store.commit(Transaction(deletes=(self._prefix + key,)))
        return was_there

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._store.read(self._prefix).entries)

    def _wait_for(self, key: str, deadline: float) -> bool:
        path = self._prefix + key
        if self._entry(key) is not None:
            return True
        snapshot, watch = self._store.follow(path)
        try:
            if any(entry.key == path for entry in snapshot.entries):
                return True
            while (patience := deadline - time.monotonic()) > 0:
                for change in watch.next(Duration(int(patience * SECOND))):
                    if change.key == path and change.value is not None:
                        return True
        finally:
            watch.close()
        return False

    def _replace(self, key: str, entry: Entry | None, value: bytes) -> bool:
        path = self._prefix + key
        unchanged = Unchanged(path, ABSENT if entry is None else entry.revision)
        transaction = Transaction(conditions=(unchanged,), puts=(Put(path, value),))
        return isinstance(self._store.commit(transaction), Committed)

    def _known(self, key: str) -> bytes:
        entry = self._entry(key)
        if entry is None:
            raise StoreTimeout(f"{key!r} was deleted while it was read")
        return entry.value

    def _entry(self, key: str) -> Entry | None:
        path = self._prefix + key
        entries = self._store.read(path).entries
        return next((entry for entry in entries if entry.key == path), None)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class PrefixedStore:
    """The keys of another store that begin with a prefix: torch's `PrefixStore`, for any store."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Any:
        """The other store."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """How long the other store waits."""
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Let the other store wait for so long."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._store.set(self._path(key), value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys."""
        self._store.multi_set(self._paths(keys), values)

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as it has one."""
        return bytes(self._store.get(self._path(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, as soon as all have one."""
        return list(self._store.multi_get(self._paths(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return what it is then."""
        return int(self._store.add(self._path(key), amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it is as expected; return what it is then."""
        return bytes(self._store.compare_set(self._path(key), expected, desired))

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until all keys have a value."""
        self._store.wait(self._paths(keys), *timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value now."""
        return bool(self._store.check(self._paths(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; say whether there was one."""
        return bool(self._store.delete_key(self._path(key)))

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _paths(self, keys: Sequence[str]) -> list[str]:
        return [self._path(key) for key in keys]
