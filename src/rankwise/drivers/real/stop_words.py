"""How ranks that were asked to stop agree on a step: two words in the segment of their node.

A rank *begins a step* whenever it asks whether to stop, and counts them in its ledger. Then:

```
 phase 0: no stop         the answer is no, at once
   │ agent: `ask`, which tells the first step that none of them has begun
 phase 1: asked           the rank sleeps on `phase`
   │ agent: `decide(step)`, the latest of those that the nodes were told
 phase 2: decided         the answer is yes from that step on, and no before
```

The decision waits for no rank. It must not: a rank that sleeps has begun its step and may have to
communicate in it with one that has had its answer already, and which comes to its next step only
when they have. So what counts is which steps were begun before the ranks were asked: no rank was
told to go on with a later one.

An agent that dies takes its ranks along, so no rank sleeps for ever.
"""

from collections.abc import Collection

from rankwise.base.units import SECOND, Duration, after
from rankwise.drivers.real.futex import FutexWord
from rankwise.drivers.real.segments import (
    LEDGER_MOVED_AT,
    LEDGER_STEP_BEGAN,
    LEDGER_STEP_TIME,
    LEDGER_STEPS,
    LEDGER_TAKES_SIGTERM,
    LEDGER_WORDS,
    Segment,
)
from rankwise.ports.clock import Clock

_PHASE, _STOP_AT = 0, 8
ASKED, DECIDED = 1, 2
SLEEP = Duration(60 * SECOND)
"""A sleeper looks around once in a while, though a wake-up is never lost."""


class StopWords:
    """Both sides' view of the words. `release` it before the segment is closed."""

    def __init__(self, segment: Segment, clock: Clock) -> None:
        memory, layout = segment.memory, segment.layout
        base = layout.stopping
        self._clock = clock
        self._phase = FutexWord(memory, base + _PHASE, layout.quiet)
        self._stop_at = memoryview(memory)[base + _STOP_AT : base + _STOP_AT + 8].cast("Q")
        self._ledgers = segment.ledgers

    def ask(self, local_ranks: Collection[int]) -> int:
        """For the agent: let every rank wait at its next step.

        Returns the first step that none of these ranks has begun.
        """
        if self._phase.look() < ASKED:
            self._phase.add_and_wake()
        # Read after `phase` has changed: a rank that has not counted its step yet will see that.
        return 1 + max(
            (self._ledgers[rank * LEDGER_WORDS + LEDGER_STEPS] for rank in local_ranks), default=0
        )

    def decide(self, step: int) -> None:
        """For the agent: let the ranks go on to `step`, and stop there."""
        if self._phase.look() == ASKED:
            self._stop_at[0] = step  # before `phase` says that it is there
            self._phase.add_and_wake()

    def uses_steps(self, local_rank: int) -> bool:
        """Whether a rank has ever asked, so that it will ask again."""
        ledger = local_rank * LEDGER_WORDS
        # One that was called again has asked in the world before.
        return bool(
            self._ledgers[ledger + LEDGER_STEPS] or self._ledgers[ledger + LEDGER_TAKES_SIGTERM]
        )

    def begin_step(self, local_rank: int, *, takes_sigterm: bool = False) -> bool:
        """For a rank: begin a step; whether it is the one to stop at. May sleep until it knows.

        The first step of a rank has the number 1.
        """
        ledger = local_rank * LEDGER_WORDS
        step = self._ledgers[ledger + LEDGER_STEPS] + 1
        now = self._clock.now()
        if began := self._ledgers[ledger + LEDGER_STEP_BEGAN]:
            self._ledgers[ledger + LEDGER_STEP_TIME] += now - began
        self._ledgers[ledger + LEDGER_STEP_BEGAN] = now
        self._ledgers[ledger + LEDGER_MOVED_AT] = now
        self._ledgers[ledger + LEDGER_TAKES_SIGTERM] = takes_sigterm
        self._ledgers[ledger + LEDGER_STEPS] = step
        # The step is counted before `phase` is read: either the agent sees it, or this rank sleeps.
        self._phase.fence_stores()
        phase = self._phase.look()
        if phase == 0:
            return False
        while phase == ASKED:
            self._phase.sleep(ASKED, after(self._clock.now(), SLEEP))
            phase = self._phase.look()
        return bool(step >= self._stop_at[0])

    def release(self) -> None:
        """Let go of the segment's memory."""
        self._phase.release()
        self._stop_at.release()
        self._ledgers.release()
