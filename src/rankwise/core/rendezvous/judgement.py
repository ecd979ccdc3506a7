"""What a failed round means: whose fault it was, and whether there is another one.

Pure. Failures of several nodes are put in order on the leader's clock: when it heard of each, minus
the age that its node gave it. Whatever the order is off by is what two messages to the leader
differ by. The rules are those of one gang (`base/root_cause.py`).

A member that vanished explains the failures of the others: their connections to it broke, long
before its lease ended. Such a round ended by a change of membership, and costs no restart.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.root_cause import suspects_in_order
from rankwise.base.units import ZERO, Instant
from rankwise.core.rendezvous.configuration import has_progressed, obstacle_to_another
from rankwise.core.rendezvous.records import Round, Suspect, Verdict
from rankwise.core.rendezvous.view import View


class Judgement(NamedTuple):
    """What the end of a round means.

    Attributes:
        root: the failure that explains the others; None if there was none.
        failure_count: how many workers failed by themselves.
        is_failure: whether it costs a restart.
        fruitless: how many rounds in a row have now ended without progress.
        best_step: the farthest step that was ever told.
        strikes: root causes by host, this one included.
        obstacle: why there can be no further round; None if there can.
    """

    root: Suspect | None
    failure_count: int
    is_failure: bool
    fruitless: int
    best_step: int | None
    strikes: dict[str, int]
    obstacle: str | None


def judge(view: View, ended: Round) -> Judgement:
    """Judge the round whose members have all ended.

    Args:
        view: with the last words of its members.
        ended: the record that gathers the next round.
    """
    suspects = suspects_in_order(_suspects(view, ended), lambda suspect: suspect.failure)
    root = suspects[0] if suspects else ended.suspect
    is_failure = ended.is_failure and not view.lost
    steps = [
        heard.record.step
        for _, heard in view.last_words()
        if heard.record is not None and heard.record.step is not None
    ]
    best_step = max([*steps, *([] if ended.best_step is None else [ended.best_step])], default=None)
    fruitless = ended.fruitless
    if is_failure or view.lost:
        ran = [heard.record.ran for _, heard in view.last_words() if heard.record is not None]
        progressed = has_progressed(
            view.config.policy, steps, ended.best_step, max(ran, default=ZERO)
        )
        fruitless = 0 if progressed else fruitless + 1
    strikes = dict(ended.strikes)
    if is_failure and root is not None and root.host and not _is_of_several_hosts(root, suspects):
        strikes[root.host] = strikes.get(root.host, 0) + 1
    return Judgement(
        root=root,
        failure_count=max(len(suspects), root is not None),
        is_failure=is_failure,
        fruitless=fruitless,
        best_step=best_step,
        strikes=strikes,
        obstacle=obstacle_to_another(
            view.config.policy,
            root=root.failure if is_failure and root is not None else None,
            is_failure=is_failure,
            fruitless=fruitless,
            restarts=ended.restarts,
        ),
    )


def _is_of_several_hosts(root: Suspect, suspects: Iterable[Suspect]) -> bool:
    """Whether ranks of other hosts are to blame as much as the root cause is."""
    return root.failure.is_shared and any(
        each.failure.accused == root.failure.accused and each.host != root.host for each in suspects
    )


def first_suspect(view: View, number: int) -> Suspect | None:
    """The failure of round `number` that explains the others, as far as is known yet."""
    suspects = _told_failures(view, number)
    return next(iter(suspects_in_order(suspects, lambda suspect: suspect.failure)), None)


def verdict_on_failure(judgement: Judgement, ended: Round) -> Verdict:
    """What every node is told when a failure was the last one."""
    root = judgement.root
    return Verdict(
        status=OutcomeStatus.FAILED,
        detail=judgement.obstacle or "",
        root=None if root is None else root.failure,
        node="" if root is None else root.node,
        host="" if root is None else root.host,
        failure_count=judgement.failure_count,
        restarts=ended.restarts,
    )


def _suspects(view: View, ended: Round) -> list[Suspect]:
    told = list(_told_failures(view, ended.number - 1))
    known = ended.suspect
    if known is None:
        return told
    if any((each.node, each.failure.rank) == (known.node, known.failure.rank) for each in told):
        return told
    # Its node vanished after it had told. It was the first that anybody heard of.
    earliest = min((each.failure.at for each in told), default=known.failure.at)
    failure = msgspec.structs.replace(known.failure, at=earliest)
    return [msgspec.structs.replace(known, failure=failure), *told]


def _told_failures(view: View, number: int) -> Iterator[Suspect]:
    """The failures of a round in which workers failed by themselves, on the leader's clock."""
    seen: set[tuple[str, int]] = set()
    for node, heard in view.last_words():
        record = heard.record
        if record is None or record.failing != number:
            continue
        for note in record.failures:
            if note.failure.cause is FailureCause.STOPPED or (node, note.failure.rank) in seen:
                continue
            seen.add((node, note.failure.rank))
            failure = msgspec.structs.replace(note.failure, at=Instant(heard.at - note.age))
            yield Suspect(failure=failure, node=node, host=record.host)
