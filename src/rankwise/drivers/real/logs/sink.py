"""Where the chunks of a worker's stream go."""

from typing import Protocol

from rankwise.base.units import Instant


class Sink(Protocol):
    """Receives one stream, chunk by chunk. Never blocks on anything but a disk."""

    @property
    def is_congested(self) -> bool:
        """Whether the stream should not be read for now, since what it says cannot be placed."""
        ...

    def take(self, chunk: bytes, now: Instant) -> None:
        """Receive the next bytes, at least one; `now` is when they were read."""
        ...

    def end(self, now: Instant) -> None:
        """Receive the news that nothing more will come. Called once."""
        ...
