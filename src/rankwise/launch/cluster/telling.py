"""What an agent tells its user while nodes meet, come and go: one line each on stderr."""

from rankwise.base.units import format_duration
from rankwise.core.agent.vocabulary import Announcement, AnnounceRoundEnd
from rankwise.core.gang.vocabulary import AnnounceKill
from rankwise.core.rendezvous.records import Verdict
from rankwise.core.rendezvous.vocabulary import AnnounceWaiting, MadeSpare
from rankwise.launch.cluster.plan import ClusterPlan
from rankwise.launch.stage import Stage, tell_kill


class ClusterTeller:
    """Says the announcements of one agent."""

    def __init__(self, stage: Stage, plan: ClusterPlan) -> None:
        self._stage = stage
        self._place = f"{plan.backend} at {plan.endpoint}" if plan.endpoint else plan.backend

    def tell_too_late(self, verdict: Verdict) -> None:
        """Say that nothing was started here, since the run is over."""
        self._stage.say(
            f"the run {self._stage.job.run_id} had {verdict.status} before this node could take "
            "part, so nothing was started here"
        )

    def tell(self, announcement: Announcement) -> None:
        """Say one of them."""
        match announcement:
            case AnnounceWaiting():
                waited = format_duration(announcement.waited)
                self._stage.say(f"waiting {announcement.text} (since {waited}; {self._place})")
            case MadeSpare():
                self._stage.say(
                    f"this node is a spare for now: {announcement.why}; it is taken in as soon as "
                    "a seat is free"
                )
            case AnnounceRoundEnd():
                self._stage.say(f"round {announcement.round} is over: {announcement.why}")
            case AnnounceKill():
                tell_kill(self._stage, announcement)
