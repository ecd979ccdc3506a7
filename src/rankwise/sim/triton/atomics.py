"""Atomic operations on memory.

In a lockstep group the programs' operations take effect one program after the other, element by
element, so that a sum of floats is the same in every run. The value before an operation is its
result. A compare-and-swap is how programs wait for one another. A group goes on in lockstep as long
as each of its programs gets a word of its own, as with locks that are free; programs that want the
same word go in turn, in groups of their own. Where a word is not what was expected, another program
has to run, and the lockstep ends.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim.triton.access import element_of, masked, note_access
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.casting import cast
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import (
    Execution,
    InTurn,
    KernelTypeError,
    KernelValueError,
    MustInterleave,
    active,
    line_of_kernel,
    parts_by,
    place,
)
from rankwise.sim.triton.memory import AccessTarget, Scattered, bits_of, resolve_scattered
from rankwise.sim.triton.tensor import broadcast_to, tensor, to_tensor

_Combine = Callable[[Array, Array], Array]


def _extremum_of_bits(
    signed: Callable[..., Array], unsigned: Callable[..., Array]
) -> Callable[[Array, Array], Array]:
    """Of floats: hardware has atomics of integers only, and takes the floats' bits for them.

    The sign of the new value decides: a value with a sign is compared as an unsigned number, since
    of two negative floats the greater one has the smaller bits. This fixes what becomes of NaN and
    of negative zero.
    """

    def combined(old: Array, new: Array) -> Array:
        if new.dtype.kind != "f":
            return signed(old, new)
        as_signed, as_unsigned = (f"{kind}{new.dtype.itemsize}" for kind in "iu")
        bits = np.where(
            np.signbit(new),
            unsigned(old.view(as_unsigned), new.view(as_unsigned)).view(as_signed),
            signed(old.view(as_signed), new.view(as_signed)),
        )
        return bits.view(new.dtype)

    return combined


_COMBINE: dict[str, _Combine] = {
    "add": np.add,
    "max": _extremum_of_bits(np.maximum, np.minimum),
    "min": _extremum_of_bits(np.minimum, np.maximum),
    # To add zero would make 0.0 of -0.0, and another NaN of a NaN.
    "load": lambda old, _new: old,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda _old, new: new,
}
_ORDERS = (None, "acquire", "release", "acq_rel", "relaxed")
_SCOPES = (None, "gpu", "cta", "sys")


def atomic(
    name: str,
    pointer: Any,
    value: Any,
    mask: Any = None,
    sem: str | None = None,
    scope: str | None = None,
) -> tensor:
    """Combine a value into memory; what was there before is the result, or 0 where masked."""
    element = element_of(pointer)
    _check(name, element, sem, scope)
    execution = active()
    pointer, mask = masked(pointer, mask)
    value = broadcast_to(cast(value, element), pointer.shape)
    index, target = _addresses(execution, name, pointer, element)
    mask_data = None if mask is None else mask.data
    size = execution.size
    access = resolve_scattered(target, _for_each(index, size), mask_data)
    flat = target.buffer.elements(element)
    values = _for_each(value.data, size)
    if mask_data is None:
        chosen: Any = slice(None)
        where, operands = access.elements.reshape(-1), values.reshape(-1)
    else:
        chosen = _for_each(mask_data, size).reshape(-1)
        where, operands = access.elements.reshape(-1)[chosen], values.reshape(-1)[chosen]
    before = np.zeros(size * pointer.numel, element.compute)
    changes = execution.launch.memory.changes
    before[chosen] = _combined(execution, flat, element, where, operands, _COMBINE[name])
    result = tensor(before.reshape(size, *pointer.shape), element, pointer.shape)
    _conclude(
        execution, target, access, result, (pointer, value, mask), (sem, scope),
        changes_before=changes,
    )  # fmt: skip
    return result


def compare_and_swap(
    pointer: Any, expected: Any, value: Any, sem: str | None = None, scope: str | None = None
) -> tensor:
    """Store `value` where memory holds `expected`; what was there before is the result."""
    element = element_of(pointer)
    _check("cas", element, sem, scope)
    execution = active()
    if not execution.interleaves and pointer.numel != 1:
        raise MustInterleave
    expected, value = to_tensor(expected), to_tensor(value)
    result_type = value.dtype
    for each in (expected, value):
        _check_same_bits(element, each.dtype)
    expected = broadcast_to(cast(expected, element), pointer.shape)
    value = broadcast_to(cast(value, element), pointer.shape)
    index, target = _addresses(execution, "cas", pointer, element)
    index = _for_each(index, execution.size)
    access = resolve_scattered(target, index, None)
    flat = target.buffer.elements(element)
    if not execution.interleaves:
        _take_turns(access.elements.reshape(-1))
    wanted, new = (np.broadcast_to(each.data, index.shape) for each in (expected, value))
    # Bits are compared, as hardware does: a NaN equals itself, and -0.0 is not 0.0.
    wanted, new, flat = (
        bits_of(each) for each in (element.encode(wanted), element.encode(new), flat)
    )
    wanted, new = wanted.reshape(-1), new.reshape(-1)
    words = access.elements.reshape(-1)
    before = flat[words]
    if not execution.interleaves:
        if (before != wanted).any():
            raise MustInterleave  # another program has to release it first
        execution.remember(lambda: flat.__setitem__(words, before))
    changes = execution.launch.memory.changes
    for at, where in enumerate(words.tolist()):
        before[at] = flat[where]
        if before[at] == wanted[at]:
            if flat[where] != new[at]:
                execution.changed_memory()
            flat[where] = new[at]
    found = element.decode(before.view(element.storage)).reshape(index.shape)
    result = tensor(found, element, pointer.shape)
    _conclude(
        execution, target, access, result, (pointer, expected, value), (sem, scope),
        words[before == wanted], changes_before=changes,
    )  # fmt: skip
    return in_type(result, result_type)


def _check_same_bits(element: dtype, given: dtype) -> None:
    """Refuse what would have to be converted: as in Triton, a compare-and-swap takes bits."""
    if given != element and not (
        given.is_int()
        and element.is_int()
        and given.primitive_bitwidth == element.primitive_bitwidth
    ):
        raise KernelTypeError(
            f"{place()}: atomic_cas of {element} takes values of {element}, not {given}",
            hint=f"cast with .to({element!r})".replace("triton.language", "tl"),
        )


def _take_turns(words: Array) -> None:
    """End a group of which several programs want one word: those who come first go first."""
    order = np.argsort(words, kind="stable")
    first = np.flatnonzero(np.diff(words[order], prepend=words[order[:1]] - 1))
    turns = np.empty(len(words), np.int64)
    turns[order] = np.arange(len(words)) - np.repeat(first, np.diff(np.append(first, len(words))))
    if turns.any():
        raise InTurn(parts_by(turns))


def _check(name: str, element: dtype, sem: str | None, scope: str | None) -> None:
    if sem not in _ORDERS:
        raise KernelValueError(
            f"{place()}: sem={sem!r}: it is one of {', '.join(map(str, _ORDERS))}"
        )
    if scope not in _SCOPES:
        raise KernelValueError(
            f"{place()}: scope={scope!r}: it is one of {', '.join(map(str, _SCOPES))}"
        )
    if not _has_atomic(name, element):
        raise KernelTypeError(f"{place()}: atomic_{name} is not for {element}")


def _has_atomic(name: str, element: dtype) -> bool:
    """Whether Triton has the operation for the type, for NVIDIA's devices."""
    if name == "load":
        return not element.is_fp8()
    if name == "cas":
        return element.primitive_bitwidth in (16, 32, 64)
    if name in ("and", "or", "xor") and not element.is_int():
        return False
    if element.primitive_bitwidth >= 32:
        return True
    return name == "add" and element.primitive_bitwidth == 16 and element.is_floating()


def _for_each(data: Array, size: int) -> Array:
    """One row for each program, also where all have the same."""
    return np.broadcast_to(data, (size, *data.shape[1:]))


def _addresses(
    execution: Execution, name: str, pointer: tensor, element: dtype
) -> tuple[Array, AccessTarget]:
    if pointer.buffer is None:
        buffer = execution.launch.memory.buffer_at(int(pointer.data.reshape(-1)[0]))
        if buffer is None:
            raise KernelValueError(f"{place()}: atomic_{name} through an address in no buffer")
        index = (pointer.data - buffer.address) // element.itemsize
    else:
        buffer, index = pointer.buffer, pointer.data
    if execution.launch.access_trace is not None:
        raise MustInterleave  # in which order they come is a question of time
    if execution.observer is not None:
        # Others see the effect now: so everything before it has to have happened.
        execution.observer.settle()
    execution.before_reading(buffer)
    return index, AccessTarget(f"atomic_{name}", buffer, element, pointer.shape)


def _combined(
    execution: Execution,
    flat: Array,
    element: dtype,
    where: Array,
    operands: Array,
    combine: _Combine,
) -> Array:
    """Carry the operations out, in order, and return what each of them found."""
    order = np.argsort(where, kind="stable")
    in_order = where[order]
    first = np.ones(len(where), np.bool_)
    first[1:] = in_order[1:] != in_order[:-1]
    starts = np.flatnonzero(first)
    turn_in_order = np.arange(len(where)) - np.repeat(starts, np.diff([*starts, len(where)]))
    unique = in_order[starts]
    old = flat[unique]
    found = np.empty(len(where), element.compute)
    turns = int(turn_in_order.max(initial=-1)) + 1
    if turns == 1:
        found = element.decode(flat[where])
        flat[where] = element.encode(element.rounded(combine(found, operands)))
    else:
        by_turn = np.argsort(turn_in_order, kind="stable")
        edges = np.searchsorted(turn_in_order[by_turn], np.arange(turns + 1))
        for turn in range(turns):
            chosen = order[by_turn[edges[turn] : edges[turn + 1]]]
            here = where[chosen]
            current = element.decode(flat[here])
            found[chosen] = current
            flat[here] = element.encode(element.rounded(combine(current, operands[chosen])))
    if not (execution.may_wait and np.array_equal(bits_of(old), bits_of(flat[unique]))):
        execution.changed_memory()
    if not execution.interleaves:
        execution.remember(lambda: flat.__setitem__(unique, old))
    return found


def _note_setters(
    execution: Execution, target: AccessTarget, access: Scattered, result: tensor
) -> None:
    """Remember which program has set which word, for those who will wait for it in vain."""
    buffer, element = target.buffer, target.element
    indexes = access.elements.reshape(-1)
    stored = buffer.elements(element)[indexes]
    now = element.decode(stored)
    changed = np.flatnonzero(bits_of(stored) != bits_of(element.encode(result.data)).reshape(-1))
    setters, line = execution.launch.memory.setters, line_of_kernel()
    addresses = buffer.address + indexes[changed] * element.itemsize
    values = now[changed].tolist()
    for position, address, value in zip(changed.tolist(), addresses.tolist(), values, strict=True):
        setters.note(address, value, execution.name_of(position), line)


def _elements_of(access: Scattered) -> Array:
    """The elements under the mask."""
    if access.mask is None:
        return access.elements.reshape(-1)
    mask = np.broadcast_to(access.mask, access.elements.shape)
    found: Array = access.elements[mask]
    return found


def _conclude(
    execution: Execution,
    target: AccessTarget,
    access: Scattered,
    result: tensor,
    operands: tuple[Any, ...],
    order: tuple[str | None, str | None],
    swapped: Array | None = None,
    *,
    changes_before: int,
) -> None:
    launch = execution.launch
    # In lockstep, only what may be a lock: there may be thousands of others.
    is_swap = target.action == "atomic_cas"
    if (execution.interleaves or is_swap) and result.numel == 1 and access.touched:
        _note_setters(execution, target, access, result)
    if launch.races is not None:
        used = _elements_of(access)
        changed = used if swapped is None else swapped
        launch.races.on_atomic(execution, target, used, changed, order)
    if execution.observer is not None:
        after = map(to_tensor, (each for each in operands if each is not None))
        changes = launch.memory.changes != changes_before
        result.token = note_access(
            execution, "atomic", target, access, access.touched, after, changes=changes
        )
        execution.observer.settle()
    if execution.may_wait and (result.numel == 1 or launch.memory.changes == changes_before):
        execution.probe(target.buffer, target.element, access.elements, result.data)
