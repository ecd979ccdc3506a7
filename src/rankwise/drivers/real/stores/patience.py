"""Trying again until a server answers, with a deadline, pauses that grow, and a way out.

A client of a store asks, fails, and asks the next server or the same one once more. Pauses between
attempts are waits for the client's being closed, so no sleep delays that.
"""

from collections.abc import Iterator
from random import uniform
from threading import Event
from time import monotonic

from rankwise.base.errors import StoreUnavailable
from rankwise.drivers.real.stores.connections import is_end_of_tls

PAUSE_FIRST_S = 0.02
PAUSE_LONGEST_S = 0.5


class Patience:
    """How long one call may go on, and until when its present attempt.

    Args:
        whole_s: for the call.
        closed: set when the client is closed, which ends everything.
        who: who is tried, for the error: `etcd at 10.0.0.1:2379`.
    """

    def __init__(self, whole_s: float, closed: Event, who: str) -> None:
        self._whole_s = whole_s
        self._closed = closed
        self._who = who
        self._ends_at = monotonic() + whole_s

    @property
    def left_s(self) -> float:
        """What is left of it, never less than a moment."""
        return max(0.001, self._ends_at - monotonic())

    def attempts(self) -> Iterator[None]:
        """One step per attempt, pausing in between; ends when the time is over or it is closed."""
        pause_s = PAUSE_FIRST_S
        while not self._closed.is_set():
            yield
            # Spread out, so that a thousand nodes do not come back in one moment.
            spread_s = uniform(pause_s / 2, pause_s)  # noqa: S311 -- no secret
            pause_now_s = min(spread_s, self._ends_at - monotonic())
            if pause_now_s <= 0 or self._closed.wait(pause_now_s):
                return
            pause_s = min(2 * pause_s, PAUSE_LONGEST_S)

    def exhausted(self, last_error: BaseException | None, hint: str) -> StoreUnavailable:
        """The error that ends the call, for the caller to raise."""
        if self._closed.is_set():
            return closed_error(self._who)
        cause = f": {describe(last_error)}" if last_error is not None else ""
        return StoreUnavailable(
            f"no answer within {self._whole_s:.3g} s from {self._who}{cause}", hint=hint
        )


def closed_error(who: str) -> StoreUnavailable:
    """What calls of a closed client raise."""
    return StoreUnavailable(f"the connection to {who} was closed by this process")


def describe(error: BaseException) -> str:
    """An error of the operating system or of a server in a few words."""
    if isinstance(error, EOFError | ConnectionResetError) or is_end_of_tls(error):
        return "it hangs up"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error.__cause__, OSError):
        return describe(error.__cause__)
    text = str(error) or type(error).__name__
    # Where in Python's source that is does not help users.
    return text.partition(": ")[2] if text.startswith("_ssl.c:") else text
