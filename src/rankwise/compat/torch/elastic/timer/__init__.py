"""torch's timers, which end a worker that takes too long: `with expires(after=60): …`."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # found by `__getattr__`
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

__getattr__ = names_of_torch(__name__)
