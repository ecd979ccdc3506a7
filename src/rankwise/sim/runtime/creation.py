"""Making tensors: torch's functions for it, which a context offers as its own."""

import weakref
from collections.abc import Callable, Iterable
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.base.seeds import derived_seed
from rankwise.sim.runtime.placement import DPPolicy
from rankwise.sim.runtime.tensor import Tensor, element_type, encoded
from rankwise.sim.triton.dtypes import Array, dtype

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext


class TensorCreation:
    """The functions of a context that make tensors.

    Each maps the tensor's addresses, and then writes its values: two commands, two waits. `empty`
    only maps. Values are made when there is room for them.
    """

    def __init__(self, context: "RuntimeContext", seed: int) -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._seed = seed
        self._random: dict[int, np.random.Generator] = {}

    def empty(
        self, *shape: Any, dtype: Any = "f32", dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """A tensor without initial values; they read as zero."""
        return self._context.allocate(_shape(shape), _kind(dtype), dp, name)

    def full(
        self,
        shape: Any,
        fill_value: float,
        dtype: Any = "f32",
        dp: DPPolicy | None = None,
        name: str | None = None,
    ) -> Tensor:
        """A tensor with one value everywhere."""
        lengths, kind = _shape((shape,)), _kind(dtype)
        return self._written(lengths, kind, dp, name, lambda: np.broadcast_to(fill_value, lengths))

    def zeros(
        self, *shape: Any, dtype: Any = "f32", dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """A tensor of zeros."""
        lengths, kind = _shape(shape), _kind(dtype)
        tensor = self._context.allocate(lengths, kind, dp, name)
        # Zeros of numpy take no memory before they are written to.
        tensor.write(np.zeros(lengths, kind.storage) if self._context.engine.enable_data else None)
        return tensor

    def ones(
        self, *shape: Any, dtype: Any = "f32", dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """A tensor of ones."""
        return self.full(_shape(shape), 1, dtype, dp, name)

    def rand(
        self, *shape: Any, dtype: Any = "f32", dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """Uniform values from 0 to 1; each rank has a stream of its own from the context's seed."""
        lengths = _shape(shape)
        return self._written(
            lengths, _kind(dtype), dp, name, lambda: self._stream().random(lengths, np.float32)
        )

    def randn(
        self, *shape: Any, dtype: Any = "f32", dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """Normal values; each rank has a stream of its own from the context's seed."""
        lengths = _shape(shape)
        return self._written(
            lengths, _kind(dtype), dp, name,
            lambda: self._stream().standard_normal(lengths, np.float32),
        )  # fmt: skip

    def tensor(
        self, data: Any, dtype: Any = None, dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """A tensor with the given values; floats of Python become f32, as in torch."""
        values = data.numpy() if isinstance(data, Tensor) else np.asarray(data)
        if dtype is None:
            is_python_float = not hasattr(data, "dtype") and values.dtype == np.float64
            dtype = "f32" if is_python_float else getattr(data, "dtype", values.dtype)
        return self._written(values.shape, element_type(dtype), dp, name, lambda: values)

    def from_numpy(
        self, array: Array, dp: DPPolicy | None = None, name: str | None = None
    ) -> Tensor:
        """A tensor with the values and the type of an array; a copy, unlike torch's."""
        if not hasattr(array, "dtype"):
            raise ConfigError(
                f"from_numpy was given {array!r}, expected a numpy array",
                hint="tensor() makes a tensor of numbers and lists",
            )
        return self.tensor(array, array.dtype, dp, name)

    def zeros_like(self, other: Tensor) -> Tensor:
        """Zeros in the shape, type and policy of another tensor."""
        return self.zeros(other.shape, dtype=other.kind, dp=other.dp)

    def empty_like(self, other: Tensor) -> Tensor:
        """A tensor without initial values, with the shape and dtype of another."""
        return self._context.allocate(other.shape, other.kind, other.dp)

    def manual_seed(self, seed: int) -> None:
        """Begin all ranks' random values anew."""
        self._seed = seed
        self._random.clear()

    def _stream(self) -> np.random.Generator:
        """The random numbers of the rank that is running."""
        rank = self._context.rank
        if rank not in self._random:
            self._random[rank] = np.random.default_rng(derived_seed(self._seed, "tensors", rank))
        return self._random[rank]

    def _written(
        self,
        shape: tuple[int, ...],
        kind: dtype,
        dp: DPPolicy | None,
        name: str | None,
        values: Callable[[], Array],
    ) -> Tensor:
        tensor = self._context.allocate(shape, kind, dp, name)
        has_data = self._context.engine.enable_data
        tensor.write(encoded(values(), kind) if has_data else None)
        return tensor


def _kind(named: Any) -> dtype:
    """The element type that a user means; None is the default, as in torch."""
    return element_type("f32" if named is None else named)


def _shape(given: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape given as one sequence, as one number, or as several numbers."""
    if len(given) == 1 and not isinstance(given[0], SupportsIndex):
        given = tuple(given[0]) if isinstance(given[0], Iterable) else given
    if not all(isinstance(length, SupportsIndex) for length in given):
        raise TypeError(f"a shape is whole numbers, not {given!r}")
    return tuple(map(index, given))
