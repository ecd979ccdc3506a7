"""How ranks that were asked to stop agree on a step: three words in the segment of their node.

A rank *begins a step* whenever it asks whether to stop, and counts them in its ledger. Then:

```
 phase 0: nobody stops    the answer is no, at once
   │ agent: `ask`
 phase 1: asked           the rank says where it stands, and sleeps on `phase`
   │ agent: `decide(step)`, the largest count of all ranks of all nodes
 phase 2: decided         the answer is yes from that step on, and no before
```

A rank that stands has done all its earlier steps, so a rank that is behind can catch up with it:
what it takes part in for those steps has been given. `phase` and `standing` are futex words,
counted up by the agent and by the ranks; `stop_at` is stored before `phase` says that it is there.

A rank that dies meanwhile is seen by the agent, which then waits for one less. An agent that dies
takes its ranks along, so nobody sleeps for ever.
"""

from collections.abc import Collection

from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.drivers.real.futex import FutexWord
from rankwise.drivers.real.segments import (
    LEDGER_MOVED_AT,
    LEDGER_STANDS,
    LEDGER_STEPS,
    LEDGER_TAKES_SIGTERM,
    LEDGER_WORDS,
    Segment,
)
from rankwise.ports.clock import Clock

_PHASE, _STANDING, _STOP_AT = 0, 4, 8
ASKED, DECIDED = 1, 2
SLEEP = Duration(60 * SECOND)
"""A sleeper looks around once in a while, though a wake-up is never lost."""


class StopWords:
    """Both sides' view of the words. `release` it before the segment is closed."""

    def __init__(self, segment: Segment, clock: Clock) -> None:
        memory, layout = segment.memory, segment.layout
        base = layout.stopping
        self._clock = clock
        self._count = segment.worker_count
        self._phase = FutexWord(memory, base + _PHASE, layout.quiet)
        self._standing = FutexWord(memory, base + _STANDING, layout.quiet)
        self._stop_at = memoryview(memory)[base + _STOP_AT : base + _STOP_AT + 8].cast("Q")
        self._ledgers = segment.ledgers

    def ask(self) -> None:
        """For the agent: let every rank stand at its next step."""
        if self._phase.look() < ASKED:
            self._phase.add_and_wake()

    def decide(self, step: int) -> None:
        """For the agent: let the ranks go on to `step`, and stop there."""
        if self._phase.look() == ASKED:
            self._stop_at[0] = step
            self._phase.add_and_wake()

    def uses_steps(self, local_rank: int) -> bool:
        """Whether a rank has ever asked, so that it will ask again."""
        ledger = local_rank * LEDGER_WORDS
        # One that was called again has asked in the world before.
        return bool(
            self._ledgers[ledger + LEDGER_STEPS] or self._ledgers[ledger + LEDGER_TAKES_SIGTERM]
        )

    def standing_step(self, alive: Collection[int]) -> int | None:
        """The largest step at which ranks stand, if all that are alive do; else None."""
        stands = [self._ledgers[rank * LEDGER_WORDS + LEDGER_STANDS] for rank in sorted(alive)]
        if not stands or not all(stands):
            return None
        return max(stands) - 1

    def wait_standing(self, seen: int) -> int:
        """For a thread of the agent: sleep until more ranks stand than `seen`, or it was woken."""
        if (now := self._standing.look()) != seen:
            return now
        self._standing.sleep(seen, after(self._clock.now(), SLEEP))
        return self._standing.look()

    def wake_waiter(self) -> None:
        """Let `wait_standing` return, since the ranks that are alive have changed."""
        self._standing.ring()

    def begin_step(self, local_rank: int, *, takes_sigterm: bool = False) -> bool:
        """For a rank: begin a step; whether it is the one to stop at. May sleep while others come.

        The first step of a rank has the number 1.
        """
        ledger = local_rank * LEDGER_WORDS
        step = self._ledgers[ledger + LEDGER_STEPS] + 1
        self._ledgers[ledger + LEDGER_MOVED_AT] = self._clock.now()
        self._ledgers[ledger + LEDGER_TAKES_SIGTERM] = takes_sigterm
        self._ledgers[ledger + LEDGER_STEPS] = step
        phase = self._phase.look()
        if phase == 0:
            return False
        if phase == ASKED:
            self._ledgers[ledger + LEDGER_STANDS] = step + 1
            self._standing.add_and_wake()
            while self._phase.look() == ASKED:
                self._phase.sleep(ASKED, self._next_look())
        return bool(step >= self._stop_at[0])

    def release(self) -> None:
        """Let go of the segment's memory."""
        self._phase.release()
        self._standing.release()
        self._stop_at.release()
        self._ledgers.release()

    def _next_look(self) -> Instant:
        return after(self._clock.now(), SLEEP)
