"""Programs of hw-native-sys/simpler, with their imports changed."""

import ctypes
from typing import Any

import numpy as np
import pytest

import rankwise.workers
from rankwise.base.errors import ConfigError
from rankwise.compat.simpler import env_manager, orchestrator, torch_interop
from rankwise.compat.simpler.task_interface import (
    CHIP_BOOTSTRAP_MAILBOX_SIZE,
    ArgDirection,
    ChipBootstrapChannel,
    ChipBootstrapConfig,
    ChipBootstrapMailboxState,
    ChipBufferSpec,
    ChipCallable,
    ChipCommBootstrapConfig,
    ChipWorker,
    ContinuousTensor,
    CoreCallable,
    DataType,
    TaskArgs,
    TensorArgType,
    _mailbox_load_i32,
    _mailbox_store_i32,
)
from rankwise.compat.simpler.worker import Worker

pytestmark = pytest.mark.system


class Misfortune(ValueError):
    pass


class Picky(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)
        self.why = why


def fail(args: Any) -> None:
    raise Misfortune("not today")


def fail_with_more(args: Any) -> None:
    raise Picky("not today", why="it rains")


def submitting(*numbers: int) -> Any:
    def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
        for number in numbers:
            orch.submit_sub(number)

    return orchestrate


@pytest.mark.parametrize(("function", "kind"), [(fail, Misfortune), (fail_with_more, Picky)])
def test_what_a_task_raises_is_what_it_was_and_a_runtime_error(function: Any, kind: type) -> None:
    with Worker(level=3, num_sub_workers=1) as worker:
        number = worker.register(function)
        worker.init()
        with pytest.raises(RuntimeError) as caught:
            worker.run(submitting(number))

    assert isinstance(caught.value, kind)
    assert str(caught.value) == f"sub_worker 0: {kind.__name__}: not today"
    assert getattr(caught.value, "why", "it rains") == "it rains"
    assert "in fail" in str(caught.value.__cause__)


def test_each_level_that_an_error_has_come_through_is_in_its_text() -> None:
    inner = Worker(level=3, num_sub_workers=1)
    bottom = inner.register(fail)
    with Worker(level=4) as root:
        number = root.register(submitting(bottom))
        root.add_worker(inner)
        root.init()
        with pytest.raises(Misfortune) as caught:
            root.run(lambda orch, _args, _config: orch.submit_next_level(number, TaskArgs()))

    assert isinstance(caught.value, RuntimeError)
    text = "child_worker 0: Misfortune: sub_worker 0: Misfortune: not today"
    assert str(caught.value) == text


def test_what_an_orchestration_function_raises_stays_as_it_is() -> None:
    def orchestrate(_orch: Any, _args: Any, _config: Any) -> None:
        raise Misfortune("before any task")

    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        with pytest.raises(Misfortune, match=r"^before any task$") as caught:
            worker.run(orchestrate)

    assert not isinstance(caught.value, RuntimeError)


def test_an_address_that_is_nobodys_orders_tasks() -> None:
    def args(tag: TensorArgType, step: int) -> TaskArgs:
        made = TaskArgs()
        made.add_tensor(ContinuousTensor.make(0xCAFE0000, (1,), DataType.UINT8), tag)
        made.add_scalar(step)
        return made

    def step(args: TaskArgs) -> None:
        steps[0] = steps[0] * 10 + args.scalar(0)

    def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
        for number in range(1, 6):
            orch.submit_sub(step_number, args(TensorArgType.INOUT, number))

    with Worker(level=3, num_sub_workers=3) as worker:
        worker.init()
        steps = worker.share(1, "i8")
        step_number = worker.register(step)
        worker.run(orchestrate)

    assert steps[0] == 12345


@pytest.mark.parametrize("module", ["workers", "simpler"])
def test_an_address_of_private_memory_is_refused_as_children_do_not_see_it(module: str) -> None:
    kind = Worker if module == "simpler" else rankwise.workers.Worker
    private = np.zeros(4)
    args = TaskArgs()
    args.add_tensor(private)

    with kind(level=3, num_sub_workers=1) as worker:
        worker.init()
        with pytest.raises(ConfigError, match="which children do not share"):
            worker.run(lambda orch, _args, _config: orch.submit_sub(fail, args))


def test_chips_of_the_models_simulator_are_simulated_chips() -> None:
    configs = [
        ChipBootstrapConfig(
            comm=ChipCommBootstrapConfig(rank, 2, "/tmp/nothing-is-made-there", 4096),
            buffers=[ChipBufferSpec("x", "float32", 16, "window", 64)],
        )
        for rank in range(2)
    ]
    worker = Worker(
        level=3, platform="a2a3sim", runtime="tensormap_and_ringbuffer", device_ids=[0, 1],
        num_sub_workers=0, chip_bootstrap_configs=configs,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="after init"):
        _ = worker.chip_contexts

    with worker:
        worker.init()
        contexts = worker.chip_contexts

    assert [context.rank for context in contexts] == [0, 1]
    assert all(each.buffer_ptrs == {"x": each.local_window_base} for each in contexts)


def add_one(x: Any, out: Any) -> None:
    out[...] = x + 1


def test_a_chip_worker_takes_the_paths_of_binaries_and_needs_none() -> None:
    chip = ChipWorker()
    assert (chip.initialized, chip.device_set, chip.device_id) == (False, False, -1)
    with pytest.raises(RuntimeError, match="not initialized"):
        chip.set_device(0)

    chip.init("libhost.so", "libaicpu.so", "aicore.o", "libcpu_sim_context.so")
    with pytest.raises(RuntimeError, match="device not set"):
        chip.malloc(4)
    chip.set_device(1)

    assert (chip.platform, chip.initialized, chip.device_set, chip.device_id) == (
        "sim", True, True, 1,
    )  # fmt: skip
    chip.finalize()
    assert (chip.initialized, chip.device_set) == (False, False)
    with pytest.raises(RuntimeError, match="finalized"):
        chip.init("libhost.so", "libaicpu.so", "aicore.o")


def test_a_chip_worker_raises_runtime_errors_of_what_a_function_raises() -> None:
    def give_up(_x: Any) -> None:
        raise Misfortune("not today")

    chip = ChipWorker()
    chip.init("host")
    chip.set_device(0)
    args = TaskArgs()
    args.add_tensor(np.zeros(2))
    with pytest.raises(RuntimeError, match=r"^Misfortune: not today$") as caught:
        chip.run(ChipCallable.build([ArgDirection.IN], "give_up", give_up), args)

    assert isinstance(caught.value, Misfortune)
    chip.finalize()


def test_machine_code_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"machine code cannot be run here.*tl language"):
        CoreCallable.build(signature=[ArgDirection.IN], binary=b"\x7fELF")  # type: ignore[arg-type]


def test_a_bootstrap_channel_has_the_size_and_the_states_that_programs_know() -> None:
    assert CHIP_BOOTSTRAP_MAILBOX_SIZE == 4096
    assert [(state.name, state.value) for state in ChipBootstrapMailboxState] == [
        ("IDLE", 0), ("SUCCESS", 1), ("ERROR", 2),
    ]  # fmt: skip
    memory = (ctypes.c_uint64 * (CHIP_BOOTSTRAP_MAILBOX_SIZE // 8))()
    channel = ChipBootstrapChannel(ctypes.addressof(memory), max_buffer_count=376)

    channel.write_error(3, "no such chip")

    assert (channel.state, _mailbox_load_i32(channel.addr)) == (ChipBootstrapMailboxState.ERROR, 2)
    _mailbox_store_i32(channel.addr, 0)
    assert (channel.state, channel.error_code) == (ChipBootstrapMailboxState.IDLE, 3)
    with pytest.raises(ValueError, match="buffer_ptrs exceeds max_buffer_count"):
        channel.write_success(0, 0, 0, list(range(377)))


def test_a_variable_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RANKWISE_TEST_OF_ENV_MANAGER"
    assert env_manager.get(name) is None
    with pytest.raises(OSError, match=f"{name} is not set"):
        env_manager.ensure(name)

    monkeypatch.setenv(name, "first")
    assert env_manager.ensure(name) == "first"
    monkeypatch.setenv(name, "second")
    assert (env_manager.ensure(name), env_manager.get(name)) == ("first", "first")


def test_other_modules_have_the_names_of_rankwise() -> None:
    assert orchestrator.Orchestrator is rankwise.workers.Orchestrator
    assert torch_interop.make_tensor_arg is rankwise.workers.make_tensor_arg
