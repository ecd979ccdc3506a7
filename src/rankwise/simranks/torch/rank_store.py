"""The store of a simulated world: a dictionary whose waits let other ranks run.

Programs and torch itself wait in a store for keys that other ranks set. The names of process groups
are unique per rank (see `hooks`), and torch puts them into keys; here every rank's name of a
group is the same again.
"""

import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, QueueEmptyError, Store

from rankwise.base.units import SECOND, Instant
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.turn_takers import taking_turns

SYMMETRIC_MEMORY = "symmetric memory"
"""What a rank has shared, which goes with its groups."""
OF_RANK = "@rank"
_MARK = re.compile(OF_RANK + r"\d+\.\d+")
_PATIENCE = timedelta(seconds=300)
_OF_GROUPS = "torch.distributed.distributed_c10d"
"""The module that makes process groups."""
_FIRST_PORT = 29_500
"""A server that takes any port gets the next one."""


class _KeyIsSet(Gate):
    """Waits for a key."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def describe(self) -> str:
        return f"key {self._key!r} of the store, which no rank has set"


class StoreEntries:
    """What the ranks have stored; one for each place where they meet."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.gates: dict[str, _KeyIsSet] = {}

    def has(self, key: str) -> bool:
        """Whether a key is set, or its queue holds something."""
        return key in self.values or key in self.queues

    def put(self, key: str, value: bytes) -> None:
        """Set a key, and let those run that wait for it."""
        self.values[key] = value
        self._open(key)

    def push(self, key: str, value: bytes) -> None:
        """Put a value at the end of a queue, and let those run that wait for it."""
        self.queues.setdefault(key, deque()).append(value)
        self._open(key)

    def pop(self, key: str) -> bytes:
        """Take the first value of a queue, which holds one."""
        queue = self.queues[key]
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def _open(self, key: str) -> None:
        gate = self.gates.pop(key, None)
        if gate is not None:
            gate.open()


class RehearsedStore(Store):  # type: ignore[misc]  # torch is untyped here
    """One rank's view of the entries; with a prefix, of those whose keys begin like that."""

    def __init__(self, scheduler: Scheduler, entries: StoreEntries, prefix: str = "") -> None:
        super().__init__()
        self._scheduler = scheduler
        self._entries = entries
        self._prefix = prefix
        self._patience, self._is_kept = _PATIENCE, False
        self._clones: list[RehearsedStore] = []

    @taking_turns
    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._entries.put(self._common(key), _as_bytes(value))

    @taking_turns
    def get(self, key: str) -> bytes:
        """The value of a key, once it is set."""
        self.wait([key])
        return self._entries.values[self._common(key)]

    @taking_turns
    def add(self, key: str, amount: int) -> int:
        """Add to a key that counts; returns the sum. To add 0 is to look: others run then."""
        key = self._common(key)
        total = int(self._entries.values.get(key, b"0")) + amount
        self._entries.put(key, str(total).encode())
        if not amount:
            self._scheduler.poll((key, total))
        return total

    @taking_turns
    def append(self, key: str, value: Any) -> None:
        """Put a value after the one that is there."""
        key = self._common(key)
        self._entries.put(key, self._entries.values.get(key, b"") + _as_bytes(value))

    @taking_turns
    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value; returns the value that it has now."""
        key = self._common(key)
        present = self._entries.values.get(key)
        if present is None and not _as_bytes(expected):
            present = b""
        if present == _as_bytes(expected):
            self._entries.put(key, _as_bytes(desired))
            return _as_bytes(desired)
        return _as_bytes(expected) if present is None else present

    @taking_turns
    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set; if not, others run before the next look."""
        if all(self._entries.has(self._common(key)) for key in keys):
            return True
        self._scheduler.poll(tuple(keys))
        return False

    @taking_turns
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys: for `timeout`, or the store's, if the program has set that; else for ever.

        C++ gives the store's where the program gives none.
        """
        self._wait([self._common(key) for key in keys], self._entries.has, timeout)

    def _wait(
        self, keys: list[str], is_there: Callable[[str], bool], timeout: timedelta | None = None
    ) -> None:
        timeout = self._patience if timeout is None else timeout
        until = None
        if self._is_kept or timeout != self._patience:
            nanoseconds = round(timeout.total_seconds() * SECOND)
            until = Instant(self._scheduler.now + nanoseconds)
        for key in keys:
            while not is_there(key):
                gate = self._entries.gates.setdefault(key, _KeyIsSet(key))
                if not self._scheduler.wait(gate, until):
                    patience_ms = round(timeout.total_seconds() * 1_000)
                    raise DistStoreError(
                        f"wait timeout after {patience_ms}ms, keys: {', '.join(keys)}"
                    )

    @taking_turns
    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._entries.values.pop(self._common(key), None) is not None

    deleteKey = delete_key  # noqa: N815  # as C++ calls it, for a `PrefixStore` around this one

    @taking_turns
    def num_keys(self) -> int:
        """How many keys are set, with any prefix."""
        count = len(self._entries.values)
        self._scheduler.poll(count)
        return count

    getNumKeys = num_keys  # noqa: N815  # the same

    @taking_turns
    def list_keys(self) -> list[str]:
        """The keys that are set; those with the prefix, without it."""
        prefix = self._common("")
        return [key.removeprefix(prefix) for key in self._entries.values if key.startswith(prefix)]

    @taking_turns
    def queue_push(self, key: str, value: Any) -> None:
        """Put a value at the end of a queue."""
        self._entries.push(self._common(key), _as_bytes(value))

    @taking_turns
    def queue_pop(self, key: str, block: bool = True) -> bytes:  # torch's signature
        """Take the first value of a queue; wait for one, unless `block` is false."""
        key, queues = self._common(key), self._entries.queues
        if not block and key not in queues:
            self._scheduler.poll(key)
            raise QueueEmptyError("queue is empty")
        self._wait([key], queues.__contains__)
        return self._entries.pop(key)

    @taking_turns
    def queue_len(self, key: str) -> int:
        """How many values a queue holds."""
        key = self._common(key)
        count = len(self._entries.queues.get(key, ()))
        self._scheduler.poll((key, count))
        return count

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys, once they are all set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """It has append, multi_get and multi_set."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Note how long waits take at most, in virtual time.

        The time-out of a process group is noted only: if nothing can happen any more, the report of
        a deadlock tells more than its time-out.
        """
        caller = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001  # it has no other name
        self._note_timeout(timeout, is_kept=caller != _OF_GROUPS)

    def _note_timeout(self, timeout: timedelta, *, is_kept: bool) -> None:
        self._patience, self._is_kept = timeout, is_kept

    @property
    def timeout(self) -> timedelta:
        """How long waits take at most."""
        return self._patience

    def clone(self) -> "RehearsedStore":
        """Another view of the same entries."""
        clone = RehearsedStore(self._scheduler, self._entries, self._prefix)
        self._clones.append(clone)  # C++ keeps no Python object alive
        return clone

    def _common(self, key: str) -> str:
        """What all ranks call a key."""
        return _MARK.sub("", self._prefix + key)


class RehearsedPrefixStore(RehearsedStore):
    """What a program gets that makes a `PrefixStore` around a store of the simulated world."""

    def __init__(self, prefix: str, store: RehearsedStore) -> None:
        super().__init__(store._scheduler, store._entries, f"{store._prefix}{prefix}/")  # noqa: SLF001  # a class of ours
        self.underlying_store = store
        self._patience, self._is_kept = store._patience, store._is_kept  # noqa: SLF001  # the same

    def has_extended_api(self) -> bool:
        """As the store inside."""
        return self.underlying_store.has_extended_api()

    def _note_timeout(self, timeout: timedelta, *, is_kept: bool) -> None:
        """Note it for the store inside, too."""
        super()._note_timeout(timeout, is_kept=is_kept)
        self.underlying_store._note_timeout(timeout, is_kept=is_kept)  # noqa: SLF001  # the same


class RehearsedTCPStore(RehearsedStore):
    """What a program gets that makes a `TCPStore`: one per host and port, without a socket.

    As the real one does, the server waits until all have come, if it is to, and who comes before
    it waits for the server.
    """

    def __init__(  # noqa: PLR0917  # torch's signature
        self,
        scheduler: Scheduler,
        shared: dict[str, Any],
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,  # torch's signature
        timeout: timedelta = _PATIENCE,
        wait_for_workers: bool = True,  # the same
        **_about_sockets: Any,
    ) -> None:
        if not port:  # any free one: counted, so that equal runs have equal ports
            port = shared["last port"] = shared.get("last port", _FIRST_PORT) + 1
        place = f"{host_name}:{port}"
        super().__init__(scheduler, shared.setdefault(f"store tcp://{place}", StoreEntries()))
        self.host = host_name
        self.port = port
        self._patience = timeout
        # Apart from the program's keys: it may list them, or wait for their number.
        meeting = RehearsedStore(
            scheduler, shared.setdefault(f"clients of {place}", StoreEntries())
        )
        if meeting.add("clients", 1) == world_size:
            meeting.set("all clients", b"1")
        if is_master:
            meeting.set(f"server at {place}", b"1")
            if wait_for_workers and world_size:
                meeting.wait(["all clients"])
        else:
            meeting.wait([f"server at {place}"])


class RehearsedFileStore(RehearsedStore):
    """What a program gets that makes a `FileStore`: one per file, which is not written."""

    def __init__(
        self, scheduler: Scheduler, shared: dict[str, Any], file_name: str, world_size: int = -1
    ) -> None:
        del world_size
        self.path = str(Path(file_name).absolute())
        super().__init__(scheduler, shared.setdefault(f"store file://{self.path}", StoreEntries()))

    def has_extended_api(self) -> bool:
        """It has append, multi_get and multi_set, and says that it has not, as the real one."""
        return False

    def _has_no_queues(self, *_args: Any, **_named: Any) -> Any:
        raise NotImplementedError("queue support is not implemented: a FileStore has none")

    queue_push = queue_pop = queue_len = _has_no_queues


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
