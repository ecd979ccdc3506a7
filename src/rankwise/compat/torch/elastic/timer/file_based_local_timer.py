"""torch's timers through a FIFO, for workers of any origin on one node."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
]

__getattr__ = names_of_torch(__name__)
