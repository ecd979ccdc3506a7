"""The parts of a session that a node's agent acts through."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import msgspec

from rankwise.core.rendezvous.vocabulary import BooksWanted, InquiryAnswered
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.decoration import FailureDecorator
from rankwise.launch.job import Job
from rankwise.launch.notices import Say
from rankwise.launch.planning import JobPlanner
from rankwise.launch.run_history import RunHistory
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal

if TYPE_CHECKING:
    from rankwise.core.ledger import Delay


class KnowsCalls(Protocol):
    """Who knows the collective calls of this node's ranks."""

    def delays(self) -> "tuple[Delay, ...]":
        """What each rank has cost the others by coming late."""
        ...

    def tell_books(self, wanted: BooksWanted, on_sheet: Callable[[bytes], None]) -> None:
        """Make a sheet of the ranks' books for the other nodes."""
        ...

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        """The trouble that the other nodes were asked about has been looked into."""
        ...


class RunParts(msgspec.Struct, kw_only=True):
    """What an agent's driver finds; it may put what it needs besides onto the `stack`.

    Attributes:
        job: what is run.
        stack: takes down, in reverse order, what is put onto it.
        clock, reactor, host, planner, decorator, journal: the parts.
        calls: knows the ranks' collective calls.
        history: remembers the attempts.
        say: tells the user a sentence on stderr, or a machine an object.
    """

    job: Job
    stack: ExitStack
    clock: Clock
    reactor: Reactor
    host: RealProcessHost
    planner: JobPlanner
    decorator: FailureDecorator
    journal: Journal | None
    calls: KnowsCalls
    history: RunHistory
    say: Say
