"""Kernels that talk, in Iris's words: what a kernel finds as `iris.load`, `iris.store`, ...

The pointers are those of the calling rank, in symmetric memory; each call names the rank whose
memory is meant, and its own. `heap_bases` is what Iris finds addresses with; here the machine
knows them, and whatever is passed is not looked at.
"""

from collections.abc import Callable
from typing import Any

from rankwise.sim.triton import access, operations
from rankwise.sim.triton import distributed as dl
from rankwise.sim.triton.tensor import tensor


def load(
    pointer: Any, to_rank: Any, from_rank: Any, heap_bases: Any = None, mask: Any = None
) -> tensor:
    """Load from the memory of `from_rank`."""
    del to_rank, heap_bases
    return access.load(dl.symm_at(pointer, from_rank), mask=mask)


def store(  # Iris's signature, as all of these
    pointer: Any,
    value: Any,
    from_rank: Any,
    to_rank: Any,
    heap_bases: Any = None,
    mask: Any = None,
) -> None:
    """Store to the memory of `to_rank`."""
    del from_rank, heap_bases
    access.store(dl.symm_at(pointer, to_rank), value, mask=mask)


def get(
    from_ptr: Any,
    to_ptr: Any,
    from_rank: Any,
    to_rank: Any,
    heap_bases: Any = None,
    mask: Any = None,
) -> None:
    """Load from the memory of `to_rank`, and store here."""
    del from_rank, heap_bases
    access.store(to_ptr, access.load(dl.symm_at(from_ptr, to_rank), mask=mask), mask=mask)


def put(
    from_ptr: Any,
    to_ptr: Any,
    from_rank: Any,
    to_rank: Any,
    heap_bases: Any = None,
    mask: Any = None,
) -> None:
    """Load here, and store to the memory of `to_rank`."""
    del from_rank, heap_bases
    access.store(dl.symm_at(to_ptr, to_rank), access.load(from_ptr, mask=mask), mask=mask)


def _atomic(combine: Callable[..., tensor]) -> Callable[..., tensor]:
    def at_rank(
        pointer: Any,
        val: Any,
        from_rank: Any,
        to_rank: Any,
        heap_bases: Any = None,
        mask: Any = None,
        sem: Any = None,
        scope: Any = None,
    ) -> tensor:
        """Combine a value into the memory of `to_rank`; what was there is the result."""
        del from_rank, heap_bases
        return combine(dl.symm_at(pointer, to_rank), val, mask=mask, sem=sem, scope=scope)

    return at_rank


atomic_add = _atomic(operations.atomic_add)
atomic_and = _atomic(operations.atomic_and)
atomic_max = _atomic(operations.atomic_max)
atomic_min = _atomic(operations.atomic_min)
atomic_or = _atomic(operations.atomic_or)
atomic_xchg = _atomic(operations.atomic_xchg)
atomic_xor = _atomic(operations.atomic_xor)


def atomic_cas(
    pointer: Any,
    cmp: Any,
    val: Any,
    from_rank: Any,
    to_rank: Any,
    heap_bases: Any = None,
    sem: Any = None,
    scope: Any = None,
) -> tensor:
    """Store where the memory of `to_rank` holds `cmp`; what was there is the result."""
    del from_rank, heap_bases
    return operations.atomic_cas(dl.symm_at(pointer, to_rank), cmp, val, sem=sem, scope=scope)
