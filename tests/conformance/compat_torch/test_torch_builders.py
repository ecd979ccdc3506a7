"""Handlers over a backend of one's own: torch's and ours through the same scenarios."""

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, Load, load_from

LONG_S = 60.0


class Shelf:
    """A place for one state, for all handlers of this process; what backends here are made of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state: tuple[bytes, int] | None = None
        self.error: Exception | None = None

    def get(self) -> tuple[bytes, Any] | None:
        with self._lock:
            if self.error is not None:
                raise self.error
            return self.state

    def replace(self, state: bytes, token: Any) -> tuple[bytes, Any, bool]:
        with self._lock:
            if self.error is not None:
                raise self.error
            has_set = token == (None if self.state is None else self.state[1])
            if has_set:
                self.state = (state, (token or 0) + 1)
            assert self.state is not None
            return (*self.state, has_set)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [one.name for one in threading.enumerate() if one.name.startswith("rankwise-")] == []


@pytest.fixture
def dynamic(load: Load) -> ModuleType:
    return load("rendezvous.dynamic_rendezvous")


@pytest.fixture
def rendezvous(load: Load) -> ModuleType:
    return load("rendezvous")


def backend_on(shelf: Shelf, dynamic: ModuleType) -> Any:
    class ShelfBackend(dynamic.RendezvousBackend):  # type: ignore[name-defined, misc]
        @property
        def name(self) -> str:
            return "shelf"

        def get_state(self) -> tuple[bytes, Any] | None:
            return shelf.get()

        def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
            return shelf.replace(state, token)

    return ShelfBackend()


def handler_on(shelf: Shelf, dynamic: ModuleType, store: Any, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "run_id": "run",
        "min_nodes": 2,
        "max_nodes": 2,
        "local_addr": "127.0.0.1",
        "timeout": dynamic.RendezvousTimeout(join=timedelta(seconds=60)),
    }
    fields |= changes
    return dynamic.DynamicRendezvousHandler.from_backend(
        fields.pop("run_id"), store, backend_on(shelf, dynamic), **fields
    )


def hash_store() -> Any:
    return pytest.importorskip("torch.distributed").HashStore()


def test_timeouts_have_torchs_defaults_and_must_be_positive(dynamic: ModuleType) -> None:
    timeout = dynamic.RendezvousTimeout(join=timedelta(seconds=7))

    seconds = [timeout.join, timeout.last_call, timeout.close, timeout.heartbeat]
    assert [one.total_seconds() for one in seconds] == [7, 30, 30, 5]
    for name in ("join", "last_call", "close", "heartbeat"):
        with pytest.raises(
            ValueError, match=rf"^The {name} timeout \(0:00:00\) must be positive.$"
        ):
            dynamic.RendezvousTimeout(**{name: timedelta(0)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": ""}, r"^The run id must be a non-empty string.$"),
        ({"min_nodes": 0}, r"^The minimum number of nodes \(0\) must be greater than zero.$"),
        (
            {"min_nodes": 3},
            r"^The maximum number of nodes \(2\) must be .* equal to the minimum .* \(3\).$",
        ),
    ],
)
def test_handlers_that_make_no_sense_are_refused(
    dynamic: ModuleType, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        handler_on(Shelf(), dynamic, None, **changes)


def test_a_handler_is_made_from_parameters(dynamic: ModuleType, rendezvous: ModuleType) -> None:
    settings = {"join_timeout": "50", "close_timeout": 7, "keep_alive_interval": "2"}
    params = rendezvous.RendezvousParameters("shelf", "place", "run", 3, 6, **settings)

    handler = dynamic.create_handler(None, backend_on(Shelf(), dynamic), params)

    assert (handler.get_backend(), handler.get_run_id()) == ("shelf", "run")
    made = handler.settings
    assert (made.run_id, made.min_nodes, made.max_nodes) == ("run", 3, 6)
    assert (made.timeout.join, made.timeout.last_call) == (timedelta(0, 50), timedelta(0, 30))
    assert made.timeout.close == timedelta(seconds=7)
    assert (made.keep_alive_interval, made.keep_alive_max_attempt) == (timedelta(0, 2), 3)
    assert handler.shutdown()


@pytest.mark.parametrize("value", [None, timedelta(seconds=1)])
def test_an_interval_that_is_no_number_is_refused(
    dynamic: ModuleType, rendezvous: ModuleType, value: Any
) -> None:
    params = rendezvous.RendezvousParameters("shelf", "p", "run", 1, 1, keep_alive_interval=value)

    with pytest.raises(TypeError):
        dynamic.create_handler(None, backend_on(Shelf(), dynamic), params)


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.parametrize("shares", ["0", "1"])
def test_two_nodes_meet_and_share_a_store(
    dynamic: ModuleType, shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0" if shares == "1" else "1")
    shelf, store = Shelf(), hash_store()
    handlers = [handler_on(shelf, dynamic, store) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=LONG_S))

    assert sorted(info.rank for info in infos) == [0, 1]
    assert [info.world_size for info in infos] == [2, 2]
    assert [handler.use_agent_store for handler in handlers] == [shares == "1"] * 2
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    assert store.get("torch.rendezvous.run.0/key") == b"value"
    assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
    assert infos[0].bootstrap_store_info.master_addr == "127.0.0.1"
    assert infos[0].bootstrap_store_info.master_port > 0
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert not any(handler.is_closed() for handler in handlers)
    assert all(handler.shutdown() for handler in handlers)


@pytest.mark.system
def test_nodes_that_never_come_are_a_timeout(dynamic: ModuleType, rendezvous: ModuleType) -> None:
    store = hash_store()
    short = dynamic.RendezvousTimeout(join=timedelta(seconds=2))
    handler = handler_on(Shelf(), dynamic, store, timeout=short)

    with pytest.raises(rendezvous.RendezvousTimeoutError):
        handler.next_rendezvous()

    handler.shutdown()


@pytest.mark.system
def test_a_closed_rendezvous_admits_nobody(dynamic: ModuleType, rendezvous: ModuleType) -> None:
    shelf, store = Shelf(), hash_store()
    first = handler_on(shelf, dynamic, store, min_nodes=1, max_nodes=1)
    first.next_rendezvous()

    first.set_closed()
    first.shutdown()

    assert first.is_closed()
    late = handler_on(shelf, dynamic, store, min_nodes=1, max_nodes=1)
    with pytest.raises(rendezvous.RendezvousClosedError):
        late.next_rendezvous()
    late.shutdown()


@pytest.mark.system
def test_what_the_backend_holds_must_make_sense(
    dynamic: ModuleType, rendezvous: ModuleType
) -> None:
    shelf = Shelf()
    shelf.state = (b"not a state", 1)
    handler = handler_on(shelf, dynamic, hash_store())

    # torch's unpickler raises what it likes for some bytes.
    with pytest.raises((rendezvous.RendezvousStateError, EOFError)):
        handler.next_rendezvous()


@pytest.mark.system
@pytest.mark.parametrize("kind", ["RendezvousConnectionError", "RendezvousStateError", ""])
def test_what_the_backend_raises_is_raised(
    dynamic: ModuleType, rendezvous: ModuleType, kind: str
) -> None:
    shelf = Shelf()
    error = getattr(rendezvous, kind)("no shelf") if kind else KeyError("no shelf")
    shelf.error = error
    short = dynamic.RendezvousTimeout(join=timedelta(seconds=2))
    handler = handler_on(shelf, dynamic, hash_store(), timeout=short)

    with pytest.raises(type(error), match="no shelf"):
        handler.next_rendezvous()


class TestOursAlone:
    """What torch's handler cannot do."""

    @pytest.fixture
    def dynamic(self) -> ModuleType:
        return load_from(RANKWISE, "rendezvous.dynamic_rendezvous")

    def test_the_backend_is_the_agents_store_too(self, dynamic: ModuleType) -> None:
        shelf = Shelf()
        handlers = [handler_on(shelf, dynamic, None) for _ in range(2)]

        with ThreadPoolExecutor(2) as pool:
            infos = list(pool.map(lambda each: each.next_rendezvous(), handlers, timeout=LONG_S))
            waiting = pool.submit(infos[1].store.get, "key")
            infos[0].store.set("key", "value")

            assert waiting.result(LONG_S) == b"value"
        assert not handlers[0].use_agent_store
        assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.1"}
        for handler in handlers:
            assert handler.shutdown()

    def test_rounds_of_a_store_of_ones_own_do_not_mix(self, dynamic: ModuleType) -> None:
        memory = load_from(RANKWISE, "rendezvous.torch_store")
        from rankwise.drivers.real.clock import SystemClock  # noqa: PLC0415
        from rankwise.drivers.real.stores.in_process import MemoryStore  # noqa: PLC0415

        store = memory.TorchStore(MemoryStore(SystemClock()).connect(), "mine/")
        handler = handler_on(Shelf(), dynamic, store, min_nodes=1, max_nodes=1)
        keys = f"key-{uuid.uuid4().hex}"

        first = handler.next_rendezvous()
        first.store.multi_set([keys, "n"], ["1", "5"])
        second = handler.next_rendezvous()

        assert first.store.multi_get([keys, "n"]) == [b"1", b"5"]
        assert first.store.add("n", 2) == 7
        assert first.store.compare_set(keys, "1", "2") == b"2"
        assert not second.store.check([keys])
        assert first.store.delete_key(keys)
        assert first.store.underlying_store is store
        first.store.set_timeout(timedelta(milliseconds=50))
        assert store.timeout == timedelta(milliseconds=50)
        with pytest.raises(RuntimeError, match=r"was not set within 0\.05 s"):
            second.store.wait(["never"])
        assert handler.shutdown()
