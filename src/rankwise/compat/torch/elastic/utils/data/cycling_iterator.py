"""torch's iterator over epochs."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "CyclingIterator",
]

__getattr__ = names_of_torch(__name__)
