"""Founding a run, joining one that others have founded, and replacing one that is over.

The charter says what all nodes must want alike. The keys of a run may be those of an earlier one:

```
              founded            closed            `run_ttl` after its last leader
   (no run) ──────────→ OPEN ──────────────→ OVER ────────────────────────────────→ (no run)
                         │ ↑ ↑                 │
             no leader   │ │ └─────────────────┘ a newcomer founds another run in its place
                         ↓ │
                     ABANDONED ── a newcomer that wants the same goes on with it;
                                  one that wants something else founds another in its place
```

- A *newcomer* has not agreed to the run's charter: it has taken no part. All others learn how the
  run ended, however late: those who watch, since the end comes first in the order of changes; those
  who have to read anew find another founder than their own, and are told that the run is over.
- A run that is *over* has no workers any more: it is closed when all have ended. So there is
  nothing to wait for.
- *Abandoned* is a run without a leader for a lease and its fence.
"""

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import LeaseId, Put, Snapshot, Transaction, Unchanged
from rankwise.base.units import Duration, Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import (
    Charter,
    RoundPhase,
    RunKeys,
    decode_charter,
    decode_round,
    encode,
)
from rankwise.core.rendezvous.requests import Purpose, SharedKeys, StoreRequests
from rankwise.core.rendezvous.vocabulary import Commit, Order, RefusalKind, Refused


def founding(
    charter: bytes, me: bytes, keys: RunKeys, shared: SharedKeys, lease: LeaseId
) -> Transaction:
    """Write the charter, unless another node has, and take the lead with it.

    An earlier run's charter is replaced, and its round deleted; the lease by which the store
    remembers that run serves the new one.

    Args:
        charter: what to write.
        me: the node that founds the run, by id and host.
        keys: where the run's records lie.
        shared: what lies there now.
        lease: this node's.
    """
    # One transaction, bound to the shared keys: of many newcomers one founds the run, and the
    # others join it.
    conditions: tuple[Unchanged, ...] = (
        Unchanged(keys.charter, shared.charter.revision),
        Unchanged(keys.leader, shared.leader.revision),
    )
    puts = (
        Put(keys.charter, charter, shared.charter.lease), Put(keys.leader, me, lease),
    )  # fmt: skip
    if shared.round.value is None:
        return Transaction(conditions=conditions, puts=puts)
    conditions = (*conditions, Unchanged(keys.round, shared.round.revision))
    return Transaction(conditions=conditions, puts=puts, deletes=(keys.round,))


def agree(value: bytes, keys: RunKeys, config: RendezvousConfig) -> str | Refused:
    """Compare the charter with what this node wants: the run's founder, or why it cannot join."""
    try:
        theirs = decode_charter(value, keys.charter)
    except RemoteProtocolError as error:
        return Refused(RefusalKind.VERSION, error.message, error.hint or "")
    if theirs != msgspec.structs.replace(config.charter, founder=theirs.founder):
        return Refused(
            RefusalKind.CHARTER,
            f"the run {keys.run_id} was started by other nodes with "
            f"{_differences(theirs, config.charter)}",
            "start every node with the same options, or choose another run id",
        )
    return theirs.founder


def forgotten(keys: RunKeys, founder: str) -> Refused:
    """What a node is told whose run is not in the store any more, but perhaps another's."""
    if founder:
        return Refused(
            RefusalKind.FORGOTTEN,
            f"the run {keys.run_id} that this node took part in is over, and another run has "
            "started under that id",
            "start this node again to take part in the other run",
        )
    return Refused(
        RefusalKind.FORGOTTEN,
        f"the store has forgotten the run {keys.run_id}: it was restarted, or its keys "
        "were deleted",
        "a store that survives its host, such as etcd with three members, does not forget",
    )


def founder_in(snapshot: Snapshot, keys: RunKeys) -> str:
    """The founder of the charter that was read; empty if there is none, or none to be read."""
    for entry in snapshot.entries:
        if entry.key == keys.charter:
            try:
                return decode_charter(entry.value, entry.key).founder
            except RemoteProtocolError:
                return ""
    return ""


def _differences(theirs: Charter, ours: Charter) -> str:
    """The fields in which two charters differ, for people."""
    found = []
    for field in msgspec.structs.fields(Charter):
        name = field.name
        if name in {"settings", "founder"}:
            continue
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            found.append(f"{name} {there} (here: {here})")
    for name in sorted(theirs.settings.keys() | ours.settings.keys()):
        there, here = theirs.settings.get(name), ours.settings.get(name)
        if there != here:
            found.append(f"{name} {_shown(there)} (here: {_shown(here)})")
    return ", ".join(found)


def _shown(setting: str | None) -> str:
    if setting is None:
        return "none"
    return f'"{setting}"' if "'" in setting else f"'{setting}'"


class Succession:
    """Which run a node takes part in: what a newcomer makes of one that it finds, or founds.

    Args:
        config: whether it may replace it, and how long nodes are believed to live.
        keys: where the run's records lie.
        shared: what lies there.
    """

    def __init__(self, config: RendezvousConfig, keys: RunKeys, shared: SharedKeys) -> None:
        self.obstacle = ""
        """Why this newcomer cannot take part as long as the run is not abandoned; empty if it can
        or may not wait for that."""
        self._agreed: bytes | None = None
        """The charter of the run that this node takes part in."""
        self._config = config
        self._keys = keys
        self._shared = shared

    @property
    def has_agreed(self) -> bool:
        """Whether the charter said what this node wants."""
        return self._agreed is not None

    def look(self) -> str | Refused | None:
        """Look at the charter as a newcomer: who founded the run, or why this node may not join.

        None says neither: there is no charter, or another run may be founded in its place.
        """
        value = self._shared.charter.value
        if value is None:
            return None
        self.obstacle = ""
        if self.is_over:
            return None
        found = agree(value, self._keys, self._config)
        if not isinstance(found, Refused):
            self._agreed = value
        # Only where the charters differ: a newcomer that wants the same joins an abandoned run.
        elif found.kind is RefusalKind.CHARTER and self.may_be_abandoned:
            self.obstacle = found.why
            return None
        return found

    def successor(self) -> str | None:
        """The founder of the run in place of this node's; empty if there is none to be read.

        None while this node's run is there.
        """
        value = self._shared.charter.value
        if value == self._agreed:
            return None
        try:
            return "" if value is None else decode_charter(value, self._keys.charter).founder
        except RemoteProtocolError:
            return ""

    def found(
        self, node_id: str, name: bytes, lease: LeaseId, requests: StoreRequests, now: Instant
    ) -> list[Order]:
        """Ask the store to take this node's charter, and the node as the leader."""
        if not requests.may_begin(Purpose.CHARTER, now):
            return []
        charter = encode(msgspec.structs.replace(self._config.charter, founder=node_id))
        transaction = founding(charter, name, self._keys, self._shared, lease)
        return [Commit(requests.begin(Purpose.CHARTER, now, charter), transaction)]

    @property
    def is_over(self) -> bool:
        """Whether the run that lies there is closed, and may be replaced."""
        value = self._shared.round.value
        # A newcomer may be meant for the run that is over, and late, or for another: it is taken
        # for another's, unless run ids serve once, as those of Kubernetes' Jobs do.
        if value is None or not self._config.replaces_ended:
            return False
        try:
            return decode_round(value, self._keys.round).phase is RoundPhase.CLOSED
        except RemoteProtocolError:
            return False

    @property
    def may_be_abandoned(self) -> bool:
        """True if the round has no leader, so that it may be replaced soon."""
        return self._config.replaces_ended and self._shared.is_lead_free

    @property
    def abandoned_at(self) -> Instant | None:
        """When the run counts as abandoned; None while that is not waited for."""
        since = self._shared.lead_free_since
        if not self.obstacle or since is None:
            return None
        # Any node that is alive would have taken the lead by then, or has lost its lease.
        return after(since, Duration(self._config.lease_ttl + self._config.fence))

    def is_due(self, now: Instant) -> bool:
        """Whether it is time to found another run in its place."""
        if self._shared.charter.value is None:
            return True
        abandoned_at = self.abandoned_at
        return self.is_over or (abandoned_at is not None and now >= abandoned_at)
