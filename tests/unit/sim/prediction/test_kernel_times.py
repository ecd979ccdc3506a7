"""Which launches take the same time, so that one trial does for them."""

from typing import Any

import numpy as np
import pytest

from rankwise.sim import load_topology, triton
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.triton import execution as triton_execution
from rankwise.sim.triton import language as tl
from rankwise.sim.triton.kernel_runner import tried
from rankwise.sim.triton.launch_arguments import OTHERS
from rankwise.simranks.prediction import Prediction, RankClock
from rankwise.simranks.prediction.costs import DeviceOperation, Engine
from rankwise.simranks.prediction.kernel_times import KernelTimes, Meter


@triton.jit
def fill(x_ptr: Any, rounds: Any, seed: Any, value: Any, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        tl.store(x_ptr + places, tl.load(x_ptr + places) + value + seed)


@triton.jit
def attend(x_ptr: Any, length: Any, seed: Any, BLOCK: tl.constexpr) -> None:
    places = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, 127):
        total += tl.where(start + places < length, tl.load(x_ptr + places), 0.0) + seed
    tl.store(x_ptr + places, total)


@triton.jit
def padded(x_ptr: Any, PAD: tl.constexpr, BLOCK: tl.constexpr) -> None:
    for _ in range((PAD + 1) // 2):
        tl.store(x_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)) + 1)


@triton.jit
def picked(x_ptr: Any, choice_ptr: Any, BLOCK: tl.constexpr) -> None:
    for _ in range(tl.load(choice_ptr)):
        places = x_ptr + tl.arange(0, BLOCK)
        tl.store(places, tl.load(places) + 1)


@triton.jit
def in_turn(x_ptr: Any, lock_ptr: Any, BLOCK: tl.constexpr) -> None:
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    places = x_ptr + tl.arange(0, BLOCK)
    tl.store(places, tl.load(places) + 1)
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def positive(x_ptr: Any, BLOCK: tl.constexpr) -> None:
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.device_assert(tl.exp(x) / x > 0)
    tl.assume(tl.sum(x) > 0)
    tl.store(x_ptr + tl.arange(0, BLOCK), -x)


@triton.jit
def pull(x_ptr: Any, y_ptr: Any, flag_ptr: Any, BLOCK: tl.constexpr) -> None:
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass
    places = tl.arange(0, BLOCK)
    tl.store(x_ptr + places, tl.load(y_ptr + places) + 1)


@triton.jit
def waits_and_multiplies(
    x_ptr: Any, flag_ptr: Any, BLOCK: tl.constexpr, N: tl.constexpr, TURNS: tl.constexpr
) -> None:
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass
    places = x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(places)
    for _ in range(TURNS):
        x = tl.exp(x)
    tl.store(places, tl.dot(x, x))


class Others:
    """Other ranks, one of which sets a flag when it is waited for."""

    def __init__(self, flag: Any) -> None:
        self._flag = flag

    def wait(self, awaited: str) -> None:
        assert "memory to change" in awaited
        self._flag[0] = 1

    def notify(self) -> None:
        """Nobody waits for this one."""


class Launches:
    """Launches kernels, and knows of the trials."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials = 0
        self.said: list[str] = []
        self.prediction = Prediction(load_topology("pod64"), 2)
        self.peers: list[Any] = []
        self._clock = RankClock(self.prediction, 0, 0)
        self._meter = Meter(self.prediction, self._clock, self._owner_of)
        self._times = KernelTimes(self.prediction, self.said.append)

        def counted(*args: Any) -> Any:
            self.trials += 1
            return tried(*args)

        monkeypatch.setattr("rankwise.simranks.prediction.kernel_times.tried", counted)

    def time(self, kernel: Any, *args: Any, grid: int = 4, **meta: Any) -> int:
        begun = self._clock.time
        self._times.run(kernel, grid, args, {"BLOCK": 64, **meta}, self._meter)
        return self._clock.time - begun

    def _owner_of(self, address: int) -> int | None:
        """Rank 1 has what lies in `peers`."""
        ranges = [(each.ctypes.data, each.nbytes) for each in self.peers]
        return 1 if any(0 <= address - begin < size for begin, size in ranges) else None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def test_equal_launches_are_tried_once(launches: Launches) -> None:
    x = np.zeros(256, np.float32)

    times = {launches.time(fill, x, 2, 1, 0.5) for _ in range(3)}

    assert launches.trials == 1
    assert len(times) == 1
    assert x.tolist() == [3 * 2 * 1.5] * 256


def test_another_buffer_of_the_same_size_and_another_factor_are_no_other_launch(
    launches: Launches,
) -> None:
    for factor in (0.5, 0.25):
        launches.time(fill, np.zeros(256, np.float32), 2, 1, factor)

    assert launches.trials == 1


def test_sizes_types_grids_and_what_is_decided_by_numbers_are(launches: Launches) -> None:
    short = launches.time(fill, np.zeros(256, np.float32), 2, 1, 0.5)
    long = launches.time(fill, np.zeros(256, np.float32), 4, 1, 0.5)
    launches.time(fill, np.zeros(256, np.float16), 2, 1, 0.5)
    launches.time(fill, np.zeros(512, np.float32), 2, 1, 0.5)
    launches.time(fill, np.zeros(256, np.float32), 2, 1, 0.5, grid=3)

    assert launches.trials == 5
    assert long > short


def test_numbers_that_have_decided_nothing_are_looked_at_more_and_more_rarely(
    launches: Launches,
) -> None:
    x = np.zeros(256, np.float32)

    times = {launches.time(fill, x, 2, seed, 0.5) for seed in range(64, 192)}

    assert launches.trials == 1 + len({"64 to 95", "96 to 127", "128 to 191"})
    assert len(times) == 1
    assert launches.time(fill, x, 3, 192, 0.5) not in times


def test_a_length_that_grows_by_one_is_found_to_decide(launches: Launches) -> None:
    x = np.zeros(256, np.float32)

    *one_block, two_blocks = (launches.time(attend, x, length, 1) for length in range(120, 129))

    assert len({*one_block}) == 1
    assert launches.trials == 3
    assert two_blocks > one_block[0]
    assert launches.time(attend, x, 255, 1) > max(
        launches.time(attend, x, length, 1) for length in (130, 254)
    )
    # Another number, which decides nothing, is still not looked at.
    trials = launches.trials
    for seed in range(64, 96):
        launches.time(attend, x, 255, seed)
    assert launches.trials == trials + 2


def test_constants_always_decide(launches: Launches) -> None:
    x = np.zeros(256, np.float32)

    times = [launches.time(padded, x, each) for each in (1, 2, 3)]

    assert launches.trials == 3
    assert times[0] == times[1] < times[2]


def test_whole_numbers_in_memory_say_what_there_is_to_do(launches: Launches) -> None:
    few, many = (
        launches.time(picked, np.zeros(size, np.float32), np.array([rounds]), grid=1)
        for size, rounds in ((64, 1), (65, 99))
    )

    assert many > 4 * few


def test_programs_that_take_a_lock_take_longer_the_more_there_are(launches: Launches) -> None:
    x, lock = np.zeros(64, np.float32), np.zeros(1, np.int32)

    few, many = (launches.time(in_turn, x, lock, grid=grid) for grid in (2, 32))

    assert launches.said == []
    assert many > few
    assert x.tolist() == [34.0] * 64


def test_what_a_kernel_asserts_of_its_values_is_asserted_where_they_are_computed(
    launches: Launches,
) -> None:
    x = np.ones(64, np.float32)

    assert launches.time(positive, x, grid=1) > 0
    assert launches.said == []
    with pytest.raises(triton_execution.DeviceAssertion, match=r"positive.*program \(0, 0, 0\)"):
        launches.time(positive, x, grid=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_waits_for_others_takes_what_it_moves_here_and_over_the_links(
    rank: int, launches: Launches
) -> None:
    x, y, flag = np.zeros(64, np.float32), np.ones(64, np.float32), np.zeros(1, np.int32)
    launches.peers = [y] if rank else []
    others = OTHERS.set(Others(flag))
    try:
        took = [launches.time(pull, x, y, flag, grid=1) for _ in range(2)]
    finally:
        OTHERS.reset(others)

    prediction = launches.prediction
    command = picoseconds(prediction.topology.machine.system.host.command_ns)
    over_links = prediction.network.message_time(1, 0, y.nbytes)
    here = prediction.costs.bound(
        DeviceOperation("triton.pull", "math", 64, x.nbytes + y.nbytes, "f32")
    )[1]
    assert x.tolist() == [2.0] * 64
    assert launches.trials == 1, "it cannot be tried"
    assert "kernel pull cannot be simulated alone on pod64" in launches.said[0]
    assert took == pytest.approx([command + (over_links if rank else here)] * 2, rel=0.1)
    assert over_links > 10 * here


@pytest.mark.parametrize(("turns", "longer"), [(1, "gemm"), (400, "math")])
def test_a_kernel_that_cannot_be_tried_takes_as_long_as_the_engine_with_more_to_do(
    launches: Launches, turns: int, longer: Engine
) -> None:
    x, flag = np.zeros((32, 32), np.float32), np.zeros(1, np.int32)

    others = OTHERS.set(Others(flag))
    try:
        args = {"N": 32, "TURNS": turns}
        took = launches.time(waits_and_multiplies, x, flag, grid=1, **args)
    finally:
        OTHERS.reset(others)

    costs, size = launches.prediction.costs, 2 * x.nbytes
    times = {
        "gemm": costs.bound(DeviceOperation("", "gemm", 2 * 32**3, size, "f32"))[1],
        "math": costs.bound(DeviceOperation("", "math", turns * 32 * 32, size, "f32"))[1],
    }
    assert max(times, key=times.__getitem__) == longer
    command = picoseconds(launches.prediction.topology.machine.system.host.command_ns)
    assert took - command == pytest.approx(times[longer], rel=0.1)


def test_a_launch_of_no_programs_takes_no_time(launches: Launches) -> None:
    assert launches.time(fill, np.zeros(256, np.float32), 2, 1, 0.5, grid=0) == 0
    assert launches.trials == 0
