"""Arithmetic of simulated tensors: every operation is a kernel on the device, in simulated time.

Types are promoted and shapes broadcast as torch does it; narrow fractions are calculated in f32 and
rounded once. Operands are tensors of one device and Python numbers. A result is a new tensor, which
lies where its device's channels take turns; `x += y` and its siblings write to `x` itself.

Anything beyond that needs a kernel of the user's own: a `TypeError` here says so.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.runtime import kernels
from rankwise.sim.runtime.promotion import (
    category_of,
    common_kind,
    fraction_kind,
    kind_with_number,
    sum_kind,
    working_kind,
)
from rankwise.sim.triton import next_power_of_2
from rankwise.sim.triton.dtypes import dtype, int1

if TYPE_CHECKING:
    from rankwise.sim.runtime.tensor import Tensor

Shape: TypeAlias = tuple[int, ...]
_TILE = 4_096
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_BITWISE = frozenset({"and", "or", "xor"})
_FRACTIONS = frozenset({"div", "exp", "log", "sqrt", "sigmoid"})
_STARTS = {"sum": 0.0, "max": -np.inf, "min": np.inf}


def binary(
    operation: str, x: "Tensor", y: Any, *, is_swapped: bool = False, out: "Tensor | None" = None
) -> "Tensor":
    """`x operation y`, or `y operation x`; into `out` if it is given."""
    number = None if _is_tensor(y) else _number(y, operation)
    kind = _operand_kind(x, y, number)
    _check_category(operation, kind)
    kind = fraction_kind(kind) if operation in _FRACTIONS else kind
    shape = x.shape if number is not None else _broadcast(x.shape, y.shape)
    if number is None:
        _check_device(x, y)
    result_kind = int1 if operation in _COMPARISONS else kind
    result = _new(x, shape, result_kind) if out is None else out
    if out is not None:
        _check_fits(out, shape, kind)
    other = shape if number is not None else y.shape
    axes, (along_x, along_y) = _merged(shape, [_strides(x.shape, shape), _strides(other, shape)])
    if number is not None and operation in _COMPARISONS and kind.is_floating():
        number = float(kind.rounded(np.array([number], kind.compute))[0])
    _over_tiles(
        kernels.binary_kernel, axes, result, x, y if number is None else number, result,
        *axes[1:], *along_x, *along_y,
        OP=operation, KIND=working_kind(kind), Y_IS_NUMBER=number is not None, SWAPPED=is_swapped,
    )  # fmt: skip
    return result


def unary(operation: str, x: "Tensor") -> "Tensor":
    """`operation x`, element by element."""
    if operation == "neg" and x.kind.is_bool():
        raise TypeError("- is not defined for tensors of bool: take ~ for the opposite")
    if operation == "invert":
        _check_category("invert", x.kind)
        operation = "not" if x.kind.is_bool() else operation
    kind = fraction_kind(x.kind) if operation in _FRACTIONS else x.kind
    return _mapped(operation, x, x.shape, _strides(x.shape, x.shape), kind)


def converted(x: "Tensor", kind: dtype) -> "Tensor":
    """The values in another type; itself if it has that type."""
    if kind == x.kind:
        return x
    # A truth value is whether something is not zero; anything else is cast when it is stored.
    strides = _strides(x.shape, x.shape)
    return binary("ne", x, 0) if kind.is_bool() else _mapped("copy", x, x.shape, strides, kind)


def transposed_matrix(x: "Tensor") -> "Tensor":
    """A copy with rows and columns exchanged; what has none of both is left as it is."""
    if x.ndim > 2:
        raise TypeError(
            f"t() and T are for matrices, and {x.name} has shape {x.shape}: use transpose(0, 1)"
        )
    return x if x.ndim < 2 else transposed(x, 0, 1)


def transposed(x: "Tensor", one: int, other: int) -> "Tensor":
    """A copy with two axes exchanged."""
    order = list(range(x.ndim))
    one, other = _axis(x, one), _axis(x, other)
    order[one], order[other] = other, one
    strides = _strides(x.shape, x.shape)
    shape = tuple(x.shape[axis] for axis in order)
    return _mapped("copy", x, shape, [strides[axis] for axis in order], x.kind)


def reduced(
    operation: str, x: "Tensor", dim: int | None, *, keepdim: bool, is_mean: bool = False
) -> "Tensor":
    """The sum, maximum or minimum along an axis, or of everything."""
    name = "mean" if is_mean else operation
    if is_mean and not x.kind.is_floating():
        raise TypeError(
            f"the mean of {x.dtype} is not an {x.dtype}: convert it first, with to('f32')"
        )
    axis = None if dim is None else _axis(x, dim)
    length = x.numel() if axis is None else x.shape[axis]
    if not length and is_mean:  # as in torch, it is no number
        return binary("div", reduced("sum", x, dim, keepdim=keepdim), 0)
    if not length and operation != "sum":
        raise LocalProtocolError(f"{x.name} of shape {x.shape} has no elements to take {name} of")
    kind = sum_kind(x.kind) if operation == "sum" else x.kind
    partial = working_kind(kind)
    factor = 1 / length if is_mean else 1
    if axis is None:
        shape: Shape = (1,) * x.ndim if keepdim else ()
        parts = max(1, min(len(x.device.pes), -(-length // _TILE)))
        between = x
        if parts > 1:
            between = _new(x, (parts,), partial)
            _reduce(operation, x, between, length, parts)
            length = parts
        result = _new(x, shape, kind)
        _reduce(operation, between, result, length, factor=factor)
        if between is not x:
            between.free()
        return result
    kept = (1,) if keepdim else ()
    result = _new(x, (*x.shape[:axis], *kept, *x.shape[axis + 1 :]), kind)
    _reduce(operation, x, result, length, factor=factor, inner=prod(x.shape[axis + 1 :]))
    return result


def product(x: "Tensor", y: Any) -> "Tensor":
    """The matrix product: of vectors, matrices, or equally many matrices of each."""
    if not _is_tensor(y):
        raise TypeError(f"@ takes two tensors, not {_describe(y)}: numbers are multiplied with *")
    if x.kind != y.kind or not x.kind.is_floating():
        raise TypeError(
            f"@ takes tensors of one floating-point type, not {x.dtype} and {y.dtype}: convert"
            " them first, with to(dtype)"
        )
    _check_device(x, y)
    left = (1, *x.shape) if x.ndim == 1 else x.shape
    right = (*y.shape, 1) if y.ndim == 1 else y.shape
    outer, second = left[:-2], right[:-2]
    are_pairs = outer == second or not outer or not second
    if min(len(left), len(right)) < 2 or left[-1] != right[-2] or not are_pairs:
        raise LocalProtocolError(
            f"matrices of shapes {x.shape} and {y.shape} cannot be multiplied",
            hint="x @ y takes as many columns of x as y has rows: reshape or transpose one of them",
        )
    (m, k), n, pairs = left[-2:], right[-1], outer or second
    rows, columns = (() if x.ndim == 1 else (m,)), (() if y.ndim == 1 else (n,))
    result = _new(x, (*pairs, *rows, *columns), x.kind)
    tile_m, tile_n, tile_k = (min(128, max(16, next_power_of_2(each))) for each in (m, n, k))
    grid = prod(pairs) * -(-m // tile_m) * -(-n // tile_n)
    if grid and k:  # of nothing the sums are zero, which is what new memory holds
        result.launch_kernel(
            kernels.matmul_kernel, grid, x, y, result, m, n, k,
            m * k if outer else 0, k * n if second else 0,
            TILE_M=tile_m, TILE_N=tile_n, TILE_K=min(tile_k, 64), num_stages=3,
        )  # fmt: skip
    return result


def _reduce(
    operation: str,
    x: "Tensor",
    result: "Tensor",
    length: int,
    parts: int = 1,
    *,
    factor: float = 1,
    inner: int = 1,
) -> None:
    kind = working_kind(sum_kind(x.kind) if operation == "sum" else x.kind)
    start: float = _STARTS[operation]
    if not kind.is_floating() and operation != "sum":
        low, high = (0, 1) if kind.is_bool() else kind.limits()
        start = low if operation == "max" else high
    width = min(next_power_of_2(inner), 256)
    depth = min(next_power_of_2(max(length, 1)), _TILE // width)
    if x.numel():  # of nothing the sum is zero, which is what new memory holds
        programs = result.numel() // inner * -(-inner // width)
        result.launch_kernel(
            kernels.reduce_kernel, programs, x, result, length, inner, parts,
            start if kind.is_floating() else int(start), factor,
            OP=operation, KIND=kind, DEPTH=depth, WIDTH=width,
        )  # fmt: skip


def _mapped(
    operation: str, x: "Tensor", shape: Shape, strides: Sequence[int], kind: dtype
) -> "Tensor":
    result = _new(x, shape, kind)
    axes, (along,) = _merged(shape, [strides])
    working = working_kind(fraction_kind(x.kind) if operation in _FRACTIONS else x.kind)
    _over_tiles(
        kernels.unary_kernel, axes, result, x, result, *axes[1:], *along,
        OP=operation, KIND=working,
    )  # fmt: skip
    return result


def _over_tiles(kernel: Any, axes: Shape, result: "Tensor", *args: Any, **meta: Any) -> None:
    """Launch a kernel over four axes, a tile of the inner two per program."""
    if not result.numel():
        return
    width = min(next_power_of_2(axes[3]), _TILE)
    height = min(next_power_of_2(axes[2]), _TILE // width)
    programs = axes[0] * axes[1] * -(-axes[2] // height) * -(-axes[3] // width)
    result.launch_kernel(kernel, programs, *args, **meta, HEIGHT=height, WIDTH=width)


def _new(like: "Tensor", shape: Shape, kind: dtype) -> "Tensor":
    return like.sibling(shape, kind)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "launch_kernel")


def _number(value: Any, operation: str) -> float:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    raise TypeError(
        f"{operation} of a simulated tensor and {_describe(value)} is not defined: make a tensor of"
        " it first, with torch.tensor or torch.from_numpy, or take numpy() for the host"
    )


def _describe(value: Any) -> str:
    return f"a {type(value).__name__}"


def _operand_kind(x: "Tensor", y: Any, number: float | None) -> dtype:
    if number is not None:
        return kind_with_number(x.kind, number)
    if bool(x.shape) == bool(y.shape):
        return common_kind(x.kind, y.kind)
    wide, single = (x.kind, y.kind) if x.shape else (y.kind, x.kind)
    return single if category_of(single) > category_of(wide) else wide


def _check_category(operation: str, kind: dtype) -> None:
    if operation in _BITWISE | {"invert"} and kind.is_floating():
        raise TypeError(f"{operation} is for whole numbers and truth values, not {kind.name}")
    if operation == "pow" and not kind.is_floating():
        raise TypeError("** is for fractions: convert the tensor first, with to('f32')")
    if operation == "sub" and kind.is_bool():
        raise TypeError("- is not defined for tensors of bool: take ^ for where they differ")


def _check_device(x: "Tensor", y: "Tensor") -> None:
    if x.device != y.device:
        raise LocalProtocolError(
            f"{x.name} is on {x.device}, {y.name} on {y.device}",
            hint="copy one of them into a tensor on the other's device with copy_",
        )


def _check_fits(out: "Tensor", shape: Shape, kind: dtype) -> None:
    if shape != out.shape:
        raise LocalProtocolError(
            f"{out.name} has shape {out.shape}, its new values {shape}",
            hint="x = x + y makes a new tensor of their shape",
        )
    if category_of(kind) > category_of(out.kind):
        raise TypeError(f"{kind.name} values cannot be put into {out.name} of {out.dtype}")


def _axis(x: "Tensor", dim: int) -> int:
    if not isinstance(dim, int):
        raise TypeError(
            f"dim is {_describe(dim)}, expected one number: take one axis after the other"
        )
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{x.name} has {x.ndim} dimensions and none of number {dim}")
    return dim % x.ndim


def _broadcast(one: Shape, other: Shape) -> Shape:
    try:
        return tuple(map(int, np.broadcast_shapes(one, other)))
    except ValueError:
        raise LocalProtocolError(
            f"shapes {one} and {other} cannot be broadcast",
            hint="from the last axis on, lengths must be equal, or one of them 1: reshape one",
        ) from None


def _strides(shape: Shape, seen_as: Shape) -> list[int]:
    """Strides of a row-major tensor along the axes of what it is broadcast to."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step if length > 1 else 0)
        step *= length
    return [0] * (len(seen_as) - len(shape)) + strides[::-1]


def _merged(shape: Shape, strides: Sequence[Sequence[int]]) -> tuple[Shape, list[Shape]]:
    """The same elements over four axes: those that lie behind each other count as one."""
    axes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for at, length in enumerate(shape):
        steps = [each[at] for each in strides]
        if axes and all(own[-1] == step * length for own, step in zip(kept, steps, strict=True)):
            axes[-1] *= length
            for own, step in zip(kept, steps, strict=True):
                own[-1] = step
        elif length != 1:
            axes.append(length)
            for own, step in zip(kept, steps, strict=True):
                own.append(step)
    if len(axes) > 4:
        raise TypeError(
            f"shape {shape} is broadcast or turned along more than four axes: launch a kernel"
        )
    lead = 4 - len(axes)
    return (1,) * lead + tuple(axes), [(0,) * lead + tuple(own) for own in kept]
