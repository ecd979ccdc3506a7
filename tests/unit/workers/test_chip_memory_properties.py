"""Any sequence of uses of a chip's memory does what a dictionary of bytes would."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rankwise.workers import ChipWorker
from rankwise.workers.errors import BadPointer

SIZES = st.integers(1, 10_000)
SEEDS = st.integers(0, 2**32 - 1)


class ChipMemory(RuleBasedStateMachine):
    platform = "host"
    pointers = Bundle("pointers")

    def __init__(self) -> None:
        super().__init__()
        self.worker = ChipWorker()
        self.worker.init(self.platform)
        self.worker.set_device(1)
        self.model: dict[int, Any] = {}

    @rule(target=pointers, size=SIZES)
    def malloc(self, size: int) -> int:
        pointer = self.worker.malloc(size)
        assert pointer not in self.model
        self.model[pointer] = np.zeros(size, np.uint8)
        return pointer

    @rule(pointer=consumes(pointers))
    def free(self, pointer: int) -> None:
        self.worker.free(pointer)
        del self.model[pointer]
        with pytest.raises(BadPointer, match="freed before"):
            self.worker.free(pointer)

    @rule(pointer=pointers, seed=SEEDS, cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def copy_to(self, pointer: int, seed: int, cut: tuple[float, float]) -> None:
        held = self.model[pointer]
        begin, end = sorted(int(part * held.size) for part in cut)
        if begin == end:
            return
        data = np.random.default_rng(seed).integers(0, 256, end - begin, np.uint8)
        self.worker.copy_to(pointer + begin, data.ctypes.data, data.size)
        held[begin:end] = data

    @rule(pointer=pointers)
    def copy_from(self, pointer: int) -> None:
        held = self.model[pointer]
        data = np.empty_like(held)
        self.worker.copy_from(data.ctypes.data, pointer, data.size)
        np.testing.assert_array_equal(data, held)

    @rule(pointer=pointers, beyond=SIZES)
    def run_over_the_end(self, pointer: int, beyond: int) -> None:
        size = self.model[pointer].size + beyond
        data = np.empty(size, np.uint8)
        with pytest.raises(BadPointer, match="run over the end"):
            self.worker.copy_from(data.ctypes.data, pointer, size)

    @invariant()
    def the_account_is_right(self) -> None:
        assert self.worker.committed_device_memory == sum(a.size for a in self.model.values())

    def teardown(self) -> None:
        self.worker.finalize()
        leaks = {leak.address: leak.size for leak in self.worker.leaks}
        assert leaks == {pointer: array.size for pointer, array in self.model.items()}


class SimulatedChipMemory(ChipMemory):
    platform = "sim"


TestHostMemory = ChipMemory.TestCase
TestHostMemory.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestSimulatedMemory = SimulatedChipMemory.TestCase
TestSimulatedMemory.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
