"""Founding a run, and joining one that others have founded: what all nodes must want alike."""

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import LeaseId, Put, Snapshot, Transaction, Unchanged
from rankwise.core.rendezvous.codec import decode_charter
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.core.rendezvous.records import Charter
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.vocabulary import RefusalKind, Refused


def founding(
    charter: bytes, me: bytes, keys: RunKeys, shared: SharedKeys, lease: LeaseId
) -> Transaction:
    """Write the charter, unless somebody else has, and take the lead with it.

    An earlier run's charter is replaced, and its round deleted; the lease by which the store
    remembers that run serves the new one.

    Args:
        charter: what to write.
        me: the node that founds the run, by id and host.
        keys: where the run's records lie.
        shared: what lies there now.
        lease: this node's.
    """
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
        f"the store has forgotten the run {keys.run_id}: it was restarted, or somebody has "
        "deleted its keys",
        "a store that survives its host, such as etcd with three members, does not forget",
    )


def founder_in(snapshot: Snapshot, keys: RunKeys) -> str:
    """Who wrote the charter that was read; empty if there is none, or none to be read."""
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
    return "none" if setting is None else f"'{setting}'"
