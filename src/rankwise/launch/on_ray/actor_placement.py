"""Who of the agents runs, and what that makes of the job. No I/O: the driver tells what happens.

A *seat* is a place in the placement group. It is

    PENDING  from the start, and again after its agent was lost: Ray looks for a node
    RUNNING  an agent is at work there
    ENDED    its agent has ended with a code, and with it the run as far as this node knows
    GIVEN_UP it was lost too often

The job is over when nobody runs, and either an agent has ended by itself, or there is nobody left
to wait for. A seat that still waits for a node is then not waited for: the others have finished.
"""

from enum import Enum

LOSSES_MAX = 3
"""How often one seat is filled again: nodes die, but not again and again under one agent."""


class Seat(Enum):
    """See the module's text."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    GIVEN_UP = "given up"


class ActorPlacement:
    """All seats of one job.

    Attributes:
        states: of each seat.
        stop_signal: the first signal that was passed on, if any.
    """

    def __init__(self, count: int) -> None:
        self.states = [Seat.PENDING] * count
        self.stop_signal: int | None = None
        self._losses = [0] * count
        self._codes: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        if Seat.RUNNING in self.states:
            return False
        is_anybody_wanted = self.stop_signal is None and not self._codes
        return not (is_anybody_wanted and Seat.PENDING in self.states)

    @property
    def code(self) -> int:
        """The job's exit code: what the agents say, who all know the same verdict.

        Success is only said by an agent when all nodes of the run have succeeded, so it outweighs
        an agent that was stopped or lost before.
        """
        if 0 in self._codes.values():
            return 0
        if self._codes:
            return self._codes[min(self._codes)]
        return 1 if self.stop_signal is None else 128 + self.stop_signal

    def begin(self, seat: int) -> None:
        """An agent has begun."""
        self.states[seat] = Seat.RUNNING

    def end(self, seat: int, code: int) -> None:
        """An agent has ended by itself."""
        self.states[seat] = Seat.ENDED
        self._codes[seat] = code

    def lose(self, seat: int) -> bool:
        """An agent was lost, perhaps with its node; returns whether to fill the seat again."""
        self._losses[seat] += 1
        gives_up = self._losses[seat] > LOSSES_MAX or self.stop_signal is not None
        self.states[seat] = Seat.GIVEN_UP if gives_up else Seat.PENDING
        return not gives_up

    def stop(self, signal: int) -> list[int]:
        """A signal has come; returns the seats whose agents are to get it."""
        if self.stop_signal is None:
            self.stop_signal = signal
        return [seat for seat, state in enumerate(self.states) if state is Seat.RUNNING]
