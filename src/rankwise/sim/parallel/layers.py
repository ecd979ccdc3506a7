"""Layers whose weights are cut over the ranks that share a model.

    ColumnParallelLinear: every rank has some outputs:   Y_i = X A_i^T
    RowParallelLinear:    every rank has some inputs:    Y = sum over i of X_i A_i^T

One after the other they need a single all-reduce, at the end. Products are of f16 with accumulation
in f32, by kernels on the simulated PEs. A row-parallel layer sums its partial products in f32 and
rounds once, so that its result is that of the unsharded layer but for the order of additions;
`reduce_dtype="f16"` halves what the all-reduce moves, and rounds each of its steps.

Weights are drawn as a whole from a seed and then cut, so they do not depend on the number of
ranks. Forward only: there are no gradients.
"""

from typing import Any

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.base.seeds import derived_seed
from rankwise.sim.parallel.kernels import add_bias_kernel, embedding_kernel, linear_kernel
from rankwise.sim.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    divided,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from rankwise.sim.parallel.parallel_groups import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from rankwise.sim.runtime.context import active_context
from rankwise.sim.runtime.tensor import Tensor
from rankwise.sim.triton.dtypes import Array

_BLOCK_M, _BLOCK_N, _BLOCK_K = 32, 32, 64
_BLOCK = 256
_INITIAL_DEVIATION = 0.02


class ColumnParallelLinear:
    """`Y = X A^T + b` with the rows of A, and so the columns of Y, cut over the ranks.

    Args:
        input_size: the last dimension of X.
        output_size: the last dimension of Y, over all ranks.
        bias: whether there is a b.
        gather_output: whether every rank gets all of Y, or its own columns.
        weight: A as a whole, `(output_size, input_size)`; drawn from `seed` unless given.
        bias_values: b as a whole; zero unless given.
        seed: what the weight is drawn from.

    Attributes:
        weight: this rank's part of A.
        bias: this rank's part of b; None without.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = True,
        weight: Any = None,
        bias_values: Any = None,
        seed: int = 0,
        dtype: str = "f16",
    ) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        part = divided(output_size, ranks, "output_size")
        mine = slice(rank * part, (rank + 1) * part)
        context = active_context()
        whole = _whole(weight, (output_size, input_size), seed)
        self.gather_output = gather_output
        self.weight = context.tensor(whole[mine], dtype, name="column weight")
        self.bias = (
            context.tensor(_bias(bias_values, output_size)[mine], dtype, name="column bias")
            if bias
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to a tensor that every rank has."""
        x = copy_to_tensor_model_parallel_region(x)
        y = _linear(x, self.weight, self.bias, self.weight.dtype)
        return gather_from_tensor_model_parallel_region(y) if self.gather_output else y

    forward = __call__


class RowParallelLinear:
    """`Y = X A^T + b` with the columns of A, and so those of X, cut over the ranks.

    Args:
        input_size: the last dimension of X, over all ranks.
        output_size: the last dimension of Y.
        bias: whether there is a b; it is added after the sum.
        input_is_parallel: whether X comes in parts, as a column-parallel layer leaves it.
        weight: A as a whole, `(output_size, input_size)`; drawn from `seed` unless given.
        bias_values: b as a whole; zero unless given.
        seed: what the weight is drawn from.
        reduce_dtype: the type in which partial products are summed over the ranks.

    Attributes:
        weight: this rank's part of A.
        bias: b, whole; None without.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        weight: Any = None,
        bias_values: Any = None,
        seed: int = 0,
        dtype: str = "f16",
        reduce_dtype: str = "f32",
    ) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        part = divided(input_size, ranks, "input_size")
        mine = slice(rank * part, (rank + 1) * part)
        context = active_context()
        whole = _whole(weight, (output_size, input_size), seed)
        self.input_is_parallel = input_is_parallel
        self.reduce_dtype = reduce_dtype
        self.weight = context.tensor(np.ascontiguousarray(whole[:, mine]), dtype, name="row weight")
        self.bias = (
            context.tensor(_bias(bias_values, output_size), dtype, name="row bias")
            if bias
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; every rank gets all of the result."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x)
        partial = _linear(x, self.weight, None, self.reduce_dtype)
        total = reduce_from_tensor_model_parallel_region(partial)
        if self.bias is None and total.dtype == self.weight.dtype:
            return total
        context, columns = active_context(), total.shape[-1]
        y = context.empty(total.shape, dtype=self.weight.dtype)
        context.launch(
            add_bias_kernel,
            total.numel() // columns,
            total,
            self.bias if self.bias is not None else total,
            y,
            columns,
            has_bias=self.bias is not None,
            block=_BLOCK,
        )
        total.free()
        return y

    forward = __call__


class VocabParallelEmbedding:
    """An embedding whose vocabulary is cut over the ranks.

    Args:
        num_embeddings: the size of the vocabulary, over all ranks.
        embedding_dim: the length of a row.
        weight: the table as a whole; drawn from `seed` unless given.
        seed: what the table is drawn from.

    Attributes:
        weight: this rank's part of the table.
        vocab_start_index, vocab_end_index: the ids that are in it, the end not included.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        weight: Any = None,
        seed: int = 0,
        dtype: str = "f16",
    ) -> None:
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        part = divided(num_embeddings, ranks, "num_embeddings")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.vocab_start_index, self.vocab_end_index = rank * part, (rank + 1) * part
        whole = _whole(weight, (num_embeddings, embedding_dim), seed)
        mine = whole[self.vocab_start_index : self.vocab_end_index]
        self.weight = active_context().tensor(mine, dtype, name="embedding")

    def __call__(self, ids: Tensor) -> Tensor:
        """Look ids up; every rank gets all rows. Ids must be below `num_embeddings`."""
        context = active_context()
        y = context.empty((*ids.shape, self.embedding_dim), dtype=self.weight.kind)
        context.launch(
            embedding_kernel,
            ids.numel(),
            ids,
            self.weight,
            y,
            self.vocab_start_index,
            self.vocab_end_index,
            self.embedding_dim,
            block=_BLOCK,
        )
        # All ranks but one have zeros: the sum is exact in any type and order.
        return reduce_from_tensor_model_parallel_region(y)

    forward = __call__


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: str) -> Tensor:
    """`x @ weight.T + bias` on this rank's PEs, for x with any number of leading dimensions."""
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:
        raise LocalProtocolError(
            f"{x.name} has {x.shape[-1]} columns, but this rank's part of the weight takes {inputs}"
        )
    context, rows = active_context(), x.numel() // inputs
    y = context.empty((*x.shape[:-1], outputs), dtype=dtype)
    tiles = -(-rows // _BLOCK_M) * -(-outputs // _BLOCK_N)
    context.launch(
        linear_kernel,
        tiles,
        x,
        weight,
        bias if bias is not None else weight,
        y,
        rows,
        outputs,
        inputs,
        has_bias=bias is not None,
        block_m=_BLOCK_M,
        block_n=_BLOCK_N,
        block_k=_BLOCK_K,
    )
    return y


def _whole(given: Any, shape: tuple[int, int], seed: int) -> Array:
    """A weight before it is cut."""
    if given is None:
        random = np.random.default_rng(derived_seed(seed, "weight", *shape))
        return random.standard_normal(shape, dtype=np.float32) * np.float32(_INITIAL_DEVIATION)
    values = np.asarray(given)
    if values.shape != shape:
        raise LocalProtocolError(f"the weight has shape {values.shape}, expected {shape}")
    return values


def _bias(given: Any, length: int) -> Array:
    """A bias before it is cut."""
    if given is None:
        return np.zeros(length, np.float32)
    values = np.asarray(given)
    if values.shape != (length,):
        raise LocalProtocolError(f"the bias has shape {values.shape}, expected {(length,)}")
    return values
