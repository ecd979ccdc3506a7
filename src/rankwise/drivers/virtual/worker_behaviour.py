"""What a worker does, as a value: how it starts, works, takes being told to stop, and ends.

The simulated driver acts these out in virtual time; `rankwise.testing.worker_script` acts them out
in a real process, all but the fields that only a simulation can arrange (named so below).
"""

from collections.abc import Sequence

import msgspec

from rankwise.base.units import ZERO, Duration


class Exits(msgspec.Struct, frozen=True, tag=True):
    """It ends with an exit code."""

    code: int = 0


PEER_IS_GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
"""What ranks say when a peer's connection has closed."""


class Dies(msgspec.Struct, frozen=True, tag=True):
    """It is killed by a signal, which rankwise did not send."""

    signal: int


class Raises(msgspec.Struct, frozen=True, tag=True):
    """It raises an uncaught exception, and is gone `exit_takes` later."""

    message: str
    exception: str = "RuntimeError"
    exit_takes: Duration = ZERO
    blames_peer: bool = False
    """Whether a peer that is gone, or has not come, is the reason (simulated only)."""


class RunsForever(msgspec.Struct, frozen=True, tag=True):
    """It does not end by itself."""


Ending = Exits | Dies | Raises | RunsForever


class WorkerProgram(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What one worker does in one attempt.

    Attributes:
        ending: how it ends when it is not stopped.
        after: how long it works before that.
        stop_takes: how long after a signal other than SIGKILL it ends; None ignores such signals.
        stop_code: the exit code with which it obeys; None lets the signal kill it.
        progress_every: how often it shows a sign of life; None never after its start.
        silent_after: when it falls silent; None never.
        strays: how many processes it leaves behind, each in a session of its own.
        start_takes: how long it takes to come into being (simulated only).
        refusal: why it cannot be started; empty if it can (simulated only).
        kill_takes: how long SIGKILL takes; None never ends it (simulated only).
        stray_kill_takes: the same for its strays (simulated only).
    """

    ending: Ending = Exits()
    after: Duration = ZERO
    stop_takes: Duration | None = ZERO
    stop_code: int | None = None
    progress_every: Duration | None = None
    silent_after: Duration | None = None
    strays: int = 0
    start_takes: Duration = ZERO
    refusal: str = ""
    kill_takes: Duration | None = ZERO
    stray_kill_takes: Duration | None = ZERO

    @property
    def is_realizable(self) -> bool:
        """Whether a real process can do this too."""
        return (self.start_takes, self.refusal, self.kill_takes, self.stray_kill_takes) == (
            ZERO,
            "",
            ZERO,
            ZERO,
        )


Lives = Sequence[Sequence[WorkerProgram]]
"""For each attempt the programs of its workers by local rank; the last attempt's repeat."""


def program_of(lives: Lives, local_rank: int, attempt: int) -> WorkerProgram:
    """What the worker does in that attempt."""
    return lives[min(attempt, len(lives) - 1)][local_rank]
