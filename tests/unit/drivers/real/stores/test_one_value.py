"""The store in one value, where the conformance suite does not look: limits and absences."""

from typing import Any

import msgspec
import pytest

from rankwise.base.errors import Compacted, StoreUnavailable
from rankwise.base.keys import Put, Revision, Transaction
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.drivers.real.stores.one_value import HISTORY_BATCHES, NotOurs, OneValueStore, Value

PATIENCE = Duration(300 * MILLISECOND)
LIFE = Duration(3 * SECOND)


class HandMovedClock:
    def __init__(self) -> None:
        self.instant = Instant(0)

    def now(self) -> Instant:
        return self.instant

    def wall_ns(self) -> int:
        return self.instant

    def advance(self, by: Duration) -> None:
        self.instant = after(self.instant, by)


class RankAddress:
    """One value; others may be quicker each time, or it may be away."""

    def __init__(self) -> None:
        self.state: tuple[bytes, int] | None = None
        self.is_contended = False
        self.is_away = False

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.is_away:
            raise StoreUnavailable("the place is away")
        return self.state

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if self.is_contended:
            return None if self.state is None else (*self.state, False)
        assert token == (self.state and self.state[1])
        self.state = (state, (token or 0) + 1)
        return (*self.state, True)


def client_of(place: RankAddress, clock: HandMovedClock | None = None) -> OneValueStore:
    return OneValueStore(
        place, who="the place", clock=clock or HandMovedClock(), request_timeout=PATIENCE
    )


def put(store: OneValueStore, key: str = "key", value: bytes = b"") -> None:
    store.commit(Transaction(puts=(Put(key, value),)))


def look_for(store: OneValueStore, clock: HandMovedClock, time: Duration) -> None:
    """Look as a watch does, once a second, for so long."""
    for _ in range(time // SECOND):
        clock.advance(Duration(1 * SECOND))
        store.poll("", store.read("").revision)


def test_only_the_last_changes_are_kept() -> None:
    place = RankAddress()
    store = client_of(place)
    for _ in range(HISTORY_BATCHES + 10):
        put(store)

    told, _, _ = store.poll("", store.read("").revision)

    assert told == ()
    with pytest.raises(Compacted, match="from 1 to 10"):
        store.poll("", Revision(0))


def test_large_changes_push_old_ones_out_and_the_last_one_stays() -> None:
    place = RankAddress()
    store = client_of(place)
    put(store, "small")
    put(store, "large", b"x" * (1 << 20))

    changes, revision, _ = store.poll("", store.read("").revision)
    assert (changes, revision) == ((), 2)
    assert place.state is not None
    value = msgspec.msgpack.decode(place.state[0], type=Value)
    assert [[change.key for change in batch] for batch in value.keyspace.history] == [["large"]]


def test_a_lease_that_stands_still_is_ended_by_whoever_looks() -> None:
    place, clock = RankAddress(), HandMovedClock()
    dead, alive = client_of(place, clock), client_of(place, clock)
    lease = dead.grant_lease(LIFE)
    dead.commit(Transaction(puts=(Put("node", b"", lease),)))
    alive.read("")

    look_for(alive, clock, Duration(2 * SECOND))
    assert alive.read("").entries
    look_for(alive, clock, Duration(1 * SECOND))

    assert alive.read("").entries == ()


def test_who_was_away_for_long_gives_all_leases_their_time_again() -> None:
    place, clock = RankAddress(), HandMovedClock()
    store = client_of(place, clock)
    lease = store.grant_lease(LIFE)
    store.commit(Transaction(puts=(Put("node", b"", lease),)))
    place.is_away = True
    for _ in range(5):
        clock.advance(Duration(1 * SECOND))
        with pytest.raises(StoreUnavailable, match="is away"):
            store.poll("", store._keyspace.revision)
    place.is_away = False

    look_for(store, clock, Duration(2 * SECOND))

    assert [entry.key for entry in store.read("").entries] == ["node"]


def test_a_value_that_others_change_all_the_time_is_given_up() -> None:
    place = RankAddress()
    place.is_contended = True

    with pytest.raises(StoreUnavailable, match="others have changed the place for 300 ms"):
        put(client_of(place))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"a pickle", "holds 8 bytes that rankwise did not write"),
        (
            msgspec.msgpack.encode(["rankwise keyspace 2", b"", [0, [], [], [], 0], {}]),
            "holds 'rankwise keyspace 2', expected 'rankwise keyspace 1'",
        ),
    ],
)
def test_another_programs_value_is_left_alone(raw: bytes, said: str) -> None:
    place = RankAddress()
    place.state = (raw, 1)

    with pytest.raises(NotOurs, match=said):
        put(client_of(place))

    assert place.state == (raw, 1)
