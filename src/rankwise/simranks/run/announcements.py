"""What the agents of simulated nodes tell the user, who sees all of them on one console.

An announcement that all agents make alike, such as the begin of a round, is said once.
"""

from typing import Any

from rankwise.base.wording import counted
from rankwise.core.agent.vocabulary import (
    Announcement,
    AnnounceRound,
    AnnounceRoundEnd,
    AnnounceStop,
)
from rankwise.core.rendezvous.vocabulary import AnnounceWaiting
from rankwise.launch.cluster.console_announcements import (
    ConsoleAnnouncements,
    fields_of_round,
    lineup_text,
    stop_line,
)
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.job import Job
from rankwise.launch.telling.notices import Say


class NodesAnnouncements:
    """Says the announcements of all agents of a run.

    Args:
        job: what each node runs.
        plan: of each node.
        say: tells the user a line.
        is_alone: whether one agent stands for all nodes, as on a machine alone.
    """

    def __init__(self, job: Job, plan: RendezvousPlan, say: Say, *, is_alone: bool) -> None:
        self._job = job
        self._plan = plan
        self._say = say
        self._is_alone = is_alone
        self._consoles: dict[str, ConsoleAnnouncements] = {}
        self._shown: set[str] = set()
        self._lost: dict[int, list[str]] = {}

    def note_loss(self, round_number: int, host: str) -> None:
        """A node has died in a round, of which the agents will see only what follows from it."""
        self._lost.setdefault(round_number, []).append(host)

    def tell(self, host: str, announcement: Announcement) -> None:
        """Say what the agent of a host announces, unless another one has."""
        match announcement:
            case AnnounceRound(world):
                self._console(host).first_rank = world.first_rank
                line = f"round {world.round}: {counted(world.size)}; {lineup_text(world)}"
                self._once(line, "round", **fields_of_round(world))
            case AnnounceRoundEnd(number, why) if not self._is_alone:
                text = f": {self._with_losses(number, why)}"
                self._once(f"round {number} is over", "round-over", text, round=number)
            case AnnounceStop() if not self._is_alone:
                self._once(stop_line(announcement), "stop", signal=announcement.signal)
            case AnnounceWaiting():
                text = f"waiting {announcement.text}"
                self._once(text, "waiting", round=announcement.round)
            case _:
                self._console(host).tell(announcement)

    def _console(self, host: str) -> ConsoleAnnouncements:
        if host not in self._consoles:
            self._consoles[host] = ConsoleAnnouncements(self._job, self._plan, self._say_of(host))
        return self._consoles[host]

    def _with_losses(self, number: int, why: str) -> str:
        """Why a round is over, with the nodes that were lost in it."""
        # The leader's sentence names a node that it has missed itself: to say it once.
        lost = [host for host in self._lost.get(number, ()) if host not in why]
        if not lost:
            return why
        nodes = f"node {lost[0]} was" if len(lost) == 1 else f"nodes {', '.join(lost)} were"
        return f"{nodes} lost, and {why}"

    def _once(self, line: str, event: str, more: str = "", **fields: Any) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._say(line + more, event, **fields)

    def _say_of(self, host: str) -> Say:
        if self._is_alone:
            return self._say
        return lambda message, event="notice", **fields: self._say(
            f"{host}: {message}", event, host=host, **fields
        )
