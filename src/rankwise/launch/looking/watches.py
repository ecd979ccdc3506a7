"""Answers to questions about the ranks of a run.

The exit watch of the agent (`core/watch`) asks while it holds an exit back, `rankwise why` and the
time limit when they are due. The watches that find it out (`call_watch.py`, `hang_watch.py`) are
loaded when there is something to watch: that takes its time.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.units import ZERO, Duration, Instant, between
from rankwise.base.wording import BY_SIGNAL, ranks_in_words
from rankwise.core.gang.state import GangPhase
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.vocabulary import (
    AskRanks,
    AwaitedFound,
    CallsBegan,
    FindAwaited,
    HostAnswer,
    JudgeCalls,
    LookAtEnd,
    LookAtPast,
    LookOrder,
    RanksAnswered,
)

if TYPE_CHECKING:
    from rankwise.core.ledger import Delay
    from rankwise.core.rendezvous.vocabulary import CallRecordsWanted, InquiryAnswered
    from rankwise.drivers.real.process_host import RealProcessHost
    from rankwise.drivers.real.reactor import Reactor
    from rankwise.drivers.real.report_pipe import Recorded
    from rankwise.launch.cluster.agent_runner import AgentRunner
    from rankwise.launch.control.server import Reply
    from rankwise.launch.looking.call_watch import CallWatch
    from rankwise.launch.looking.hang_explanation import HangExplanation, NodesAnswer
    from rankwise.launch.looking.hang_watch import HangWatch
    from rankwise.launch.looking.rank_records import RunRecorder
    from rankwise.launch.looking.rank_status import WaitedSoFar
    from rankwise.launch.run.planning import JobPlanner
    from rankwise.launch.telling.notices import Say
    from rankwise.ports.clock import Clock


class Watches:
    """Looks at the processes of a run for its agent; `attach` comes before the first fact.

    Args:
        hang_timeout: how long ranks may make no progress; None for any time.
        planner: knows the memory that holds the ranks' call records.
        reactor: wakes the watches.
        clock: tells the time to them.
        say: tells the user something.
        recorder: what the ranks do is recorded there, if it is; asked for when a rank starts.
        starting_server: the process of the fork server while it imports, if there is one.
    """

    def __init__(
        self,
        hang_timeout: Duration | None,
        planner: "JobPlanner",
        reactor: "Reactor",
        clock: "Clock",
        *,
        say: "Say",
        recorder: Callable[[], "RunRecorder | None"],
        starting_server: Callable[[], int | None],
    ) -> None:
        self._hang_timeout = hang_timeout
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._say = say
        self._recorder = recorder
        self._starting_server = starting_server
        self._curious: list[Callable[[InquiryAnswered | None], None]] = []
        """The callers that wait for what the other nodes tell."""
        self._awaits_lateness = False
        """Whether the exit watch asks the other nodes which rank made others wait."""
        self.ledger_lacks = ""
        """What the ledger does not have, in a sentence; empty if nothing."""

    def attach(self, host: "RealProcessHost", agent: "AgentRunner") -> None:
        """Say who has the processes, and who is told of them."""
        self._host = host
        self._agent = agent

    def on_spawned(self) -> None:
        """A rank has a process."""
        if self._hang_timeout is not None:
            self._hang_watch.begin()

    def look(self, order: LookOrder, deliver: Callable[[HostAnswer], None]) -> None:
        """Find out what the exit watch wants to know of the ranks, and tell it."""
        calls = self._call_watch
        match order:
            case LookAtEnd():
                deliver(calls.look_at_end(order))
            case AskRanks():
                calls.ask_for_hold(lambda asked: deliver(RanksAnswered(order.attempt, asked)))
            case JudgeCalls():
                deliver(calls.judge(order))
            case LookAtPast():
                looked = calls.look_at_past(order)
                self._awaits_lateness = looked.asks_who_is_late
                deliver(looked)
            case FindAwaited():
                deliver(self._find_awaited(order))

    def _find_awaited(self, order: FindAwaited) -> AwaitedFound:
        # One that is stopped is what the others wait for, whatever their call records say.
        stopped = self._host.stopped()
        is_all = len(stopped) == len(self._host.living())
        awaited = self._call_watch.awaited() if is_all or not stopped else stopped
        return AwaitedFound(order.attempt, awaited, tuple(map(self._planner.ranks.rank, awaited)))

    def on_inquiry_answered(self, answered: "InquiryAnswered") -> None:
        """The trouble that the other nodes were asked about has been looked into."""
        if self._awaits_lateness:
            self._awaits_lateness = False
            self._call_watch.lateness.on_late(answered)
        curious, self._curious = self._curious, []
        for on_answer in curious:
            on_answer(answered)

    def tell_call_records(
        self, wanted: "CallRecordsWanted", on_sheet: Callable[[bytes], None]
    ) -> None:
        """Make a sheet of the ranks' call records for the other nodes."""
        self._call_watch.tell_call_records(
            wanted.trouble, on_sheet, with_recorders=wanted.with_recorders
        )

    def take_last_look(self) -> "tuple[Delay, str] | None":
        """The rank that made the others wait notably in collectives, and that in a sentence."""
        return self._call_watch.lateness.take_last_look() if self._has_watch else None

    @cached_property
    def waited_so_far(self) -> "WaitedSoFar":
        """What was told of how long others have waited for ranks, also to other askers."""
        from rankwise.launch.looking.rank_status import WaitedSoFar  # noqa: PLC0415  # few runs are asked

        return WaitedSoFar()

    def delays(self) -> "tuple[Delay, ...]":
        """What each rank has cost the others by coming late to collectives."""
        return self._call_watch.lateness.delays() if self._has_watch else ()

    def calling(self) -> Duration:
        """For how long ranks have taken part: what lateness is a share of."""
        return self._call_watch.lateness.lasted if self._has_watch else ZERO

    def on_calls(self) -> None:
        """A rank enters its calls."""
        attempt = self._call_watch.begin()
        if attempt is not None:
            self._agent.deliver(CallsBegan(attempt))

    def on_recorded(self, local_rank: int, recorded: "Recorded") -> None:
        """A rank has told what torch's flight recorder has."""
        self._call_watch.on_recorded(local_rank, recorded)

    def on_ledger_off(self, why: str) -> None:
        """A rank cannot enter its calls, or not all: say so, for the first one."""
        if not self.ledger_lacks:
            self.ledger_lacks = (
                f"the ledger of collectives {why}; a report may blame a rank that only waited for "
                "another"
            )
            self._say(self.ledger_lacks, "no-ledger")

    def begin_start(self) -> None:
        """A rank is about to be made: watch the fork server that imports for it."""
        if self._hang_timeout is not None and self._starting_server() is not None:
            self._hang_watch.begin()

    def last_progress(self) -> Instant:
        """When a rank last made progress."""
        return self._hang_watch.last_progress()

    def answer_why(self, reply: "Reply") -> None:
        """Answer `rankwise why`."""
        self._hang_watch.answer(reply)

    def ask_recorders(self, on_answers: Callable[[], None]) -> None:
        """Ask the ranks what C++ has called; call back when they have told, or cannot."""
        self._call_watch.ask(on_answers)

    def ask_other_nodes(self, on_answer: Callable[["NodesAnswer | None"], None]) -> None:
        """Ask the other nodes what their ranks do."""

        def tell(answered: "InquiryAnswered | None") -> None:
            on_answer(None if answered is None else self._agent.nodes_answered(answered))

        self._ask_nodes(Trouble.WHY, tell)

    def explain_hang(self) -> tuple["HangExplanation", Mapping[int, str]]:
        """The ranks to blame for a hang, if known; and what each rank waits for."""
        from rankwise.launch.looking.hang_explanation import HangExplanation  # noqa: PLC0415  # rare

        blame, waits = self._call_watch.explain_hang()
        found = HangExplanation()
        if blame is not None:
            found = HangExplanation(blame.text, blame.identity)
        elif "_hang_watch" in vars(self):
            # Call records do not show a program that polls a file, a queue or a store of its own.
            found = self._hang_watch.explain_by_polling()
        if stopped := [self._planner.ranks.rank(each) for each in self._host.stopped()]:
            are = "is" if len(stopped) == 1 else "are"
            told = f"{ranks_in_words(stopped)} {are} {BY_SIGNAL}"
            text = told if found.is_empty else f"{told}; {found.text}"
            found = msgspec.structs.replace(found, text=text, stopped=tuple(stopped))
        return found, waits

    def on_suspended(self, since: Instant, until: Instant) -> None:
        """Take note that all ranks were stopped for a while."""
        if self._has_watch:
            self._call_watch.lateness.on_suspended(since, until)
        if "_hang_watch" in vars(self):
            self._hang_watch.on_suspended(between(since, until))

    @property
    def _has_watch(self) -> bool:
        """Whether ranks have made calls, so that there is a call record to look into."""
        return "_call_watch" in vars(self)

    def _ask_nodes(
        self, trouble: Trouble, on_answer: Callable[["InquiryAnswered | None"], None]
    ) -> None:
        """Have the other nodes asked; calls back with None at once if there are none."""
        self._curious.append(on_answer)
        if not self._agent.ask_nodes(trouble) and on_answer in self._curious:
            self._curious.remove(on_answer)
            on_answer(None)

    def warn_of_hang(self, still: Duration, verdict: str) -> None:
        """Say half-way that the hang timeout is running, and what is known."""
        from rankwise.launch.telling.announcements import hang_warning  # noqa: PLC0415  # rare

        hang_timeout, gang = self._hang_timeout, self._agent.gang
        assert hang_timeout is not None, "without a hang timeout there is no warning of a hang"
        if gang is None or gang.phase is not GangPhase.RUNNING:
            return  # they are being stopped, or wait for another node: nothing is timed
        self._say(hang_warning(still, hang_timeout, verdict), "hang-warning")

    @cached_property
    def _call_watch(self) -> "CallWatch":
        """Loaded when ranks make calls that it watches, or one has failed."""
        from rankwise.launch.looking.call_watch import CallWatch  # noqa: PLC0415  # rare

        recorder = self._recorder()
        return CallWatch(
            self._host,
            self._planner,
            self._reactor,
            self._clock,
            blame=self._agent.deliver,
            ask_nodes=self._agent.ask_nodes,
            is_holding=lambda: self._agent.is_holding,
            hang_timeout=self._hang_timeout,
            on_cpp_calls=None if recorder is None else recorder.on_cpp_calls,
        )

    @cached_property
    def _hang_watch(self) -> "HangWatch":
        """Loaded where there is a hang timeout, or at the first question why ranks wait."""
        from rankwise.launch.looking.hang_watch import HangWatch  # noqa: PLC0415  # rare

        return HangWatch(
            hang_timeout=self._hang_timeout,
            host=self._host,
            planner=self._planner,
            reactor=self._reactor,
            clock=self._clock,
            watches=self,
            starting_server=self._starting_server,
        )
