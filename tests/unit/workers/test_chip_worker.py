"""One chip in this process, on every platform."""

import ctypes
import mmap
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.drivers.real.windows import WindowRegion
from rankwise.sim import triton
from rankwise.workers import (
    ArgDirection,
    ChipCallable,
    ChipCallConfig,
    ContinuousTensor,
    CoreCallable,
    DataType,
    Parameter,
    TaskArgs,
    TaskReport,
)
from rankwise.workers.bootstrap import (
    ChannelState,
    ChipBootstrapChannel,
    ChipBootstrapConfig,
    ChipBootstrapResult,
    ChipBufferSpec,
    ChipCommBootstrapConfig,
    HostBufferStaging,
    channel_bytes,
)
from rankwise.workers.chip_worker import ChipShutdownFailed, ChipWorker
from rankwise.workers.errors import BadArguments, BadPointer, DeviceMemoryExhausted, UnknownName
from rankwise.workers.platforms.host import HostPlatform

IN, OUT, INOUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.INOUT, ArgDirection.SCALAR
BLOCK = 64


@triton.jit
def add_kernel(x: Any, y: Any, out: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def scale_kernel(x: Any, n: Any, factor: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def careless_kernel(x: Any) -> None:
    tl.store(x + 1_000_000 + tl.arange(0, 16), 1.0)


def blocks(given: dict[str, Any]) -> tuple[int]:
    return (-(-int(given["n"]) // int(given["block"])),)


ADD = ChipCallable.build(
    [
        Parameter.of(IN, "x", "float32", (None,)),
        Parameter.of(IN, "y", "float32", (None,)),
        Parameter.of(OUT, "out", "float32", (None,)),
        Parameter.of(SCALAR, "n", "int64"),
    ],
    "add",
    add_kernel,
    grid=blocks,
    meta={"block": BLOCK},
)
SCALE = CoreCallable.build(
    [INOUT, SCALAR, SCALAR], scale_kernel, grid=blocks, meta={"block": BLOCK}
)


def add_and_scale(chip: Any, x: Any, y: Any, out: Any, n: int) -> None:
    scratch = chip.alloc(x.shape, x.dtype)
    chip.launch(0, x, y, scratch, n)
    chip.launch(1, scratch, n, 3.0)
    chip.launch(0, scratch, x, out, n)


PROGRAM = ChipCallable.build(
    [IN, IN, OUT, SCALAR],
    "add_and_scale",
    add_and_scale,
    [
        (0, CoreCallable.build([IN, IN, OUT, SCALAR], add_kernel, grid=blocks, meta={"block": 64})),
        (1, SCALE),
    ],
)


def opened(platform: str, device_id: int = 0) -> ChipWorker:
    worker = ChipWorker()
    worker.init(platform)
    worker.set_device(device_id)
    return worker


@pytest.fixture(params=["host", "sim"])
def worker(request: pytest.FixtureRequest) -> Iterator[ChipWorker]:
    worker = opened(request.param)
    yield worker
    worker.finalize()


def arguments(*values: Any) -> TaskArgs:
    args = TaskArgs()
    for value in values:
        if isinstance(value, np.ndarray | ContinuousTensor):
            args.add_tensor(value)
        else:
            args.add_scalar(value)
    return args


def vectors(count: int = 200) -> tuple[Any, Any, Any]:
    x = np.linspace(-1, 1, count, dtype=np.float32)
    return x, x[::-1].copy() ** 2, np.zeros_like(x)


def on_chip(worker: ChipWorker, array: Any) -> ContinuousTensor:
    pointer = worker.malloc(array.nbytes)
    worker.copy_to(pointer, array.ctypes.data, array.nbytes)
    kind = {"float32": DataType.FLOAT32}[array.dtype.name]
    return ContinuousTensor.make(pointer, array.shape, kind, child_memory=True)


def from_chip(worker: ChipWorker, tensor: ContinuousTensor) -> Any:
    array = np.empty(tensor.shapes, np.float32)
    worker.copy_from(array.ctypes.data, tensor.data, array.nbytes)
    return array


def test_a_kernel_on_host_tensors_equals_numpy(worker: ChipWorker) -> None:
    x, y, out = vectors()

    worker.run(ADD, arguments(x, y, out, x.size))

    np.testing.assert_array_equal(out, x + y)


def test_a_kernel_on_tensors_of_the_chip_equals_numpy(worker: ChipWorker) -> None:
    x, y, out = vectors()
    held = [on_chip(worker, array) for array in (x, y, out)]

    worker.run(ADD, arguments(*held, x.size))

    np.testing.assert_array_equal(from_chip(worker, held[2]), x + y)
    assert worker.committed_device_memory == 3 * x.nbytes
    for tensor in held:
        worker.free(tensor.data)
    assert worker.committed_device_memory == 0


def test_a_program_launches_its_children_in_turn_and_its_scratch_memory_goes(
    worker: ChipWorker,
) -> None:
    x, y, out = vectors()

    worker.run(PROGRAM, arguments(x, y, out, x.size))

    np.testing.assert_allclose(out, (x + y) * np.float32(3) + x, rtol=1e-6)
    assert worker.committed_device_memory == 0


def test_tensors_of_the_host_leave_nothing_on_the_chip(worker: ChipWorker) -> None:
    x, y, out = vectors()
    for _ in range(3):
        worker.run(ADD, arguments(x, y, out, x.size))

    assert worker.committed_device_memory == 0


def test_block_dim_is_the_grid_unless_the_callable_says_otherwise(worker: ChipWorker) -> None:
    x, y, out = vectors(4 * BLOCK)
    without_grid = ChipCallable.build(
        [IN, IN, OUT, SCALAR], "add", add_kernel, meta={"block": BLOCK}
    )

    worker.run(without_grid, arguments(x, y, out, x.size), ChipCallConfig(block_dim=2))
    half_done = out.copy()
    worker.run(without_grid, arguments(x, y, out, x.size), block_dim=4)

    np.testing.assert_array_equal(half_done[: 2 * BLOCK], (x + y)[: 2 * BLOCK])
    assert not half_done[2 * BLOCK :].any()
    np.testing.assert_array_equal(out, x + y)


def test_a_wrong_argument_is_named_before_anything_runs(worker: ChipWorker) -> None:
    x, y, out = vectors()

    with pytest.raises(BadArguments, match=r"argument 1 \('y'\) of add has dtype FLOAT16"):
        worker.run(ADD, arguments(x, y.astype(np.float16), out, x.size))
    with pytest.raises(BadArguments, match=r"argument 0 \('x'\) of add has shape \(10, 20\)"):
        worker.run(ADD, arguments(x.reshape(10, 20), y, out, x.size))

    assert not out.any()


def test_a_read_only_array_is_no_output(worker: ChipWorker) -> None:
    x, y, out = vectors()
    out.flags.writeable = False

    with pytest.raises(BadArguments, match=r"argument 2 \('out'\) of add is OUT, but a read-only"):
        worker.run(ADD, arguments(x, y, out, x.size))


def test_an_unknown_override_is_refused(worker: ChipWorker) -> None:
    with pytest.raises(ConfigError, match="no call option 'blockdim'"):
        worker.run(ADD, None, blockdim=3)


def test_only_a_chip_callable_can_be_run(worker: ChipWorker) -> None:
    with pytest.raises(BadArguments, match=r"expected a ChipCallable .*ChipCallable.build"):
        worker.run(0xDEAD_BEEF, TaskArgs())  # type: ignore[arg-type]


def test_a_pointer_of_another_chip_is_refused_and_names_both(worker: ChipWorker) -> None:
    x, y, out = vectors()
    other = opened(worker.platform, 1)
    foreign = on_chip(other, x)

    with pytest.raises(BadPointer, match=r"\('x'\) of add: .*memory of chip 1, and this is chip 0"):
        worker.run(ADD, arguments(foreign, y, out, x.size))
    with pytest.raises(BadPointer, match=r"free: .* is memory of chip 1"):
        worker.free(foreign.data)
    with pytest.raises(BadPointer, match=r"copy_to: .* is memory of chip 1"):
        worker.copy_to(foreign.data, x.ctypes.data, 4)

    other.free(foreign.data)
    other.finalize()
    assert other.leaks == ()


def test_two_chips_have_memories_of_their_own(worker: ChipWorker) -> None:
    other = opened(worker.platform, 1)
    ones, twos = np.ones(50, np.float32), np.full(50, 2, np.float32)
    first, second = on_chip(worker, ones), on_chip(other, twos)

    worker.run(ADD, arguments(first, ones, first, 50))
    other.run(ADD, arguments(second, ones, second, 50))

    assert set(from_chip(worker, first)) == {2.0}
    assert set(from_chip(other, second)) == {3.0}
    other.finalize()
    assert [leak.size for leak in other.leaks] == [200]


def test_an_address_that_nobody_has_is_an_error_and_no_crash(worker: ChipWorker) -> None:
    x, y, _ = vectors()
    nowhere = ContinuousTensor.make(4096, x.shape, DataType.FLOAT32)

    with pytest.raises(BadPointer, match=r"argument 2 \('out'\) of add has 800 bytes at 0x1000"):
        worker.run(ADD, arguments(x, y, nowhere, x.size))
    with pytest.raises(BadPointer, match="the target has 4 bytes at 0x1000"):
        worker.copy_from(4096, worker.malloc(4), 4)


def test_what_was_not_freed_is_listed_at_the_end(worker: ChipWorker) -> None:
    worker.malloc(100)
    kept = worker.malloc(300)
    worker.free(worker.malloc(50))

    worker.finalize()

    assert [leak.size for leak in worker.leaks] == [100, 300]
    assert worker.leaks[1].address == kept


def test_new_memory_holds_zeros(worker: ChipWorker) -> None:
    tensor = ContinuousTensor.make(worker.malloc(400), (100,), DataType.FLOAT32, child_memory=True)

    assert not from_chip(worker, tensor).any()


def test_dumped_tensors_tell_which_one_went_bad(worker: ChipWorker) -> None:
    x, y, out = vectors()
    x[3], y[4] = np.nan, np.inf

    worker.run(ADD, arguments(x, y, out, x.size), enable_dump_tensor=True)

    assert worker.last_report is not None
    by_name = {each.argument: each for each in worker.last_report.tensors}
    bad = by_name["argument 2 ('out') of add"]
    assert (bad.nans, bad.infinities, bad.dtype, bad.shape) == (1, 1, "FLOAT32", (200,))
    assert bad.minimum == float((x + y)[np.isfinite(x + y)].min())
    assert by_name["argument 1 ('y') of add"].nans == 0


def test_init_is_once_and_finalize_is_for_good() -> None:
    worker = ChipWorker()
    with pytest.raises(RuntimeError, match="is not initialized"):
        worker.set_device(0)
    worker.init("host")
    with pytest.raises(RuntimeError, match="initialised for 'host' already"):
        worker.init("host")
    with pytest.raises(RuntimeError, match=r"its device not set \(call set_device"):
        worker.malloc(1)

    worker.finalize()
    worker.finalize()

    for use in (
        lambda: worker.init("host"),
        lambda: worker.set_device(0),
        lambda: worker.malloc(1),
    ):
        with pytest.raises(RuntimeError, match=r"after it was finalized"):
            use()


def test_a_device_is_set_and_reset_any_number_of_times() -> None:
    worker = opened("host", 2)
    worker.set_device(2)
    with pytest.raises(RuntimeError, match=r"has chip 2, so it cannot take chip 3 .*reset_device"):
        worker.set_device(3)

    worker.reset_device()
    worker.reset_device()
    worker.set_device(3)

    assert worker.device_id == 3
    worker.finalize()


def test_an_unknown_platform_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no platform 'tpu' .*host, sim"):
        ChipWorker().init("tpu")


def test_a_platform_that_takes_no_option_says_so() -> None:
    with pytest.raises(ConfigError, match="'host:fast' cannot be made"):
        ChipWorker().init("host:fast")


def test_a_platform_can_be_an_object_of_ones_own() -> None:
    class Mine:
        name = "mine"

        def open(self, device_id: int) -> Any:
            raise ConfigError(f"mine has no chip {device_id}")

    worker = ChipWorker()
    worker.init(Mine())

    with pytest.raises(ConfigError, match="mine has no chip 7"):
        worker.set_device(7)


# Bootstrap.


class Channel(ChipBootstrapChannel):
    """A channel with memory of its own."""

    def __init__(self, count: int = 8) -> None:
        self.own = ctypes.create_string_buffer(channel_bytes(count) + 8)
        super().__init__(-(-ctypes.addressof(self.own) // 8) * 8, count)
        self.reset()


def initialised(platform: str) -> ChipWorker:
    worker = ChipWorker()
    worker.init(platform)
    return worker


def group(size: int = 4096) -> ChipCommBootstrapConfig:
    return ChipCommBootstrapConfig(0, 1, f"group-{secrets.token_hex(4)}", size)


@pytest.fixture(params=["host", "sim"])
def bare(request: pytest.FixtureRequest) -> Iterator[ChipWorker]:
    worker = initialised(request.param)
    yield worker
    worker.shutdown_bootstrap()
    worker.finalize()


def test_a_chip_without_communicator_comes_up(bare: ChipWorker) -> None:
    channel = Channel()

    result = bare.bootstrap_context(1, ChipBootstrapConfig(), channel)

    assert result == ChipBootstrapResult() == channel.result()
    assert channel.state is ChannelState.SUCCESS
    assert bare.device_id == 1


def staged_config(size: int = 400) -> ChipBootstrapConfig:
    return ChipBootstrapConfig(
        group(),
        [
            ChipBufferSpec("odd", "int8", 3, "window", 3),
            ChipBufferSpec("x", "float32", 100, "window", 400, load_from_host=True),
            ChipBufferSpec("y", "float32", 100, "window", 400, store_to_host=True),
        ],
        [HostBufferStaging("x", "input", size)],
        [HostBufferStaging("y", "output", size)],
    )


def test_buffers_are_loaded_used_and_stored(bare: ChipWorker) -> None:
    staging = {"input": mmap.mmap(-1, 400), "output": mmap.mmap(-1, 400)}
    x = np.arange(100, dtype=np.float32)
    staging["input"][:] = x.tobytes()
    bare.staging_source = lambda name: memoryview(staging[name])
    channel = Channel()

    result = bare.bootstrap_context(0, staged_config(), channel)
    pointers = bare.buffer_ptrs
    tensors = [
        ContinuousTensor.make(pointers[name], (100,), DataType.FLOAT32, child_memory=True)
        for name in ("x", "x", "y")
    ]
    bare.run(ADD, arguments(*tensors, 100))
    bare.shutdown_bootstrap()
    bare.shutdown_bootstrap()

    assert channel.result() == result
    assert result.buffer_ptrs == tuple(pointers.values())
    assert [pointer - result.local_window_base for pointer in result.buffer_ptrs] == [0, 64, 512]
    assert result.actual_window_size >= 4096
    np.testing.assert_array_equal(np.frombuffer(staging["output"], np.float32), 2 * x)
    assert bare.device_id is None
    assert bare.leaks == ()


def test_staging_in_posix_shared_memory_is_found_by_name_and_left_alone(bare: ChipWorker) -> None:
    names = {kind: f"chip-test-{os.getpid()}-{kind}" for kind in ("input", "output")}
    paths = [Path("/dev/shm", name) for name in names.values()]
    config = staged_config()
    for staging in (*config.host_inputs, *config.host_outputs):
        staging.shm_name = names[staging.shm_name]
    try:
        paths[0].write_bytes(np.ones(100, np.float32).tobytes())
        paths[1].write_bytes(bytes(400))

        bare.bootstrap_context(0, config)
        bare.shutdown_bootstrap()

        assert all(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink()


def failing_config(what: str) -> ChipBootstrapConfig:
    config = staged_config()
    match what:
        case "no such staging":
            config.host_inputs[0].shm_name = f"chip-test-none-{os.getpid()}"
        case "no communicator":
            config.comm = None
        case _:
            config.host_inputs[0].size = 399
    return config


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("no such staging", UnknownName, "UnknownName: there is no shared memory 'chip-test-"),
        ("no communicator", ConfigError, "TreeValueError: buffers 'odd', 'x', 'y' lie in a window"),
        (
            "size",
            ConfigError,
            "TreeValueError: host_inputs has 399 bytes for buffer 'x', which has",
        ),
    ],
)
def test_a_failed_bootstrap_is_published_undone_and_can_be_tried_again(
    bare: ChipWorker, what: str, error: type[Exception], message: str
) -> None:
    channel = Channel()

    with pytest.raises(error):
        bare.bootstrap_context(0, failing_config(what), channel)

    assert channel.state is ChannelState.ERROR
    assert channel.error_code == 1
    assert channel.error_message.startswith(message)
    assert bare.device_id is None
    again = Channel()
    bare.bootstrap_context(0, ChipBootstrapConfig(group()), again)
    assert again.state is ChannelState.SUCCESS


def test_buffers_larger_than_the_window_are_refused(bare: ChipWorker) -> None:
    config = staged_config()
    region = WindowRegion.create("small", 1, 450)
    bare.communicator_source = lambda _config: region
    assert config.comm is not None
    config.comm.window_size = 450

    with pytest.raises(ValueError, match=r"buffer 'x' ends at byte 464 of its window.*=912"):
        bare.bootstrap_context(0, config)

    region.close()


class Unreliable:
    """A platform of the host whose chips cannot attach a second thing."""

    name = "unreliable"

    def open(self, device_id: int) -> Any:
        device = HostPlatform().open(device_id)
        attach = device.attach
        attached: list[int] = []

        def attach_one(address: int, size: int, name: str) -> None:
            if attached:
                raise OSError(f"no room for {name}")
            attached.append(address)
            attach(address, size, name)

        device.attach = attach_one  # type: ignore[method-assign]
        return device


def test_a_device_that_fails_in_the_middle_leaves_nothing_half_done() -> None:
    worker = ChipWorker()
    worker.init(Unreliable())
    channel = Channel()

    with pytest.raises(OSError, match="no room for window of rank 0"):
        worker.bootstrap_context(0, ChipBootstrapConfig(group()), channel)

    assert channel.error_message.startswith("OSError: no room for window of rank 0")
    assert worker.device_id is None
    worker.set_device(1)
    assert worker.comm_init(0, 1, "another-group") == 2
    worker.finalize()


def test_a_failure_is_published_before_anything_is_undone_and_notes_what_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = ChipWorker()
    worker.init(Unreliable())
    channel = Channel()
    undone: list[str] = []

    def reset_device() -> None:
        undone.append(channel.error_message)
        raise OSError("the chip is stuck")

    monkeypatch.setattr(worker, "reset_device", reset_device)
    with pytest.raises(OSError, match="no room for window") as caught:
        worker.bootstrap_context(0, ChipBootstrapConfig(group()), channel)

    assert undone == [channel.error_message] != [""]
    assert caught.value.__notes__ == ["and then: set_device: OSError: the chip is stuck"]
    monkeypatch.undo()
    worker.finalize()


def test_an_interrupt_during_bring_up_is_published_and_goes_on(bare: ChipWorker) -> None:
    def interrupted(_name: str) -> Any:
        raise KeyboardInterrupt

    bare.staging_source = interrupted
    channel = Channel()

    with pytest.raises(KeyboardInterrupt):
        bare.bootstrap_context(0, staged_config(), channel)

    assert channel.error_message == "KeyboardInterrupt: "
    assert bare.device_id is None


def test_more_buffers_than_the_channel_has_room_for_are_known_before_anything_is_done(
    bare: ChipWorker,
) -> None:
    channel = Channel(2)

    with pytest.raises(ConfigError, match=r"3 buffers are configured, .*room for 2"):
        bare.bootstrap_context(0, staged_config(), channel)

    assert channel.state is ChannelState.ERROR


def test_an_output_that_cannot_be_stored_is_told_and_the_chip_is_down_all_the_same(
    bare: ChipWorker,
) -> None:
    gone: dict[str, Any] = {"input": mmap.mmap(-1, 400)}
    bare.staging_source = gone.__getitem__
    bare.bootstrap_context(0, staged_config())

    with pytest.raises(
        ChipShutdownFailed, match=r"chip 0 could not .*store_to_host of 'y': KeyError: 'output'"
    ) as caught:
        bare.shutdown_bootstrap()

    assert isinstance(caught.value.__cause__, KeyError)
    assert bare.device_id is None
    bare.shutdown_bootstrap()


def test_a_chip_is_brought_up_once_at_a_time(bare: ChipWorker) -> None:
    bare.bootstrap_context(0, ChipBootstrapConfig())

    with pytest.raises(RuntimeError, match=r"chip 0 was brought up before .*shutdown_bootstrap"):
        bare.bootstrap_context(0, ChipBootstrapConfig())


def test_finalize_lets_go_of_the_communicator_but_stores_nothing(bare: ChipWorker) -> None:
    staging = {"input": mmap.mmap(-1, 400), "output": mmap.mmap(-1, 400)}
    bare.staging_source = lambda name: memoryview(staging[name])
    bare.bootstrap_context(0, staged_config())

    bare.finalize()

    assert not any(staging["output"][:])


# Communicators whose windows somebody above has made.


def two_in_a_group(platform: str, region: WindowRegion) -> list[ChipWorker]:
    workers = [opened(platform, chip) for chip in (0, 1)]
    for worker in workers:
        worker.communicator_source = lambda _config: region
    return workers


@pytest.mark.parametrize("platform", ["host", "sim"])
def test_a_chip_reads_and_writes_its_peers_window(platform: str) -> None:
    with WindowRegion.create("pair", 2, 4096) as region:
        workers = two_in_a_group(platform, region)
        handles = [worker.comm_init(rank, 2, "pair") for rank, worker in enumerate(workers)]
        contexts = [
            worker.comm_alloc_windows(handle, 4096)
            for worker, handle in zip(workers, handles, strict=True)
        ]
        bases = [
            worker.comm_get_local_window_base(handle)
            for worker, handle in zip(workers, handles, strict=True)
        ]
        x = np.arange(100, dtype=np.float32)
        own, peers = (
            ContinuousTensor.make(base, (100,), DataType.FLOAT32, child_memory=True)
            for base in bases
        )
        workers[0].copy_to(own.data, x.ctypes.data, x.nbytes)

        workers[0].run(ADD, arguments(own, own, peers, 100))

        np.testing.assert_array_equal(from_chip(workers[1], peers), 2 * x)
        table = np.ctypeslib.as_array((ctypes.c_uint64 * 4).from_address(contexts[1]))
        assert table.tolist() == [2 << 32 | 1, 4096, *bases]
        assert workers[0].comm_get_window_size(handles[0]) == 4096
        for worker, handle in zip(workers, handles, strict=True):
            worker.comm_destroy(handle)
        with pytest.raises(BadPointer, match="is not memory of chip 0"):
            workers[0].run(ADD, arguments(own, own, own, 100))
        for worker in workers:
            worker.finalize()


def test_a_communicator_is_joined_once_and_known_by_its_handle() -> None:
    worker = opened("host")
    handle = worker.comm_init(0, 1, f"alone-{secrets.token_hex(4)}")
    with pytest.raises(RuntimeError, match=r"is in communicator 'alone-.* already"):
        worker.comm_init(0, 1, "another")
    with pytest.raises(RuntimeError, match="no windows yet"):
        worker.comm_get_window_size(handle)
    worker.comm_alloc_windows(handle, 100)
    with pytest.raises(RuntimeError, match="has windows already"):
        worker.comm_alloc_windows(handle, 100)
    worker.comm_barrier(handle, timeout=30)

    worker.comm_destroy(handle)

    with pytest.raises(RuntimeError, match=f"in no communicator with handle {handle}"):
        worker.comm_barrier(handle)
    worker.finalize()


def test_ranks_that_do_not_agree_with_their_region_are_refused() -> None:
    with WindowRegion.create("pair", 2, 64) as region:
        worker = opened("host")
        worker.communicator_source = lambda _config: region

        with pytest.raises(ConfigError, match="'pair' has 2 ranks, but rank 0 was told 3"):
            worker.comm_init(0, 3, "pair")
        handle = worker.comm_init(1, 2, "pair")
        with pytest.raises(ConfigError, match=r"windows of 65 bytes are wanted, .* have 64"):
            worker.comm_alloc_windows(handle, 65)
        worker.finalize()


# What only the simulated chip has.


def test_a_simulated_task_takes_time_and_the_host_none() -> None:
    x, y, out = vectors()
    simulated, host = opened("sim"), opened("host")

    assert simulated.run(ADD, arguments(x, y, out, x.size)) > 0
    assert host.run(ADD, arguments(x, y, out, x.size)) == 0


def test_a_duration_is_rounded_up_to_whole_nanoseconds() -> None:
    durations = [
        TaskReport(chip=0, task="t", start_ps=1000, end_ps=end).duration_ns
        for end in (1000, 1001, 2000, 2001)
    ]

    assert durations == [0, 1, 1, 2]


def test_the_same_task_takes_the_same_time_and_a_larger_one_more() -> None:
    times = []
    for count in (1000, 1000, 20_000):
        x, y, out = vectors(count)
        times.append(opened("sim").run(ADD, arguments(x, y, out, x.size)))

    assert times[0] == times[1] < times[2]


def test_tensors_that_stay_on_the_chip_save_the_copies() -> None:
    x, y, out = vectors(10_000)
    worker = opened("sim")
    held = [on_chip(worker, array) for array in (x, y, out)]

    there = worker.run(ADD, arguments(*held, x.size))
    copied = worker.run(ADD, arguments(x, y, out, x.size))

    assert there < copied


def test_a_report_tells_copies_and_kernel_and_with_profiling_every_operation() -> None:
    x, y, out = vectors()
    worker = opened("sim")

    worker.run(ADD, arguments(x, y, out, x.size))
    plain = worker.last_report
    worker.run(ADD, arguments(x, y, out, x.size), enable_profiling=True)
    detailed = worker.last_report

    assert plain is not None
    assert detailed is not None
    kinds = [span.kind for span in plain.spans if "Mmu" not in span.kind]
    assert kinds == ["MemoryWrite", "MemoryWrite", "KernelLaunch", "MemoryRead"]
    assert {"load", "store"} <= {span.kind for span in detailed.spans}
    for report in (plain, detailed):
        assert report.start_ps == report.spans[0].start_ps
        assert report.end_ps == max(span.end_ps for span in report.spans)


def test_a_task_begins_when_what_it_needs_is_there() -> None:
    x, y, out = vectors()
    worker = opened("sim")

    worker.run(ADD, arguments(x, y, out, x.size), not_before_ps=5_000_000_000)
    first = worker.last_report
    worker.run(ADD, arguments(x, y, out, x.size), not_before_ps=1)
    second = worker.last_report

    assert first is not None
    assert second is not None
    assert first.start_ps == 5_000_000_000
    assert second.start_ps == first.end_ps


def test_a_kernel_that_fails_leaves_nothing_behind_and_the_chip_usable() -> None:
    x, y, out = vectors()
    worker = opened("sim")
    careless = ChipCallable.build([INOUT], "careless", careless_kernel, grid=1)

    with pytest.raises(Exception, match="careless"):
        worker.run(careless, arguments(out))
    worker.run(ADD, arguments(x, y, out, x.size))

    np.testing.assert_array_equal(out, x + y)
    assert worker.committed_device_memory == 0


def test_every_error_of_a_chip_can_travel_to_another_process() -> None:
    _x, _y, out = vectors()
    worker = opened("sim")
    careless = ChipCallable.build([INOUT], "careless", careless_kernel, grid=1)
    mistakes: list[Callable[[], object]] = [
        lambda: worker.run(careless, arguments(out)),
        lambda: worker.run(careless),
        lambda: worker.free(3),
        lambda: worker.malloc(1 << 50),
        lambda: worker.init("sim"),
        lambda: TaskArgs().tensor(5),
        lambda: ChipBootstrapConfig().input_staging("x"),
    ]

    for mistake in mistakes:
        with pytest.raises(RankwiseError) as caught:
            mistake()
        arrived = pickle.loads(pickle.dumps(caught.value))
        assert type(arrived) is caught.type
        assert str(arrived) == str(caught.value)
        assert arrived.hint == caught.value.hint


def test_a_read_only_input_stays_one_even_without_a_signature() -> None:
    x, y, out = vectors()
    x.flags.writeable = False
    unsigned = ChipCallable.build(None, "add", add_kernel, grid=blocks, meta={"block": BLOCK})

    opened("sim").run(unsigned, arguments(x, y, out, x.size))

    np.testing.assert_array_equal(out, x + y)


def test_a_full_chip_says_how_full_it_is() -> None:
    worker = opened("sim")
    worker.malloc(10 << 30)

    with pytest.raises(
        DeviceMemoryExhausted, match=r"chip 0 has no room for 7 GiB, 6 GiB left; .*with 10 GiB"
    ):
        worker.malloc(7 << 30)
    worker.malloc(6 << 30)


def test_a_task_that_does_not_fit_leaves_nothing_of_it_on_the_chip() -> None:
    x, y, out = vectors(1 << 20)
    worker = opened("sim")
    worker.malloc((16 << 30) - 3 * x.nbytes // 2)
    before = worker.committed_device_memory

    with pytest.raises(DeviceMemoryExhausted, match="no room for 4 MiB, 2 MiB left"):
        worker.run(ADD, arguments(x, y, out, x.size))

    assert worker.committed_device_memory == before


@triton.jit
def matmul_kernel(  # noqa: PLR0917 (kernels take their arguments in order)
    a: Any, b: Any, c: Any, n: Any, k: Any, block: tl.constexpr
) -> None:
    row = tl.program_id(0) * block + tl.arange(0, block)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block, block), dtype=tl.float32)
    for start in range(0, k, block):
        depth = start + tl.arange(0, block)
        left = tl.load(a + row[:, None] * k + depth[None, :])
        right = tl.load(b + depth[:, None] * n + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * n + column[None, :], total)


@pytest.mark.parametrize("platform", ["host", "sim"])
def test_a_product_of_matrices_split_over_two_chips_equals_numpy(platform: str) -> None:
    random = np.random.default_rng(7)
    a = random.standard_normal((64, 96)).astype(np.float16)
    b = random.standard_normal((96, 32)).astype(np.float16)
    matmul = ChipCallable.build(
        [
            Parameter.of(IN, "a", "float16", (None, 96)),
            Parameter.of(IN, "b", "float16", (96, None)),
            Parameter.of(OUT, "c", "float32"),
            SCALAR,
            SCALAR,
        ],
        "matmul",
        matmul_kernel,
        grid=(2, 2),
        meta={"block": 16},
    )
    halves = [np.zeros((32, 32), np.float32) for _ in range(2)]

    for chip, half in enumerate(halves):
        rows = np.ascontiguousarray(a[32 * chip : 32 * chip + 32])
        opened(platform, chip).run(matmul, arguments(rows, b, half, 32, 96))

    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(np.vstack(halves), exact, rtol=1e-5, atol=1e-4)


def test_a_plain_function_is_no_kernel() -> None:
    function = ChipCallable.build([INOUT], "numpy_code", np.negative)

    with pytest.raises(BadArguments, match=r"numpy_code is a plain function.*platform='host'"):
        opened("sim").run(function, arguments(np.zeros(3, np.float32)))


def test_a_tensor_without_elements_is_no_argument_of_a_kernel() -> None:
    _x, y, out = vectors()

    with pytest.raises(BadArguments, match=r"\('x'\) of add has shape \(0,\), and no elements"):
        opened("sim").run(ADD, arguments(np.zeros(0, np.float32), y, out, 0))


def test_a_topology_has_as_many_chips_as_it_has() -> None:
    with pytest.raises(ConfigError, match=r"device_id is 4, but .*'default' has 4 chips, 0 to 3"):
        opened("sim", 4)
    worker = opened("sim:switch8", 7)
    assert worker.device_id == 7
    with pytest.raises(ConfigError, match=r"no topology file 'nowhere.yaml'"):
        initialised("sim:nowhere.yaml")


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int32", "int8", "uint8", "int64"])
def test_every_data_type_is_what_it_is_on_the_chip(kind: str) -> None:
    bits = np.arange(40, dtype=np.int64)
    stored: Any
    if kind == "bfloat16":
        stored = (bits.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = bits.astype(kind)
    expected = stored.copy()
    out = np.zeros_like(stored)
    worker = opened("sim")
    copy = ChipCallable.build(
        [IN, INOUT, OUT, SCALAR], "add", add_kernel, grid=blocks, meta={"block": BLOCK}
    )
    zeros = np.zeros_like(stored)
    args = TaskArgs()
    for array in (stored, zeros, out):
        args.add_tensor(ContinuousTensor.make(array.ctypes.data, array.shape, kind))
    args.add_scalar(40)

    worker.run(copy, args)

    np.testing.assert_array_equal(out, expected)


# What only the host has.


def test_a_numpy_function_writes_its_results_in_place() -> None:
    x, y, out = vectors()
    worker = opened("host")

    worker.run(
        ChipCallable.build([IN, IN, OUT], "add", lambda a, b, c: np.add(a, b, out=c)),
        arguments(x, y, out),
    )

    np.testing.assert_array_equal(out, x + y)


def test_a_result_that_is_only_returned_is_an_error_and_not_lost() -> None:
    x, _y, out = vectors()
    wrong = ChipCallable.build([IN, OUT], "double", lambda a, b: a + b)

    with pytest.raises(
        RuntimeError, match=r"double returned ndarray, and a result is not sent back"
    ):
        opened("host").run(wrong, arguments(x, out))


def test_an_exception_of_a_function_comes_out_as_it_is() -> None:
    def boom(array: Any) -> None:
        raise ZeroDivisionError(f"no {array.shape}")

    with pytest.raises(ZeroDivisionError, match=r"no \(3,\)"):
        opened("host").run(
            ChipCallable.build([INOUT], "boom", boom), arguments(np.zeros(3, np.float32))
        )
