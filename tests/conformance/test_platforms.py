"""The conformance suite of platforms, for every platform there is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import triton
from rankwise.testing.conformance.platforms import PLATFORM_BEHAVIOURS, check_platform
from rankwise.workers import ArgDirection, ChipCallable, Platform
from rankwise.workers.platforms.host import HostDevice, HostPlatform
from rankwise.workers.platforms.sim import SimulatedPlatform

IN, OUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.SCALAR


@triton.jit
def add_kernel(x: Any, y: Any, out: Any, n: Any) -> None:
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


def add_arrays(x: Any, y: Any, out: Any, n: int) -> None:
    np.add(x[:n], y[:n], out=out[:n])


KERNEL = ChipCallable.build([IN, IN, OUT, SCALAR], "add", add_kernel, grid=3)
FUNCTION = ChipCallable.build([IN, IN, OUT, SCALAR], "add", add_arrays)


@pytest.mark.parametrize(
    ("make", "add"),
    [(HostPlatform, FUNCTION), (HostPlatform, KERNEL), (SimulatedPlatform, KERNEL)],
    ids=["host-function", "host-kernel", "sim"],
)
@pytest.mark.parametrize("name", PLATFORM_BEHAVIOURS)
def test_a_platform_keeps_what_is_expected(
    name: str, make: Callable[[], Platform], add: ChipCallable
) -> None:
    PLATFORM_BEHAVIOURS[name](make(), add)


class Careless(HostDevice):
    """Takes any pointer back."""

    def free(self, pointer: int) -> None:
        if pointer in self._memory:
            super().free(pointer)


class CarelessPlatform(HostPlatform):
    def open(self, device_id: int) -> HostDevice:
        return Careless(device_id)


def test_a_platform_that_does_not_keep_it_is_found_out_and_told_what() -> None:
    with pytest.raises(AssertionError, match="expected BadPointer") as caught:
        check_platform(CarelessPlatform, FUNCTION)

    assert caught.value.__notes__ == ["the platform does not keep: pointers tell chips apart"]
