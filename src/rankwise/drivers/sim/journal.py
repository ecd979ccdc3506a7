"""The journal of a simulated run: kept in memory, written as the real one is.

Two runs of a seed give byte-identical journals: the fields are written in the order in which they
are declared, instants are virtual, and nothing else of the process gets in.
"""

from typing import Any

import msgspec

from rankwise.base.units import Instant
from rankwise.ports.journal import Journal


class MemoryJournal:
    """Remembers every stimulus and effect; `lines` writes them down."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def stimulus(self, machine: str, stimulus: Any, now: Instant) -> None:
        """Remember what a machine was told."""
        self._entries.append({"at": now, "machine": machine, "stimulus": stimulus})

    def effect(self, machine: str, effect: Any, now: Instant) -> None:
        """Remember what it ordered."""
        self._entries.append({"at": now, "machine": machine, "effect": effect})

    def lines(self) -> bytes:
        """The journal as JSON lines, as a file would hold them."""
        encode = msgspec.json.Encoder().encode
        return b"".join(encode(entry) + b"\n" for entry in self._entries)


class NoJournal:
    """Remembers nothing: for runs whose journal would be larger than memory."""

    def stimulus(self, machine: str, stimulus: Any, now: Instant) -> None:
        """Forget it."""

    def effect(self, machine: str, effect: Any, now: Instant) -> None:
        """Forget it."""


class NamedJournal:
    """A journal in which this agent has a name of its own."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = name

    def stimulus(self, machine: str, stimulus: Any, now: Instant) -> None:
        """Remember it under the agent's name."""
        del machine
        self._journal.stimulus(self._name, stimulus, now)

    def effect(self, machine: str, effect: Any, now: Instant) -> None:
        """Remember it under the agent's name."""
        del machine
        self._journal.effect(self._name, effect, now)
