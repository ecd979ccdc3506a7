"""torch's timers through a queue of `multiprocessing`."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
]

__getattr__ = names_of_torch(__name__)
