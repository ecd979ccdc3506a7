"""Holders of the memory of a device: what it is for, of which module, and where it was made.

A rank keeps what it takes and gives back since its last step began, and how much was in use then.
From that, the holders at the peak are told exactly, however many steps there are.
"""

from collections import Counter
from typing import NamedTuple

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
COMMUNICATION = "communication buffers"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, COMMUNICATION)


class Holder:
    """Of one storage: what it is for, as far as is known by now.

    Attributes:
        kind: one of `KINDS`.
        module: the name of the module that has made it, or in whose backward it was made.
        place: the program's line, such as `model.py:212`.
        is_of_backward: whether it was made in backward.
    """

    __slots__ = ("is_of_backward", "kind", "module", "place")

    def __init__(self, kind: str, module: str, place: str, *, is_of_backward: bool) -> None:
        self.kind = kind
        self.module = module
        self.place = place
        self.is_of_backward = is_of_backward

    def __str__(self) -> str:
        of = self.module or "the program"
        where = f" ({self.place})" if self.place else ""
        return f"the backward of {of}{where}" if self.is_of_backward else f"{of}{where}"


class Held(NamedTuple):
    """Bytes of one kind, module and line."""

    kind: str
    module: str
    place: str
    size: int


UNKNOWN = Holder(TEMPORARIES, "", "", is_of_backward=False)
"""Holds what has no holder of its own in the report."""


class HolderRecords:
    """What a rank has taken and given back since its last step began.

    Attributes:
        peak: the most that has lived at once in a step that is over, of those after the first.
        at_peak: who held it then.
        curve: bytes in use over that step, at most `POINTS` of them.
    """

    POINTS = 400

    def __init__(self) -> None:
        self._base: dict[Holder, int] = {}
        self._events: list[tuple[Holder, int]] = []
        self._steps = 0
        self.peak = 0
        self.at_peak: list[Held] = []
        self.curve: list[int] = []

    def note(self, holder: Holder | None, size: int) -> None:
        """Bytes are taken or given back."""
        self._events.append((holder or UNKNOWN, size))

    def forget(self) -> None:
        """All that was noted so far was not on the device."""
        self._base, self._events = {}, []

    def end_step(self) -> None:
        """A step is over: its peak counts, unless it was the first."""
        self._steps += 1
        events, self._events = self._events, []
        used = sum(self._base.values())
        peak, at, sizes = used, 0, [used]
        for index, (_, size) in enumerate(events):
            used += size
            sizes.append(used)
            if used > peak:
                peak, at = used, index + 1
        if self._steps > 1 and peak > self.peak:
            self.peak = peak
            self.curve = sizes[:: max(1, -(-len(sizes) // self.POINTS))]
            self.at_peak = _held_by(self._base, events[:at])
        self._base = _after(self._base, events)

    def present(self) -> list[Held]:
        """The holders now."""
        return _held_by(self._base, self._events)


def _after(base: dict[Holder, int], events: list[tuple[Holder, int]]) -> dict[Holder, int]:
    held = Counter(base)
    for holder, size in events:
        held[holder] += size
    return {holder: size for holder, size in held.items() if size}


def _held_by(base: dict[Holder, int], events: list[tuple[Holder, int]]) -> list[Held]:
    """The holders after these events, the largest first."""
    together: Counter[tuple[str, str, str]] = Counter()
    for holder, size in _after(base, events).items():
        together[holder.kind, holder.module, holder.place] += size
    rows = [Held(*words, size) for words, size in together.items() if size]
    return sorted(rows, key=lambda row: (-row.size, row[:3]))
