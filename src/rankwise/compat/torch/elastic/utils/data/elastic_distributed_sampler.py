"""A sampler that goes on where an earlier life has ended. This module needs torch."""

import math
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data.distributed import DistributedSampler

__all__ = ["ElasticDistributedSampler"]


class ElasticDistributedSampler(DistributedSampler[Any]):  # type: ignore[misc]  # no types here
    """Gives each rank its part of what is left of a data set after `start_index` samples.

    Raises:
        TypeError: the data set has no length.
        ValueError: `start_index` lies behind its end.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        if not isinstance(dataset, Sized):
            raise TypeError("Dataset must be an instance of collections.abc.Sized")
        size = len(dataset)
        if start_index >= size:
            raise ValueError(f"Start index {start_index} should be less than dataset size {size}")
        self.start_index = start_index
        self.num_samples = math.ceil((size - start_index) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        import torch  # noqa: PLC0415  # the base class has imported it; this is for its name

        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        size = len(self.dataset)
        order = torch.randperm(size - self.start_index, generator=generator)
        left = [int(index) + self.start_index for index in order]
        # Some are taken twice, so that every rank has equally many.
        left += left[: self.total_size - len(left)]
        return iter(left[self.rank : self.total_size : self.num_replicas])
