"""The door through which every decision is remembered."""

from typing import Any, Protocol

from rankwise.base.units import Instant


class Journal(Protocol):
    """Every stimulus and effect of a machine with its instant: log, replay and oracle in one."""

    def stimulus(self, machine: str, number: int, stimulus: Any, now: Instant) -> None:
        """Remember a fact, the `number`-th that the machine named `machine` was told."""
        ...

    def effect(self, machine: str, cause: int, effect: Any, now: Instant) -> None:
        """Remember an order that it gave; `cause` is the number of the fact that led to it."""
        ...
