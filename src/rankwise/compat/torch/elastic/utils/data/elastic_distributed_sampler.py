"""torch's sampler that continues where an earlier attempt has ended."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "ElasticDistributedSampler",
]

__getattr__ = names_of_torch(__name__)
