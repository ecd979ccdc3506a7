"""Numbers for callables: what a worker registers, and what its children find under a number.

Callables registered before `init()` are in the children's memory as it was then, closures and all.
Later ones are pickled into the arena, where a child looks when it meets a number that it does not
know; the pickle is there before the first word with that number is.

A function that is submitted without having been registered has its number for as long as the
program holds it. Then its pickle goes, at the next run, and its number is not given out again, so
what a child remembers under it is never asked for; a child forgets such when it fetches others.
"""

import struct
import weakref
from io import BytesIO
from typing import Any

from rankwise.base.deferred_calls import empty_call
from rankwise.base.errors import TreeValueError
from rankwise.drivers.real.interrupts import came_from_handler, gate_here, without_handlers
from rankwise.drivers.real.tree.arena import CALLABLES_MAX, Arena
from rankwise.drivers.real.tree.pipe_protocol import FIELD_MASK

_ENTRY = struct.Struct("=QQ")
_FORGET_FROM = 4


class CallableTable:
    """The callables of one worker, and, after the fork, of its children.

    Attributes:
        names: what to call each callable, by its number.
        found: in a child, what it has asked for, by number.
        dropped: what was borrowed, and the program has let go of.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._borrowed: dict[int, weakref.ref[Any]] = {}
        """Those that were not registered, and that the program keeps alive."""
        self.dropped: list[int] = []
        self._numbers: dict[int, int] = {}
        """The number of a callable by its identity."""
        self._offsets: dict[int, int] = {}
        """Where the pickle of a number is; in a child, where it was."""
        self._taken: set[int] = set()
        """Entries in the arena that some number has."""
        self._next = 0
        self._forget_at = _FORGET_FROM
        self._arena: Arena | None = None
        self.names: dict[int, str] = {}
        self.found: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.names)

    def add(self, callable_: Any) -> int:
        """Give a callable a number for good; the same one keeps its number.

        Raises:
            ConfigError: it cannot be called, or cannot be pickled for children that run already.
        """
        number, payload = self._numbers.get(id(callable_)), None
        if number is None:
            check_call_runs(callable_, "task")
            payload = self._pickled(callable_)
        with gate_here().closed():
            if number is None:
                number = self._enter(callable_, payload)
            self._borrowed.pop(number, None)
            self._kept[number] = callable_
        return number

    def borrow(self, callable_: Any) -> int:
        """Give a callable a number for as long as the program holds it; see `add`."""
        identity = id(callable_)
        number = self._numbers.get(identity)
        if number is not None:
            return number
        check_call_runs(callable_, "task")
        payload = self._pickled(callable_)
        with gate_here().closed():
            return self._lend(callable_, identity, payload)

    def _lend(self, callable_: Any, identity: int, payload: bytes | None) -> int:
        number = mine = self._enter(callable_, payload)

        @without_handlers
        def on_end(_: Any) -> None:
            if self._borrowed.pop(mine, None) is not None:
                del self._numbers[identity]
                self.dropped.append(mine)

        try:
            self._borrowed[number] = weakref.ref(callable_, on_end)
        except TypeError:  # there is no way to learn of its end
            self._kept[number] = callable_
        return number

    def let_go(self) -> None:
        """Forget what the program has let go of; called while no task is under way."""
        while self.dropped:
            number = self.dropped.pop()
            del self.names[number]
            self._taken.discard(number % CALLABLES_MAX)
            offset = self._offsets.pop(number)
            if self._arena is not None:
                _ENTRY.pack_into(self._arena.memory, _place(number), 0, 0)
                self._arena.release(offset)

    def share_through(self, arena: Arena | None) -> None:
        """From now on children exist that find new callables there; None when they are gone."""
        if arena is None:
            self._arena = None
            self.dropped += self._borrowed
            self._borrowed.clear()
            self.let_go()
            self._numbers = {id(callable_): number for number, callable_ in self._kept.items()}
            self._offsets.clear()
        self._arena = arena

    def find(self, number: int) -> Any:
        """The callable of a number, in a child."""
        callable_ = self.found.get(number)
        if callable_ is None:
            callable_ = self._kept.get(number)
            if callable_ is None:
                callable_ = self._fetch(number)
            self.found[number] = callable_
        return callable_

    def _enter(self, callable_: Any, payload: bytes | None) -> int:
        number = self._free_number()
        if self._arena is not None and payload is not None:
            self._publish(number, payload, self._arena)
        self._numbers[id(callable_)] = number
        self._taken.add(number % CALLABLES_MAX)
        self._next = number + 1
        self.names[number] = name_of(callable_)
        return number

    def _free_number(self) -> int:
        """The next number whose entry in the arena is free."""
        if len(self._taken) == CALLABLES_MAX:
            raise TreeValueError(f"a worker has {CALLABLES_MAX} callables, and no room for more")
        number = self._next
        while number % CALLABLES_MAX in self._taken:
            number += 1
        if number > FIELD_MASK:
            raise TreeValueError(
                f"a worker has given numbers to {FIELD_MASK + 1} callables, and has no more",
                hint="submit the same functions again instead of new ones for each task",
            )
        return number

    def _pickled(self, callable_: Any) -> bytes | None:
        """What children that run already are sent; may take long, and runs code of the user's."""
        if self._arena is None:
            return None
        from rankwise.workers.late_callables import pickled  # noqa: PLC0415  # only who needs it

        try:
            return pickled(callable_, self._arena)
        except Exception as error:
            if came_from_handler(error):
                raise
            raise TreeValueError(
                f"{name_of(callable_)} cannot be sent to children that run already: {error}",
                hint="register it before init(), or let it capture nothing that is open",
            ) from error

    def _publish(self, number: int, payload: bytes, arena: Arena) -> None:
        offset = self._offsets[number] = arena.allocate(len(payload))
        arena.memory[offset : offset + len(payload)] = payload
        _ENTRY.pack_into(arena.memory, _place(number), offset, len(payload))

    def _fetch(self, number: int) -> Any:
        import pickle  # noqa: PLC0415  # only what was registered late needs it

        assert self._arena is not None, "a child has the arena of its worker"
        memory = self._arena.memory
        offset, length = _ENTRY.unpack_from(memory, _place(number))
        if not length:
            raise TreeValueError(f"callable {number} is not registered")
        if len(self.found) >= self._forget_at:
            self._forget_stale(memory)
        self._offsets[number] = offset
        with BytesIO(memory[offset : offset + length]) as payload:
            if sources := pickle.load(payload):  # noqa: S301  # our own
                import linecache  # noqa: PLC0415  # only from notebooks and the like

                linecache.cache.update(sources)
            return pickle.load(payload)  # noqa: S301  # the same

    def _forget_stale(self, memory: Any) -> None:
        for number, offset in list(self._offsets.items()):
            if _ENTRY.unpack_from(memory, _place(number))[0] != offset:
                self.found.pop(number, None)
                del self._offsets[number]
        # So that all of this costs little per callable, however many there are.
        self._forget_at = max(_FORGET_FROM, 2 * len(self.found))


def _place(number: int) -> int:
    return number % CALLABLES_MAX * _ENTRY.size


def check_callable(thing: Any) -> None:
    """Refuse what no child could call.

    Raises:
        ConfigError: it is neither a function nor a `ChipCallable`.
    """
    if not callable(thing) and not hasattr(thing, "func_name"):
        raise TreeValueError(
            f"{thing!r} cannot be called, so it cannot be a task",
            hint="give a number from register(), a function, or a ChipCallable",
        )


def check_call_runs(function: Any, role: str) -> None:
    """Refuse async functions and generators, whose call would run nothing.

    Raises:
        ConfigError: it is one.
    """
    if empty := empty_call(function):
        name = name_of(function)
        raise TreeValueError(
            f"{name} is {empty.kind}: a call makes {empty.makes}, so it cannot be a {role}",
            hint=f"give a function that runs it: {empty.runner}({name}(…))",
        )


def name_of(callable_: Any) -> str:
    """What to call a callable in messages."""
    for attribute in ("func_name", "__qualname__", "__name__"):
        name = getattr(callable_, attribute, None)
        if isinstance(name, str) and name:
            return name.replace("<locals>.", "")
    return type(callable_).__name__
