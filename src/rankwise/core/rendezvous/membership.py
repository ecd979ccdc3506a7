"""This node's part in the round: what its agent must be told, and what it has been told.

A node is *ready*, then a *member* if the round that runs lists it, or a *spare* if not. A member
stays one until it is ready for another round, also when its round was dissolved and its gang has
ended. Whatever comes after the verdict or a refusal is of no interest any more.
"""

from rankwise.core.rendezvous.own_record import OwnRecord
from rankwise.core.rendezvous.records import Departure, Round, RoundPhase
from rankwise.core.rendezvous.vocabulary import (
    Closed,
    Dissolved,
    MadeSpare,
    Notification,
    RefusalKind,
    Refused,
    Settled,
    StopAgreed,
    StopStepAgreed,
    World,
)


class Membership:
    """What one node is in the present round.

    Args:
        me: the node's id.
        own: its record.
        is_static: whether each node has a seat of its own.
    """

    def __init__(self, me: str, own: OwnRecord, *, is_static: bool) -> None:
        self.round: Round | None = None
        self.round_bytes: bytes | None = None
        self.place: int | None = None
        """The node's place among the members of the round; None if it is none of them."""
        self.member_of: World | None = None
        """The round in which it has, or had, a gang, until it is ready for another."""
        self.is_dissolved = False
        """Whether that round is over, so that the node is wanted for another."""
        self.has_ended = False
        """Whether its gang of that round has ended."""
        self.is_told_the_end = False
        """Whether the agent knows the verdict, or why it may not take part."""
        self._me = me
        self._own = own
        self._is_static = is_static
        self._spare_in = -1
        self._is_stop_told = False
        self._is_step_told = False

    @property
    def is_spare(self) -> bool:
        """Whether the round that runs, runs without this node."""
        return self.round is not None and self._spare_in == self.round.number

    @property
    def was_done(self) -> bool:
        """Whether all workers of this node have succeeded in the round that ran last."""
        return self._own.record.is_done

    @property
    def is_fit(self) -> bool:
        """Whether the node was ever ready for a round."""
        return self._own.record.ready >= 0

    @property
    def is_running(self) -> bool:
        """Whether this node's gang lives, as far as its agent has told."""
        return self.member_of is not None and not self.has_ended

    def begin_again(self) -> None:
        """The node is ready for another round."""
        self.member_of = None
        self.has_ended = self.is_dissolved = False
        self._is_stop_told = self._is_step_told = False

    def turn_to(self, round_: Round, value: bytes, place: int | None) -> None:
        """There is a new round, or the old one has changed; `value` is what it was read from."""
        self.round, self.round_bytes, self.place = round_, value, place

    def refuse(self, refused: Refused) -> list[Notification]:
        """Tell the agent that it may not take part, unless it knows the end already."""
        if self.is_told_the_end:
            return []
        self.is_told_the_end = True
        return [refused]

    def cut_off(self, why: str) -> list[Notification]:
        """The others will soon believe this node dead: its gang must go at once."""
        world = self.member_of
        if world is None or self.has_ended:
            return []
        self.is_dissolved = True
        self._own.rewrite(cut_off=world.round)
        why = f"this node is cut off from the store, {why}"
        return [Dissolved(world.round, world.round + 1, why, at_once=True)]

    def compare(self, *, is_registered: bool) -> list[Notification]:
        """Compare the round with what the agent knows of it."""
        round_ = self.round
        if round_ is None or self.is_told_the_end:
            return []
        if self._me in round_.refusals:
            kind = RefusalKind.SEAT if self._is_static else RefusalKind.EXCLUDED
            return self.refuse(Refused(kind, round_.refusals[self._me], ""))
        if round_.phase is RoundPhase.CLOSED:
            assert round_.verdict is not None, "a closed round has a verdict"
            self.is_told_the_end = True
            return [Closed(round_.verdict)]
        if self.member_of is not None:
            return self._compare_as_member(round_, self.member_of)
        if self._own.record.ready < 0 or not is_registered:
            return []
        if round_.phase is RoundPhase.RUNNING:
            return self._compare_as_candidate(round_)
        self._pass_over_missed(round_)
        return []

    def _compare_as_member(self, round_: Round, world: World) -> list[Notification]:
        if round_.number > world.round:
            if self.is_dissolved:
                return []
            self.is_dissolved = True
            return [Dissolved(world.round, world.round + 1, round_.why)]
        if round_.phase is not RoundPhase.STOPPING or self.is_dissolved:
            return []
        notifications: list[Notification] = []
        if not self._is_stop_told:
            self._is_stop_told = True
            notifications.append(StopAgreed(world.round, round_.why, round_.signal))
        if round_.stop_at is not None and not self._is_step_told:
            self._is_step_told = True
            notifications.append(StopStepAgreed(world.round, round_.stop_at))
        return notifications

    def _compare_as_candidate(self, round_: Round) -> list[Notification]:
        if self.place is None:
            return self._become_spare(round_)
        record = self._own.record
        if record.ready > round_.number or record.ended >= round_.number:
            return []
        if record.departure is not Departure.STAYS:
            self._own.rewrite(ended=round_.number)  # chosen too late, and nothing was begun
            return []
        self.member_of = _world(round_, self.place)
        self.has_ended = self.is_dissolved = False
        return [Settled(self.member_of)]

    def _pass_over_missed(self, round_: Round) -> None:
        """Say so if a round with this node was over before it heard of it: nothing was begun.

        A watch may tell the beginning and the end at once, and the others wait for its workers.
        """
        is_dissolved = round_.phase is RoundPhase.GATHERING
        missed = round_.number - is_dissolved
        record = self._own.record
        if self.place is None or record.ready > missed or record.ended >= missed:
            return
        if is_dissolved:
            self._own.rewrite(ready=round_.number)  # what it has prepared is unused
        else:
            self._own.rewrite(ended=missed)

    def _become_spare(self, round_: Round) -> list[Notification]:
        if self.is_spare:
            return []
        self._spare_in = round_.number
        count = len(round_.members)
        others = "one other node" if count == 1 else f"{count} other nodes"
        return [MadeSpare(round_.number, f"round {round_.number} runs on {others}", round_.lineup)]


def _world(round_: Round, node_rank: int) -> World:
    return World(
        round=round_.number,
        node_rank=node_rank,
        members=round_.members,
        first_rank=round_.workers_before(node_rank),
        slots=round_.slots_of(node_rank),
        size=round_.workers_before(len(round_.members)),
        master_address=round_.master_address,
        master_port=round_.master_port,
        restarts=round_.restarts,
        lineup=round_.lineup,
        why=round_.why,
    )
