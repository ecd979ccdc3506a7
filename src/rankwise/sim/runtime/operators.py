"""The operators and methods by which tensors calculate; what they do is `arithmetic`'s."""

from typing import TYPE_CHECKING, Any, NoReturn

from rankwise.sim.runtime import arithmetic

if TYPE_CHECKING:
    from rankwise.sim.runtime.tensor import Tensor


def _operator(operation: str, *, is_swapped: bool = False) -> Any:
    def operator(self: Any, other: Any) -> "Tensor":
        return arithmetic.binary(operation, self, other, is_swapped=is_swapped)

    operator.__doc__ = f"`{operation}`, element by element."
    return operator


def _in_place(operation: str) -> Any:
    def operator(self: Any, other: Any) -> "Tensor":
        return arithmetic.binary(operation, self, other, out=self)

    operator.__doc__ = f"`{operation}` with another, in this tensor's memory."
    return operator


def _method(operation: str) -> Any:
    def method(self: Any) -> "Tensor":
        return arithmetic.unary(operation, self)

    method.__doc__ = f"`{operation}` of every element."
    return method


def _missing(what: str, instead: str) -> Any:
    def operator(_self: Any, *_given: Any) -> NoReturn:
        raise TypeError(f"a simulated tensor has no {what}: {instead}")

    operator.__doc__ = f"Not offered: {instead}."
    return operator


class Operators:
    """What a tensor calculates, in simulated time."""

    __array_priority__ = 1_000
    """An array of numpy leaves it to the tensor to refuse shapes that cannot be broadcast."""

    __add__, __radd__, __iadd__ = _operator("add"), _operator("add"), _in_place("add")
    __sub__, __isub__ = _operator("sub"), _in_place("sub")
    __rsub__ = _operator("sub", is_swapped=True)
    __mul__, __rmul__, __imul__ = _operator("mul"), _operator("mul"), _in_place("mul")
    __truediv__, __itruediv__ = _operator("div"), _in_place("div")
    __rtruediv__ = _operator("div", is_swapped=True)
    __pow__, __ipow__ = _operator("pow"), _in_place("pow")
    __rpow__ = _operator("pow", is_swapped=True)
    __and__, __rand__, __iand__ = _operator("and"), _operator("and"), _in_place("and")
    __or__, __ror__, __ior__ = _operator("or"), _operator("or"), _in_place("or")
    __xor__, __rxor__, __ixor__ = _operator("xor"), _operator("xor"), _in_place("xor")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __hash__ = object.__hash__
    __neg__, __abs__, __invert__ = _method("neg"), _method("abs"), _method("invert")
    __setitem__ = _missing("assignment to elements", "use copy_, or launch a kernel")
    __floordiv__ = __rfloordiv__ = _missing("//", "launch a kernel, or take numpy() for the host")
    __mod__ = __rmod__ = _missing("%", "launch a kernel, or take numpy() for the host")

    abs, exp, log = _method("abs"), _method("exp"), _method("log")
    sqrt, sigmoid, relu = _method("sqrt"), _method("sigmoid"), _method("relu")
    add, sub, mul, div = _operator("add"), _operator("sub"), _operator("mul"), _operator("div")
    maximum, minimum = _operator("maximum"), _operator("minimum")
    add_, sub_, mul_, div_ = _in_place("add"), _in_place("sub"), _in_place("mul"), _in_place("div")

    def __matmul__(self: Any, other: Any) -> "Tensor":
        return arithmetic.product(self, other)

    matmul = mm = __matmul__

    def __rmatmul__(self: Any, other: Any) -> NoReturn:
        raise TypeError(
            f"@ takes two tensors, not a {type(other).__name__}: make a tensor of it first, with"
            " torch.from_numpy"
        )

    @property
    def T(self: Any) -> "Tensor":  # noqa: N802 (torch's name)
        """A copy with rows and columns exchanged; a vector itself."""
        return arithmetic.transposed_matrix(self)

    def t(self: Any) -> "Tensor":
        """A copy with rows and columns exchanged; a vector itself."""
        return arithmetic.transposed_matrix(self)

    def transpose(self: Any, dim0: int, dim1: int) -> "Tensor":
        """A copy with two axes exchanged."""
        return arithmetic.transposed(self, dim0, dim1)

    def to(self: Any, dtype: Any) -> "Tensor":
        """The values in another type; itself if it has that type."""
        return arithmetic.converted(self, self.kind_named(dtype))

    def float(self: Any) -> "Tensor":
        """The values in f32."""
        return arithmetic.converted(self, self.kind_named("f32"))

    def half(self: Any) -> "Tensor":
        """The values in f16."""
        return arithmetic.converted(self, self.kind_named("f16"))

    def sum(self: Any, dim: int | None = None, keepdim: bool = False) -> "Tensor":
        """The sum of everything, or along an axis; of whole numbers in i64."""
        return arithmetic.reduced("sum", self, dim, keepdim=keepdim)

    def mean(self: Any, dim: int | None = None, keepdim: bool = False) -> "Tensor":
        """The mean of everything, or along an axis."""
        return arithmetic.reduced("sum", self, dim, keepdim=keepdim, is_mean=True)

    def amax(self: Any, dim: int | None = None, keepdim: bool = False) -> "Tensor":
        """The largest of all elements, or along an axis."""
        return arithmetic.reduced("max", self, dim, keepdim=keepdim)

    def amin(self: Any, dim: int | None = None, keepdim: bool = False) -> "Tensor":
        """The smallest of all elements, or along an axis."""
        return arithmetic.reduced("min", self, dim, keepdim=keepdim)

    def max(self: Any, dim: int | None = None) -> "Tensor":
        """The largest of all elements; along an axis, with their places, it is not offered."""
        _refuse_places("max", dim)
        return arithmetic.reduced("max", self, None, keepdim=False)

    def min(self: Any, dim: int | None = None) -> "Tensor":
        """The smallest of all elements; along an axis, with their places, it is not offered."""
        _refuse_places("min", dim)
        return arithmetic.reduced("min", self, None, keepdim=False)


def _refuse_places(name: str, dim: int | None) -> None:
    if dim is not None:
        raise TypeError(
            f"{name}(dim) would tell the places as well, which is not offered: take a{name}(dim)"
        )
