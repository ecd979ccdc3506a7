"""A store that is opened while others go on."""

import threading

import pytest

from rankwise.base.errors import ConfigError, StoreRefused, StoreUnavailable
from rankwise.base.keys import Put, Transaction
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.deferred import DeferredStore
from rankwise.drivers.real.stores.in_process import MemoryStore
from rankwise.ports.store import Store

LONG = Duration(60 * SECOND)


def test_calls_reach_the_store_once_it_is_open() -> None:
    shared = MemoryStore(SystemClock())

    with DeferredStore(shared.connect, "the store", LONG) as store:
        lease = store.grant_lease(LONG)
        store.commit(Transaction(puts=(Put("a", b"1", lease),)))
        store.renew_lease(lease)
        snapshot, watch = store.follow("a")
        store.revoke_lease(lease)

        assert [entry.value for entry in snapshot.entries] == [b"1"]
        assert [change.value for change in watch.next(LONG)] == [None]
        assert store.read("").entries == ()
        store.watch("", snapshot.revision).close()


def test_a_call_waits_no_longer_than_a_request_may_take() -> None:
    gate = threading.Event()
    opened: list[Store] = []

    def open_slowly() -> Store:
        gate.wait(60)
        opened.append(MemoryStore(SystemClock()).connect())
        return opened[0]

    store = DeferredStore(open_slowly, "the store at h:1", Duration(10 * MILLISECOND))

    with pytest.raises(StoreUnavailable, match="no answer within 10 ms from the store at h:1"):
        store.read("")
    store.close()
    gate.set()
    with pytest.raises(StoreUnavailable, match="was closed"):
        store.read("")


def test_a_call_that_waits_for_this_process_itself_says_so_and_blames_no_endpoint() -> None:
    gate = threading.Event()
    doing = ["importing torch"]

    def open_slowly() -> Store:
        gate.wait(60)
        return MemoryStore(SystemClock()).connect()

    patience = Duration(10 * MILLISECOND)
    with DeferredStore(
        open_slowly, "the store at h:1", patience, preparing=lambda: doing[0]
    ) as store:
        with pytest.raises(StoreUnavailable) as caught:
            store.read("")
        doing[0] = ""
        with pytest.raises(StoreUnavailable, match="no answer within 10 ms"):
            store.read("")
        gate.set()

    assert str(caught.value) == "this node is still importing torch, which the store at h:1 needs"


def test_who_was_not_there_may_come_later() -> None:
    attempts = iter([StoreUnavailable("nobody is there"), None])

    def open_at_the_second_time() -> Store:
        if (error := next(attempts)) is not None:
            raise error
        return MemoryStore(SystemClock()).connect()

    with DeferredStore(open_at_the_second_time, "the store", LONG) as store:
        with pytest.raises(StoreUnavailable, match="nobody is there"):
            store.read("")

        assert store.read("").entries == ()


@pytest.mark.parametrize("error", [ConfigError("torch is missing"), RuntimeError("torch is odd")])
def test_what_will_never_work_is_a_refusal(error: Exception) -> None:
    def refuse() -> Store:
        raise error

    with (
        DeferredStore(refuse, "the store", LONG) as store,
        pytest.raises(StoreRefused, match="torch"),
    ):
        store.read("")
