"""The parts of a session that a node's agent acts through."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.failure import Failure
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.looking.process_evidence import ProcessEvidence
from rankwise.launch.looking.watches import Watches
from rankwise.launch.run.job import Job
from rankwise.launch.run.planning import JobPlanner
from rankwise.launch.run.run_history import RunHistory
from rankwise.launch.telling.notices import Say
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal

if TYPE_CHECKING:
    from rankwise.launch.looking.rank_records import RunRecorder


class RunParts(msgspec.Struct, kw_only=True):
    """What an agent's driver finds; it may put what it needs besides onto the `stack`.

    Attributes:
        job: what is run.
        stack: takes down, in reverse order, what is put onto it.
        clock, reactor, host, planner, evidence, journal: the parts.
        describe: describes failures, each once.
        recorder: records what ranks do, if the run has a journal; asked for when a rank starts.
        watches: know what the ranks do.
        history: remembers the attempts.
        say: tells the user a sentence on stderr, or a machine an object.
    """

    job: Job
    stack: ExitStack
    clock: Clock
    reactor: Reactor
    host: RealProcessHost
    planner: JobPlanner
    evidence: ProcessEvidence
    describe: Callable[[tuple[Failure, ...]], tuple[Failure, ...]]
    journal: Journal | None
    recorder: "Callable[[], RunRecorder | None]"
    watches: Watches
    history: RunHistory
    say: Say
