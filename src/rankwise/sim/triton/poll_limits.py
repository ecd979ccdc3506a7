"""When a program that looks at memory again is waiting.

Programs wait in loops: they look at a word until it holds what they want. Each look takes time, and
a loop without a writer would never end, so a program that waits is laid to sleep until memory
changes; if no program is left to change it, that is a deadlock. But a program may look twice and
see the same without waiting: a flag that stays set is looked at in every turn of an outer loop.
Which of the two it is follows from what lies between two equal looks of one instruction at one
word:

- *Work*: the program itself has changed memory. It goes on.
- *Nothing*: it is where it was, all its variables are as they were, and memory has not changed. It
  will look again, without end, until another program changes memory: it waits.
- *Counting*: only its variables differ. It may be counting its tries, in vain, or the turns of an
  outer loop that ends. It goes on, and is taken to wait after `TRIES` such looks in a row, if the
  kernel has a `while` at all. A `while` that compares what it counts ends by itself: such a kernel
  has `TRIES_COUNTED`, which take seconds.

Variables are those of all kernel functions that are being carried out. Numbers are compared by
value. A block is the same only while it is the same object, and nothing is kept alive for that.
"""

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from rankwise.sim.triton.constants import plain

TRIES = 1_000
"""Equal looks in a row, with nothing but other variables between them, that count as waiting."""
TRIES_COUNTED = 20_000
"""The same, where loops count their tries and end after so many."""


class ObservedWord(NamedTuple):
    """What a program saw at a word, and in which state it was.

    Attributes:
        seen: the word's bytes.
        state: of the program: see `state_of`.
        work: how often the program had changed memory.
        changes: how often memory had changed, for any reason.
        reads: how often the program had read memory.
        tries: equal looks in a row before this one.
    """

    seen: bytes
    state: tuple[Any, ...]
    work: int
    changes: int
    reads: int
    tries: int = 0

    def after(
        self, before: "ObservedWord | None", words: int, limit: int, *, counts: bool
    ) -> "ObservedWord":
        """The same look at so many words, knowing the look before it at the same ones.

        With `limit` tries it waits. Where nothing `counts` tries, since all loops have a bound,
        only an equal state is waiting.
        """
        if before is None or (before.seen, before.work) != (self.seen, self.work):
            return self
        # Else another word could have changed unseen.
        alone = words == 1 and self.reads == before.reads + 1
        is_same = before.state == self.state and (alone or before.changes == self.changes)
        return self._replace(tries=limit if is_same else before.tries + counts)


class _Same(weakref.ref[Any]):
    """An object; equal only to itself, and to nothing once it is gone."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (mine := self()) is not None and mine is other()


def state_of(frames: Iterable[FrameType]) -> tuple[Any, ...]:
    """Where a program is, and what its variables hold, so that two states can be compared."""
    return tuple(
        (frame.f_code, frame.f_lasti, *map(_held, frame.f_locals.values())) for frame in frames
    )


def _held(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, tuple):
        return tuple(map(_held, value))
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if getattr(value, "shape", None) == () and hasattr(value, "dtype"):
        return id(getattr(value, "buffer", None)), value.dtype, value.data.tobytes()
    try:
        return _Same(value)
    except TypeError:  # it cannot be watched: a list, say, which lives as long as its variable
        return id(value)
