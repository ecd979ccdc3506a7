"""`rankwise.should_stop`: ends all ranks of a job after the same step when it is asked to stop.

Runs inside workers. The words that it reads are in the segment of the node; what happens between
nodes is the agents' affair.
"""

import os
import signal
import threading
from functools import cache
from types import FrameType

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.segments import STOP_VARIABLE, Segment
from rankwise.drivers.real.stop_words import StopWords


def should_stop(*, takes_sigterm: bool = True) -> bool:
    """Begin a step; whether the job was asked to stop, and this is where all ranks stop.

    Call it once per step on every rank, at the same place of the program:

        while not rankwise.should_stop():
            train_one_step()
        save_checkpoint()

    When the run, or a node of it, gets SIGTERM or another signal to stop, all ranks on all nodes
    get the same answer at the same call: none of them is a step ahead. To agree, a call may wait
    for the agents, for milliseconds. Ranks that are behind catch up. In a program without a
    launcher the answer is always no.

    A rank that calls it is not sent the signal by which the job was asked to stop. It has the whole
    grace (`--shutdown-timeout`) to reach the step and to end; then it is killed. Where SIGTERM
    reaches ranks all the same, as of SLURM or systemd, which send it to every process, it asks the
    whole job to stop instead of ending the rank: from the first call on, in the main thread, and
    unless the program handles SIGTERM itself. `takes_sigterm=False` leaves the signal alone.
    """
    if "RANKWISE_SIMULATED" in os.environ:
        from rankwise.simranks.world.world import present_world, running_rank  # noqa: PLC0415  # only there

        if (rank := running_rank()) is not None:
            return present_world().begin_step(rank.number)
    words = _words()
    if words is None:
        return False
    local_rank = int(os.environ["RANKWISE_LOCAL_RANK"])
    return words.begin_step(local_rank, takes_sigterm=takes_sigterm and _takes_sigterm())


@cache
def _words() -> StopWords | None:
    text = os.environ.get("RANKWISE_SEGMENT_FD")
    if text is None:
        return None
    try:
        return StopWords(Segment.attach(int(text)), SystemClock())
    except ConfigError:
        return None  # a process that a worker has started: it is no rank


def forget_words() -> None:
    """Let the next step be the first one of another world."""
    _words.cache_clear()


def _takes_sigterm() -> bool:
    """Whether SIGTERM asks the agent to stop the job; make it so, if the signal is free."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is _ask_agent:
        return True
    is_free = handler is signal.SIG_DFL and STOP_VARIABLE in os.environ
    if not is_free or threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGTERM, _ask_agent)
    forks = _Forks()
    os.register_at_fork(
        before=forks.begin, after_in_parent=forks.go_on, after_in_child=forks.begin_child
    )
    return True


def _ask_agent(_signum: int, _frame: FrameType | None) -> None:
    os.eventfd_write(int(os.environ[STOP_VARIABLE]), 1)


class _Forks(threading.local):
    """Lets SIGTERM end what a rank forks: it is no rank, and its parent waits for that.

    The signal is held back meanwhile, since Python drops what comes between fork and the handler's
    removal.
    """

    def begin(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def go_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def begin_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) is _ask_agent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.go_on()
