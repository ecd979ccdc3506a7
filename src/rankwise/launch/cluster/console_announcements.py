"""What an agent tells its user while it runs: one line each on stderr."""

from typing import Any

import msgspec

from rankwise.base.failure import SIGNAL_NAMES, TIME_LIMIT_SIGNAL
from rankwise.base.units import Duration, format_duration
from rankwise.core.agent.vocabulary import (
    Announcement,
    AnnounceRestart,
    AnnounceRound,
    AnnounceRoundEnd,
    AnnounceStop,
)
from rankwise.core.gang.vocabulary import AnnounceKill, AnnounceStuck
from rankwise.core.rendezvous.records import HOSTS_MAX, Verdict
from rankwise.core.rendezvous.vocabulary import AnnounceWaiting, MadeSpare, World
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.job import Job
from rankwise.launch.telling.notices import Say, fields_of

SHOWN_MAX = 8
"""How many hosts a line names."""


class ConsoleAnnouncements:
    """Says the announcements of one agent.

    Attributes:
        first_rank: the lowest of this node's ranks in its last round.
    """

    def __init__(self, job: Job, plan: RendezvousPlan, say: Say) -> None:
        self._job = job
        self._say = say
        self._is_alone = plan.is_alone
        self.first_rank = 0
        self._restarts = 0
        self._place, self._endpoint = plan.place, plan.endpoint
        self._places_known = min(plan.rendezvous.nodes_max, HOSTS_MAX)

    def tell_too_late(self, verdict: Verdict) -> None:
        """Say that nothing was started here, since the run is over."""
        self._say(
            f"the run {self._job.run_id} had {verdict.status} before this node could take "
            "part, so nothing was started here",
            "too-late",
        )

    def tell(self, announcement: Announcement) -> None:
        """Say one of them."""
        match announcement:
            case AnnounceWaiting():
                # Fractions of seconds would only look exact; below one second they are all.
                whole = Duration(round(announcement.waited, -9))
                waited = format_duration(whole or announcement.waited)
                # The error of a store that cannot be reached, which the text may end in, names the
                # endpoint itself: a store of a plug-in says it in words of its own.
                is_placed = bool(self._endpoint) and self._endpoint in announcement.text
                where = "" if is_placed else f"; {self._place}"
                self._say(
                    f"waiting {announcement.text} (since {waited}{where})",
                    "waiting",
                    round=announcement.round,
                )
            case MadeSpare():
                # A round may be smaller than the job: then the next one has room for this node.
                has_place = 0 < len(announcement.lineup.hosts) < self._places_known
                when = "with the next round" if has_place else "as soon as a place is free"
                self._say(
                    f"this node is a spare for now: {announcement.why}; it is taken in {when}",
                    "spare",
                    round=announcement.round,
                )
            case AnnounceRound(world, kept):
                self.first_rank = world.first_rank
                line = round_line(world, kept)
                if world.restarts > self._restarts:
                    self._restarts = world.restarts
                    line += f" (restart {world.restarts} of {self._job.restarts_allowed})"
                self._say(line, "round", called_again=kept, **fields_of_round(world))
            case AnnounceRoundEnd():
                if not self._is_alone:  # who is alone has been told what ended it
                    number, why = announcement.round, announcement.why
                    self._say(f"round {number} is over: {why}", "round-over", round=number)
            case AnnounceStop():
                if not self._is_alone:
                    self._say(stop_line(announcement), "stop", signal=announcement.signal)
            case AnnounceRestart():
                self._tell_restart(announcement)
            case AnnounceKill():
                self._tell_kill(announcement)
            case AnnounceStuck():
                from rankwise.launch.telling.announcements import stuck_line  # noqa: PLC0415  # rare

                self._say(
                    stuck_line(announcement, self.first_rank),
                    "stuck",
                    local_ranks=list(announcement.local_ranks),
                    attempt=announcement.attempt,
                )

    def _tell_restart(self, announcement: AnnounceRestart) -> None:
        from rankwise.launch.telling.announcements import details_of, restart_line  # noqa: PLC0415  # rare

        say, failures = self._say, announcement.failures
        line = restart_line(announcement, failures, self._job.restarts_allowed)
        say(line, "restart", restarts_left=announcement.restarts_left, **fields_of(failures[0]))
        details = details_of(failures)
        if details:
            say(details, "details", rank=failures[0].local_rank, attempt=failures[0].attempt)

    def _tell_kill(self, announcement: AnnounceKill) -> None:
        """Tell the user that workers have not ended and are being killed."""
        from rankwise.launch.telling.announcements import kill_line  # noqa: PLC0415  # rare

        grace = format_duration(self._job.gang.grace)
        line = kill_line(announcement, self.first_rank, grace)
        ranks = list(announcement.local_ranks)
        self._say(line, "kill", local_ranks=ranks, attempt=announcement.attempt)


def round_line(world: World, kept: int = 0) -> str:
    """Say that a round begins: which ranks are here, who is in it, and what has changed."""
    last = world.first_rank + world.slots - 1
    ranks = f"rank {last}" if world.slots == 1 else f"ranks {world.first_rank}-{last}"
    again = f", {kept} of them called again" if kept else ""
    return f"round {world.round}: {ranks} of {world.size} here{again}; {lineup_text(world)}"


def lineup_text(world: World) -> str:
    """The nodes of a round, what has changed since the one before, and why."""
    count, lineup = len(world.members), world.lineup
    hosts = ", ".join(lineup.hosts[:SHOWN_MAX])
    more = f" and {count - SHOWN_MAX} more" if count > SHOWN_MAX else ""
    parts = [f"{count} {'node' if count == 1 else 'nodes'} ({hosts}{more})"]
    for who, what in ((lineup.came, "came"), (lineup.left, "left"), (lineup.reserve, "in reserve")):
        if who:
            more = " and others" if len(who) > SHOWN_MAX else ""
            parts.append(f"{what}: {', '.join(who[:SHOWN_MAX])}{more}")
    if world.why:
        parts.append(f"round {world.round - 1} ended because {world.why}")
    return "; ".join(parts)


def fields_of_round(world: World) -> dict[str, Any]:
    """The same for machines."""
    return {
        "round": world.round,
        "attempt": world.round,
        "node_rank": world.node_rank,
        "rank": world.first_rank,
        "ranks": world.slots,
        "world_size": world.size,
        "restarts": world.restarts,
        **{name: list(hosts) for name, hosts in msgspec.structs.asdict(world.lineup).items()},
        "why": world.why,
    }


def stop_line(announcement: AnnounceStop) -> str:
    """Say that this node has been asked to stop, and what follows."""
    signal = announcement.signal
    who = "asked to stop" if signal is None else SIGNAL_NAMES.get(signal, f"signal {signal}")
    who = "the time limit is over" if signal == TIME_LIMIT_SIGNAL else who
    return f"{who}: {announcement.what_follows}"
