"""Load and store: from pointers and masks to accesses, and from memory's form to values.

`load` and `store` are the language's; with pointers to elements alone, `load_block` and
`store_block` do.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rankwise.sim.hardware.footprint import (
    Footprint,
    footprint_of_elements,
    footprint_of_view,
    starts_of,
)
from rankwise.sim.triton import casting
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, dtype, int1, int8, pointer_type
from rankwise.sim.triton.execution import (
    Execution,
    KernelTypeError,
    KernelValueError,
    MustInterleave,
    Operation,
    active,
    place,
    tokens_of,
)
from rankwise.sim.triton.memory import (
    Access,
    AccessTarget,
    Buffer,
    Scattered,
    Strided,
    aligned_index,
    buffers_behind,
    resolve_pattern,
    resolve_scattered,
    scattered_store,
    strided_store,
)
from rankwise.sim.triton.tensor import broadcast_shape, broadcast_to, padded, tensor, to_tensor


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
    *,
    boundary_check: Any = (),
    padding_option: str = "",
) -> tensor:
    """Read from memory: one address, a block of them, or a block pointer."""
    del cache_modifier, eviction_policy
    if plain(volatile) and not active().interleaves:
        # A volatile load is repeated since another program writes there meanwhile.
        raise MustInterleave
    if _is_block_pointer(pointer):
        _refuse_mask(mask, other)
        pointers, inside = pointer.aimed(boundary_check)
        padding = float("nan") if plain(padding_option) == "nan" else None
        return load_block(pointers, inside, padding)
    if plain(other) is not None and plain(mask) is None:
        raise KernelValueError(f"{place()}: load has `other` but no `mask`")
    return load_block(pointer, mask, other, volatile=bool(plain(volatile)))


def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    *,
    boundary_check: Any = (),
) -> None:
    """Write to memory: one address, a block of them, or a block pointer."""
    del cache_modifier, eviction_policy
    if _is_block_pointer(pointer):
        _refuse_mask(mask, None)
        pointers, inside = pointer.aimed(boundary_check)
        store_block(pointers, value, inside)
        return
    store_block(pointer, value, mask)


def _is_block_pointer(pointer: Any) -> bool:
    # Not by its class: `descriptors` needs this module. No tensor is asked, which would complain.
    return not isinstance(pointer, tensor) and hasattr(pointer, "aimed")


def _refuse_mask(mask: Any, other: Any) -> None:
    if plain(mask) is not None or plain(other) is not None:
        raise KernelValueError(
            f"{place()}: a block pointer takes boundary_check and padding_option, no mask or other"
        )


def element_of(pointer: Any) -> dtype:
    """The type that a pointer points to; an error if it is no pointer."""
    if not isinstance(pointer, tensor) or not isinstance(pointer.dtype, pointer_type):
        raise KernelTypeError(
            f"{place()}: {pointer!r} is not a pointer, or a block of pointers",
            hint="pass an array to the launch to get a pointer to its first element",
        )
    return pointer.dtype.element_ty


def masked(pointer: tensor, mask: Any) -> tuple[tensor, tensor | None]:
    """Pointer and mask in their common shape; a mask that is always true is none."""
    mask = plain(mask)
    if mask is None or mask is True:
        return pointer, None
    mask = to_tensor(mask)
    if not mask.dtype.is_bool():
        mask = tensor(mask.data != 0, int1, mask.shape, token=mask.token)
    if not pointer.shape and mask.shape:
        raise KernelTypeError(
            f"{place()}: one address is masked by a block of shape {list(mask.shape)}"
        )
    shape = broadcast_shape(pointer.shape, mask.shape)
    return broadcast_to(pointer, shape), broadcast_to(mask, shape)


def _resolve(target: AccessTarget, pointer: tensor, mask: tensor | None) -> Access:
    pattern = pointer.as_affine()
    if pattern is not None and (mask is None or mask.box is not None) and pointer.shape:
        found = resolve_pattern(target, pattern, None if mask is None else mask.box)
        if found is not None:
            return found
    return resolve_scattered(target, pointer.data, None if mask is None else mask.data)


def load_block(pointer: tensor, mask: Any, other: Any, *, volatile: bool = False) -> tensor:
    """Read a block; masked elements are `other`, or 0."""
    element = element_of(pointer)
    pointer, mask = masked(pointer, mask)
    execution = active()
    if pointer.buffer is None:
        return _load_behind(execution, pointer, mask, other, element)
    buffer = pointer.buffer
    execution.before_reading(buffer)
    target = AccessTarget("load", buffer, element, pointer.shape)
    access = _resolve(target, pointer, mask)
    execution.uses(target, pointer, mask)
    execution.launch.saw_block(pointer.numel)
    if execution.observer is not None and (volatile or not pointer.shape):
        execution.observer.settle()
    if not execution.launch.computes and pointer.shape and element.is_floating():
        data: Array = np.broadcast_to(np.zeros(1, element.compute), (1, *pointer.shape))
    else:
        data = _read(target, access, mask, other)
    result = tensor(data, element, pointer.shape)
    if execution.observer is not None:
        elements = -(-access.touched // execution.size)
        operands = pointer, mask
        result.token = note_access(execution, "load", target, access, elements, operands)
    looks = volatile or (not pointer.shape and (mask is None or mask.data[0]))
    if looks and execution.may_wait:
        execution.probe(buffer, element, pointer.data, data)
    return result


def footprint_of(target: AccessTarget, access: Access) -> tuple[int, Footprint]:
    """The lowest byte that an access touches, and what it touches from there on."""
    flat, address = target.buffer.elements(target.element), target.buffer.address
    if isinstance(access, Scattered):
        elements = access.elements
        if access.mask is not None:
            elements = elements[np.broadcast_to(access.mask, elements.shape)]
        lowest, footprint = footprint_of_elements(elements * flat.itemsize, flat.itemsize)
        return address + lowest, footprint
    begin = _address_of(flat)
    if len(access.pieces) == 1:
        ((_, view),) = access.pieces
        lowest, footprint = footprint_of_view(view)
        return address + _address_of(view) - begin + lowest, footprint
    # Of several programs at once: element by element, so that all runs are equally long.
    firsts = [(_address_of(view) - begin + starts_of(view)) for _, view in access.pieces]
    lowest, footprint = footprint_of_elements(np.concatenate(firsts), flat.itemsize)
    return address + lowest, footprint


def _address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def note_access(
    execution: Execution,
    kind: str,
    target: AccessTarget,
    access: Access,
    elements: int,
    operands: Iterable[Any],
    *,
    changes: bool = True,
) -> Any:
    """Tell the observer of an access to so many elements by each program; returns its token."""
    lowest, footprint = footprint_of(target, access) if elements else (target.buffer.address, None)
    return execution.note(
        Operation(
            kind,
            target.action,
            target.element.name,
            elements,
            tuple(map(int, execution.programs)),
            size_bytes=elements * target.element.itemsize,
            footprint=footprint,
            buffer=target.buffer.name,
            space=target.buffer.space,
            address=lowest,
            after=tokens_of(operands),
            changes_memory=changes,
        )
    )


def _plain_other(other: Any, element: dtype) -> Any:
    other = plain(other)
    if other is None:
        return element.rounded(np.zeros(1, element.compute))
    # In memory a truth value is an int8: 0.5 of them is 0.
    given = in_type(to_tensor(other), int8) if element.is_bool() else to_tensor(other)
    held = in_type(given, element)
    return held if isinstance(other, tensor) else held.data


def _read(target: AccessTarget, access: Access, mask: tensor | None, other: Any) -> Array:
    element = target.element
    filling = _plain_other(other, element)
    if isinstance(access, Strided):
        data = _read_views(target, access, filling)
    else:
        stored = target.buffer.elements(element).take(access.elements)
        data = stored if element.storage == element.compute else element.decode(stored)
        if access.mask is not None and not isinstance(filling, tensor):
            np.copyto(data, filling[0], where=~access.mask)
    if mask is not None and isinstance(filling, tensor):
        data = np.where(mask.data, data, padded(filling.data, len(target.shape)))
    return data


def _read_views(target: AccessTarget, access: Strided, filling: Any) -> Array:
    element, shape = target.element, target.shape
    if len(access.pieces) == 1:
        within, view = access.pieces[0]
        if view.shape == (access.rows, *shape):
            return element.decode(view)
    start = 0 if isinstance(filling, tensor) else filling[0]
    if element.storage == element.compute:
        data: Array = np.full((access.rows, *shape), start, element.compute)
        for within, view in access.pieces:
            data[within] = view
        return data
    first = element.encode(np.array([start], dtype=element.compute))[0]
    stored: Array = np.full((access.rows, *shape), first, element.storage)
    for within, view in access.pieces:
        stored[within] = view
    return element.decode(stored)


def _load_behind(
    execution: Execution, pointer: tensor, mask: tensor | None, other: Any, element: dtype
) -> tensor:
    """Load through bare addresses: from every buffer that they lie in."""
    mask_data = None if mask is None else mask.data
    result: tensor | None = None
    filling = _plain_other(other, element)
    for buffer, inside in buffers_behind(execution.launch.memory, pointer.data, mask_data):
        index = aligned_index(buffer, element, pointer.data, inside)
        there = tensor(index, pointer.dtype, pointer.shape, buffer=buffer, token=pointer.token)
        part = tensor(inside, int1, pointer.shape)
        before = filling if result is None else result
        if not isinstance(before, tensor):
            before = before[0]
        result = load_block(there, part, before)
    if result is None:
        start = filling if isinstance(filling, tensor) else tensor(filling, element, ())
        result = broadcast_to(start, pointer.shape)
    return result


def store_block(pointer: tensor, value: Any, mask: Any) -> None:
    """Write a block where the mask holds."""
    element = element_of(pointer)
    value = to_tensor(value)
    shape = pointer.shape
    if value.shape and not shape:
        raise KernelTypeError(
            f"{place()}: a block of shape {list(value.shape)} is stored to a single address"
        )
    if broadcast_shape(shape, value.shape) != shape:
        pointer = broadcast_to(pointer, broadcast_shape(shape, value.shape))
    pointer, mask = masked(pointer, mask)
    if value.dtype != element:
        value = casting.cast(value, element)
    value = broadcast_to(value, pointer.shape)
    execution = active()
    if pointer.buffer is None:
        mask_data = None if mask is None else mask.data
        for buffer, inside in buffers_behind(execution.launch.memory, pointer.data, mask_data):
            index = aligned_index(buffer, element, pointer.data, inside)
            there = tensor(index, pointer.dtype, pointer.shape, buffer=buffer)
            _store(execution, there, value, tensor(inside, int1, pointer.shape), element)
        return
    _store(execution, pointer, value, mask, element)


def _store(
    execution: Execution, pointer: tensor, value: tensor, mask: tensor | None, element: dtype
) -> None:
    buffer = pointer.buffer
    assert buffer is not None
    target = AccessTarget("store", buffer, element, pointer.shape)
    _refuse_read_only(buffer)
    access = _resolve(target, pointer, mask)
    execution.uses(target, pointer, mask)
    execution.launch.saw_block(pointer.numel)
    changes = True
    if execution.launch.computes or not element.is_floating():
        stored = element.encode(value.data)
        if isinstance(access, Scattered):
            changes = execution.store(scattered_store(buffer, element, access, stored))
        else:
            changes = execution.store(strided_store(buffer, access, stored))
    if execution.observer is not None:
        elements, operands = -(-access.touched // execution.size), (pointer, value, mask)
        note_access(execution, "store", target, access, elements, operands, changes=changes)


def _refuse_read_only(buffer: Buffer) -> None:
    if not buffer.flat.flags.writeable:
        raise KernelTypeError(f'{place()}: buffer "{buffer.name}" is read-only')
