"""What a running agent answers: its status, where its ranks stand, and what they write."""

import os
from collections.abc import Callable

from rankwise.base.failure import Outcome
from rankwise.base.units import SECOND, Instant
from rankwise.launch.cluster.agent_runner import AgentRunner
from rankwise.launch.control.server import ControlRequest, Reply
from rankwise.launch.run.log_layout import LogPlaces
from rankwise.launch.run.run_parts import RunParts


class ControlAnswers:
    """Answers questions about one run; `stop` is told that it is to end, and whether at once."""

    def __init__(
        self,
        parts: RunParts,
        dispatch: AgentRunner,
        places: LogPlaces,
        stop: Callable[[bool], None],
        began_at: Instant,
    ) -> None:
        self._parts = parts
        self._job, self._host, self._planner = parts.job, parts.host, parts.planner
        self._dispatch = dispatch
        self._places = places
        self._stop = stop
        self._began_at = began_at
        self._awaiting_end: list[Reply] = []

    def on_request(self, request: ControlRequest, reply: Reply) -> None:
        """Answer at once, or when the workers have been asked."""
        match request.ask:
            case "status":
                reply.send(self._status())
                reply.finish()
            case "ranks" | "stacks" | "why" if self._dispatch.gang is None:
                told = "no rank runs before the nodes have met; its stderr tells what it waits for"
                self._refuse(reply, told)
                reply.finish()
            case "ranks":  # which do not learn of it: py-spy looks into them
                self._reply_stacks({}, reply)
            case "stacks":
                self._host.collect_stacks(lambda stacks: self._reply_stacks(stacks, reply))
            case "why":
                self._parts.watches.answer_why(reply)
            case "logs":
                self._show_logs(request, reply)
            case "end":
                reply.send({"state": "going on"})
                self._awaiting_end = [each for each in self._awaiting_end if each.is_wanted]
                self._awaiting_end.append(reply)
            case "stop":
                self._stop(request.at_once)
                # The answer ends when this run does.
                reply.send(
                    {"stopping": len(self._host.living()), "grace_s": self._job.gang.grace / SECOND}
                )

    def _refuse(self, reply: Reply, why: str) -> None:
        """Say why there is no answer; with the run's name, which its socket's may hide."""
        reply.send({"error": why, "run_id": self._job.run_id})

    def tell_end(self, outcome: Outcome) -> None:
        """Tell those who asked for it that the run is over, and how."""
        for reply in self._awaiting_end:
            reply.send(_end_of(outcome))
            reply.finish()

    def _status(self) -> dict[str, object]:
        from rankwise.launch.looking.rank_status import ranks_now  # noqa: PLC0415  # few runs are asked

        gang = self._dispatch.gang
        status: dict[str, object] = {
            "run_id": self._job.run_id,
            "nproc": self._job.gang.size,
            "state": "meeting" if gang is None else str(gang.phase),
            "age_s": (self._parts.clock.now() - self._began_at) / SECOND,
            "calling_s": self._parts.watches.calling() / SECOND,
            "program": self._job.program_name,
            "attempt": 0 if gang is None else gang.attempt,
            "restarts_max": self._job.restarts_allowed,
            "log_dir": self._log_directory(),
            "place": "" if self._job.cluster is None else self._job.cluster.place,
        }
        if (gpus := self._parts.evidence.gpus) is not None:
            status["xids"] = gpus.describe_xids()
        if gang is not None:  # between two rounds this node has no place among the others
            ranks = self._planner.ranks
            counts, latest = self._dispatch.failures_so_far
            status |= {
                "node_rank": ranks.node_rank,
                "nodes": ranks.node_count,
                "first_rank": ranks.first_rank,
                "world_size": ranks.size,
                "restarts": gang.attempt if ranks.restarts is None else ranks.restarts,
                "failures": counts,
                "latest_failure": latest,
                "workers": ranks_now(
                    gang,
                    ranks,
                    self._planner.segment,
                    self._parts.watches.delays(),
                    self._parts.clock.now(),
                    waited_so_far=self._parts.watches.waited_so_far,
                ),
            }
            if lineup := self._dispatch.lineup:  # agreed upon by nodes, however few there are
                status |= {"round": gang.attempt, "lineup": lineup}
        return status

    def _log_directory(self) -> str | None:
        directory = self._places.directory if self._places.keep else None
        return os.path.abspath(directory) if directory else None

    def _show_logs(self, request: ControlRequest, reply: Reply) -> None:
        from rankwise.launch.looking.log_readers import StreamName, WrittenExtent  # noqa: PLC0415  # rarely asked

        here, files = self._planner.ranks, self._planner.destinations
        ranks = range(here.first_rank, here.first_rank + self._job.gang.size)
        if request.rank is not None and request.rank not in ranks:
            told = f"there is no rank {request.rank} here, its ranks are {ranks[0]} to {ranks[-1]}"
            self._refuse(reply, told)
            reply.finish()
            return
        streams = [
            WrittenExtent(
                StreamName(here.rank(local_rank), link.attempt, name),
                os.path.abspath(path) if (path := paths.get(local_rank)) else "",
                stream.tail.kept,
            )
            for local_rank, link in sorted(self._host.links.items())
            for name, stream, paths in (
                ("stdout", link.stdout, files.stdouts),
                ("stderr", link.stderr, files.stderrs),
            )
        ]
        self._planner.log_readers.serve(request, reply, streams)

    def _reply_stacks(self, stacks: dict[int, str], reply: Reply) -> None:
        from rankwise.launch.telling.failure_report.stacks import fatal_lines  # noqa: PLC0415  # rarely asked

        pids = self._host.living()
        if not pids:
            self._refuse(reply, "none of its ranks is running now")
        for local_rank, pid in sorted(pids.items()):
            rank = self._planner.ranks.rank(local_rank)
            lines = fatal_lines(stacks.get(local_rank, ""))
            reply.send({"rank": rank, "pid": pid, "stacks": "\n".join(lines)})
        reply.finish()


def _end_of(outcome: Outcome) -> dict[str, object]:
    from rankwise.launch.telling.failure_report.sentences import one_line  # noqa: PLC0415  # few runs are asked

    why = one_line(outcome.failures[0]) if outcome.failures else outcome.detail
    return {"state": str(outcome.status), "starts": outcome.attempts, "why": why}
