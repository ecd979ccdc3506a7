"""Data loaders that do not run (`--synthetic-data`): each repeats its first batch.

The first batch is made for real, without worker processes, by the loader's own sampler, data set
and function that collates. An epoch has as many batches as the loader says; each is as large as the
first, the last one too. A loader without a length repeats its batch without end.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor
from torch.utils._pytree import tree_map

from rankwise.simranks.world.world import present_world, running_rank

REMARK = "data loaders do not run: each repeats its first batch (--synthetic-data)"
ENDLESS = "a data loader without a length repeats its first batch without end (--synthetic-data)"


class RepeatedBatch:
    """An epoch of one batch.

    Args:
        batch: the first one; each that is given is a copy, since programs change them.
        count: how many there are; None for no end.
    """

    def __init__(self, batch: Any, count: int | None) -> None:
        self._batch = batch
        self._count = count
        self._given = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._given == self._count:
            raise StopIteration
        self._given += 1
        return tree_map(_copied, self._batch)

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("the data loader has no length")
        return self._count


def repeat_first_batch(
    original: Callable[[Any], Iterator[Any]], remark: Callable[[str], None]
) -> Callable[[Any], Iterator[Any]]:
    """`DataLoader.__iter__`; `remark` has the user told of what is left out."""
    batches: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def iterate(loader: Any) -> Iterator[Any]:
        if running_rank() is None or not present_world().prediction.has_synthetic_data:
            return original(loader)
        count = _length_of(loader)
        remark(ENDLESS if count is None else REMARK)
        first = batches.get(loader)
        if first is None:
            first = batches[loader] = _first_of(original, loader)
        return RepeatedBatch(first[0] if first else None, count if first else 0)

    return iterate


def _first_of(original: Callable[[Any], Iterator[Any]], loader: Any) -> list[Any]:
    """The first batch, in a list; no batch if the loader has none."""
    workers, patience = loader.num_workers, loader.timeout
    persists = loader.persistent_workers
    loader.num_workers, loader.timeout = 0, 0
    vars(loader)["persistent_workers"] = False  # which its own `__setattr__` refuses
    try:
        for batch in original(loader):
            return [batch]
    finally:
        loader.num_workers, loader.timeout = workers, patience
        vars(loader)["persistent_workers"] = persists
    return []


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable data set
        return None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
