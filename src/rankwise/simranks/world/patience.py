"""How long the scheduler thread lets a rank hold the run token, in real time, before it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.simranks.world.places import is_in_import

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.simranks.world.ranks import Rank

NOTICE_S = 30.0
"""How long one rank may keep all others waiting, in real time, before the user is told."""
STOP_NOTICE_S = 2.0
"""The same after a request to stop."""
_LOOKS_PER_PATIENCE = 4
"""How often the progress of a rank is checked before the rank is given up."""


class TokenPatience:
    """Counts, from look to look, for how long a rank has held the token.

    Attributes:
        limit_s: a rank that holds the token for this long is given up; None: never.
        is_stopping: whether a stop has been asked for: then progress does not count.
        makes_progress: asked now and then whether the rank that has the token has made progress
            since it was asked before, by computing for instance; its patience begins anew then, if
            no rank has asked for a stop. None: holding the token is no progress.
        on_held: told of a rank that has kept others waiting for `NOTICE_S`, once in a run, and of
            one that keeps a request to stop waiting.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self.is_stopping = False
        self.makes_progress: Callable[[Rank], bool] | None = None
        self.on_held: Callable[[Rank], None] | None = None
        self._reported_while_interrupted: set[bool] = set()
        self.begin(0)

    def begin(self, hand_overs: int) -> None:
        """A rank takes the token: `hand_overs` counts how often it has changed hands."""
        self._hand_overs, self._limit_before_s = hand_overs, self.limit_s
        self._held_s = self._still_s = 0.0

    def look(self, rank: Rank, glance_s: float, hand_overs: int) -> bool:
        """Add the time since the last look; False if the token has changed hands meanwhile."""
        makes_progress = self.limit_s is not None and self.has_progress(rank)
        is_held = hand_overs == self._hand_overs
        is_same = is_held and self.limit_s == self._limit_before_s
        held_s, still_s = (self._held_s, self._still_s) if is_same else (0.0, 0.0)
        self.begin(hand_overs)
        if is_held:
            self._held_s = glance_s + held_s
            self._still_s = 0.0 if makes_progress else glance_s + still_s
        return is_held

    def has_progress(self, rank: Rank) -> bool:
        """Whether a rank has made progress that counts since this was asked before."""
        return (
            self.makes_progress is not None and not self.is_stopping and self.makes_progress(rank)
        )

    @property
    def is_over(self) -> bool:
        """Whether the rank is to be given up."""
        return self.limit_s is not None and self._still_s >= self.limit_s

    def is_notice_due(self, *, is_interrupted: bool) -> bool:
        """Whether the rank has held the token for so long that the user is to know."""
        return self._held_s >= _notice_s(is_interrupted=is_interrupted)

    def glance_after(self, *, is_interrupted: bool) -> float:
        """How long to wait until the next look."""
        notice_s = _notice_s(is_interrupted=is_interrupted)
        if self.limit_s is None:
            return notice_s
        looks = 1 if self.makes_progress is None else _LOOKS_PER_PATIENCE
        return min(self.limit_s / looks, notice_s)

    @property
    def of_resting_s(self) -> float:
        """How long threads without the token may make no progress while no rank is ready."""
        return NOTICE_S if self.limit_s is None else self.limit_s

    @property
    def rest_glance_s(self) -> float:
        """How long to wait for them until the next look."""
        return self.of_resting_s / _LOOKS_PER_PATIENCE

    def tell_of(self, rank: Rank, *, do_others_wait: bool, is_interrupted: bool) -> None:
        """Report once that a rank keeps others waiting, or the stop that was asked for."""
        if not is_interrupted and is_in_import(rank.stack()):
            return  # of a large package on a busy machine: the next look tells what still holds
        is_missed = is_interrupted or do_others_wait
        if is_missed and self.on_held and is_interrupted not in self._reported_while_interrupted:
            self._reported_while_interrupted.add(is_interrupted)
            self.on_held(rank)


def _notice_s(*, is_interrupted: bool) -> float:
    return STOP_NOTICE_S if is_interrupted else NOTICE_S
