"""`autotune` on a simulated machine: configurations are tried in virtual time."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.commands import KernelLaunch, MemoryRead, MemoryWrite, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner

N = 2_000


def doubled(x: Any, o: Any, n: Any, B: tl.constexpr) -> None:
    tl.static_assert(B < 4_096)
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n)
    tl.store(o + i, value + value, mask=i < n)


def tuned(*blocks: int, **options: Any) -> Any:
    configs = [triton.Config({"B": block}) for block in blocks]
    return triton.autotune(configs, key=["n"], **options)(triton.jit(doubled))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["B"]),)


class Device:
    """A device with an input and an output array of N numbers."""

    def __init__(self) -> None:
        self.engine = GraphEngine("default")
        self.values = np.arange(N, dtype=np.float32)
        self.x, self.o = self._put(self.values), self._put(np.zeros_like(self.values))

    def _put(self, array: Any) -> DevicePointer:
        address = self.engine.space(0).reserve(array.nbytes)
        self.engine.wait(
            self.engine.submit(MmuMap(sip=0, address=address, size=array.nbytes, cube=2, pe=3))
        )
        self.engine.wait(self.engine.submit(MemoryWrite(sip=0, address=address, data=array)))
        return DevicePointer(address, "float32", N)

    def launch(self, kernel: Any, **meta: Any) -> int:
        launch = KernelLaunch(
            sip=0, runner=KernelRunner(meta, grid), kernel_fn=kernel,
            kernel_args=(self.x, self.o, N), num_programs=1, pes=tuple(range(4)),
        )  # fmt: skip
        handle = self.engine.submit(launch)
        self.engine.wait(handle)
        assert handle.started_at is not None
        assert handle.completed_at is not None
        return handle.completed_at - handle.started_at

    def output(self) -> Any:
        read = MemoryRead(sip=0, address=self.o.address, size=4 * N)
        return self.engine.wait(self.engine.submit(read)).view(np.float32)


def test_the_configuration_that_is_fastest_in_virtual_time_is_taken() -> None:
    blocks = (2, 512, 2_048)
    times = {block: Device().launch(doubled, B=block) for block in blocks}
    kernel, device = tuned(*blocks), Device()

    took = device.launch(kernel)

    assert times[512] == min(times.values()), "the middle one, so that neither end is right"
    assert kernel.best_config.kwargs == {"B": 512}
    assert took == times[512], "trials take no time here, and are right about it"
    np.testing.assert_array_equal(device.output(), 2 * device.values)


def test_a_choice_is_kept_for_its_key_and_its_machine() -> None:
    kernel, device = tuned(2, 512), Device()

    for _ in range(3):
        device.launch(kernel)

    assert [key[1:] for key in kernel.cache] == [(N, "float32", "float32")]


def test_a_trial_leaves_no_trace_in_the_machine_or_its_log() -> None:
    device, alone = Device(), Device()

    device.launch(tuned(2, 512))
    alone.launch(doubled, B=512)

    assert device.engine.op_log.encode() == alone.engine.op_log.encode()
    names = [[link.name for link in each.engine.machine.links] for each in (device, alone)]
    assert names[0] == names[1]


def test_configurations_that_do_not_compile_are_passed_over() -> None:
    kernel = tuned(8_192, 512)

    Device().launch(kernel)

    assert kernel.best_config.kwargs == {"B": 512}
    with pytest.raises(ConfigError, match="none of the 2 configurations of kernel doubled runs"):
        Device().launch(tuned(8_192, 4_096))


def test_a_model_of_the_callers_decides_without_trials() -> None:
    kernel = tuned(2, 512, prune_configs_by={"perf_model": lambda **given: given["B"]})

    Device().launch(kernel)

    assert kernel.best_config.kwargs == {"B": 2}
