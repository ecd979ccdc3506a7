"""torch's log of timers that have expired."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "log_debug_info_for_expired_timers",
]

__getattr__ = names_of_torch(__name__)
