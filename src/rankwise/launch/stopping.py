"""`rankwise.should_stop`: ends all ranks of a job after the same step when it is asked to stop.

Runs inside workers. The words that it reads are in the segment of the node; what happens between
nodes is the agents' affair.
"""

import os
from functools import cache

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.stop_words import StopWords


def should_stop() -> bool:
    """Begin a step; whether the job was asked to stop, and this is where all ranks stop.

    Call it once per step on every rank, at the same place of the program:

        while not rankwise.should_stop():
            train_one_step()
        save_checkpoint()

    When the run, or a node of it, gets SIGTERM or another signal to stop, all ranks on all nodes
    get the same answer at the same call: none of them is a step ahead. To agree, a call may wait
    for ranks that are behind. In a program that nobody launched the answer is always no.

    A rank that calls it is not sent the signal by which the job was asked to stop. It has the whole
    grace (`--shutdown-timeout`) to reach the step and to end; then it is killed.
    """
    words = _words()
    return words is not None and words.begin_step(int(os.environ["RANKWISE_LOCAL_RANK"]))


@cache
def _words() -> StopWords | None:
    text = os.environ.get("RANKWISE_SEGMENT_FD")
    if text is None:
        return None
    try:
        return StopWords(Segment.attach(int(text)), SystemClock())
    except ConfigError:
        return None  # a process that a worker has started: it is no rank
