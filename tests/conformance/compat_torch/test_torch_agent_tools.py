"""Stores, timers and process states: torch's and ours through the same scenarios."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
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
