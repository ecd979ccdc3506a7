"""One node's part in the rounds, as its agent is told of it: what it is there, on whom it waits.

A node is *ready*, then a *member* if the round that runs lists it, or a *spare* if not. A member
stays one until it is ready for another round, also when its round was dissolved and its gang has
ended. Whatever comes after the verdict or a refusal is of no interest any more.
"""

from rankwise.base.units import Duration, Instant, after, between, format_duration
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.founding import Succession
from rankwise.core.rendezvous.lead import Lead
from rankwise.core.rendezvous.leader import labels, last_end_in_words
from rankwise.core.rendezvous.records import Departure, Round, RoundPhase
from rankwise.core.rendezvous.registration import OwnRecord
from rankwise.core.rendezvous.requests import Purpose, SharedKeys
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
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
        is_static: whether each node has a node rank of its own from the start.
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
        self.knows_the_end = False
        """Whether the agent knows the verdict, or why it may not take part."""
        self._me = me
        self._own = own
        self._is_static = is_static
        self._spare_in = -1
        self._is_stop_reported = False
        self._is_step_reported = False

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

    def begin_again(self) -> None:
        """The node is ready for another round."""
        self.member_of = None
        self.has_ended = self.is_dissolved = False
        self._is_stop_reported = self._is_step_reported = False

    def turn_to(self, round_: Round, value: bytes, place: int | None) -> None:
        """There is a new round, or the old one has changed; `value` is what it was read from."""
        self.round, self.round_bytes, self.place = round_, value, place

    def refuse(self, refused: Refused) -> list[Notification]:
        """Tell the agent that it may not take part, unless it knows the end already."""
        if self.knows_the_end:
            return []
        self.knows_the_end = True
        return [refused]

    def cut_off(self, why: str) -> list[Notification]:
        """The others will soon believe this node dead: its gang must go at once."""
        world = self.member_of
        if world is None or self.has_ended:
            return []
        self.is_dissolved = True
        # So that the leader knows why it vanished, should it come back: it is lost, and has not
        # failed.
        self._own.rewrite(cut_off=world.round)
        why = f"this node is cut off from the store, {why}"
        return [Dissolved(world.round, world.round + 1, why, at_once=True)]

    def compare(self, *, is_registered: bool) -> list[Notification]:
        """Compare the round with what the agent knows of it."""
        round_ = self.round
        if round_ is None or self.knows_the_end:
            return []
        if self._me in round_.refusals:
            # Refused nodes are told before all else: they must not wait for a round that is not
            # theirs.
            kind = RefusalKind.STATIC_RANK if self._is_static else RefusalKind.EXCLUDED
            return self.refuse(Refused(kind, round_.refusals[self._me], ""))
        if round_.phase is RoundPhase.CLOSED:
            assert round_.verdict is not None, "a closed round has a verdict"
            self.knows_the_end = True
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
        if not self._is_stop_reported:
            self._is_stop_reported = True
            notifications.append(StopAgreed(world.round, round_.why, round_.signal))
        if round_.stop_at is not None and not self._is_step_reported:
            self._is_step_reported = True
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
        """Say so if a round with this node was over before it read of it: nothing was begun.

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


class RoundWait:
    """For how long a node waits for a round, and on whom.

    Args:
        config: how long a node waits.
        membership, lead, shared, succession: of the same node; looked at, never changed.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        membership: Membership,
        lead: Lead,
        shared: SharedKeys,
        succession: Succession,
    ) -> None:
        self.cut_off_since: Instant | None = None
        """Since when the others cannot see this node; None while they can."""
        self.store_trouble = ""
        """Why a request to the store failed; empty once one like it has succeeded."""
        self.troubled: Purpose | None = None
        """What that request was for."""
        self.received_at = Instant(0)
        """When the store last answered anything."""
        self.announce_at: Instant | None = None
        self._config = config
        self._membership = membership
        self._lead = lead
        self._shared = shared
        self._succession = succession
        self._since: Instant | None = None
        self._announced = ""
        """What people were told last of this wait."""
        self._again_at = Instant(0)
        """When they are told again, though nothing has changed."""
        self._pause = config.announce_every

    def silence(self, now: Instant) -> str:
        """For how long the store has not answered, in words."""
        return format_duration(between(self.received_at, now))

    def begin(self, now: Instant) -> None:
        """Count from now for how long this node waits, and tell people if it takes long."""
        self._since = now
        self._announced = ""
        self._pause = self._config.announce_every
        self.announce_at = after(now, self._pause)

    def take_note(self, notification: Notification, now: Instant) -> None:
        """What the agent is told may be what was waited for."""
        if isinstance(notification, Settled):
            self._since = self.announce_at = None
        elif isinstance(notification, MadeSpare):
            self._since = now

    @property
    def deadline(self) -> Instant | None:
        """When this node waits no longer; the leader closes a run for which too few come before."""
        if self.cut_off_since is not None:
            return after(self.cut_off_since, self._config.join_timeout)
        if (
            self._since is None
            or self._membership.member_of is not None
            or self._membership.is_spare
        ):
            return None
        patience = 2 * self._config.join_timeout + self._config.close_timeout
        return after(self._since, Duration(patience))

    def give_up(self, now: Instant) -> list[Notification]:
        """Refuse to wait any longer when the deadline has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        waited = format_duration(between(self._since or now, now))
        trouble = self.store_trouble or "the store has answered"
        why, kind = f"no round with this node has started within {waited}", RefusalKind.TIMEOUT
        if self.cut_off_since is not None:
            waited = format_duration(between(self.cut_off_since, now))
            why = f"this node could not register within {waited}"
            if self._membership.round is not None:
                why, kind = f"this node has been cut off for {waited}", RefusalKind.STORE
            if self._membership.was_done:
                why = "its workers were done, but the outcome of the job did not arrive"
                why = f"{why} within {waited}"
        hint = "" if self.store_trouble else "is the store reachable from here?"  # else it says so
        return self._membership.refuse(Refused(kind, f"{why}: {trouble}", hint))

    def announce(self, now: Instant, *, is_leading: bool) -> list[Notification]:
        """Tell people on whom is being waited, if that has changed; else more and more rarely."""
        if self.announce_at is None or now < self.announce_at:
            return []
        self.announce_at = after(now, self._config.announce_every)
        waiting = self._waiting_for(is_leading=is_leading)
        if not waiting or self._since is None or self._membership.knows_the_end:
            return []
        # While others work on, perhaps for hours, what changes is who has ended.
        is_news = waiting != self._announced and not (
            self._announced and self._membership.member_of
        )
        if not is_news and now < self._again_at:
            return []
        self._pause = self._config.announce_every if is_news else Duration(2 * self._pause)
        self._announced, self._again_at = waiting, after(now, self._pause)
        number = 0 if self._membership.round is None else self._membership.round.number
        return [AnnounceWaiting(number, waiting, between(self._since, now))]

    def _waiting_for(self, *, is_leading: bool) -> str:
        """On which nodes this one waits, for people; empty if on none."""
        if self._succession.obstacle:
            return f"to see whether a leader exists, since {self._succession.obstacle}"
        if self.cut_off_since is not None:
            return f"for the store: {self.store_trouble or 'it has not answered yet'}"
        if self._lead.round_trouble and is_leading:
            trouble = self._lead.round_trouble
            return f"for the store, which does not take the next round: {trouble}"
        if self._membership.member_of is not None:
            return self._waiting_for_members()
        if self._membership.is_spare:
            return ""
        if not self._membership.is_fit:
            return "until this node is fit for a round: its checks have not ended"
        if is_leading:
            return self._lead.decision.waiting
        leader = self._shared.leader.value
        if leader is None:
            return "for a node that leads"
        who = leader.decode("utf-8", "backslashreplace")
        round_ = self._membership.round
        is_gathering = round_ is not None and round_.phase is RoundPhase.GATHERING
        why = round_.why if round_ is not None and is_gathering else ""
        return f"for node {who}, which gathers the others{last_end_in_words(why)}"

    def _waiting_for_members(self) -> str:
        """On whom a node waits whose own workers have ended."""
        if not self._membership.has_ended:
            return ""
        if self._membership.is_dissolved:
            return "until this node is fit for the next round"
        view = self._lead.view
        if view is None:
            return "until the workers of the other nodes have ended"
        return f"until the workers of {labels(view, view.blockers())} have ended"
