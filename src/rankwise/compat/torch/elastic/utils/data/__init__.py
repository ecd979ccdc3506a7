"""Iterating over data that survives a restart."""

from rankwise.compat.torch.elastic.utils.data.cycling_iterator import CyclingIterator
from rankwise.compat.torch.lazy_names import lazy_names

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

__getattr__ = lazy_names(__name__, {"ElasticDistributedSampler": "elastic_distributed_sampler"})
