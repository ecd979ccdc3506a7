"""The parts of a session that a node's machine acts through, and who conducts them.

A *conductor* makes what turns the machine: one gang for a run on one node, as here, or an agent
that meets others (`launch.cluster`). It may put what it needs besides onto the stage's `stack`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from rankwise.base.units import format_duration
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import AnnounceKill, AnnounceRestart
from rankwise.drivers.dispatch import Announcement, Dispatch, GangDispatch
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.decoration import FailureDecorator
from rankwise.launch.job import Job
from rankwise.launch.one_gang import OneGang, SteppingRanks
from rankwise.launch.planning import JobPlanner
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal


@dataclass(slots=True, kw_only=True)
class Stage:
    """What a conductor finds.

    Attributes:
        job: what is run.
        stack: takes down, in reverse order, what is put onto it.
        clock, reactor, host, planner, decorator, journal: the parts.
        say: tells the user a sentence on stderr.
    """

    job: Job
    stack: ExitStack
    clock: Clock
    reactor: Reactor
    host: RealProcessHost
    planner: JobPlanner
    decorator: FailureDecorator
    journal: Journal
    say: Callable[[str], None]


Conductor = Callable[[Stage], Dispatch]


def conduct_one_gang(stage: Stage) -> GangDispatch:
    """One gang, with restarts of its own: a run on one node."""

    def announce(announcement: Announcement) -> None:
        match announcement:
            case AnnounceRestart():
                _tell_restart(stage, announcement)
            case AnnounceKill():
                tell_kill(stage, announcement)

    ranks = SteppingRanks(stage.host, stage.planner, stage.reactor, stage.clock)
    stage.stack.callback(ranks.close)
    return OneGang(Gang(stage.job.gang), ranks, stage.clock, stage.journal, announce)


def _tell_restart(stage: Stage, announcement: AnnounceRestart) -> None:
    from rankwise.launch.announcements import details_of, restart_line  # noqa: PLC0415  # rare

    failures = stage.decorator.decorate(announcement.failures)
    stage.say(restart_line(announcement, failures, stage.job.gang.restarts_max))
    details = details_of(failures[0])
    if details:
        stage.say(details)
    stage.decorator.begin_attempt()


def tell_kill(stage: Stage, announcement: AnnounceKill) -> None:
    """Tell the user that workers have not ended and are being killed."""
    from rankwise.launch.announcements import kill_line  # noqa: PLC0415  # rare

    stage.say(kill_line(announcement, format_duration(stage.job.gang.grace)))
