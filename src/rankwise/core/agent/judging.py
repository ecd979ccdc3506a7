"""Find the ranks that keep the others waiting, by the call records of all nodes that have told."""

from collections.abc import Iterator
from contextlib import suppress

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import Instant
from rankwise.core import ledger
from rankwise.core.rendezvous.records import LateRank, Trouble
from rankwise.core.rendezvous.vocabulary import InquiryJudged, SheetsGathered


def judged(gathered: SheetsGathered, size: int | None, own_id: str, now: Instant) -> InquiryJudged:
    """Judge the gathered sheets. A node with an unreadable sheet counts as one without an answer.

    Args:
        gathered: the answers of the nodes.
        size: the number of ranks of the job; None if this node has left its round.
        own_id: this node; its clock is the reference.
        now: by this node's clock.
    """
    if size is None:
        return InquiryJudged(gathered.inquiry)
    if gathered.trouble is Trouble.DONE:
        found = ledger.late_over_nodes(_timetables(gathered, own_id), size)
        return InquiryJudged(gathered.inquiry, late=None if found is None else _late(*found))
    sheets = []
    for sheet in gathered.sheets.values():
        with suppress(RemoteProtocolError):
            sheets.append(ledger.unpack(sheet, now))
    verdict = ledger.judge(
        ledger.with_all_members((record for each in sheets for record in each.seen), size),
        ledger.with_all_members((record for each in sheets for record in each.recorded), size),
        patience_is_over=gathered.trouble in (Trouble.TIMED_OUT, Trouble.WHY),
    )
    if verdict is None:
        return InquiryJudged(gathered.inquiry)
    return InquiryJudged(
        gathered.inquiry,
        verdict.blamed,
        verdict.text,
        verdict.is_certain,
        mismatch=verdict.mismatch,
        identity=verdict.identity,
    )


def _timetables(gathered: SheetsGathered, own_id: str) -> Iterator[ledger.ReceivedTimetable]:
    """Those of the nodes, each with what is known of its clock."""
    for node, sheet in gathered.sheets.items():
        is_own = node == own_id
        asked_at = None if is_own else gathered.asked_at
        received_at = None if is_own else gathered.received_at[node]
        with suppress(RemoteProtocolError):
            yield ledger.ReceivedTimetable(ledger.unpack_times(sheet), asked_at, received_at)


def _late(delay: ledger.Delay, text: str) -> LateRank:
    return LateRank(rank=delay.rank, last=delay.last, waited=delay.waited, text=text)
