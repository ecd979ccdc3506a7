"""Timers that end a worker which takes too long: `with expires(after=60): …`.

A worker asks for a timer through a client that it has configured; the agent's server ends the
worker when the timer is not given back in time. `FileTimer…` talk through a FIFO, `LocalTimer…`
through a queue of `multiprocessing`.
"""

from rankwise.compat.torch.elastic.timer.api import TimerClient, TimerRequest, TimerServer
from rankwise.compat.torch.elastic.timer.api import configure as configure
from rankwise.compat.torch.elastic.timer.api import expires as expires
from rankwise.compat.torch.lazy_names import lazy_names

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

__getattr__ = lazy_names(
    __name__,
    {
        "FileTimerClient": "file_based_local_timer",
        "FileTimerRequest": "file_based_local_timer",
        "FileTimerServer": "file_based_local_timer",
        "LocalTimerClient": "local_timer",
        "LocalTimerServer": "local_timer",
    },
)
