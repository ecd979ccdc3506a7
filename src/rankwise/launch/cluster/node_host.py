"""The real node: a process host that knows what else an agent asks of its machine.

Long work is done in threads, whose results are posted into the reactor: the checks before a round,
and the wait for ranks that are to stop at one step. Everything else is the process host's.

A rank that counts its steps (`rankwise.should_stop`) is not sent the signal by which a job is asked
to stop while its ranks agree on a step: it would end a step too early. It keeps its grace, and the
kill at its end is sent as ever. One that takes SIGTERM for such a request is ended by SIGKILL where
others are ended by SIGTERM: it would have died of that at once, had it not asked `should_stop`.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rankwise.base.errors import RankwiseError
from rankwise.base.failure import Failure, FailureCause
from rankwise.core.agent.vocabulary import (
    FailuresDescribed,
    PreparationFailed,
    RanksStood,
    RoundPrepared,
    StepReported,
    Stimulus,
)
from rankwise.core.gang.vocabulary import RecoveryOrder, WorkerExited
from rankwise.core.rendezvous.vocabulary import (
    CallRecordsReported,
    CallRecordsWanted,
    InquiryAnswered,
    World,
)
from rankwise.core.watch.vocabulary import LookOrder
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.master_port import ReservedPort, listen_next_to
from rankwise.launch.run.node_ranks import NodeRanks
from rankwise.launch.run.run_parts import RunParts

if TYPE_CHECKING:
    import socket

    from rankwise.drivers.real.stop_words import StopWords
    from rankwise.launch.cluster.fitness import NodeCheck

SIGKILL = 9
SIGCONT = 18
SIGTERM = 15
SHUT_RDWR = 2
PORTS_TRIED_MAX = 100
"""So often a port is reserved of which the next one is taken, before it has to do without that."""
ANY_ADDRESS = {4: "0.0.0.0", 6: "::"}  # noqa: S104  # rank 0 must be reachable from other nodes


class RealNodeHost:
    """One node of a cluster; a `rankwise.drivers.agent_dispatch.NodeHost`."""

    def __init__(
        self, parts: RunParts, plan: RendezvousPlan, deliver: Callable[[Stimulus], None]
    ) -> None:
        self._parts = parts
        self._plan = plan
        self._deliver = deliver
        self._processes = parts.host
        self._node_check: NodeCheck | None = None
        self.world_size: int | None = None
        """How many workers the last round had on all nodes."""
        self.restarts = 0
        """How many were spent when that round began."""
        self.failure_counts: dict[str, int] = {}
        """How many ranks have failed by themselves, by cause, in all rounds."""
        self.latest_failure: Failure | None = None
        """The root cause of the latest round that failed, as far as it is on this node."""
        self._is_closed = False
        self._ports_lock = threading.Lock()
        """Ports are reserved in a thread, which may come to that only when the run is over."""
        self._port: ReservedPort | None = None
        self._listener: socket.socket | None = None
        """Where ranks of all nodes would be connected, should rank 0 be on this one."""
        self._agreement: StopWords | None = None
        """Where the ranks that count their steps read at which one all of the job stop."""
        self._steppers: set[int] = set()
        self._over: set[int] = set()
        parts.stack.callback(self.close)

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process."""
        self._processes.spawn(local_rank, attempt)

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Signal a worker's process group, unless its rank is on its way to a step to stop at."""
        if signal != SIGKILL and self._agreement is not None and local_rank in self._steppers:
            self._processes.signal(local_rank, attempt, SIGCONT)  # it may be stopped
            return
        if signal == SIGTERM and self._takes_sigterm(local_rank):
            signal = SIGKILL  # of SIGTERM it would ask the job to stop, and go on
        self._processes.signal(local_rank, attempt, signal)

    def _takes_sigterm(self, local_rank: int) -> bool:
        segment = self._parts.planner.segment
        return segment is not None and segment.takes_sigterm(local_rank)

    def look_for_progress(self, attempt: int) -> None:
        """Find out when a worker last made progress."""
        self._processes.look_for_progress(attempt)

    def look_for_dumps(self, attempt: int) -> None:
        """See ports.processes."""
        self._processes.look_for_dumps(attempt)

    def dump_stacks(self, attempt: int) -> None:
        """Make every living worker print its stacks."""
        self._processes.dump_stacks(attempt)

    def tell(self, local_rank: int, attempt: int, word: str) -> None:
        """Say a word to a worker that can be recovered."""
        self._processes.tell(local_rank, attempt, RecoveryOrder(word))

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill what the attempt's workers left behind."""
        if spares:
            self._tell_step(attempt)  # the attempt is over for those that are spared, too
        self._processes.sweep(attempt, spares)

    def prepare_round(self, number: int) -> None:
        """Check the node, and reserve a port for rank 0."""
        self._end_agreement()
        if self._plan.is_alone and not self._plan.checks:
            self._deliver(self._prepared_alone(number))
            return
        from rankwise.launch.cluster.fitness import NodeCheck  # noqa: PLC0415  # subprocess takes ms

        self._node_check = self._node_check or NodeCheck()
        self._in_thread(partial(self._prepare, number, self._node_check))

    def begin_attempt(self, world: World) -> None:
        """Let the next workers live in `world`."""
        plan = self._plan
        self._over = set()
        self._processes.is_stopping = False
        self.world_size, self.restarts = world.size, world.restarts
        self._parts.evidence.begin_attempt()
        listener = self._listener if world.node_rank == 0 else None
        self._parts.planner.collectives_fd = -1 if listener is None else listener.fileno()
        self._parts.planner.ranks = NodeRanks(
            node_rank=world.node_rank,
            node_count=len(world.members),
            first_rank=world.first_rank,
            size=world.size,
            master_addr=plan.master_address or world.master_address,
            master_port=world.master_port,
            restarts=world.restarts,
            collectives_key=self._collectives_key(world) if len(world.members) > 1 else "",
        )

    def ask_ranks_to_stop(self, number: int, signal: int | None) -> None:  # noqa: ARG002  # the gang's
        """Let the ranks that count their steps wait until they know where to stop."""
        self._processes.is_stopping = True
        if self._agreement is not None:
            return  # its ranks were to stop without the others, who have answered after all
        segment = self._parts.planner.segment
        if segment is None or (segment.steps() is None and not segment.sigterm_takers()):
            return  # no rank counts steps: the signal is all that they get
        from rankwise.drivers.real.stop_words import StopWords  # noqa: PLC0415  # only at a stop

        words = self._agreement = StopWords(segment, self._parts.clock)
        alive = set(self._processes.links) - self._over
        self._steppers = {rank for rank in alive if words.uses_steps(rank)}
        step = words.ask(self._steppers)
        if self._steppers:
            self._parts.reactor.post(partial(self._deliver, RanksStood(number, step)))

    def stop_ranks_at(self, number: int, step: int) -> None:  # noqa: ARG002  # there is one round
        """Let the ranks go on to that step."""
        if self._agreement is not None:
            self._agreement.decide(step)

    def describe_failures(self, number: int, failures: tuple[Failure, ...]) -> None:
        """Find out what only the world knows."""
        described = self._parts.describe(failures)
        # Only remembered: few people ask how a run is, and what is told of it costs imports.
        own = [each for each in described if each.cause is not FailureCause.STOPPED]
        for each in own:
            self.failure_counts[each.cause] = self.failure_counts.get(each.cause, 0) + 1
        self.latest_failure = own[0] if own else self.latest_failure
        if not self._plan.is_alone:  # who is alone is told by what it announces
            self._parts.history.on_failures(described)
        self._deliver(FailuresDescribed(number, described))

    def tell_call_records(self, wanted: CallRecordsWanted) -> None:
        """Look what the ranks' calls are."""
        on_sheet = partial(self._tell_sheet, wanted.inquiry)
        self._parts.watches.tell_call_records(wanted, on_sheet)

    def on_inquiry_answered(self, answered: InquiryAnswered) -> None:
        """Wake the callers that wait for that."""
        self._parts.watches.on_inquiry_answered(answered)

    def look_at_ranks(self, order: LookOrder) -> None:
        """Read the call records of the ranks, or ask the ranks themselves."""
        self._parts.watches.look(order, self._deliver)

    def _tell_sheet(self, inquiry: str, sheet: bytes) -> None:
        self._deliver(CallRecordsReported(inquiry, sheet))

    def note_exit(self, exited: WorkerExited) -> None:
        """Tell what has to be told before a rank's exit."""
        self._over.add(exited.local_rank)
        if len(self._over) == self._parts.job.gang.size:
            self._tell_step(exited.attempt)
        if self._agreement is not None and not exited.exit.ok:
            self._tell_end(exited.local_rank)

    def close(self) -> None:
        """Give the port back, and end waiting threads and a check that is no longer needed."""
        if self._node_check is not None:
            self._node_check.end()
        self._end_agreement()
        with self._ports_lock:
            self._is_closed = True
            self._close_ports()

    def _tell_step(self, number: int) -> None:
        segment = self._parts.planner.segment
        step = None if segment is None else segment.steps()
        if step is not None:
            self._deliver(StepReported(number, step))

    def _tell_end(self, local_rank: int) -> None:
        """Let no rank on its way to the step wait for this one, if they are not connected yet."""
        ranks = self._parts.planner.ranks
        if not ranks.collectives_key:
            return
        if ranks.rank(local_rank) == 0:
            if self._listener is not None:
                self._listener.shutdown(SHUT_RDWR)  # for those in its queue, too
            return
        self._in_thread(partial(self._tell_rank_0_of_end, ranks, local_rank))

    def _tell_rank_0_of_end(self, ranks: NodeRanks, local_rank: int) -> None:
        from rankwise.collectives.connecting import Connector, RankEndpoint  # noqa: PLC0415  # rare

        here = RankEndpoint(
            rank=ranks.rank(local_rank),
            size=ranks.size,
            node=ranks.node_rank,
            local_rank=local_rank,
            local_size=self._parts.job.gang.size,
            address=ranks.master_addr,
            port=ranks.master_port + 1,
            key=bytes.fromhex(ranks.collectives_key),
        )
        Connector(here, "to stop", self._parts.job.gang.grace).tell_end()

    def _prepare(self, number: int, node_check: "NodeCheck") -> None:
        """In a thread: look at the node, reserve a port, tell."""
        from rankwise.launch.cluster.fitness import places_to_check, unfitness  # noqa: PLC0415

        plan = self._plan
        answer: Stimulus
        places = places_to_check(self._parts.job.logs.directory)
        unfit = unfitness(plan.checks, places, node_check)
        if unfit is not None:
            answer = PreparationFailed(number, unfit.reason, unfit.hint)
        else:
            try:
                with self._ports_lock:
                    if self._is_closed:
                        return
                    answer = RoundPrepared(number, self._reserve_port(number))
            except RankwiseError as error:
                answer = PreparationFailed(number, error.message, error.hint or "")
        self._parts.reactor.post(partial(self._deliver, answer))

    def _prepared_alone(self, number: int) -> Stimulus:
        try:
            return RoundPrepared(number, self._port_alone(number))
        except RankwiseError as error:
            return PreparationFailed(number, error.message, error.hint or "")

    def _port_alone(self, number: int) -> int:
        """Where rank 0 listens: on the port that was reserved with the session, in the first round.

        Later on another one, unless it was named: a rank that lives on may hold the first.
        """
        job = self._parts.job
        if number == 0 or job.master_port is not None:
            return self._parts.planner.ranks.master_port
        self._close_ports()
        self._port = ReservedPort(job.master_bind)
        return self._port.number

    def _reserve_port(self, number: int) -> int:
        if self._plan.is_alone:
            return self._port_alone(number)
        host = ANY_ADDRESS[6 if ":" in self._plan.address else 4]
        if self._plan.master_port is not None:
            self._close_ports()
            self._listener = listen_next_to(host, self._plan.master_port)
            return self._plan.master_port
        for _ in range(PORTS_TRIED_MAX):
            self._close_ports()
            self._port = ReservedPort(host)
            self._listener = listen_next_to(host, self._port.number)
            if self._listener is not None:
                break
        assert self._port is not None, "one try at least"
        return self._port.number

    def _close_ports(self) -> None:
        for each in (self._port, self._listener):
            if each is not None:
                each.close()
        self._port = self._listener = None

    def _collectives_key(self, world: World) -> str:
        """What only ranks of this round know, made of what only nodes of this run do."""
        from hmac import digest  # noqa: PLC0415  # for several nodes

        from rankwise.drivers.real.stores.opening import token_of  # noqa: PLC0415  # the same

        run_id = self._parts.job.run_id
        words = f"rankwise collectives {run_id} {world.round}"
        return digest(token_of(self._plan.store, run_id).encode(), words.encode(), "sha256").hex()

    def _end_agreement(self) -> None:
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.release()

    @staticmethod
    def _in_thread(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="rankwise-node", daemon=True).start()
