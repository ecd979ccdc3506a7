"""The ledger of simulated ranks: their books, made from where they have met and what they wait for.

So the verdict on who is to blame is the one that `rankwise.core.ledger` gives on real processes.
Here all is known at any moment, and nothing has to be entered: a rank's book is made when somebody
asks. It has the rank's latest call of each group, and those of all operations that are not over.
"""

import os
import zlib
from collections.abc import Mapping

from rankwise.core.ledger import Book, Call, Fate, Stage, Verdict, find_verdict
from rankwise.core.ledger import Group as Members
from rankwise.sim.rehearsal.meetings import Arrival, Group, Post
from rankwise.sim.rehearsal.places import Place
from rankwise.sim.rehearsal.scheduler import Gate, Rank, Timer
from rankwise.sim.rehearsal.world import World

_NO_TAG = ", tag 0,"


def verdict_on(
    world: World, fates: Mapping[int, Fate], *, patience_is_over: bool
) -> Verdict | None:
    """Tell who is to blame that ranks wait, or have waited in vain; None if nobody is.

    Args:
        world: where they live.
        fates: what is known of ranks beside whether they have ended: how they have raised.
        patience_is_over: whether who is merely late is to blame.
    """
    books = [
        _book(world, rank, fates.get(rank.number) or _fate_of(rank))
        for _, rank in sorted(world.scheduler.ranks.items())
    ]
    verdict = find_verdict(books, patience_is_over=patience_is_over)
    if verdict is None or verdict.is_certain:
        return verdict
    # Who is absent since it waits itself, for a signal or a key of a store, is not to blame.
    gates = [world.scheduler.ranks[blamed].waits_for for blamed in verdict.blamed]
    return verdict if all(gate is None or isinstance(gate, Timer) for gate in gates) else None


def _fate_of(rank: Rank) -> Fate:
    if rank.exit_code is None:
        return Fate.LIVES
    return Fate.LEFT if rank.exit_code == 0 else Fate.DIED


def _book(world: World, rank: Rank, fate: Fate) -> Book:
    number = rank.number
    groups = [group for group in world.groups.values() if number in group.ranks]
    failed = world.failed_waits.get(number)
    calls = [
        _call(group, place, arrival, _stage(rank, failed, gate))
        for group in groups
        for place, arrival, gate in group.calls_of(number)
    ]
    posts = [group.latest_post(number) for group in groups]
    calls += [_message(post, _stage(rank, failed, post)) for post in posts if post is not None]
    # The one that it stands in, or has failed in, is its last.
    calls.sort(key=lambda call: call.stage in (Stage.WAITING, Stage.FAILED))
    return Book(
        rank=number,
        groups={group.name: _members(group) for group in groups},
        counts={group.name: group.begun_by(number) for group in groups},
        calls=tuple(calls),
        fate=fate,
    )


def _members(group: Group) -> Members:
    return Members(label=group.label, size=len(group.ranks), members=group.ranks)


def _stage(rank: Rank, failed: Gate | None, gate: Gate | None) -> Stage:
    if gate is None:
        return Stage.DONE
    if gate is failed:
        return Stage.FAILED
    if gate is rank.waits_for:
        return Stage.WAITING
    return Stage.DONE if gate.is_open else Stage.ISSUED


def _call(group: Group, number: int, arrival: Arrival, stage: Stage) -> Call:
    return Call(
        group=group.name,
        number=number,
        text=arrival.call,
        match=zlib.crc32(arrival.call.encode()),
        place=_told(arrival.place),
        stage=stage,
    )


def _message(post: Post, stage: Stage) -> Call:
    return Call(
        group="",
        number=0,
        text=post.call.removesuffix(_NO_TAG).removesuffix(","),
        place=_told(post.place),
        stage=stage,
        peer=post.peer,
    )


def _told(place: Place | None) -> str:
    """`train.py:88`, as real ranks enter it."""
    return "" if place is None else f"{os.path.basename(place.code.co_filename)}:{place.line}"  # noqa: PTH119  # a name, and no file
