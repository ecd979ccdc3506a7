"""Nodes around one keyspace that answers at once, or does not: for tests of the machine."""

from typing import TYPE_CHECKING

from rankwise.base.errors import LeaseLost
from rankwise.base.keys import Committed
from rankwise.base.units import Instant
from rankwise.core.keyspace.machine import Keyspace
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.records import NodeRecord, RunKeys, decode_node
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    Commit,
    Effect,
    EndWatch,
    GrantLease,
    Joined,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    NodeReady,
    Notification,
    Order,
    ReadKeys,
    RenewLease,
    RequestFailed,
    RevokeLease,
    Stimulus,
    TransactionCommitted,
    TransactionConflicted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = RunKeys("run")


class Table:
    """Nodes around one keyspace: carries orders and answers until nobody has any."""

    def __init__(self) -> None:
        self.keyspace = Keyspace()
        self.now = Instant(0)
        self.nodes: dict[str, Rendezvous] = {}
        self.told: dict[str, list[Notification]] = {}
        self.orders: list[Order] = []
        self.watches: dict[tuple[str, int], tuple[str, int]] = {}
        self.is_reached: Callable[[Order], bool] = lambda _order: True
        self.deaf: set[str] = set()
        """Nodes that hear of changes later, of all at once."""

    def add(self, node: str, config: RendezvousConfig) -> Rendezvous:
        offer = NodeOffer(node_id=node, host=f"host-{node}", address=node, slots=2)
        self.nodes[node] = Rendezvous("run", config, offer)
        self.told[node] = []
        self.tell(node, Joined())
        return self.nodes[node]

    def ready(self, node: str, number: int = 0) -> None:
        self.tell(node, NodeReady(number, 29500))

    def tell(self, node: str, stimulus: Stimulus) -> None:
        self.carry_out(node, self.nodes[node].handle(stimulus, self.now))

    def pass_time(self, duration: int) -> None:
        until = self.now + duration
        while due := [each for each in self.nodes.values() if each.next_deadline is not None]:
            first = min(due, key=lambda each: each.next_deadline or 0)
            if first.next_deadline is None or first.next_deadline > until:
                break
            self.now = Instant(max(self.now, first.next_deadline))
            self.keyspace.end_leases(self.now)
            self.publish()
            self.carry_out(first.offer.node_id, first.tick(self.now))
        self.now = Instant(until)
        self.keyspace.end_leases(self.now)
        self.publish()

    def carry_out(self, node: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                self.orders.append(effect)
                self.serve(node, effect)
            else:
                self.told[node].append(effect)

    def serve(self, node: str, order: Order) -> None:
        match order:
            case EndWatch():
                self.watches.pop((node, order.token), None)
            case _ if not self.is_reached(order):
                self.tell(node, RequestFailed(order.token, "nobody answers"))
            case _:
                answer = self.answer(order)
                self.publish()
                if isinstance(answer, KeysRead) and isinstance(order, ReadKeys) and order.watch:
                    self.watches[node, order.watch] = (order.prefix, answer.snapshot.revision)
                self.tell(node, answer)

    def answer(self, order: Order) -> Answer:
        match order:
            case ReadKeys():
                return KeysRead(order.token, self.keyspace.read(order.prefix), order.watch)
            case Commit():
                done = self.keyspace.commit(order.transaction)
                kind = (
                    TransactionCommitted if isinstance(done, Committed) else TransactionConflicted
                )
                return kind(order.token, done.revision)
            case GrantLease():
                return LeaseGranted(order.token, self.keyspace.grant_lease(order.ttl, self.now))
            case RenewLease():
                try:
                    self.keyspace.renew_lease(order.lease, self.now)
                except LeaseLost:
                    return LeaseEnded(order.token)
                return LeaseRenewed(order.token)
            case RevokeLease():
                self.keyspace.revoke_lease(order.lease)
                return LeaseRevoked(order.token)
            case _:
                raise AssertionError(order)

    def publish(self) -> None:
        for (node, token), (prefix, after) in list(self.watches.items()):
            if (node, token) not in self.watches or after >= self.keyspace.revision:
                continue
            if node in self.deaf:
                continue
            self.watches[node, token] = (prefix, self.keyspace.revision)
            changes = self.keyspace.changes_after(after, prefix)  # type: ignore[arg-type]  # a revision
            if changes:
                self.tell(node, KeysChanged(token, changes))

    def kill(self, node: str) -> None:
        """SIGKILL: its lease ends by itself."""
        del self.nodes[node]
        for watch in [watch for watch in self.watches if watch[0] == node]:
            del self.watches[watch]

    def record(self, node: str) -> NodeRecord:
        (entry,) = self.keyspace.read(KEYS.node(node)).entries
        return decode_node(entry.value, entry.key, node)
