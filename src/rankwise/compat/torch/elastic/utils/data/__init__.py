"""torch's iterators over data that survive a restart."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # found by `__getattr__`
    "CyclingIterator",
    "ElasticDistributedSampler",
]

__getattr__ = names_of_torch(__name__)
