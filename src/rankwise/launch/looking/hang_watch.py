"""Looks at what the ranks of this node do: rarely for `--hang-timeout`, at once for `rankwise why`.

`rankwise.core.gang.progress` decides what is progress, and when to look next; here is what a look
reads: the kernel's counts of the ranks' processes, the words that ranks write into their segment,
and their call records.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after, between
from rankwise.base.wording import ranks_in_words
from rankwise.core.gang.progress import Activity, Doing, ProgressWatch
from rankwise.drivers.real.call_rings import calls_begun, polls_in_vain, read_call_record
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.process_work import is_stopped, works_of
from rankwise.drivers.real.reactor import Reactor, ReactorTimer
from rankwise.drivers.real.worker_link import WorkerLink
from rankwise.launch.looking.hang_explanation import HangExplanation, NodesAnswer, best_of
from rankwise.launch.looking.rank_activity import activity_of
from rankwise.launch.run.planning import JobPlanner
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.launch.control.server import Reply
    from rankwise.launch.looking.watches import Watches

_SERVER = -1
"""The fork server among the ranks, while it imports what they need."""
WINDOW = Duration(500 * MILLISECOND)
"""How long ranks are watched for an answer to `rankwise why`."""


class HangWatch:
    """Watches the progress of one run's ranks on this node.

    Args:
        hang_timeout: without progress of any rank for so long they have hung; None for never.
        host: knows the ranks' processes.
        planner: knows the memory that they share.
        reactor: wakes for the next look.
        clock: tells when a look was.
        starting_server: the process of the fork server while it imports, if there is one.
        watches: ask the ranks and the other nodes, and read who waits for whom.
    """

    def __init__(
        self,
        *,
        hang_timeout: Duration | None,
        host: RealProcessHost,
        planner: JobPlanner,
        reactor: Reactor,
        clock: Clock,
        watches: "Watches",
        starting_server: Callable[[], int | None],
    ) -> None:
        self._host = host
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._watches = watches
        self._starting_server = starting_server
        self._watch = ProgressWatch(hang_timeout, clock.now())
        self._timer: ReactorTimer | None = None
        self._in_call_since: dict[int, Instant] = {}

    def begin(self) -> None:
        """Look at the ranks from now on, as often as the watch wants to."""
        if self._timer is None:
            self._look()

    def on_suspended(self, duration: Duration) -> None:
        """Take note that ranks and agent were stopped for so long, and have just gone on."""
        self._watch.on_suspended(duration)

    def last_progress(self) -> Instant:
        """When any rank last made progress, as of now."""
        self._look()
        return self._watch.last_progress

    def explain_by_polling(self) -> HangExplanation:
        """Which ranks poll while others do not wake up; empty unless there are both.

        It accuses no rank: one that does not wake up sleeps, or waits for anything.
        """
        doing = {
            self._planner.ranks.rank(local_rank): known.doing
            for local_rank, known in self._watch.ranks.items()
            if local_rank != _SERVER
        }
        polling = [rank for rank, did in doing.items() if did is Doing.POLLS]
        still = [rank for rank, did in doing.items() if did is Doing.NOTHING]
        if not polling or not still:
            return HangExplanation()
        wake = "does not wake up" if len(still) == 1 else "do not wake up"
        poll = "polls" if len(polling) == 1 else "poll"
        text = f"{ranks_in_words(still)} {wake}, while {ranks_in_words(polling)} {poll}"
        return HangExplanation(text, asleep=tuple(still), polling=tuple(polling))

    def answer(self, reply: "Reply") -> None:
        """Tell what each rank does, in a moment: it takes two looks, on all nodes.

        The ranks are asked at each: an answer of a while ago tells of calls that may be over.
        """
        self._watches.ask_recorders(partial(self._look_first, reply))

    def _look_first(self, reply: "Reply") -> None:
        self._look()
        own, _ = self._watches.explain_hang()
        self._watches.ask_other_nodes(partial(self._look_later, own, reply))

    def _look_later(self, own: HangExplanation, reply: "Reply", told: NodesAnswer | None) -> None:
        again = after(self._clock.now(), WINDOW)
        self._reactor.call_at(again, partial(self._look_again, best_of(own, told), reply))

    def _look_again(self, before: HangExplanation, reply: "Reply") -> None:
        self._look()
        self._watches.ask_recorders(
            lambda: self._watches.ask_other_nodes(partial(self._compare, before, reply))
        )

    def _compare(self, before: HangExplanation, reply: "Reply", told: NodesAnswer | None) -> None:
        own, waits = self._watches.explain_hang()
        now = best_of(own, told)
        # A rank that is late for a moment does not keep others in the same call all the time.
        header: dict[str, Any] = {"verdict": now.text if now.agrees_with(before) else ""}
        if told is not None:
            header |= {"others": told.others, "silent": told.silent}
        if lacks := self._watches.ledger_lacks:
            header["ledger"] = lacks
        self._host.collect_stacks(partial(self._answer, header, waits, reply))

    def _answer(
        self,
        header: dict[str, Any],
        waits: Mapping[int, str],
        reply: "Reply",
        stacks: Mapping[int, str],
    ) -> None:
        from rankwise.launch.telling.failure_report.stacks import innermost_frames  # noqa: PLC0415  # rarely asked

        alive = {link.local_rank: link.pid for link in self._alive() if link.pid is not None}
        if not alive:
            reply.send({"error": "none of its ranks is running now"})
        reply.send(header)
        awaited_s = self._awaited_s()
        for local_rank, pid in sorted(alive.items()):
            line = self._what_it_does(local_rank)
            reply.send(
                {"rank": self._planner.ranks.rank(local_rank), "pid": pid}
                | line
                | {
                    "waits_for": waits.get(local_rank, ""),
                    "awaited_s": awaited_s.get(local_rank),
                    "is_stopped": is_stopped(pid),
                    "frames": innermost_frames(stacks.get(local_rank, "")),
                }
            )
        reply.finish()

    def _awaited_s(self) -> dict[int, float]:
        """For how long ranks of this node have waited in calls for each one, in seconds."""
        from rankwise.drivers.real.last_calls import awaited, last_call  # noqa: PLC0415  # rarely asked

        segment, now = self._planner.segment, self._clock.now()
        if segment is None:
            return {}
        calls = {link.local_rank: last_call(segment, link.local_rank) for link in self._alive()}
        known = {rank: call for rank, call in calls.items() if call is not None}
        found = awaited(segment, known, now)
        return {rank: between(since, now) / SECOND for rank, (_, since) in found.items()}

    def _what_it_does(self, local_rank: int) -> dict[str, Any]:
        known = self._watch.ranks.get(local_rank)
        if known is None:
            return {"doing": str(Doing.NOTHING)}
        line: dict[str, Any] = {"doing": str(known.doing)}
        if not known.doing.is_progress:
            since = self._in_call_since.get(local_rank, known.last_progress)
            line["still_s"] = between(since, self._clock.now()) / SECOND
        return line

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        links, server = self._alive(), self._starting_server()
        if not links and server is None:
            return  # the next rank that is made begins again
        now = self._clock.now()
        works = self._works(links)
        if server and server in (done := works_of([server])):
            works[_SERVER] = activity_of(server, done[server])
        self._watch.look(works, now)
        if self._watch.warns(now):
            self._watches.ask_recorders(
                partial(self._tell_half, between(self._watch.last_progress, now))
            )
        if (at := self._watch.next_look) is not None:
            self._timer = self._reactor.call_at(at, self._look)

    def _tell_half(self, still: Duration) -> None:
        self._watches.warn_of_hang(still, self._watches.explain_hang()[0].text)

    def _alive(self) -> list[WorkerLink]:
        links = self._host.links.values()
        return [link for link in links if link.pid is not None and not link.is_over]

    def _works(self, links: Iterable[WorkerLink]) -> dict[int, Activity]:
        pids = {link.local_rank: link.pid for link in links if link.pid is not None}
        done = works_of(pids.values())
        works = {}
        for link in links:
            if link.pid not in done:
                continue
            process = done[link.pid]
            marks, in_call_since = self._marks(link.local_rank)
            if in_call_since is None:
                self._in_call_since.pop(link.local_rank, None)
            else:
                self._in_call_since[link.local_rank] = in_call_since
            output = sum(stream.pump.byte_count for stream in link.streams)
            works[link.local_rank] = msgspec.structs.replace(
                activity_of(link.pid, process),
                marks=marks,
                is_in_call=in_call_since is not None,
                polls=self._polls(link.local_rank),
                byte_count=process.byte_count - output,
            )
        return works

    def _polls(self, local_rank: int) -> int:
        segment = self._planner.segment
        return 0 if segment is None else polls_in_vain(segment, local_rank)

    def _marks(self, local_rank: int) -> tuple[tuple[int, ...], Instant | None]:
        """How far a rank has come, and since when it is in a collective call, if it is."""
        segment = self._planner.segment
        if segment is None:
            return (), None
        marks = segment.marks(local_rank)
        record = read_call_record(segment, local_rank, self._planner.ranks.rank(0))
        if record is None:
            return marks, None
        call = record.call_of_main_thread
        since = None if call is None else call.begun_at
        return (*marks, calls_begun(segment, local_rank), since or 0), since
