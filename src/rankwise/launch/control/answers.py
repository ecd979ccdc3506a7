"""What a running agent answers: its status, and where its ranks stand."""

from collections.abc import Callable

from rankwise.base.units import SECOND
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.launch.cluster.agent_runner import AgentRunner
from rankwise.launch.control.server import Reply, Request
from rankwise.launch.job import Job, program_name
from rankwise.launch.planning import JobPlanner
from rankwise.ports.clock import Clock


class ControlAnswers:
    """Answers questions about one run; `explain` answers why its ranks do not get on."""

    def __init__(
        self,
        job: Job,
        dispatch: AgentRunner,
        host: RealProcessHost,
        planner: JobPlanner,
        clock: Clock,
        *,
        explain: Callable[[Reply], None],
    ) -> None:
        self._job = job
        self._dispatch = dispatch
        self._host = host
        self._planner = planner
        self._clock = clock
        self._explain = explain
        self._began_at = clock.now()

    def on_request(self, request: Request, reply: Reply) -> None:
        """Answer at once, or when the workers have been asked."""
        match request.ask:
            case "status":
                reply.send(self._status())
                reply.finish()
            case "stacks":
                self._host.collect_stacks(lambda stacks: self._reply_stacks(stacks, reply))
            case "why":
                self._explain(reply)

    def _status(self) -> dict[str, object]:
        gang = self._dispatch.gang
        status: dict[str, object] = {
            "nproc": self._job.gang.size,
            "state": "meeting" if gang is None else str(gang.phase),
            "age_s": (self._clock.now() - self._began_at) / SECOND,
            "program": program_name(self._job),
            "attempt": 0 if gang is None else gang.attempt,
        }
        if gang is not None:  # between two rounds this node has no place among the others
            world = self._planner.world
            status |= {
                "node_rank": world.node_rank,
                "nodes": world.node_count,
                "first_rank": world.first_rank,
                "world_size": world.size,
            }
            if world.restarts is not None:  # agreed upon by nodes, however few there are
                status["round"] = gang.attempt
            if lineup := self._dispatch.lineup:
                status["lineup"] = lineup
        return status

    def _reply_stacks(self, stacks: dict[int, str], reply: Reply) -> None:
        from rankwise.launch.failure_report.stacks import fatal_lines  # noqa: PLC0415  # rarely asked

        pids = self._host.pids()
        if not pids:
            reply.send({"error": "none of its ranks is running now"})
        for local_rank, pid in sorted(pids.items()):
            rank = self._planner.world.rank(local_rank)
            lines = fatal_lines(stacks.get(local_rank, ""))
            reply.send({"rank": rank, "pid": pid, "stacks": "\n".join(lines)})
        reply.finish()
