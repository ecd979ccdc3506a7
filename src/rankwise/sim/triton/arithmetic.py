"""Operators: which type the result has, and its values.

Which type that is says `promotion`. Integer division and remainder round towards zero, as C's do.

Indices stay symbolic (see `affine`) through sums, products with a number, and the remainders and
quotients that real kernels use to wrap or to swizzle them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import box_where
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import (
    KernelTypeError,
    active,
    deciding,
    note_math,
    place,
)
from rankwise.sim.triton.promotion import combined, common_type, converted, fitting
from rankwise.sim.triton.tensor import (
    box_in,
    broadcast_shape,
    number_type,
    padded,
    scalar,
    tensor,
    to_tensor,
)

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def elementwise(
    name: str, function: Callable[..., Array], type_: dtype, *operands: tensor
) -> tensor:
    """A function of elements, whose operands have the function's type already."""
    shape = operands[0].shape
    for operand in operands[1:]:
        shape = broadcast_shape(shape, operand.shape)
    execution = active()
    if shape and type_.letter == "f" and not execution.launch.computes:
        data = np.broadcast_to(np.zeros(1, type_.compute), (1, *shape))
    else:
        rank = len(shape)
        data = function(*(padded(operand.data, rank) for operand in operands))
        if type_.is_narrow:
            data = type_.rounded(data)
        elif data.dtype != type_.compute:
            data = data.astype(type_.compute)
        if data.shape[1:] != shape:
            data = np.broadcast_to(data, (data.shape[0], *shape))
    result = tensor(data, type_, shape)
    if execution.observer is not None:
        note_math(name, result, operands)
    return result


def in_type(operand: tensor, type_: dtype) -> tensor:
    """A numeric tensor in another type."""
    if operand.dtype == type_:
        return operand
    if operand.dtype.is_fp8() != type_.is_fp8() and operand.dtype.is_int() != type_.is_int():
        raise KernelTypeError(
            f"{place()}: {operand.dtype} cannot become {type_}", hint="cast to tl.float32 between"
        )
    pattern = None
    if operand.affine is not None and type_.is_int() and type_.primitive_bitwidth >= 32:
        pattern = checked(operand).affine
    data = None if pattern is not None else converted(operand.data, operand.dtype, type_)
    return tensor(data, type_, operand.shape, affine=pattern, token=operand.token)


def combined_all(name: str, *operands: Any) -> tuple[list[tensor], dtype]:
    """Several operands in their common type; numbers count together, after all blocks.

    So a number is not rounded to the type of one block where another one is wider.
    """
    values = [plain(each) for each in operands]
    blocks = [each.dtype for each in values if isinstance(each, tensor)]
    numbers = [number_type(each) for each in values if not isinstance(each, tensor)]
    found = [_of_all(name, types) for types in (blocks, numbers) if types]
    if len(found) == 2 and found[1].kind().value <= found[0].kind().value:
        del found[1]
    type_ = _of_all(name, found)
    return [
        in_type(each, type_) if isinstance(each, tensor) else scalar(fitting(each, type_), type_)
        for each in values
    ], type_


def _of_all(name: str, types: list[dtype]) -> dtype:
    type_ = types[0]
    for each in types[1:]:
        common = common_type(type_, each, divides=False)
        if common is None:
            raise KernelTypeError(f"{place()}: {name} of {type_} and {each} is not defined")
        type_ = common
    return type_


def checked(operand: tensor) -> tensor:
    """The same, without its pattern if its values leave its type and so wrap around."""
    pattern = operand.affine
    if pattern is None or operand.shape == () or operand.dtype.is_ptr():
        return operand
    below, above = pattern.span(operand.shape)
    low, high = operand.dtype.limits()
    if int(pattern.base.min()) + below >= low and int(pattern.base.max()) + above <= high:
        return operand
    return tensor(operand.data, operand.dtype, operand.shape, token=operand.token)


def _patterned(
    left: tensor, right: tensor, type_: dtype, combine: Callable[..., Any]
) -> tensor | None:
    """A symbolic result, where one operand at least is a symbolic block and a pattern results."""
    if not (left.shape or right.shape) or (left.affine is None and right.affine is None):
        return None
    mine, theirs = left.as_affine(), right.as_affine()
    if mine is None or theirs is None:
        return None
    shape = broadcast_shape(left.shape, right.shape)
    pattern = combine(mine.padded(len(shape)), theirs.padded(len(shape)), shape)
    if pattern is None:
        return None
    token = left.token if right.token is None else right.token
    return tensor(None, type_, shape, affine=pattern, token=token)


def add(left: Any, right: Any) -> tensor:
    """`left + right`; either may be a pointer."""
    left, right = plain(left), plain(right)
    if isinstance(left, tensor) and left.dtype.is_ptr():
        return _moved(left, to_tensor(right), 1)
    if isinstance(right, tensor) and right.dtype.is_ptr():
        return _moved(right, to_tensor(left), 1)
    left, right, type_ = combined(left, right, "+")
    if type_.letter in "iu":
        found = _patterned(left, right, type_, lambda mine, theirs, _shape: mine.plus(theirs))
        if found is not None:
            return found
    # One bit wraps around, which for numpy's truth values is an "or".
    function = np.logical_xor if type_.is_bool() else np.add
    return elementwise("add", function, type_, in_type(left, type_), in_type(right, type_))


def sub(left: Any, right: Any) -> tensor:
    """`left - right`; the left, or both, may be pointers."""
    left, right = plain(left), plain(right)
    if isinstance(left, tensor) and left.dtype.is_ptr():
        if isinstance(right, tensor) and right.dtype.is_ptr():
            return elementwise("sub", np.subtract, t.int64, left, right)
        return _moved(left, to_tensor(right), -1)
    left, right, type_ = combined(left, right, "-")
    if type_.letter in "iu":
        found = _patterned(left, right, type_, lambda mine, theirs, _shape: mine.plus(theirs, -1))
        if found is not None:
            return found
    function = np.logical_xor if type_.is_bool() else np.subtract
    return elementwise("sub", function, type_, in_type(left, type_), in_type(right, type_))


def _moved(pointer: tensor, offset: tensor, sign: int) -> tensor:
    if not offset.dtype.is_int():
        raise KernelTypeError(f"{place()}: a pointer and {offset.dtype} cannot be added")
    shape = broadcast_shape(pointer.shape, offset.shape)
    rank = len(shape)
    element = pointer.dtype.element_ty  # type: ignore[attr-defined]
    scale = 1 if pointer.buffer is not None else element.itemsize
    token = offset.token if pointer.token is None else pointer.token
    mine, theirs = pointer.as_affine(), checked(offset).as_affine()
    if mine is not None and theirs is not None:
        pattern = mine.padded(rank).plus(theirs.times(scale).padded(rank), sign)
        return tensor(
            None, pointer.dtype, shape, affine=pattern, buffer=pointer.buffer, token=token
        )
    steps = padded(offset.data, rank).astype(np.int64, copy=False)
    if sign * scale != 1:
        steps = steps * (sign * scale)
    data = padded(pointer.data, rank) + steps
    data = np.broadcast_to(data, (data.shape[0], *shape))
    return tensor(data, pointer.dtype, shape, buffer=pointer.buffer, token=token)


def mul(left: Any, right: Any) -> tensor:
    """`left * right`."""
    left, right, type_ = combined(left, right, "*")
    if type_.letter in "iu":
        for one, other in ((left, right), (right, left)):
            if other.shape == () and len(other.data) == 1 and one.affine is not None and one.shape:
                factor = int(deciding(other.data)[0])
                return tensor(
                    None, type_, one.shape, affine=one.affine.times(factor), token=one.token
                )
            pattern = one.affine
            if other.shape == () and pattern is not None and one.shape and pattern.is_constant:
                base = pattern.base * deciding(other.data).astype(np.int64)
                return tensor(
                    None, type_, one.shape, affine=pattern._replace(base=base), token=one.token
                )
    return elementwise("mul", np.multiply, type_, in_type(left, type_), in_type(right, type_))


def truediv(left: Any, right: Any) -> tensor:
    """`left / right`; integers are divided in fp32."""
    left, right, type_ = combined(left, right, "/")
    if type_.is_int():
        type_ = t.float32
    return elementwise("div", np.divide, type_, in_type(left, type_), in_type(right, type_))


def _toward_zero(left: Array, right: Array) -> Array:
    quotient = np.floor_divide(left, right)
    if left.dtype.kind == "u" or (left.min(initial=0) >= 0 and right.min(initial=0) >= 0):
        return quotient
    exact = quotient * right == left
    rounded: Array = quotient + (~exact & (quotient < 0))
    return rounded


def _by_number(divisor: tensor, type_: dtype) -> int | None:
    """The divisor as a plain positive number, if it is one and the same for all programs."""
    if type_.letter not in "iu" or divisor.shape != () or len(divisor.data) != 1:
        return None
    return int(deciding(divisor.data)[0])


def floordiv(left: Any, right: Any) -> tensor:
    """`left // right` of integers, rounded towards zero."""
    left, right, type_ = combined(left, right, "//")
    if not type_.is_int():
        raise KernelTypeError(f"{place()}: // is for integers, not {left.dtype} and {right.dtype}")
    divisor = _by_number(right, type_)
    if divisor is not None and left.affine is not None and left.shape:
        pattern = left.affine.divided_by(divisor, left.shape)
        if pattern is not None:
            return tensor(None, type_, left.shape, affine=pattern, token=left.token)
    return elementwise("floordiv", _toward_zero, type_, in_type(left, type_), in_type(right, type_))


def mod(left: Any, right: Any) -> tensor:
    """`left % right`, with the sign of the left."""
    left, right, type_ = combined(left, right, "%")
    divisor = _by_number(right, type_)
    if divisor is not None and left.affine is not None and left.shape:
        pattern = left.affine.wrapped_by(divisor, left.shape)
        if pattern is not None:
            return tensor(None, type_, left.shape, affine=pattern, token=left.token)
    return elementwise("mod", np.fmod, type_, in_type(left, type_), in_type(right, type_))


def _of_integers(name: str, function: Callable[..., Array], left: Any, right: Any) -> tensor:
    left, right, type_ = combined(left, right, name)
    if not type_.is_int():
        raise KernelTypeError(
            f"{place()}: {name} is for integers, not {left.dtype} and {right.dtype}"
        )
    return elementwise(name, function, type_, in_type(left, type_), in_type(right, type_))


def bit_and(left: Any, right: Any) -> tensor:
    """`left & right`; two boxes give a box."""
    left, right = plain(left), plain(right)
    if (
        isinstance(left, tensor)
        and isinstance(right, tensor)
        and left.box is not None
        and right.box is not None
    ):
        shape = broadcast_shape(left.shape, right.shape)
        mine = box_in(left, shape)
        theirs = box_in(right, shape)
        if mine is not None and theirs is not None:
            token = left.token if right.token is None else right.token
            return tensor(None, t.int1, shape, box=mine.both(theirs), token=token)
    return _of_integers("&", np.bitwise_and, left, right)


def bit_or(left: Any, right: Any) -> tensor:
    """`left | right`."""
    return _of_integers("|", np.bitwise_or, left, right)


def bit_xor(left: Any, right: Any) -> tensor:
    """`left ^ right`."""
    return _of_integers("^", np.bitwise_xor, left, right)


def shift_left(left: Any, right: Any) -> tensor:
    """`left << right`."""
    return _of_integers("<<", np.left_shift, left, right)


def shift_right(left: Any, right: Any) -> tensor:
    """`left >> right`; the sign of the left is kept, also where both are combined unsigned."""
    is_signed = to_tensor(left).dtype.is_int_signed()
    return _of_integers(">>", _keeping_sign if is_signed else np.right_shift, left, right)


def _keeping_sign(left: Array, right: Array) -> Array:
    if left.dtype.kind != "u":
        plainly: Array = np.right_shift(left, right)
        return plainly
    signed = np.dtype(f"i{left.itemsize}")
    shifted: Array = np.right_shift(left.astype(signed), right.astype(signed))
    return shifted.astype(left.dtype)


def logical_and(left: Any, right: Any) -> tensor:
    """Where both are true."""
    return bit_and(compare("!=", left, 0), compare("!=", right, 0))


def logical_or(left: Any, right: Any) -> tensor:
    """Where one of them is true."""
    return bit_or(compare("!=", left, 0), compare("!=", right, 0))


def negative(operand: tensor) -> tensor:
    """`-operand`."""
    if operand.dtype.is_ptr():
        raise KernelTypeError(f"{place()}: a pointer has no negative")
    if operand.affine is not None and operand.shape:
        return tensor(None, operand.dtype, operand.shape, affine=operand.affine.times(-1))
    if operand.dtype.is_bool():
        return operand  # 0 - 1 is 1, of one bit
    return elementwise("neg", np.negative, operand.dtype, operand)


def invert(operand: tensor) -> tensor:
    """`~operand`."""
    if not operand.dtype.is_int():
        raise KernelTypeError(f"{place()}: ~ is for integers, not {operand.dtype}")
    return elementwise("not", np.invert, operand.dtype, operand)


def absolute(operand: tensor) -> tensor:
    """`abs(operand)`."""
    return elementwise("abs", np.abs, operand.dtype, operand)


def compare(name: str, left: Any, right: Any) -> tensor:
    """A comparison; of an index with a bound, a box."""
    left, right = plain(left), plain(right)
    pointers = [side for side in (left, right) if isinstance(side, tensor) and side.dtype.is_ptr()]
    if pointers:
        left, right = (casting.address_of(to_tensor(side)) for side in (left, right))
    left, right, type_ = combined(left, right, name)
    if name in _MIRRORED and type_.letter in "iu":
        for one, other, relation in ((left, right, name), (right, left, _MIRRORED[name])):
            pattern = checked(one).affine
            if pattern is not None and one.shape and other.shape == ():
                box = box_where(pattern, one.shape, relation, deciding(other.data))
                if box is not None:
                    return tensor(None, t.int1, one.shape, box=box, token=one.token)
    function = _COMPARISONS[name]
    return elementwise(name, function, t.int1, in_type(left, type_), in_type(right, type_))


def extremum(name: str, left: Any, right: Any, *, keeps_nan: bool) -> tensor:
    """The smaller or the greater of two; a NaN loses unless `keeps_nan`."""
    left, right, type_ = combined(left, right, name)
    function: Callable[..., Array]
    if name == "maximum":
        function = np.maximum if keeps_nan or type_.is_int() else np.fmax
    else:
        function = np.minimum if keeps_nan or type_.is_int() else np.fmin
    return elementwise(name, function, type_, in_type(left, type_), in_type(right, type_))


from rankwise.sim.triton import casting  # noqa: E402 (they build on this module)


def _swapped(function: Callable[[Any, Any], tensor]) -> Callable[[Any, Any], tensor]:
    return lambda self, other: function(other, self)


def _comparing(name: str) -> Callable[[Any, Any], tensor]:
    return lambda self, other: compare(name, self, other)


_OPERATORS: dict[str, Callable[[Any, Any], tensor]] = {
    "add": add, "sub": sub, "mul": mul, "truediv": truediv, "floordiv": floordiv, "mod": mod,
    "and": bit_and, "or": bit_or, "xor": bit_xor, "lshift": shift_left, "rshift": shift_right,
}  # fmt: skip
_METHODS: dict[str, Callable[..., tensor]] = {
    "__neg__": negative, "__invert__": invert, "__abs__": absolute,
    "logical_and": logical_and, "logical_or": logical_or,
    **{f"__{name}__": function for name, function in _OPERATORS.items()},
    **{f"__r{name}__": _swapped(function) for name, function in _OPERATORS.items()},
    **{
        f"__{name}__": _comparing(sign)
        for name, sign in zip(("lt", "le", "gt", "ge", "eq", "ne"), _COMPARISONS, strict=True)
    },
}  # fmt: skip
for _name, _method in _METHODS.items():
    setattr(tensor, _name, _method)
