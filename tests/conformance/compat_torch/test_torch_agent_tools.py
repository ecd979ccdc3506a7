"""Stores, timers and process states: torch's and ours through the same scenarios."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, Load, load_from

LONG_S = 60.0


@pytest.fixture
def store_tools(load: Load) -> ModuleType:
    return load("utils.store")


class RecordingStore:
    """A store of one member that remembers what it was asked."""

    def __init__(self) -> None:
        self.timeout = "as before"
        self.calls: list[tuple[Any, ...]] = []

    def set_timeout(self, timeout: Any) -> None:
        self.calls.append(("set_timeout", getattr(timeout, "total_seconds", lambda: timeout)()))
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        self.calls.append(("set", key, value))

    def add(self, key: str, amount: int) -> int:
        self.calls.append(("add", key, amount))
        return 1

    def wait(self, keys: list[str]) -> None:
        self.calls.append(("wait", keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append(("multi_get", keys))
        return [key.encode() for key in keys]


def test_what_a_gathering_asks_of_its_store(store_tools: ModuleType) -> None:
    store = RecordingStore()

    values = store_tools.synchronize(store, b"own", 0, 1, "p/", timeout=7)

    assert values == [b"p/0"]
    assert store.calls == [
        ("set_timeout", 7.0),
        ("set", "p/0", b"own"),
        ("multi_get", ["p/0"]),
        ("add", "p//finished/num_members", 1),
        ("set", "p//finished/last_member", "<val_ignored>"),
        ("wait", ["p//finished/last_member"]),
        ("set_timeout", "as before"),
    ]


@pytest.mark.torch
def test_members_meet_and_have_each_others_bytes(store_tools: ModuleType) -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()

    with ThreadPoolExecutor(4) as pool:
        told = list(
            pool.map(
                lambda rank: store_tools.synchronize(store, b"%d" % rank, rank, 4, "meeting/"),
                range(4),
            )
        )

    assert told == [[b"0", b"1", b"2", b"3"]] * 4


class StoreWithoutPatience(RecordingStore):
    """A store where time is always up: what is not there does not come, but for rank 0's word."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self._error = error
        self._keys: set[str] = set()
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:  # noqa: ARG002
        with self._changed:
            self._keys.add(key)
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # noqa: ARG002
        with self._changed:
            if keys == ["gate/TRACING_GATE"]:
                self._changed.wait_for(lambda: keys[0] in self._keys, LONG_S)
            if not self._keys.issuperset(keys):
                raise self._error(f"nobody set {keys}")

    def wait_until_set(self, key: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._keys, LONG_S)


@pytest.mark.torch
def test_who_is_missing_at_a_barrier_is_named_by_rank_0(store_tools: ModuleType) -> None:
    pytest.importorskip("torch")
    store = StoreWithoutPatience(store_tools.DistStoreError)

    def come(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            store_tools.barrier(store, 4, "gate", 3, rank, lambda node: f"host{node}")
        return str(raised.value)

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come, 2)
        store.wait_until_set("gate2/TRACE")
        by_rank_0, by_rank_2 = come(0), coming.result(LONG_S)

    assert "rank 0, for key prefix: gate (world_size=4" in by_rank_0
    assert "host1" in by_rank_0
    assert "host3" in by_rank_0
    assert "host2" not in by_rank_0
    assert "[<check rank 0 (host0) for missing rank info>]" in by_rank_2


def test_a_failed_meeting_gives_the_store_its_timeout_back() -> None:
    # torch leaves the short timeout on a store that others use.
    class Failing(RecordingStore):
        def wait(self, keys: list[str]) -> None:
            raise RuntimeError(f"nobody set {keys}")

    store = Failing()

    with pytest.raises(RuntimeError, match="nobody set"):
        load_from(RANKWISE, "utils.store").barrier(store, 2, "gate", 1)

    assert store.timeout == "as before"


def test_states_of_processes(load: Load) -> None:
    tools = load("utils.process_state")

    assert tools.read_proc_state(os.getpid()) in {"R", "S"}
    assert tools.read_proc_state(2**22 + 1) is None
    assert tools.is_uninterruptible_state("D")
    assert not tools.is_uninterruptible_state("R")


def test_macros_in_arguments(load: Load) -> None:
    macros = load("utils.api").macros

    assert macros.substitute(["--gpu=${local_rank}", "$x", 5], "3") == ["--gpu=3", "$x", 5]
    assert macros.local_rank == "${local_rank}"


def test_a_variable_that_must_be_there(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = load("utils")
    monkeypatch.setenv("MEADOW", "green")

    assert tools.get_env_variable_or_raise("MEADOW") == "green"
    with pytest.raises(ValueError, match="Environment variable FOREST expected, but not set"):
        tools.get_env_variable_or_raise("FOREST")


def test_a_socket_on_a_free_port(load: Load) -> None:
    with load("utils.api").get_socket_with_port() as listener:
        assert listener.getsockname()[1] > 0


def test_an_iterator_goes_on_with_the_next_epoch(load: Load) -> None:
    cycling = load("utils.data").CyclingIterator(3, lambda epoch: iter([epoch, 10 + epoch]), 1)

    assert list(cycling) == [1, 11, 2, 12]


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_sampler_goes_on_where_it_has_stopped(rank: int) -> None:
    pytest.importorskip("torch")
    data = list(range(11))
    ours = load_from(RANKWISE, "utils.data").ElasticDistributedSampler(data, 3, rank, 4)
    theirs = load_from("torch.distributed", "utils.data").ElasticDistributedSampler(
        data, 3, rank, 4
    )

    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    with pytest.raises(ValueError, match="Start index 11 should be less than dataset size 11"):
        load_from(RANKWISE, "utils.data").ElasticDistributedSampler(data, 3, rank, 11)


@pytest.fixture
def timer(load: Load) -> ModuleType:
    load("timer.local_timer")
    load("timer.file_based_local_timer")
    return load("timer")


class Notebook:
    """A client that writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id, expiration_time - time.time()))

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id))


def test_a_block_takes_a_timer_and_gives_it_back(timer: ModuleType) -> None:
    notes = Notebook()

    with pytest.raises(KeyError), timer.expires(after=50, scope="here", client=notes):
        raise KeyError

    (taken, scope, rest), given_back = notes.calls
    assert (taken, scope) == ("acquire", "here")
    assert 0 < rest <= 50
    assert given_back == ("release", "here")


def test_a_timer_without_a_name_is_called_after_the_callers_line() -> None:
    # torch's is called after a line of contextlib, the same for every caller.
    notes = Notebook()

    with load_from(RANKWISE, "timer").expires(after=50, client=notes):
        pass

    assert notes.calls[0][1].startswith(__file__ + "#")


def test_without_a_client_there_is_no_timer(
    timer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[timer.__name__ + ".api"], "_timer_client", None)

    with pytest.raises(RuntimeError), timer.expires(after=1):
        pass


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends when it is killed, and not before."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_whose_timer_runs_out_is_killed(
    timer: ModuleType, sleeper: "subprocess.Popen[bytes]"
) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    server = timer.LocalTimerServer(queue, max_interval=0.05)
    server.start()

    queue.put(timer.TimerRequest(sleeper.pid, "scope", time.time() + 0.05))

    try:
        assert sleeper.wait(LONG_S) == -signal.SIGKILL
    finally:
        server.stop()
        queue.close()
        queue.join_thread()


def test_a_timer_that_was_given_back_kills_nobody(timer: ModuleType) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    server = timer.LocalTimerServer(queue, max_interval=0.05)

    server.register_timers([timer.TimerRequest(1, "a", 5.0), timer.TimerRequest(2, "a", 50.0)])
    server.register_timers([timer.TimerRequest(2, "a", -1)])

    assert {pid: len(t) for pid, t in server.get_expired_timers(100.0).items()} == {1: 1}
    server.clear_timers({1})
    assert server.get_expired_timers(100.0) == {}
    queue.close()


def test_requests_travel_through_the_fifo(timer: ModuleType, tmp_path: Path) -> None:
    path = str(tmp_path / "fifo")
    server = timer.FileTimerServer(path, "run", max_interval=0.02)
    server.start()
    client = timer.FileTimerClient(path, signal=signal.SIGKILL)

    client.acquire("scope a", time.time() + 600)
    client.acquire("scope b", time.time() + 600)
    client.release("scope a")
    server.run_once()

    assert list(server._timers) == [(os.getpid(), "scope b")]
    assert server._request_count == 3
    assert not Path(path).exists()


def test_a_request_as_json(timer: ModuleType) -> None:
    request = timer.FileTimerRequest(7, "s", 1.5, signal.SIGKILL)

    assert json.loads(request.to_json()) == {
        "version": 1,
        "pid": 7,
        "scope_id": "s",
        "expiration_time": 1.5,
        "signal": 9,
    }
    assert request == timer.FileTimerRequest(7, "s", 1.5, signal.SIGKILL)
    assert request != timer.FileTimerRequest(7, "s", 1.5, signal.SIGTERM)


def test_only_the_worker_dies_of_its_timer(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    # torch's server kills its own process as well, and with it the report of the failure.
    timer = load_from(RANKWISE, "timer")
    told: list[str] = []
    path = str(tmp_path / "fifo")
    server = timer.FileTimerServer(path, "run", 0.02, log_event=lambda name, _: told.append(name))
    server.start()

    with Path(path).open("w", encoding="utf-8") as fifo:
        request = timer.FileTimerRequest(sleeper.pid, "s", time.time(), signal.SIGKILL)
        fifo.write("what is this\n" + request.to_json() + "\n")

    assert sleeper.wait(LONG_S) == -signal.SIGKILL
    server.stop()
    server.stop()
    assert told == [
        "watchdog started",
        "timer expired",
        "kill worker process",
        "watchdog stopped",
        "watchdog stopped",
    ]


def test_a_server_that_nobody_ever_writes_to_stops(tmp_path: Path) -> None:
    # torch's waits for a first client for ever.
    server = load_from(RANKWISE, "timer").FileTimerServer(str(tmp_path / "fifo"), "run", 600)
    server.start()

    server.stop()

    assert not (tmp_path / "fifo").exists()


def test_a_client_without_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_from(RANKWISE, "timer.file_based_local_timer")
    monkeypatch.setattr(module, "OPEN_PAUSE_S", 0.001)

    with pytest.raises(BrokenPipeError, match="no FileTimerServer reads"):
        module.FileTimerClient(str(tmp_path / "none")).acquire("s", 1.0)


@pytest.mark.torch
@pytest.mark.parametrize(("variable", "is_newer"), [("0", False), ("1", True), (None, True)])
def test_which_daemon_a_c10d_store_has(
    load: Load, monkeypatch: pytest.MonkeyPatch, variable: str | None, *, is_newer: bool
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if variable is not None:
        monkeypatch.setenv("USE_LIBUV", variable)

    store = load("utils.distributed").create_c10d_store(
        is_server=True, server_addr="localhost", timeout=30
    )

    assert store.libuvBackend is is_newer


@pytest.mark.torch
def test_the_error_of_torchs_stores_is_found_beside_the_barrier(load: Load) -> None:
    dist = pytest.importorskip("torch.distributed")

    assert load("utils.store").DistStoreError is dist.DistStoreError
