"""The class of an operation in a comparison, by its name and engine."""

import pytest

from rankwise.simranks.prediction.bill import class_of


@pytest.mark.parametrize(
    ("name", "engine", "expected"),
    [
        ("aten.mm", "gemm", "matrix products"),
        ("aten.addmm", "gemm", "matrix products"),
        ("aten._scaled_dot_product_flash_attention", "gemm", "attention"),
        ("aten.convolution_backward", "gemm", "convolutions"),
        ("aten.native_layer_norm", "math", "normalization"),
        ("aten.normal_", "math", "elementwise and others"),
        ("aten._log_softmax", "math", "softmax and losses"),
        ("aten._foreach_norm", "math", "updates of parameters"),
        ("aten._fused_rms_norm", "math", "normalization"),
        ("aten.embedding_dense_backward", "math", "lookups"),
        ("aten.copy_", "math", "copies and fills"),
        ("aten.relu", "math", "elementwise and others"),
        ("triton.softmax_kernel", "math", "kernels of Triton"),
        ("triton.add", "math", "kernels of Triton"),
    ],
)
def test_operations_have_classes(name: str, engine: str, expected: str) -> None:
    assert class_of(name, engine) == expected
