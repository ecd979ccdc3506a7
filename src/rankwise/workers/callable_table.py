"""Numbers for callables: what a worker registers, and what its children find under a number.

What was registered before `init()` is in the children's memory as it was then, closures and all.
What is registered later is pickled into the arena, where a child looks when it meets a number that
it does not know; the pickle is there before the first word with that number is.
"""

import struct
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.tree.arena import CALLABLES_MAX, Arena

_ENTRY = struct.Struct("=QQ")


class CallableTable:
    """The callables of one worker, and, after the fork, of its children."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._numbers: dict[int, int] = {}
        """The number of a callable by its identity; `_known` keeps it alive."""
        self._fetched: dict[int, Any] = {}
        self._arena: Arena | None = None
        self.names: list[str] = []
        """What to call each callable."""

    def __len__(self) -> int:
        return len(self._known)

    def add(self, callable_: Any) -> int:
        """Give a callable a number; the same one keeps its number.

        Raises:
            ConfigError: it cannot be called, or cannot be pickled for children that run already.
        """
        number = self._numbers.get(id(callable_))
        if number is not None:
            return number
        number = len(self._known)
        if number == CALLABLES_MAX:
            raise ConfigError(f"a worker has {CALLABLES_MAX} callables, and no room for more")
        if self._arena is not None:
            self._publish(number, callable_, self._arena)
        self._known.append(callable_)
        self._numbers[id(callable_)] = number
        self.names.append(name_of(callable_))
        return number

    def share_through(self, arena: Arena | None) -> None:
        """From now on children exist that find new callables there; None when they are gone."""
        self._arena = arena

    def find(self, number: int) -> Any:
        """The callable of a number, in a child."""
        if number < len(self._known):
            return self._known[number]
        if number not in self._fetched:
            self._fetched[number] = self._fetch(number)
        return self._fetched[number]

    def _publish(self, number: int, callable_: Any, arena: Arena) -> None:
        from rankwise.workers.late_callables import pickled  # noqa: PLC0415  # only who needs it

        try:
            payload = pickled(callable_, arena)
        except Exception as error:
            raise ConfigError(
                f"{name_of(callable_)} cannot be sent to children that run already: {error}",
                hint="register it before init(), or let it capture nothing that is open",
            ) from error
        offset = arena.allocate(len(payload))
        arena.memory[offset : offset + len(payload)] = payload
        _ENTRY.pack_into(arena.memory, number * _ENTRY.size, offset, len(payload))

    def _fetch(self, number: int) -> Any:
        import pickle  # noqa: PLC0415  # only what was registered late needs it

        assert self._arena is not None, "a child has the arena of its worker"
        offset, length = _ENTRY.unpack_from(self._arena.memory, number * _ENTRY.size)
        if not length:
            raise ConfigError(f"callable {number} is not registered")
        return pickle.loads(self._arena.memory[offset : offset + length])  # noqa: S301  # our own


def check_callable(thing: Any) -> None:
    """Refuse what no child could call.

    Raises:
        ConfigError: it is neither a function nor a `ChipCallable`.
    """
    if not callable(thing) and not hasattr(thing, "func_name"):
        raise ConfigError(
            f"{thing!r} cannot be called, so it cannot be a task",
            hint="give a number from register(), a function, or a ChipCallable",
        )


def name_of(callable_: Any) -> str:
    """What to call a callable in messages."""
    for attribute in ("func_name", "__qualname__", "__name__"):
        name = getattr(callable_, attribute, None)
        if isinstance(name, str) and name:
            return name.replace("<locals>.", "")
    return type(callable_).__name__
