"""What must be true of every cluster, checked whenever it could have become false.

The checker keeps records of its own, on the world's clock: it sees every write to the store, every
start and end of a worker, and what each agent told in the end. It shares no code with the
machines but the words in which they write.

- One round is current at a time: what is written follows lawfully on what was written before; no
  worker starts while one of an earlier round lives.
- No rank is held by two living workers. One that has left its function (`rankwise.recover`) holds
  none until it is called again: then it is started, and what is said of those that start holds.
- A restart is spent for each round that ended by a failure, once, and for no other; never more than
  there are.
- No round ends because a node goes that is done: with leave, by SIGKILL, leading or not.
- A node that is admitted to a round runs in it within a few leases, unless it died or the round
  ended.
- One run is current at a time under one id: another is founded only when the one before is closed
  or has no leader, and no worker starts while one of an earlier run lives. A node that took part in
  a run that is over begins nothing more in it; and one that took part in a run that the store has
  forgotten takes part in no other. So a run that a newcomer begins in an empty store ends as it
  may.
- A node that is asked to stop is gone a grace later, and the few answers of the store that its last
  words wait for; whatever it was doing, and whether or not the others read them.
- No node takes part in a job other than the one that it brings: another program, another budget.
- When the agent that serves the store is lost, all others that took part end within their leases.
- The keys of a run vanish when it had no leader for the life of its lease.
- In the end every agent tells why it ended; all who know the verdict know the same one, and it is
  true: a success is one of all members' workers, a root cause is a worker that failed by itself and
  first.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NoReturn

import msgspec

from rankwise.base.keys import Change, Entry
from rankwise.base.units import SECOND, Duration, Instant, between, format_duration
from rankwise.core.agent.vocabulary import FinishRun
from rankwise.core.rendezvous.records import (
    Charter,
    Departure,
    Round,
    RoundPhase,
    RunKeys,
    Verdict,
    decode_charter,
    decode_node,
    decode_round,
)
from rankwise.core.rendezvous.vocabulary import RefusalKind, World
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.drivers.virtual.cluster.known_runs import RoundRecords, RunRecords
from rankwise.drivers.virtual.cluster.node import SimulatedNode
from rankwise.drivers.virtual.cluster.root_cause_truth import loss_is_root_cause, verdict_is_true
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker
from rankwise.drivers.virtual.invariants import InvariantBroken

FAILURES_WITHOUT_A_WORKER = ("refuse-workers", "blame-worker", "lose-guardian", "miss-call")
"""Faults of which no worker fails by itself, and which cost a restart all the same."""


class ClusterChecker:
    """Watches one cluster.

    Args:
        plan: the faults of the cluster.
        run_id: under which its keys lie.
        now: tells the true instant.

    Raises:
        InvariantBroken: as soon as something is wrong.
    """

    def __init__(self, plan: ClusterPlan, run_id: str, now: Callable[[], Instant]) -> None:
        self._plan = plan
        self._keys = RunKeys(run_id)
        self._now = now
        self._run: RunRecords | None = None
        """The run whose charter lies in the store."""
        self._was_ever_emptied = False
        self._rank_holders: dict[int, SimulatedWorker] = {}
        self._round_of: dict[SimulatedWorker, tuple[int, int]] = {}
        self._living_by_round: dict[tuple[int, int], int] = {}
        """By the numbers of the run and of the round."""
        self._nodes: set[str] = set()
        self._run_of: dict[str, RunRecords] = {}
        """The run that each node takes part in, or took part in."""
        self._led_since: Instant | None = None
        self._led_for = Duration(0)
        """How long the last leader led."""
        self.runs: list[RunRecords] = []
        self.finished: dict[str, FinishRun] = {}

    @property
    def rounds(self) -> dict[int, RoundRecords]:
        """The rounds of the last run."""
        return self.runs[-1].rounds if self.runs else {}

    # The store

    def store_emptied(self) -> None:
        """The store has forgotten everything."""
        # A run that begins anew in an empty store knows nothing of the one before.
        self._was_ever_emptied = True
        self._run = None
        self._nodes.clear()
        self._rank_holders.clear()

    def changed(self, changes: tuple[Change, ...]) -> None:
        """Something was written: one transaction after the other."""
        for _, batch in groupby(changes, key=lambda change: change.revision):
            self._transacted(tuple(batch))

    def _transacted(self, changes: tuple[Change, ...]) -> None:
        by_key = {change.key: change for change in changes}
        before = self._run
        if self._keys.charter in by_key:
            self._judge_charter(by_key[self._keys.charter].value)
        if self._keys.round in by_key:
            value = by_key[self._keys.round].value
            if value is not None:
                self._judge_round(decode_round(value, self._keys.round))
            elif before is self._run:
                self._broken("the round was deleted, and the run goes on")
        for change in changes:
            if change.key == self._keys.leader:
                self._note_leader(is_led=change.value is not None)
            elif change.key.startswith(self._keys.done_notes):
                pass  # says again what the node's record says
            elif change.key.startswith(self._keys.call_records_notes):
                pass  # tells of calls
            elif change.key.startswith(self._keys.nodes):
                self._note_node(self._keys.node_id(change.key), change)

    def _judge_charter(self, value: bytes | None) -> None:
        """A run is founded, or forgotten, or its charter is bound to a lease."""
        before, self._run = self._run, None
        if value is None:
            if before is not None and self._living_in(before):
                self._broken(f"the store forgets a run of which {self._living_in(before)} live")
            return
        charter = decode_charter(value, self._keys.charter)
        if before is not None and charter.founder == before.charter.founder:
            if charter != before.charter:
                self._broken(f"the charter {before.charter} has become {charter}")
            self._run = before
            return
        if before is not None:
            self._judge_succession(before, charter)
        self._run = RunRecords(len(self.runs), charter)
        self.runs.append(self._run)

    def _judge_succession(self, before: RunRecords, charter: Charter) -> None:
        if not self._plan.rendezvous.replaces_ended:
            self._broken(f"{charter.founder} replaces a run, and ids serve once")
        wants_the_same = msgspec.structs.replace(charter, founder=before.charter.founder)
        if not before.is_closed and wants_the_same == before.charter:
            self._broken(f"{charter.founder} replaces an open run that wants the same")
        if self._living_in(before):
            self._broken(
                f"{charter.founder} replaces a run of which {self._living_in(before)} workers live"
            )

    def _living_in(self, run: RunRecords) -> int:
        return sum(
            living for (number, _), living in self._living_by_round.items() if number == run.number
        )

    def _note_leader(self, *, is_led: bool) -> None:
        now = self._now()
        if self._led_since is not None:
            self._led_for = between(self._led_since, now)
        self._led_since = now if is_led else None

    def _note_node(self, node: str, change: Change) -> None:
        if change.value is not None:
            self._nodes.add(node)
            record = decode_node(change.value, change.key, node)
            self._note_founder(node, record.founder)
            if self.rounds and not self._rounds_of(node):
                self.rounds[max(self.rounds)].had_newcomer = True
            for records in self._rounds_of(node):
                has_given_up = record.ended >= records.record.number and not record.is_done
                if record.departure is not Departure.STAYS or has_given_up:
                    records.has_leaver = True
                if record.cut_off == records.record.number:
                    records.member_vanished = True
                if record.ended == records.record.number and record.is_done:
                    records.done.add(node)
            return
        self._nodes.discard(node)
        for records in self._rounds_of(node):
            records.member_vanished |= node not in records.done

    def _note_founder(self, node: str, founder: str) -> None:
        run = next((run for run in reversed(self.runs) if run.charter.founder == founder), None)
        if run is None:
            return
        before = self._run_of.setdefault(node, run)
        if before is not run:
            self._broken(
                f"{node} takes part in run {run.number}, and took part in run {before.number}"
            )

    def _rounds_of(self, node: str) -> list[RoundRecords]:
        """The round of its run that runs, or ran last, if the node is a member."""
        run = self._run_of.get(node)
        if run is None or not run.rounds:
            return []
        last = run.rounds[max(run.rounds)]
        return [last] if node in last.members else []

    def _judge_round(self, new: Round) -> None:
        run = self._run
        if run is None:
            self._broken(f"round {new.number} {new.phase} is written, and there is no charter")
        old, run.round = run.round, new
        if new == old:
            return  # bound to the run's lease
        self._judge_order(old, new)
        if len(set(new.members)) != len(new.members):
            self._broken(f"round {new.number} has a member twice: {new.members}")
        if new.phase is RoundPhase.RUNNING and (old is None or old.phase is RoundPhase.GATHERING):
            self._judge_settlement(run, old, new)
        if (
            new.phase is RoundPhase.GATHERING
            and old is not None
            and old.phase is RoundPhase.RUNNING
        ):
            self._judge_dissolution(old, new)

    def _judge_order(self, old: Round | None, new: Round) -> None:
        if old is None:
            lawful = new.number == 0 or not self.rounds
        else:
            number, phase = new.number - old.number, (old.phase, new.phase)
            lawful = (
                phase
                in {
                    (RoundPhase.GATHERING, RoundPhase.GATHERING),
                    (RoundPhase.GATHERING, RoundPhase.RUNNING),
                    (RoundPhase.GATHERING, RoundPhase.CLOSED),
                    (RoundPhase.RUNNING, RoundPhase.RUNNING),
                    (RoundPhase.RUNNING, RoundPhase.STOPPING),
                    (RoundPhase.RUNNING, RoundPhase.CLOSED),
                    (RoundPhase.STOPPING, RoundPhase.STOPPING),
                    (RoundPhase.STOPPING, RoundPhase.CLOSED),
                }
                and number == 0
            )
            lawful = lawful or (phase == (RoundPhase.RUNNING, RoundPhase.GATHERING) and number == 1)
        if not lawful:
            before = "nothing" if old is None else f"round {old.number} {old.phase}"
            self._broken(f"round {new.number} {new.phase} was written over {before}")

    def _judge_settlement(self, run: RunRecords, old: Round | None, new: Round) -> None:
        config = run.charter
        if not config.nodes_min <= len(new.members) <= config.nodes_max:
            self._broken(f"round {new.number} has {len(new.members)} members")
        spent_before = 0 if old is None else old.restarts
        spent = new.restarts - spent_before
        last = self.rounds.get(new.number - 1)
        if spent not in (0, 1):
            self._broken(f"round {new.number} spends {spent} restarts")
        if new.restarts > config.restarts_max:
            self._broken(f"restart {new.restarts} of {config.restarts_max}")
        if last is not None:
            last.ended_because = new.why
        if last is not None and old is not None:
            failed = [worker for worker in last.workers if worker.failed_at is not None]
            if spent and not old.is_failure:
                self._broken(f"round {new.number} spends a restart, and none had failed: {old.why}")
            failed_otherwise = any(self._plan.has(what) for what in FAILURES_WITHOUT_A_WORKER)
            if spent and not failed and not failed_otherwise:
                self._broken(f"round {new.number} spends a restart, and no worker had failed")
            lost = last.member_vanished or self._may_seem_lost(last)
            if old.is_failure and not spent and not lost:
                self._broken(f"round {new.number} spends no restart after a failure: {old.why}")
        records = RoundRecords(new, self._now(), frozenset(new.members))
        # The leader reads what is written to the store a little later.
        records.member_vanished = not records.members <= self._nodes
        records.had_newcomer = not self._nodes <= records.members
        self.rounds[new.number] = records

    def _may_seem_lost(self, records: RoundRecords) -> bool:
        """Whether who leads now came after a round's end, and takes who has left since for lost."""
        led, dissolved = self._led_since, records.dissolved_at
        is_new = led is not None and dissolved is not None and led > dissolved
        return is_new and not records.members <= self._nodes

    def _judge_dissolution(self, old: Round, new: Round) -> None:
        records = self.rounds[old.number]
        records.dissolved_at = self._now()
        records.ended_because = new.why
        if new.is_failure or records.member_vanished or records.has_leaver or records.had_newcomer:
            return
        self._broken(f"round {old.number} ended without a reason, told is: {new.why}")

    # The workers

    def started(self, worker: SimulatedWorker) -> None:
        """A worker has come into being."""
        holder = self._rank_holders.get(worker.rank)
        if holder is not None:
            self._broken(
                f"rank {worker.rank} starts on {worker.node.host} in round {worker.round}, and "
                f"lives on {holder.node.host} in round {holder.round}"
            )
        run = self._run_of[worker.node.node_id]
        mine = (run.number, worker.round)
        for (run_number, number), living in self._living_by_round.items():
            if (run_number, number) != mine and living and not self._was_ever_emptied:
                where = "" if run_number == run.number else " of another run"
                self._broken(
                    f"a worker of round {worker.round} starts while {living} of round "
                    f"{number}{where} live"
                )
        self._rank_holders[worker.rank] = worker
        self._round_of[worker] = mine
        self._living_by_round[mine] = self._living_by_round.get(mine, 0) + 1
        if worker.round in run.rounds:
            run.rounds[worker.round].workers.append(worker)

    def ended(self, worker: SimulatedWorker) -> None:
        """A worker has ended."""
        if self._rank_holders.get(worker.rank) is worker:
            del self._rank_holders[worker.rank]
        mine = self._round_of.pop(worker)
        self._living_by_round[mine] -= 1
        if not self._living_by_round[mine]:
            del self._living_by_round[mine]

    def began(self, node: SimulatedNode, world: World) -> None:
        """A node's agent has begun a round."""
        run = self._run_of.get(node.node_id)
        if run is None:
            self._broken(f"{node.node_id} begins round {world.round}, and is in no run")
        wanted = self._charter_of(node)
        if wanted is not None and wanted != msgspec.structs.replace(run.charter, founder=""):
            self._broken(f"{node.node_id} wants {wanted}, and begins a round of {run.charter}")
        if not self._was_ever_emptied and (run.is_closed or run is not self._run):
            self._broken(f"{node.node_id} begins round {world.round} of a run that is over")
        records = run.rounds.get(world.round)
        if records is None or records.record.members != world.members:
            self._broken(f"{node.node_id} begins round {world.round}, which was never settled")
        if world.members[world.node_rank] != node.node_id:
            self._broken(f"{node.node_id} begins with the rank of {world.members[world.node_rank]}")
        if node.node_id in records.began:
            self._broken(f"{node.node_id} begins round {world.round} twice")
        records.began[node.node_id] = self._now()

    @property
    def orphan_patience(self) -> Duration:
        """Within which agents must have gone whose store was lost with the agent that served it."""
        config = self._plan.rendezvous
        return Duration(config.lease_ttl + 4 * config.request_timeout + 3 * SECOND)

    def judge_orphans(self, nodes: Iterable[SimulatedNode], lost_at: Instant) -> None:
        """Long enough after the loss of a store: the nodes that had taken part have ended."""
        for node in nodes:
            if node.is_up and self._run_of.get(node.node_id) is not None:
                waited = format_duration(between(lost_at, self._now()))
                self._broken(f"{node.node_id} lives on {waited} after the loss of its store")

    @staticmethod
    def _charter_of(node: SimulatedNode) -> Charter | None:
        return None if node.agent is None else node.agent.spec.rendezvous.charter

    @property
    def stop_patience(self) -> Duration:
        """Within which an agent that is asked to stop must have gone."""
        config = self._plan.rendezvous
        # To be told the end, and to say it and goodbye: each is tried twice at most.
        last_words = 5 * config.request_timeout + config.retry_pause
        return Duration((self._plan.grace + last_words) * 101 // 100 + SECOND)

    def judge_stop(self, node: SimulatedNode, node_id: str, asked_at: Instant) -> None:
        """Long enough after an agent was asked to stop."""
        if node.is_up and node.node_id == node_id and node.agent is not None:
            waited = format_duration(between(asked_at, self._now()))
            self._broken(
                f"{node_id} was asked to stop {waited} ago, and is still {node.agent.phase}"
            )

    @property
    def admission_patience(self) -> Duration:
        """Within which a member must have learned that it is one."""
        config = self._plan.rendezvous
        return Duration(4 * (config.lease_ttl + config.request_timeout + config.retry_pause))

    def judge_admission(self, run: RunRecords, number: int, is_up: Callable[[str], bool]) -> None:
        """Long after a round has begun: its members run in it, or it is over."""
        records = run.rounds.get(number)
        current = run.round
        if (
            run is not self._run
            or records is None
            or current is None
            or current.number != number
            or current.phase is not RoundPhase.RUNNING
        ):
            return
        deaf = [
            node for node in records.record.members if node not in records.began and is_up(node)
        ]
        if deaf:
            self._broken(f"round {number} runs, and its members {deaf} do not know")

    # The end

    def agent_finished(self, node: SimulatedNode, finished: FinishRun) -> None:
        """An agent has told what became of the run."""
        self.finished[node.node_id] = finished
        if self._plan.is_alone:
            return
        if node.workers.living:
            living = sorted(node.workers.living)
            self._broken(f"{node.node_id} ends, and its workers live: {living}")
        if any(worker.is_alive for worker in node.workers.waiting.values()):
            self._broken(f"{node.node_id} ends, and ranks wait there to be called again")
        if finished.verdict is None and finished.refusal is None and not finished.detail:
            self._broken(f"{node.node_id} ends and does not say why")
        if problem := loss_is_root_cause(finished, node.workers.workers):
            self._broken(f"{node.node_id}: {problem}")
        if finished.verdict is not None:
            self._judge_verdict(node, finished.verdict)
        refusal = finished.refusal
        if refusal is not None and refusal.kind is RefusalKind.IDENTITY:
            self._broken(f"{node.node_id} takes its own record for another node's")
        if refusal is not None and refusal.kind is RefusalKind.FORGOTTEN:
            self._judge_forgotten(node)

    def _judge_forgotten(self, node: SimulatedNode) -> None:
        run = self._run_of.get(node.node_id)
        if run is not None and run is self._run:
            self._broken(f"{node.node_id} believes its run forgotten, and it is in the store")

    def _judge_verdict(self, node: SimulatedNode, verdict: Verdict) -> None:
        # A node that is told the end at once has perhaps not written of which run it is.
        mine = self._run_of.get(node.node_id)
        possible = self.runs if mine is None else [mine]
        written = [None if run.round is None else run.round.verdict for run in possible]
        if verdict not in written:
            self._broken(f"{node.node_id} shows the verdict {verdict}, and written is {written}")
        run = possible[written.index(verdict)]
        if not run.is_shown:
            run.is_shown = True
            if wrong := verdict_is_true(run, verdict, self._plan):
                self._broken(wrong)

    def judge_end(self, now: Instant, unfinished: list[str]) -> None:
        """The job should be over."""
        if unfinished:
            shown = "; ".join(unfinished[:8])
            self._broken(
                f"the job has not ended {format_duration(Duration(now))} after its beginning: "
                f"{shown}"
            )
        for (_, number), living in self._living_by_round.items():
            self._broken(f"all agents have ended, and {living} workers of round {number} live")

    def judge_leftovers(self, entries: tuple[Entry, ...]) -> None:
        """Long after the last agent has ended: only what must outlive a run is left."""
        if not entries or self._may_leave_unbound:
            return
        names = [entry.key for entry in entries]
        self._broken(f"the run had no leader for longer than its lease lives, and left are {names}")

    @property
    def _may_leave_unbound(self) -> bool:
        """Whether the last leader may not have had the time to bind what it left to a lease."""
        config = self._plan.rendezvous
        return self._plan.is_harsh or self._led_for < 2 * config.lease_ttl

    def _broken(self, what: str) -> NoReturn:
        raise InvariantBroken(f"at {self._now() / SECOND:.6f} s: {what}")
