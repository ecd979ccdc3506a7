"""The simulated store: the keyspace machine behind a network that loses, delays and doubles.

The store's clock is the world's. A request that is lost on its way, or whose answer is, ends for
its client with `RequestFailed` at its timeout; in the second case it has been carried out. Changes
that a watch tells stay in order, as in a TCP connection, and are told later when the way was cut.
Those that have come behind a late packet are told at once, as one list.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from rankwise.base.errors import Compacted, LeaseLost
from rankwise.base.keys import Change, Committed, Revision
from rankwise.base.units import MILLISECOND, ZERO, Duration, Instant, after
from rankwise.core.keyspace.machine import Keyspace
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    Commit,
    EndWatch,
    GrantLease,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    Order,
    ReadKeys,
    RenewLease,
    RequestFailed,
    RevokeLease,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)
from rankwise.drivers.virtual.agenda import Agenda, MovableClock
from rankwise.drivers.virtual.cluster.cluster_plan import Network
from rankwise.drivers.virtual.cluster.traffic import Traffic, size_of

RETRANSMISSION = Duration(200 * MILLISECOND)
"""What a lost packet costs where TCP sends it again."""
FIRST_INSTANT = Instant(0)
WATCH_RETRY = Duration(500 * MILLISECOND)


class SimulatedStoreClient:
    """One agent's end of the way to the store.

    Args:
        node: the number of its node, by which it is cut off.
        deliver: is told what the store answers.
    """

    def __init__(self, node: int, deliver: Callable[[Answer], None]) -> None:
        self.node = node
        self.is_alive = True
        self._deliver = deliver

    def on_answer(self, answer: Answer) -> None:
        """Pass an answer on, if its client still lives."""
        if self.is_alive:
            self._deliver(answer)


@dataclass(slots=True, eq=False)
class Pending:
    """A request that its client waits for."""

    client: SimulatedStoreClient
    order: Order
    token: int
    deadline: Instant
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class SimulatedWatch:
    """A watch: whether its client has been told everything, and when the last of it arrives."""

    client: SimulatedStoreClient
    token: int
    prefix: str
    notified_until: Revision
    """If it is behind: up to which revision its client has been told."""
    is_behind: bool = True
    arrives_at: Instant = FIRST_INSTANT
    arriving: list[Change] = field(default_factory=list)
    """What will be told then."""


class SimulatedStore:
    """A store that many simulated agents share.

    Args:
        agenda, clock: of the world.
        network: the latency and the losses on the way to it.
        request_timeout: the time after which its clients give up.
        chance: draws latencies and losses.
        on_change: called after each change of the keyspace.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        clock: MovableClock,
        network: Network,
        request_timeout: Duration,
        chance: Random,
        on_change: Callable[[], None],
    ) -> None:
        self.keyspace = Keyspace()
        self.traffic = Traffic()
        self.cut_off: set[int] = set()
        """Nodes that cannot reach the store."""
        self._agenda = agenda
        self._clock = clock
        self._network = network
        self._request_timeout = request_timeout
        self._chance = chance
        self._on_change = on_change
        self._is_up = True
        self._life = 0
        self._watchers: dict[str, dict[tuple[int, int], SimulatedWatch]] = {}
        self._client_numbers: dict[SimulatedStoreClient, int] = {}
        self._published = Revision(0)
        self._disk_takes = ZERO
        self._disk_free_at = Instant(0)
        self._ticks_at: Instant | None = None

    def ask(self, client: SimulatedStoreClient, order: Order) -> None:
        """Carry out a client's order; what becomes of it is told to the client."""
        match order:
            case EndWatch():
                self._end_watch(client, order.token)
            case _:
                self._send(client, order)

    def crash(self) -> None:
        """Be away: whatever arrives is lost."""
        self._is_up = False
        self._life += 1

    def come_back(self, *, forgets: bool) -> None:
        """Be there again, with all leases prolonged, or with nothing."""
        self._is_up = True
        if forgets:
            self.keyspace = Keyspace()
            self._published = Revision(0)
            for watcher in self._all_watchers():
                self._lose(watcher, "the store was started anew")
            self._watchers.clear()
            self._on_change()
        self.keyspace.prolong_leases(self._clock.now())
        self._arm()
        self.catch_up()

    def set_disk(self, takes: Duration) -> None:
        """Let every transaction take so long."""
        self._disk_takes = takes

    def compact(self) -> None:
        """Forget the history."""
        self.keyspace.compact(self.keyspace.revision)

    def catch_up(self) -> None:
        """Tell every watch what it has missed while its way was cut."""
        for watcher in self._all_watchers():
            self._tell(watcher)

    # Requests

    def _send(self, client: SimulatedStoreClient, order: Order) -> None:
        now = self._clock.now()
        pending = Pending(client, order, order.token, after(now, self._request_timeout))
        kind = type(order).__name__
        self.traffic.count(kind, size_of(order))
        if self._is_lost(client):
            self._fail(pending)
            return
        self._agenda.after(self._latency(), partial(self._arrive, pending))
        if self._network.duplicates and self._happens(self._network.duplicates):
            self._agenda.after(self._latency(), partial(self._arrive, pending))

    def _arrive(self, pending: Pending) -> None:
        if not self._is_up:
            self._fail(pending)
            return
        if self._disk_takes and isinstance(pending.order, Commit | GrantLease):
            now = self._clock.now()
            self._disk_free_at = after(max(now, self._disk_free_at), self._disk_takes)
            if self._disk_free_at >= pending.deadline:
                self._fail(pending)  # it will be written, and its client has given up by then
            life = self._life
            self._agenda.at(self._disk_free_at, partial(self._write, pending, life))
        else:
            self._carry_out(pending)

    def _write(self, pending: Pending, life: int) -> None:
        if self._is_up and life == self._life:
            self._carry_out(pending)
        else:
            self._fail(pending)

    def _carry_out(self, pending: Pending) -> None:
        answer = self._answer_to(pending.order)
        self._publish()
        self._arm()
        self.traffic.count(type(answer).__name__, size_of(answer))
        if self._is_lost(pending.client):
            self._fail(pending)
            return
        arrival = after(self._clock.now(), self._latency())
        if arrival >= pending.deadline:
            self._fail(pending)
            return
        self._agenda.at(arrival, partial(self._deliver, pending, answer))

    def _deliver(self, pending: Pending, answer: Answer) -> None:
        is_first = not pending.is_answered
        pending.is_answered = True
        if is_first and isinstance(pending.order, ReadKeys) and isinstance(answer, KeysRead):
            self._begin_watch(pending.client, pending.order, answer.snapshot.revision)
        pending.client.on_answer(answer)

    def _fail(self, pending: Pending) -> None:
        """No answer will come: the client finds out when its patience is over."""
        at = max(self._clock.now(), pending.deadline)
        self._agenda.at(at, partial(self._give_up, pending))

    def _give_up(self, pending: Pending) -> None:
        if pending.is_answered:
            return
        pending.is_answered = True
        pending.client.on_answer(RequestFailed(pending.token, "the simulated store did not answer"))

    def _answer_to(self, order: Order) -> Answer:
        now = self._clock.now()
        keyspace = self.keyspace
        match order:
            case ReadKeys():
                return KeysRead(order.token, keyspace.read(order.prefix), order.watch)
            case Commit():
                try:
                    result = keyspace.commit(order.transaction)
                except LeaseLost:
                    return LeaseEnded(order.token)
                if isinstance(result, Committed):
                    return TransactionCommitted(order.token, result.revision)
                return TransactionConflicted(order.token, result.revision)
            case GrantLease():
                return LeaseGranted(order.token, keyspace.grant_lease(order.ttl, now))
            case RenewLease():
                try:
                    keyspace.renew_lease(order.lease, now)
                except LeaseLost:
                    return LeaseEnded(order.token)
                return LeaseRenewed(order.token)
            case RevokeLease():
                keyspace.revoke_lease(order.lease)
                return LeaseRevoked(order.token)
            case EndWatch():
                raise AssertionError("it has no answer")

    # Watches

    def _begin_watch(self, client: SimulatedStoreClient, order: ReadKeys, after: Revision) -> None:
        """Begin the watch that a read asks for, if it does."""
        if order.watch is None:
            return
        number = self._client_numbers.setdefault(client, len(self._client_numbers))
        watcher = SimulatedWatch(client, order.watch, order.prefix, after)
        self._watchers.setdefault(order.prefix, {})[number, order.watch] = watcher
        self._agenda.after(self._latency(), lambda: self._first_tell(watcher))

    def _first_tell(self, watcher: SimulatedWatch) -> None:
        if self._is_lost(watcher.client) or not self._is_up:
            if watcher.client.is_alive:
                self._agenda.after(WATCH_RETRY, lambda: self._first_tell(watcher))
            return
        self._tell(watcher)

    def _end_watch(self, client: SimulatedStoreClient, token: int) -> None:
        number = self._client_numbers.get(client, -1)
        for watchers in self._watchers.values():
            watchers.pop((number, token), None)

    def forget_client(self, client: SimulatedStoreClient) -> None:
        """The client is dead; its watches end."""
        client.is_alive = False
        number = self._client_numbers.get(client, -1)
        for watchers in self._watchers.values():
            for key in [key for key in watchers if key[0] == number]:
                del watchers[key]

    def _all_watchers(self) -> list[SimulatedWatch]:
        return [watcher for group in self._watchers.values() for watcher in group.values()]

    def _publish(self) -> None:
        """Tell all watches of what has changed."""
        if self.keyspace.revision == self._published:
            return
        before, self._published = self._published, self.keyspace.revision
        self._on_change()
        for prefix, watchers in self._watchers.items():
            changes = self.keyspace.changes_after(before, prefix) if watchers else ()
            if not changes:
                continue
            size = size_of(KeysChanged(0, changes))
            for watcher in list(watchers.values()):
                if watcher.is_behind:
                    self._tell(watcher)  # it has more to get
                elif self._reaches(watcher):
                    self._send_changes(watcher, changes, size)
                else:
                    watcher.is_behind, watcher.notified_until = True, before

    def _reaches(self, watcher: SimulatedWatch) -> bool:
        return self._is_up and watcher.client.node not in self.cut_off

    def _tell(self, watcher: SimulatedWatch) -> None:
        """Tell a watch whatever it has not got yet; if its way is cut it catches up later."""
        if not watcher.is_behind or not self._reaches(watcher) or not self._is_watching(watcher):
            return
        try:
            changes = self.keyspace.changes_after(watcher.notified_until, watcher.prefix)
        except Compacted as error:
            self._end_watch(watcher.client, watcher.token)
            self._lose(watcher, str(error))
            return
        if changes:
            self._send_changes(watcher, changes, size_of(KeysChanged(0, changes)))
        watcher.is_behind = False

    def _send_changes(
        self, watcher: SimulatedWatch, changes: tuple[Change, ...], size: int
    ) -> None:
        self.traffic.count("KeysChanged", size)
        latency = self._latency()
        if self._loses():
            latency = Duration(latency + RETRANSMISSION)
        arrival = after(self._clock.now(), latency)
        if watcher.arriving and arrival <= watcher.arrives_at:
            watcher.arriving += changes
            return
        watcher.arrives_at, watcher.arriving = arrival, list(changes)
        self._agenda.at(arrival, partial(self._deliver_changes, watcher, watcher.arriving))

    def _deliver_changes(self, watcher: SimulatedWatch, changes: list[Change]) -> None:
        told = tuple(changes)
        changes.clear()  # what comes from now on is told by itself
        watcher.client.on_answer(KeysChanged(watcher.token, told))

    def _is_watching(self, watcher: SimulatedWatch) -> bool:
        number = self._client_numbers[watcher.client]
        group = self._watchers.get(watcher.prefix, {})
        return group.get((number, watcher.token)) is watcher

    def _lose(self, watcher: SimulatedWatch, reason: str) -> None:
        lost = WatchLost(watcher.token, reason)
        arrival = max(watcher.arrives_at, after(self._clock.now(), self._latency()))
        self._agenda.at(arrival, lambda: watcher.client.on_answer(lost))

    # Leases

    def _arm(self) -> None:
        """Wake up when the next lease ends."""
        deadline = self.keyspace.next_deadline
        if deadline is None or (self._ticks_at is not None and self._ticks_at <= deadline):
            return
        self._ticks_at = deadline
        self._agenda.at(max(deadline, self._clock.now()), self._tick)

    def _tick(self) -> None:
        self._ticks_at = None
        if not self._is_up:
            return
        self.keyspace.end_leases(self._clock.now())
        self._publish()
        self._arm()

    # Chance

    def _is_lost(self, client: SimulatedStoreClient) -> bool:
        if client.node in self.cut_off:
            return True
        return self._loses()

    def _loses(self) -> bool:
        network = self._network
        if not network.loss or (network.until is not None and self._clock.now() > network.until):
            return False
        return self._happens(network.loss)

    def _happens(self, of_ten_thousand: int) -> bool:
        return self._chance.randrange(10_000) < of_ten_thousand

    def _latency(self) -> Duration:
        least, most = self._network.latency_min, self._network.latency_max
        return Duration(least + int(self._chance.random() * (most - least + 1)))
