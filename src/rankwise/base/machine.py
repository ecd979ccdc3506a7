"""The shape of every protocol in rankwise: a machine without clock, I/O or threads.

A machine is fed *stimuli*, which are facts in the past tense, and answers with *effects*, which
are orders. It never waits: it says when it next wants to be woken. The driver that carries out the
effects, the *driver*, may be real or simulated; the machine cannot tell.
"""

from typing import Protocol, TypeVar

import msgspec

from rankwise.base.units import Instant

StimulusT_contra = TypeVar("StimulusT_contra", contravariant=True)
EffectT = TypeVar("EffectT")


class Ticked(msgspec.Struct, frozen=True, tag=True):
    """The machine's next deadline has come: `tick` as a fact, for the journal."""


class Machine(Protocol[StimulusT_contra, EffectT]):
    """A protocol as an object."""

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        ...

    def handle(self, stimulus: StimulusT_contra, now: Instant) -> list[EffectT]:
        """Take in a fact; return what is to be done, in this order."""
        ...

    def tick(self, now: Instant) -> list[EffectT]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        ...
