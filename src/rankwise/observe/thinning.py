"""How much of a long run is recorded: everything at first, and less and less, within one limit.

Recording goes by looks at even intervals. When a quarter of what may be written has been written,
only every second look is recorded from then on, then every fourth, and so on: each of these stages
may write as much as the others and lasts twice as long as the one before. With `STAGES` of them a
run of years is recorded to its end, and a short run loses nothing.
"""

STAGES = 20


class Thinning:
    """Decides which looks are recorded.

    Args:
        limit: how many bytes all of them may take; the last look may exceed it.

    Attributes:
        every: of so many looks one is recorded now.
    """

    def __init__(self, limit: int) -> None:
        self._until_next = limit // 4
        self._bytes_of_stage = (limit - limit // 4) // STAGES
        self._looks = 0
        self.every = 1

    def takes_look(self) -> bool:
        """Whether the look that is due now is recorded."""
        self._looks += 1
        return self.every <= 1 << STAGES and (self._looks - 1) % self.every == 0

    def note(self, written: int) -> None:
        """Take note of what a look has taken."""
        self._until_next -= written
        while self._until_next <= 0 and self.every <= 1 << STAGES:
            self._until_next += self._bytes_of_stage
            self.every *= 2
