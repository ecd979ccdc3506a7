"""How trees of real processes come up, and how they go, whatever happens."""

import contextvars
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from leftovers import open_files

import rankwise.workers
from rankwise.base.errors import (
    BootstrapFailed,
    CollectiveTimeout,
    ConfigError,
    LocalProtocolError,
    MailboxCorrupt,
    PeerDied,
    TaskFailed,
    TreeError,
    TreeTimeout,
    TreeValueError,
    WindowError,
    WorkerDied,
)
from rankwise.base.units import SECOND, Duration
from rankwise.cli.replay import replay
from rankwise.drivers.real.tree import children
from rankwise.workers import (
    ArgDirection,
    ChipBootstrapConfig,
    ChipBufferSpec,
    ChipCallable,
    ChipCallConfig,
    ChipCommBootstrapConfig,
    ContinuousTensor,
    DataType,
    HostBufferStaging,
    TaskArgs,
    TensorArgType,
    Worker,
    context,
    runs,
)

pytestmark = pytest.mark.system

PATIENCE_S = 30
IN, OUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.SCALAR


def add_one(x: Any, out: Any) -> None:
    out[...] = x + 1


def sum_up(x: Any, out: Any) -> None:
    context().communicator.all_reduce(x, out=out)


def end_the_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ADD_ONE = ChipCallable.build([IN, OUT], "add_one", add_one)
SUM_UP = ChipCallable.build([IN, OUT], "sum_up", sum_up)
END = ChipCallable.build([], "end", end_the_process)


def bring_up(rank: int, count: int, source: str = "x") -> ChipBootstrapConfig:
    return ChipBootstrapConfig(
        comm=ChipCommBootstrapConfig(rank, count, "chips", 4096),
        buffers=[
            ChipBufferSpec("x", "float32", 4, "window", 16, load_from_host=True),
            ChipBufferSpec("y", "float32", 4, "window", 16, store_to_host=True),
        ],
        host_inputs=[HostBufferStaging("x", f"{source}{rank}", 16)],
        host_outputs=[HostBufferStaging("y", f"y{rank}", 16)],
    )


def two_chips(*configs: ChipBootstrapConfig, **options: Any) -> Worker:
    worker = Worker(
        level=3,
        platform="host",
        device_ids=[0, 1],
        chip_bootstrap_configs=configs or (bring_up(0, 2), bring_up(1, 2)),
        **options,
    )
    for rank in range(2):
        worker.stage(f"x{rank}", np.full(4, rank + 1, "f4"))
        worker.stage(f"y{rank}", np.zeros(4, "f4"))
    return worker


def window_tensor(address: int) -> ContinuousTensor:
    return ContinuousTensor.make(address, (4,), DataType.FLOAT32, child_memory=True)


def submit_to_all(worker: Worker, callable_: ChipCallable) -> Any:
    def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
        for index, chip in enumerate(worker.chip_contexts):
            args = TaskArgs()
            args.add_tensor(window_tensor(chip.buffer_ptrs["x"]))
            args.add_tensor(window_tensor(chip.buffer_ptrs["y"]), TensorArgType.OUTPUT_EXISTING)
            orch.submit_next_level(callable_, args, worker=index)

    return orchestrate


def test_a_buffer_is_loaded_from_and_stored_to_the_same_staged_memory() -> None:
    config = ChipBootstrapConfig(
        buffers=[
            ChipBufferSpec("x", "float32", 4, "window", 16, load_from_host=True, store_to_host=True)
        ],
        comm=ChipCommBootstrapConfig(0, 1, "chips", 4096),
        host_inputs=[HostBufferStaging("x", "x", 16)],
        host_outputs=[HostBufferStaging("x", "x", 16)],
    )
    worker = Worker(level=3, platform="host", device_ids=[0], chip_bootstrap_configs=[config])
    worker.stage("x", np.ones(4, "f4"))

    def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
        args = TaskArgs()
        address = worker.chip_contexts[0].buffer_ptrs["x"]
        args.add_tensor(window_tensor(address))
        args.add_tensor(window_tensor(address), TensorArgType.OUTPUT_EXISTING)
        orch.submit_next_level(ADD_ONE, args, worker=0)

    with worker:
        worker.init()
        worker.run(orchestrate)

    assert worker.staged("x", "f4").tolist() == [2, 2, 2, 2]


def test_chips_find_what_was_staged_and_leave_their_outputs_where_they_were_told() -> None:
    with two_chips() as worker:
        worker.init()
        assert [chip.rank for chip in worker.chip_contexts] == [0, 1]

        worker.run(submit_to_all(worker, ADD_ONE))

    assert [worker.staged(f"y{rank}", "f4").tolist() for rank in range(2)] == [[2] * 4, [3] * 4]


def test_chips_reduce_over_their_windows() -> None:
    with two_chips() as worker:
        worker.init()
        worker.run(submit_to_all(worker, SUM_UP))

    assert [worker.staged(f"y{rank}", "f4").tolist() for rank in range(2)] == [[3] * 4] * 2


def do_nothing(_args: TaskArgs) -> None:
    """A task."""


def test_a_worker_writes_a_journal_when_asked_to_in_which_each_order_names_its_cause(
    tmp_path: Path,
) -> None:
    path = tmp_path / "worker.jsonl"
    worker = Worker(3, num_sub_workers=1, journal=str(path))
    task = worker.register(do_nothing)
    worker.init()
    worker.run(lambda orch, _args, _config: orch.submit_sub(task))
    worker.close()

    told: list[tuple[str, int]] = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "stimulus" in entry:
            told.append((entry["machine"], entry["number"]))
        else:
            assert (entry["machine"], entry["cause"]) in told
    assert {machine for machine, _ in told} == {"children", "graph"}
    assert CliRunner().invoke(replay, [str(path), "--machine", "graph"]).exit_code == 0


def test_a_journal_that_cannot_be_written_is_an_error_of_init() -> None:
    worker = Worker(3, num_sub_workers=1, journal="/nowhere/worker.jsonl")

    with pytest.raises(ValueError, match=r"journal is '/nowhere/worker.jsonl', which cannot be"):
        worker.init()


def test_memory_of_a_chip_is_taken_filled_read_and_given_back() -> None:
    source, target = np.arange(16, dtype="f4"), np.zeros(16, "f4")
    with two_chips() as worker:
        worker.init()
        pointer = worker.malloc(64, worker_id=1)
        worker.copy_to(pointer, source.ctypes.data, 64, worker_id=1)
        worker.copy_from(target.ctypes.data, pointer, 64, worker_id=1)
        worker.free(pointer, worker_id=1)
        with pytest.raises(ValueError, match="free") as caught:
            worker.free(pointer, worker_id=1)
        with pytest.raises(IndexError, match="there is no chip 2"):
            worker.malloc(64, worker_id=2)

    assert target.tolist() == source.tolist()
    assert "in chip 1" in caught.value.__notes__


def test_the_answer_to_an_interrupted_command_is_not_taken_for_that_of_the_next() -> None:
    parent, (read_gate, write_gate) = os.getpid(), os.pipe()

    def make_malloc_slow() -> None:
        def slow_malloc(size: int) -> int:
            if size == 1:
                os.kill(parent, signal.SIGINT)
                os.read(read_gate, 1)
            return size

        setattr(context().chip, "malloc", slow_malloc)  # noqa: B010  # mypy minds the other

    make_slow = ChipCallable.build([], "make_malloc_slow", make_malloc_slow)
    with Worker(level=3, platform="host", device_ids=[0]) as worker:
        worker.init()
        worker.run(lambda orch, _args, _config: orch.submit_next_level(make_slow))
        with pytest.raises(KeyboardInterrupt):
            worker.malloc(1)
        os.write(write_gate, b"!")

        assert worker.malloc(2) == 2
    os.close(read_gate)
    os.close(write_gate)


def test_a_command_may_fail_with_more_words_than_its_frame_holds() -> None:
    def make_malloc_fail() -> None:
        def failing_malloc(size: int) -> int:
            raise ValueError("much " * size)

        setattr(context().chip, "malloc", failing_malloc)  # noqa: B010  # mypy minds the other

    make_fail = ChipCallable.build([], "make_malloc_fail", make_malloc_fail)
    with Worker(level=3, platform="host", device_ids=[0]) as worker:
        worker.init()
        worker.run(lambda orch, _args, _config: orch.submit_next_level(make_fail))

        for count in (1, 50_000, 2):
            with pytest.raises(ValueError, match="much") as caught:
                worker.malloc(count)
            assert str(caught.value) == "much " * count


def test_the_first_error_of_a_bootstrap_is_told_at_once_and_the_next_init_works() -> None:
    worker = two_chips(bring_up(0, 2), bring_up(1, 2, source="nowhere"))

    with pytest.raises(BootstrapFailed, match="chip 1 bootstrap failed: UnknownName: there is no"):
        worker.init()
    with pytest.raises(LocalProtocolError, match="after init"):
        _ = worker.chip_contexts

    worker.stage("nowhere1", np.ones(4, "f4"))
    with worker:
        worker.init()
        worker.run(submit_to_all(worker, ADD_ONE))


class DeadlyPlatform:
    name = "deadly"

    def open(self, _device_id: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class SlowPlatform:
    name = "slow"

    def open(self, _device_id: int) -> Any:
        while True:
            signal.pause()


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (DeadlyPlatform(), "chip 0 bootstrap failed: it was killed by SIGKILL"),
        (SlowPlatform(), "chip 0 bootstrap failed: it was not ready within 200 ms"),
        ("no such", "chip 0 bootstrap failed: TreeValueError: there is no platform"),
    ],
)
def test_a_chip_that_dies_hangs_or_has_no_platform_fails_the_bootstrap(
    platform: Any, message: str
) -> None:
    worker = Worker(level=3, platform=platform, device_ids=[0], start_timeout=0.2 if
                    isinstance(platform, SlowPlatform) else 60)  # fmt: skip

    with pytest.raises(BootstrapFailed, match=message):
        worker.init()


def test_a_dead_chip_is_named_and_the_worker_can_be_initialised_again() -> None:
    with two_chips() as worker:
        worker.init()
        with pytest.raises(WorkerDied, match=r"chip 1 was killed by SIGKILL in task 0 \(end\)"):
            worker.run(lambda orch, _args, _config: orch.submit_next_level(END, worker=1))
        with pytest.raises(WorkerDied, match=r"chip 1 was killed by SIGKILL \(close\(\) the"):
            worker.run(submit_to_all(worker, ADD_ONE))

        worker.close()
        worker.init()
        worker.run(submit_to_all(worker, ADD_ONE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Worker(level=1), "level is 1"),
        (lambda: Worker(level=2, chip_bootstrap_configs=[]), "level >= 3"),
        (
            lambda: Worker(level=3, device_ids=[0], chip_bootstrap_configs=[]),
            "has 0 entries, and must equal device_ids length, which is 1",
        ),
        (lambda: Worker(level=4, device_ids=[0]), "chips belong to level 3"),
        (lambda: Worker(level=3, device_ids=[0, 0]), "names a chip twice"),
        (lambda: Worker(level=3, device_ids=5), "device_ids is 5, expected a list"),  # type: ignore[arg-type]
        (lambda: Worker(level=3, chip_bootstrap_configs=5), "configs is 5, expected a list"),  # type: ignore[arg-type]
        (lambda: Worker(level=3, platform=None), "platform is None, expected a name"),  # type: ignore[arg-type]
        (lambda: Worker(level=3, num_sub_workers=-1), "num_sub_workers is -1"),
        (lambda: Worker(level=4).add_worker(Worker(level=4)), "level 4 was added to one of level"),
    ],
)
def test_what_cannot_be_right_is_refused_when_a_worker_is_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()

    assert isinstance(caught.value, RuntimeError), "programs of this kind catch it"


def with_bogus_placement() -> ChipBootstrapConfig:
    config = bring_up(0, 1)
    config.buffers[0].placement = "bogus"
    return config


@pytest.mark.parametrize("level", [3, 4])
def test_a_bogus_placement_is_an_error_of_init_about_a_chip_and_a_value(level: int) -> None:
    worker = Worker(level=3, device_ids=[0], chip_bootstrap_configs=[with_bogus_placement()])
    if level == 4:
        worker, inner = Worker(level=4), worker
        worker.add_worker(inner)

    with pytest.raises(RuntimeError, match=r"^chip 0.* bootstrap failed: .*bogus") as caught:
        worker.init()

    assert isinstance(caught.value, BootstrapFailed)
    assert isinstance(caught.value, ValueError)
    assert not worker.is_initialized


@pytest.mark.parametrize("platform", ["host", "sim"])
def test_a_value_that_only_a_chip_can_refuse_is_a_value_error_too(platform: str) -> None:
    config = ChipBootstrapConfig(
        comm=ChipCommBootstrapConfig(0, 1, "alone", 4096),
        buffers=[ChipBufferSpec("x", "float32", 4096, "window", 16384)],
    )
    worker = Worker(level=3, platform=platform, device_ids=[0], chip_bootstrap_configs=[config])

    with pytest.raises(ValueError, match=r"^chip 0 bootstrap failed") as caught:
        worker.init()

    assert isinstance(caught.value, RuntimeError)


def test_every_error_that_a_tree_has_of_its_own_is_a_runtime_error() -> None:
    named = [getattr(rankwise.workers, name) for name in rankwise.workers.__all__]
    errors = [each for each in named if isinstance(each, type) and issubclass(each, Exception)]
    errors += [TreeTimeout, TreeValueError, BootstrapFailed, WorkerDied, PeerDied, WindowError]
    errors += [MailboxCorrupt, LocalProtocolError, CollectiveTimeout]

    assert len(errors) > 12
    assert [each for each in errors if not issubclass(each, RuntimeError)] == []


def test_a_run_that_takes_too_long_is_a_runtime_error_and_a_timeout() -> None:
    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        with pytest.raises(RuntimeError) as caught:
            worker.run(
                lambda orch, _args, _config: orch.submit_sub(lambda _: signal.pause()), timeout=0.1
            )

    assert isinstance(caught.value, TimeoutError)


def test_communicators_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 ranks, but the chips are"):
        two_chips(bring_up(0, 3), bring_up(1, 3)).init()


def test_a_process_with_threads_is_not_forked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="bystander")
    thread.start()
    try:
        with pytest.raises(LocalProtocolError, match="other threads: bystander"):
            Worker(level=3, num_sub_workers=1).init()
    finally:
        done.set()
        thread.join()


TORCH_BEFORE_INIT = """
import threading
import torch
from rankwise.workers import TaskArgs, TensorArgType, Worker, array_at

torch.randn(600, 600) @ torch.randn(600, 600)  # starts threads
torch.randn(600_000).relu().sum()

def square(args):
    matrix = torch.from_numpy(array_at(args.tensor(0)))
    matrix.copy_(matrix @ matrix)
    assert threading.current_thread() is threading.main_thread()

with Worker(level=4, num_sub_workers=1) as root:
    inner = Worker(level=3, num_sub_workers=2)
    root.add_worker(inner)
    number = root.register(square)
    nested = root.register(lambda orch, args, config: orch.submit_sub(square, args))
    root.init()
    matrix = root.share((600, 600), "f4")
    matrix[...] = 1
    args = TaskArgs()
    args.add_tensor(matrix, TensorArgType.INOUT)

    def orchestrate(orch, _args, _config):
        orch.submit_sub(number, args)
        orch.submit_next_level(nested, args)
        torch.randn(600, 600) @ torch.randn(600, 600)

    root.run(orchestrate)
print(matrix[0, 0] == 600.0**3)
"""


@pytest.mark.torch
def test_torch_may_be_used_before_init_and_in_tasks() -> None:
    """Its threads are OpenMP's; the copy of a thread that had some would wait for them."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", TORCH_BEFORE_INIT],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False,
    )  # fmt: skip

    assert (ended.stdout, ended.stderr) == ("True\n", "")


@contextmanager
def native_thread(name: bytes) -> Iterator[None]:
    """A thread that Python does not know."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    start = ctypes.cast(libc.pause, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(thread), None, start, None) == 0
    assert libc.pthread_setname_np(thread, name) == 0
    try:
        yield
    finally:
        libc.pthread_cancel(thread)
        libc.pthread_join(thread, None)


def test_native_threads_with_names_are_warned_of_where_init_was_called() -> None:
    message = r"children will not have .* pool-0: a task"
    with (
        Worker(level=3, num_sub_workers=1) as worker,
        native_thread(b"pool-0"),
        pytest.warns(RuntimeWarning, match=message) as warned,
    ):
        worker.init()

    assert [each.filename for each in warned] == [__file__]


def test_a_task_sees_the_context_variables_of_who_has_called_init() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    with Worker(level=3, num_sub_workers=1) as worker:

        def look(_: TaskArgs) -> None:
            raise LookupError(variable.get())

        number = worker.register(look)
        worker.init()
        with pytest.raises(LookupError, match=r"^set\b"):
            worker.run(lambda orch, _args, _config: orch.submit_sub(number))


def test_running_out_of_descriptors_is_told_and_leaves_a_worker_that_can_be_initialised() -> None:
    worker = Worker(level=3, num_sub_workers=64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with pytest.raises(TreeError, match="64 children could not be started: Too many open"):
            worker.init()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with worker:
        worker.init()


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    # Under a limit of sizes Python would leave a part of what it compiles, as if it were the whole.
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
        sys.dont_write_bytecode = writes_no_bytecode


def open_descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("level", [3, 4])
def test_a_child_that_cannot_be_started_is_named_with_the_limit(level: int) -> None:
    worker = Worker(level=3, num_sub_workers=24)
    if level == 4:
        outer = Worker(level=4)
        outer.add_worker(worker)
        worker = outer
    before = open_descriptors()
    with worker:
        worker.init()
        needed = len(open_descriptors()) - len(before)

    # Enough for this process. The fork server needs a few more, and the other one's owner many.
    free = [number for number in range(4096) if number not in before]
    with (
        limited(resource.RLIMIT_NOFILE, free[needed + 8]),
        pytest.raises(BootstrapFailed, match=r"could not be started: .*Too many.*ulimit -n"),
    ):
        worker.init()

    with worker:
        worker.init()


def test_windows_for_which_there_is_no_room_are_refused_and_leave_nothing() -> None:
    worker = two_chips()

    with limited(resource.RLIMIT_FSIZE, 4096), pytest.raises(WindowError, match="File too large"):
        worker.init()

    with worker:
        worker.init()


def test_a_task_whose_exception_finds_no_room_in_a_file_fails_even_so() -> None:
    def fail(_args: TaskArgs) -> None:
        raise ArithmeticError

    with Worker(level=3, num_sub_workers=1) as worker:
        with limited(resource.RLIMIT_FSIZE, 0):
            worker.init()

        for _ in range(2):
            with pytest.raises(TaskFailed, match=r"could not be written down.*ulimit -f") as caught:
                worker.run(lambda orch, _args, _config: orch.submit_sub(fail))
            assert "task 0 (" in caught.value.__notes__[0]
        with pytest.raises(TaskFailed, match="could not be written down"):
            worker.record(lambda orch, _args, _config: orch.submit_sub(fail)).replay()


class BrokenPlatform:
    name = "broken"

    def open(self, _device_id: int) -> Any:
        raise ValueError(self.name)


def test_a_child_whose_reason_finds_no_room_in_a_file_fails_the_bootstrap() -> None:
    worker = Worker(level=3, platform=BrokenPlatform(), device_ids=[0])

    with (
        limited(resource.RLIMIT_FSIZE, 0),
        pytest.raises(BootstrapFailed, match=r"chip 0 bootstrap failed: .* could not be written"),
    ):
        worker.init()


def stop_fork_server(worker: Worker) -> None:
    assert worker._tree is not None
    os.kill(worker._tree.engine.children._fork_server, signal.SIGSTOP)


def test_a_stopped_fork_server_makes_nobody_wait_longer_than_was_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (children, runs):
        monkeypatch.setattr(module, "_KILL_PATIENCE", Duration(3600 * SECOND))
    monkeypatch.setattr(runs, "_LATE_KILL_PATIENCE", Duration(3600 * SECOND))
    worker = Worker(level=3, num_sub_workers=2, close_timeout=0.2)
    worker.init()
    hang = worker.record(lambda orch, _args, _config: orch.submit_sub(lambda _: signal.pause()))

    stop_fork_server(worker)
    with pytest.raises(TimeoutError):
        worker.run(lambda orch, _a, _c: orch.submit_sub(lambda _: signal.pause()), timeout=0.2)
    stop_fork_server(worker)
    with pytest.raises(TimeoutError):
        hang.replay(timeout=0.2)
    worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))
    stop_fork_server(worker)
    worker.close()

    assert worker.killed == ("sub 0", "sub 1")


def end_fork_server(worker: Worker) -> None:
    assert worker._tree is not None
    fork_server = worker._tree.engine.children._fork_server
    pidfd = os.pidfd_open(fork_server)
    os.kill(fork_server, signal.SIGKILL)
    # With its end the kernel has sent SIGKILL to its children, so they cannot begin anything.
    assert select.select([pidfd], [], [], PATIENCE_S)[0]
    os.close(pidfd)


def test_sub_workers_that_are_lost_do_not_make_closing_fail() -> None:
    worker = Worker(level=3, num_sub_workers=2)
    worker.init()
    end_fork_server(worker)

    worker.close()


def test_an_unknown_platform_is_refused_before_a_process_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Worker(level=3, platform="a2a3", device_ids=[0])
    outer = Worker(level=4)
    outer.add_worker(inner)
    monkeypatch.delattr(os, "fork")
    for worker in (Worker(level=3, platform="a2a3:x", device_ids=[0]), outer):
        with pytest.raises(BootstrapFailed, match="there is no platform 'a2a3'"):
            worker.init()


@pytest.mark.parametrize("closed", ["all descriptors", "pipes"])
def test_a_task_that_closes_descriptors_of_its_child_has_failed(closed: str) -> None:
    def close_them(_: TaskArgs) -> None:
        for link in list(Path("/proc/self/fd").iterdir()):
            if closed != "pipes" or (link.exists() and "pipe:" in str(link.readlink())):
                with suppress(OSError):
                    os.close(int(link.name))

    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        with pytest.raises(WorkerDied, match="closed descriptors that it did not open in task 0"):
            worker.run(lambda orch, _args, _config: orch.submit_sub(close_them))

        worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))


def test_without_the_fork_server_a_worker_says_so_and_can_be_initialised_again() -> None:
    worker = Worker(level=3, num_sub_workers=2)
    worker.init()
    end_fork_server(worker)

    with pytest.raises(WorkerDied, match="lost with the fork server"):
        worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))

    worker.close()
    with worker:
        worker.init()
        worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))


def test_a_next_level_worker_that_is_killed_is_named_and_takes_its_children_along() -> None:
    root, inner = Worker(level=4), Worker(level=3, num_sub_workers=2)
    root.add_worker(inner)
    number = root.register(lambda _orch, _args, _config: end_the_process())

    with root:
        root.init()
        with pytest.raises(WorkerDied, match="worker 0 was killed by SIGKILL in task 0"):
            root.run(lambda orch, _args, _config: orch.submit_next_level(number))


def test_a_worker_that_nobody_closes_is_closed_with_the_program() -> None:
    program = (
        "from rankwise.workers import Worker; w = Worker(level=3, num_sub_workers=2); w.init()"
    )

    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False)

    assert done.returncode == 0


def test_a_buffer_that_is_larger_than_its_window_is_refused() -> None:
    config = ChipBootstrapConfig(
        comm=ChipCommBootstrapConfig(0, 1, "alone", 4096),
        buffers=[ChipBufferSpec("x", "float32", 4096, "window", 16384)],
    )
    worker = Worker(level=3, platform="host", device_ids=[0], chip_bootstrap_configs=[config])

    with pytest.raises(
        BootstrapFailed, match="chip 0 bootstrap failed: TreeValueError: buffer 'x'"
    ):
        worker.init()


def test_a_tree_is_closed_while_another_one_that_is_younger_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Or the fork server would be killed in the end, and the tree be closed even so.
    monkeypatch.setattr(children, "_KILL_PATIENCE", Duration(3600 * SECOND))
    with Worker(level=3, num_sub_workers=1) as older, Worker(level=3, num_sub_workers=1) as younger:
        older.init()
        younger.init()  # its processes have copies of what the older one had open

        older.close()

        younger.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))


def test_what_a_chip_has_leaked_is_told_when_its_worker_is_closed() -> None:
    inner = Worker(level=3, platform="host", device_ids=[0])
    with Worker(level=4) as outer:
        outer.add_worker(inner)
        outer.init()
        outer.run(
            lambda orch, _args, _config: orch.submit_next_level(
                lambda inner_orch, _inner_args, _inner_config: inner_orch.malloc(0, 100)
            )
        )
        outer.close()

        (leak,) = outer.leaks["chip 0 of worker 0"]
        assert leak.size == 100


def test_what_went_wrong_in_the_end_of_a_chip_is_raised_when_its_worker_is_closed() -> None:
    def vanish() -> None:
        def refuse() -> None:
            raise OSError("the host's memory is gone")

        setattr(context().chip, "shutdown_bootstrap", refuse)  # noqa: B010  # mypy minds the other

    worker = Worker(level=3, platform="host", device_ids=[0])
    worker.init()
    worker.run(
        lambda orch, _args, _config: orch.submit_next_level(
            ChipCallable.build([], "vanish", vanish)
        )
    )

    with pytest.raises(OSError, match="the host's memory is gone") as caught:
        worker.close()

    assert caught.value.__notes__ == ["in chip 0, when it was closed"]
    assert not worker.is_initialized


def test_tensors_are_summarised_in_the_timeline_when_that_is_asked_for() -> None:
    with Worker(level=3, platform="host", device_ids=[0]) as worker:
        worker.init()
        x = worker.share((4,), "f4")
        x[:] = 2
        args = TaskArgs()
        args.add_tensor(x, TensorArgType.INPUT)
        args.add_tensor(worker.share((4,), "f4"), TensorArgType.OUTPUT)

        worker.run(
            lambda orch, _args, _config: orch.submit_next_level(
                ADD_ONE, args, ChipCallConfig(enable_dump_tensor=True)
            )
        )

        (entry,) = worker.timeline.entries
        assert [(each.minimum, each.mean) for each in entry.tensors] == [(2, 2), (3, 3)]


def test_a_worker_inside_another_is_not_initialised_by_itself() -> None:
    inner = Worker(level=3, num_sub_workers=1)
    Worker(level=4).add_worker(inner)

    with pytest.raises(LocalProtocolError, match="this worker was added to one of level 4"):
        inner.init()


def own_children() -> set[str]:
    """The children of this thread, dead ones included that nobody has waited for."""
    return set(Path("/proc/thread-self/children").read_text().split())


def test_an_interrupt_while_the_fork_server_ends_leaves_no_child_and_no_descriptor() -> None:
    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGCHLD, before)
        raise KeyboardInterrupt

    descriptors = open_files()
    children = own_children()
    worker = Worker(level=3, num_sub_workers=1)
    worker.init()
    before = signal.signal(signal.SIGCHLD, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.close()
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert own_children() == children
    assert open_files() <= descriptors


def test_closing_twice_is_once_and_a_worker_can_be_used_again() -> None:
    worker = Worker(level=3, num_sub_workers=2)
    worker.close()
    for _ in range(2):
        worker.init()
        with pytest.raises(LocalProtocolError, match="twice"):
            worker.init()
        worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: None))
        worker.close()
        worker.close()
    with pytest.raises(LocalProtocolError, match="after close"):
        worker.run(lambda _orch, _args, _config: None)


def test_a_child_that_does_not_end_is_killed_and_named() -> None:
    class Stubborn:
        name = "stubborn"

        def open(self, _device_id: int) -> Any:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return self

        def close(self) -> Any:
            while True:
                signal.pause()

    worker = Worker(level=3, platform=Stubborn(), device_ids=[0], close_timeout=0.2)
    worker.init()

    worker.close()

    assert worker.killed == ("chip 0",)


PROGRAM = """
import os, signal, sys
from rankwise.workers import Worker

def busy(args):
    while True: pass

def tell_family(path):
    for kind in ("root", "inner"):
        pass

root, inner = Worker(level=4, num_sub_workers=1), Worker(level=3, num_sub_workers=2)
root.add_worker(inner)
read, write = os.pipe()

def report(args):
    os.write(write, f"{os.getpid()} {os.getppid()}\\n".encode())

def nested(orch, args, config):
    os.write(write, f"{os.getpid()} {os.getppid()}\\n".encode())
    orch.submit_sub_group(report, [None, None])

def both(orch, args, config):
    orch.submit_sub(report)
    orch.submit_next_level(number)

number = root.register(nested)
root.register(busy)
root.register(report)
root.init()
root.run(both)
lines = b""
while lines.count(b"\\n") < 4:
    lines += os.read(read, 4096)
sys.stdout.write(lines.decode())
sys.stdout.flush()
if sys.argv[1] == "idle":
    signal.pause()
root.run(lambda orch, args, config: orch.submit_sub(busy))
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_nothing_of_a_tree_outlives_the_death_of_its_root(state: str) -> None:
    root = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), "busy" if state == "busy" else "idle"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert root.stdout is not None
    families = [root.stdout.readline().split() for _ in range(4)]
    pids = {int(pid) for family in families for pid in family}
    pidfds = [os.pidfd_open(pid) for pid in sorted(pids)]
    if state == "stopped":
        for fork_server in {int(parent) for _, parent in families}:
            os.kill(fork_server, signal.SIGSTOP)

    root.kill()
    root.wait(PATIENCE_S)

    assert len(pids) == 6  # four children and two fork servers
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
    root.stdout.close()
