"""How the ranks of a node are brought to one step at which all of them stop.

The ranks that count their steps (`rankwise.should_stop`) are asked to wait at their next one, until
who has asked has decided where they stop: at once if there is one node, else with the others. The
words are described in `drivers.real.stop_words`.
"""

from collections.abc import Collection

from rankwise.drivers.real.stop_words import StopWords


class Agreement:
    """The ranks of this node on their way to a step at which all of the job stop.

    Args:
        words: in the ranks' segment; released by `close`.
        alive: the local ranks that have not ended.

    Attributes:
        first_step: the first one that none of them has begun; None if none counts its steps.
    """

    def __init__(self, words: StopWords, alive: Collection[int]) -> None:
        self._words = words
        self._steppers = {rank for rank in alive if words.uses_steps(rank)}
        step = words.ask(self._steppers)
        self.first_step = step if self._steppers else None

    def concerns(self, local_rank: int) -> bool:
        """Whether a rank counts its steps, so that it will come to the one to stop at."""
        return local_rank in self._steppers

    def decide(self, step: int) -> None:
        """Let the ranks go on to that step, and stop there."""
        self._words.decide(step)

    def close(self) -> None:
        """Let go of the segment."""
        self._words.release()
