"""What simulated memory takes of the host's: what was written, once, and nothing for zeros."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankwise.sim import GraphEngine, RuntimeContext, load_topology
from rankwise.sim.hardware import MemoryWrite


@pytest.fixture
def ctx(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeContext]:
    monkeypatch.chdir(tmp_path)
    with RuntimeContext(engine=GraphEngine(load_topology("default"))) as context:
        yield context


def test_zeros_take_none_until_somebody_writes_something_else(ctx: RuntimeContext) -> None:
    zeros = ctx.zeros((3, 4))
    (mapping,) = ctx.engine.space(zeros.device.sip).mappings()
    was_written_at_first = mapping.was_written
    values = zeros.numpy()

    zeros.copy_(np.ones((3, 4), np.float32))
    ones = zeros.numpy()
    zeros.copy_(np.zeros((3, 4), np.float32))

    assert not was_written_at_first
    np.testing.assert_array_equal(values, np.zeros((3, 4)))
    np.testing.assert_array_equal(ones, np.ones((3, 4)))
    np.testing.assert_array_equal(zeros.numpy(), np.zeros((3, 4)))


def test_a_write_that_is_done_keeps_no_data(ctx: RuntimeContext) -> None:
    ctx.ones(1000, dtype="f32")

    writes = [h.command for h in ctx._completed if isinstance(h.command, MemoryWrite)]

    assert [(each.data, each.size) for each in writes] == [(None, 4000)]
