"""How many operations the matrix engine does for an operation of torch, and which have no formula.

torch's own table (`torch.utils.flop_counter`) knows what a GPU runs. Simulated ranks compute on the
CPU, where attention, recurrent layers and some products have other names; their formulas are here.
As in torch's table, a causal mask halves nothing.

An operation whose name says that it is of the matrix kind, and that has no formula, takes the time
of moving its tensors. The prediction names it, since that time is too short.
"""

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

Flops = Callable[..., int]
"""Takes the arguments of an operation, and its result as `out_val`."""

_WORDS = re.compile(r"[a-z]+")
_OF_MATRICES = frozenset({
    "addbmm", "addmm", "addmv", "attention", "baddbmm", "bilinear", "bmm", "cdist", "chain",
    "cholesky", "conv", "convolution", "det", "eig", "eigh", "eigvals", "eigvalsh", "einsum",
    "geqrf", "gru", "householder", "hspmm", "inv", "inverse", "ldl", "linear", "lstm", "lstsq",
    "lu", "matmul", "matrix", "mm", "mv", "orgqr", "ormqr", "qconv", "qlinear", "qr", "rnn",
    "slogdet", "smm", "solve", "spsolve", "sspaddmm", "svd", "svdvals", "tensordot", "trilinear",
})  # fmt: skip
_NOT_OF_MATRICES = frozenset({
    "cell", "flatten", "grid", "pack", "prepack", "reorder", "search", "slice", "unpack",
    "upsample",
})  # fmt: skip
"""Words of operations that only prepare, cut or interpolate."""


def formula_of(packet: Any) -> Flops | None:
    """The formula of an operation; None if it has none."""
    found: Flops | None = flop_registry.get(packet)
    return _ON_CPU.get(str(packet)) if found is None else found


def is_of_matrices(name: str) -> bool:
    """Whether the name of an operation says that it multiplies or factorises matrices."""
    words = set(_WORDS.findall(name.partition(".")[2]))
    return bool(words & _OF_MATRICES) and not words & _NOT_OF_MATRICES


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """The scores again, and one product for each of the four gradients."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (3 * width + 2 * value.shape[-1]))


def _recurrent(input_: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """Each step of the sequence multiplies with both weights of the layer."""
    return int(2 * prod(input_.shape[:2]) * (of_input.numel() + of_hidden.numel()))


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return int(2 * _recurrent(*args, **kwargs))


def _linear(input_: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * input_.numel() * weight.shape[0])


def _linear_of_gradient(_shape: Any, grad: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * grad.numel() * weight.shape[1])


def _linear_of_weights(grad: Tensor, input_: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * grad.numel() * input_.shape[-1])


def _convolution(_input: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return int(2 * out_val.numel() * prod(weight.shape[1:]))


def _product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * left.numel() * right.shape[-1])


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Groups of rows, or of columns, are multiplied each with its own matrix."""
    batch = left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return int(2 * batch * rows * inner * columns)


def _transposed(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """A weight that has a row for each column of the result, and is perhaps packed."""
    return int(2 * left.numel() * right.shape[0])


def _of_columns(input_: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """A packed weight, whose shape says nothing of its columns."""
    return int(2 * input_.numel() * out_val.shape[-1])


def _quantized_convolution(
    _input: Tensor, _scale: Any, _zero: Any, weight: Tensor, *_: Any, out_val: Tensor, **__: Any
) -> int:
    return int(2 * out_val.numel() * prod(weight.shape[1:]))


def _self_attention(tokens: Tensor, weights: Sequence[Tensor]) -> int:
    """Products with these weights, and the two of attention; a nested tensor has many lengths."""
    if tokens.is_nested:
        lengths = tokens._nested_tensor_size()[:, 0].tolist()  # noqa: SLF001  # no public way
    else:
        lengths = [tokens.shape[1]] * tokens.shape[0]
    width = weights[0].shape[1]
    squares = sum(length * length for length in lengths)
    return int(2 * sum(lengths) * sum(each.numel() for each in weights) + 4 * squares * width)


def _encoder_layer(
    tokens: Tensor, _width: int, _heads: int, of_input: Tensor, _bias: Any, of_output: Tensor,
    *rest: Any, **_: Any,
) -> int:  # fmt: skip
    return _self_attention(tokens, (of_input, of_output, rest[8], rest[10]))


def _heads_of_self(
    query: Tensor, key: Tensor, value: Tensor, _width: int, _heads: int, of_input: Tensor,
    _bias: Any, of_output: Tensor, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """`nn.MultiheadAttention` calls it for self-attention alone."""
    del key, value
    return _self_attention(query, (of_input, of_output))


def _added(_added: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _with_vector(matrix: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * matrix.numel())


def _added_vector(_added: Tensor, matrix: Tensor, *_: Any, **__: Any) -> int:
    return int(2 * matrix.numel())


def _listed(lefts: Sequence[Tensor], rights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return sum(map(_product, lefts, rights))


_ON_CPU: dict[str, Flops] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten.mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten.mkldnn_linear": _linear,
    "aten.mkldnn_linear_backward_input": _linear_of_gradient,
    "aten.mkldnn_linear_backward_weights": _linear_of_weights,
    "aten.mkldnn_convolution": _convolution,
    "mkldnn._linear_pointwise": _linear,
    "mkldnn._convolution_pointwise": _convolution,
    "aten._grouped_mm": _grouped,
    "aten._scaled_grouped_mm": _grouped,
    "aten._int_mm": _product,
    "aten._weight_int8pack_mm": _transposed,
    **dict.fromkeys(
        (
            "aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu",
            "aten._weight_int4pack_mm_with_scales_and_zeros", "aten._dyn_quant_matmul_4bit",
            "onednn.qlinear_pointwise",
        ),
        _of_columns,
    ),
    **dict.fromkeys(
        (
            "onednn.qconv_pointwise", "onednn.qconv1d_pointwise", "onednn.qconv2d_pointwise",
            "onednn.qconv3d_pointwise",
        ),
        _quantized_convolution,
    ),
    "aten._transformer_encoder_layer_fwd": _encoder_layer,
    "aten._native_multi_head_attention": _heads_of_self,
    "aten._addmm_activation": _added,
    "aten.addbmm": _added,
    "aten._foreach_mm": _listed,
    "aten.mv": _with_vector,
    "aten.addmv": _added_vector,
}  # fmt: skip
