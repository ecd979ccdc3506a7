"""The journal of a simulated run: kept in memory, written as the real one is.

Two runs of a seed give byte-identical journals: the fields are written in the order in which they
are declared, instants are virtual, and nothing else of the process gets in.
"""

from typing import Any

import msgspec

from rankwise.base.units import Instant


class MemoryJournal:
    """Remembers every stimulus and effect; `lines` writes them down."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def stimulus(self, machine: str, number: int, stimulus: Any, now: Instant) -> None:
        """Remember what a machine was told."""
        self._entries.append(
            {"at": now, "machine": machine, "number": number, "stimulus": stimulus}
        )

    def effect(self, machine: str, cause: int, effect: Any, now: Instant) -> None:
        """Remember what it ordered."""
        self._entries.append({"at": now, "machine": machine, "cause": cause, "effect": effect})

    def lines(self) -> bytes:
        """The journal as JSON lines, as a file would hold them."""
        encode = msgspec.json.Encoder().encode
        return b"".join(encode(entry) + b"\n" for entry in self._entries)
