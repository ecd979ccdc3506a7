"""How often a launch binds its arguments: once, wherever it is carried out."""

import inspect
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.topology import load_topology
from rankwise.sim.runtime.context import RuntimeContext
from rankwise.sim.runtime.host_tensors import launches_on
from rankwise.simranks.prediction.clocks import Prediction, RankClock
from rankwise.simranks.prediction.kernel_times import KernelTimes, Meter

SIZE = 8


@triton.jit
def fill(x: Any, value: Any, BLOCK: tl.constexpr) -> None:
    tl.store(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), value)


def grid(given: dict[str, Any]) -> tuple[int]:
    return (SIZE // given["BLOCK"],)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[inspect.Signature]:
    """The signatures to which arguments are bound, one for each time."""
    found: list[inspect.Signature] = []
    bind = inspect.Signature.bind

    def noting(self: inspect.Signature, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        found.append(self)
        return bind(self, *args, **kwargs)

    monkeypatch.setattr(inspect.Signature, "bind", noting)
    return found


def test_a_launch_in_the_emulator_binds_its_arguments_once(bindings: list[Any]) -> None:
    values = np.zeros(SIZE, np.float32)

    fill[grid](values, 4.0, BLOCK=4)

    assert bindings == [fill.signature]
    assert (values == 4).all()


def test_a_launch_with_tensors_of_the_runtime_binds_its_arguments_once(
    bindings: list[Any],
) -> None:
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        values = torch.zeros((SIZE,))

        torch.launch(fill, grid, values, 4.0, BLOCK=4)

        assert bindings == [fill.signature]
        assert (values.numpy() == 4).all()


def test_a_launch_with_arrays_of_the_host_on_a_machine_binds_its_arguments_once(
    bindings: list[Any],
) -> None:
    values = np.zeros(SIZE, np.float32)
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch, launches_on(torch):
        compiled = fill[grid](values, 4.0, BLOCK=4)

    assert bindings == [fill.signature]
    assert (values == 4).all()
    assert compiled.name == "fill"


def test_a_launch_whose_configuration_is_chosen_on_a_machine_binds_its_arguments_once(
    bindings: list[Any],
) -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": 4})], key=[])(fill)
    values = np.zeros(SIZE, np.float32)
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch, launches_on(torch):
        tuned[grid](values, 4.0)

    assert bindings == [fill.signature]
    assert (values == 4).all()


def test_a_launch_of_a_simulated_rank_binds_its_arguments_once_also_for_its_trial(
    bindings: list[Any],
) -> None:
    prediction = Prediction(load_topology("pod64"), 1)
    clock = RankClock(prediction, 0, 0)
    values = np.zeros(SIZE, np.float32)

    KernelTimes(prediction, print).run(
        fill, grid, (values, 4.0), {"BLOCK": 4}, Meter(prediction, clock, lambda _address: None)
    )

    assert bindings == [fill.signature]
    assert (values == 4).all()
    assert clock.time > 0
