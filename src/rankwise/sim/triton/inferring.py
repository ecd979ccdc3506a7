"""Types of what a kernel does not execute: of a branch that no program takes.

Triton's compiler types both sides of an `if`. Here one side runs, and the other is read: literals,
names, operators, casts, loads and the constructors of blocks. Any other expression has no type, and
nothing is said of it. Operands are blocks without values, so nothing is calculated.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankwise.sim.triton import access, casting, creation, functions, reductions, shapes
from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import dtype
from rankwise.sim.triton.promotion import combined
from rankwise.sim.triton.tensor import (
    broadcast_shape,
    broadcast_to,
    number_type,
    plain_shape,
    tensor,
)

TypeOf = tuple[str, tuple[int, ...]]
"""A block's type: that of its elements, and its shape."""


class _Unknown(Exception):
    """An expression whose type cannot be read."""


def type_of(value: Any) -> TypeOf | None:
    """The type of a block or number; None of anything else."""
    value = plain(value)
    if isinstance(value, tensor):
        return value.dtype.name, value.shape
    if isinstance(value, bool | int | float):
        return number_type(value).name, ()
    return None


def _abstract_tensor(type_: dtype, shape: tuple[int, ...]) -> tensor:
    return tensor(None, type_, shape)


class Reading:
    """Reads expressions where names hold these values.

    Args:
        local: by name, what variables hold.
        others: by name, what the kernel finds in its module.
    """

    def __init__(self, local: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        self._local = dict(local)
        self._others = others

    def after(self, statements: Iterable[ast.stmt]) -> Mapping[str, TypeOf | None]:
        """The types of all names when these statements are done; None where they are unknown."""
        self._read(statements)
        return {name: type_of(value) for name, value in self._local.items()}

    def of(self, expression: ast.expr) -> TypeOf | None:
        """The type of an expression, or None."""
        return type_of(self._value(expression))

    def _read(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._local[name] = self._held(self._value(value))
                case ast.Return():
                    return
                case _:
                    for node in ast.walk(statement):
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                            self._local[node.id] = None

    def _held(self, value: Any) -> Any:
        known = type_of(value)
        return (
            None
            if known is None
            else _abstract_tensor(t.dtype_named(known[0]), known[1])
            if (not isinstance(plain(value), tensor))
            else plain(value)
        )

    def _value(self, node: ast.expr) -> Any:
        try:
            return plain(self._evaluated(node))
        except Exception:  # noqa: BLE001 (what is wrong with it says the side that runs)
            return None

    def _evaluated(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._local[name] if name in self._local else self._others[name]
            case ast.UnaryOp(op=operator, operand=operand):
                return self._changed(operator, self._needed(operand))
            case ast.BinOp(left=left, op=operator, right=right):
                return self._combined(operator, self._needed(left), self._needed(right))
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                sides = self._needed(left), self._needed(right)
                return _abstract_tensor(t.int1, _shape(*sides)) if _has_block(sides) else None
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(map(self._needed, elements))
            case ast.Attribute(value=owner, attr=name):
                found = self._needed(owner)
                return getattr(found, name)
            case ast.Subscript(value=owner, slice=keys):
                return self._cut(self._needed(owner), keys)
            case ast.Call():
                return self._called(node)
            case _:
                raise _Unknown

    def _needed(self, node: ast.expr) -> Any:
        value = plain(self._evaluated(node))
        if value is None:
            raise _Unknown
        return value

    def _changed(self, operator: ast.unaryop, value: Any) -> Any:
        if isinstance(value, tensor):
            return value if isinstance(operator, ast.USub | ast.Invert) else None
        return -value if isinstance(operator, ast.USub) else None

    def _combined(self, operator: ast.operator, left: Any, right: Any) -> Any:
        sign = _SIGNS[type(operator)]
        if not _has_block((left, right)):
            raise _Unknown
        for one, other in ((left, right), (right, left)):
            if isinstance(one, tensor) and one.dtype.is_ptr() and sign in "+-":
                return _abstract_tensor(one.dtype, _shape(one, other))
        mine, theirs, type_ = combined(left, right, sign)
        if sign == "/" and type_.is_int():
            type_ = t.float32
        return _abstract_tensor(type_, _shape(mine, theirs))

    def _cut(self, block: Any, keys: ast.expr) -> tensor:
        """`block[:, None]`: what is no slice and no None has no type."""
        sizes = list(block.shape)
        shape = []
        for key in keys.elts if isinstance(keys, ast.Tuple) else [keys]:
            match key:
                case ast.Constant(value=None):
                    shape.append(1)
                case ast.Slice(lower=None, upper=None, step=None):
                    shape.append(sizes.pop(0))
                case _:
                    raise _Unknown
        return _abstract_tensor(block.dtype, (*shape, *sizes))

    def _called(self, node: ast.Call) -> Any:
        name = getattr(node.func, "id", "")
        if name.startswith("__rankwise_variable"):
            return self._held(self._value(node.args[0]))
        values = [self._needed(each) for each in node.args]
        named = {str(each.arg): self._needed(each.value) for each in node.keywords}
        if name == "float" and not self._is_defined(name) and len(values) == 1:
            return float(values[0])
        if isinstance(node.func, ast.Attribute):
            owner = self._needed(node.func.value)
            if isinstance(owner, tensor):
                values.insert(0, owner)
                called = getattr(tensor, node.func.attr)
            else:
                called = getattr(owner, node.func.attr)
        else:
            called = self._needed(node.func)
        # By the function itself: a kernel's own helper may have a name of the language's.
        if called not in _CALLS:
            raise _Unknown
        return _CALLS[called](*values, **named)

    def _is_defined(self, name: str) -> bool:
        return name in self._local or name in self._others


def _has_block(values: Iterable[Any]) -> bool:
    return any(isinstance(each, tensor) for each in values)


def _shape(left: Any, right: Any) -> tuple[int, ...]:
    return broadcast_shape(getattr(left, "shape", ()), getattr(right, "shape", ()))


def _cast(input: tensor, dtype: dtype, *_rest: Any, **_options: Any) -> tensor:
    return _abstract_tensor(dtype.scalar, input.shape)


def _loaded(pointer: tensor, *_rest: Any, **_options: Any) -> tensor:
    return _abstract_tensor(pointer.dtype.element_ty, pointer.shape)  # type: ignore[attr-defined]


def _program_number(axis: Any) -> tensor:
    del axis
    return _abstract_tensor(t.int32, ())


def _full(shape: Any, value: Any, dtype: dtype) -> tensor:
    del value
    return _abstract_tensor(dtype, plain_shape((shape,)))


def _extremum(x: Any, y: Any, *_rest: Any, **_options: Any) -> tensor:
    left, right, type_ = combined(x, y, "maximum")
    return _abstract_tensor(type_, _shape(left, right))


def _range(start: int, end: int) -> tensor:
    return _abstract_tensor(t.int32, (end - start,))


def _reduced(block: tensor, axis: int | None, type_: dtype, *, keep_dims: bool) -> tensor:
    shape = block.shape
    axes = range(len(shape)) if axis is None else (range(len(shape))[axis],)
    sizes = (
        1 if at in axes else size for at, size in enumerate(shape) if keep_dims or at not in axes
    )
    return _abstract_tensor(type_, tuple(sizes))


def _sum(
    input: tensor, axis: int | None = None, keep_dims: bool = False, dtype: dtype | None = None
) -> tensor:
    type_ = reductions.sum_type(input.dtype, dtype)
    return _reduced(input, axis, type_, keep_dims=keep_dims)


def _greatest(
    input: tensor,
    axis: int | None = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> tensor:
    del return_indices_tie_break_left
    if return_indices:
        raise _Unknown
    return _reduced(input, axis, reductions.extremum_type(input.dtype), keep_dims=keep_dims)


def _where(condition: Any, x: Any, y: Any) -> tensor:
    if isinstance(x, tensor) and x.dtype.is_ptr():
        type_ = x.dtype
    elif _has_block((x, y)):
        x, y, type_ = combined(x, y, "where")
    else:
        x, y, type_ = combined(_abstract_tensor(number_type(x), ()), y, "where")
    shape = _shape(x, y)
    return _abstract_tensor(type_, broadcast_shape(getattr(condition, "shape", ()), shape))


def _broadcast(input: Any, *shape: Any) -> tensor:
    type_ = input.dtype if isinstance(input, tensor) else number_type(input)
    return _abstract_tensor(type_, plain_shape(shape))


_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
_CALLS: dict[Any, Callable[..., Any]] = {
    casting.cast: _cast, access.load: _loaded, functions.full: _full,
    functions.zeros: lambda shape, dtype: _full(shape, 0, dtype),
    functions.zeros_like: lambda x: x,
    creation.program_id: _program_number,
    functions.exp: lambda x: x,
    functions.maximum: _extremum, functions.minimum: _extremum,
    creation.arange: _range, reductions.sum: _sum, shapes.where: _where,
    reductions.max: _greatest, reductions.min: _greatest, broadcast_to: _broadcast,
}  # fmt: skip
