"""Blocks have the shapes that Triton takes."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError
from rankwise.sim.triton.tools.tensor_descriptor import TensorDescriptor


def zeros(p: Any) -> None:
    tl.store(p, tl.sum(tl.zeros((4, 12), tl.float32)))


def broadcast(p: Any) -> None:
    tl.store(p, tl.sum(tl.broadcast_to(tl.load(p), (3,))))


def huge(p: Any) -> None:
    tl.store(p, tl.sum(tl.zeros((2048, 1024), tl.int8)))


def descriptor(p: Any) -> None:
    block = tl.make_tensor_descriptor(p, [4, 12], [12, 1], [4, 12]).load([0, 0])
    tl.store(p, tl.sum(block))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (zeros, r"\[4, 12\]: axis 1 has 12 elements: it must be a power of two"),
        (broadcast, r"\[3\]: axis 0 has 3 elements"),
        (huge, r"it has 2097152 elements: 1048576 are the most"),
        (descriptor, r"\[4, 12\]: axis 1 has 12 elements"),
    ],
)
def test_a_block_of_another_shape_is_refused(kernel: Any, reason: str) -> None:
    with pytest.raises(triton.KernelValueError, match=reason):
        triton.jit(kernel)[(1,)](np.zeros(48, np.float32))


def test_a_descriptor_of_the_host_has_a_block_of_such_a_shape() -> None:
    with pytest.raises(LocalProtocolError, match=r"\[3\]: axis 0 has 3 elements"):
        TensorDescriptor(np.zeros(4, np.float32), [4], [1], [3])
