"""The conformance suite of process hosts, for the simulated one and for the real one."""

import os
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

import leftovers
import msgspec
import pytest

from rankwise.base.failure import Outcome
from rankwise.base.units import SECOND, Duration
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.virtual.gang_simulator import ONE_ATTEMPT, GangSimulator
from rankwise.launch.run.job import Job, LogPlan, Script, StartMethod
from rankwise.launch.run.supervision import Supervision
from rankwise.testing.conformance import PROCESS_HOST_BEHAVIOURS, check_process_host
from rankwise.testing.programs import WORKER_SCRIPT, Lives, WorkerProgram, script_arguments

SIGTERM = 15
REAL_METHODS = [StartMethod.SUBPROCESS, StartMethod.FORKSERVER]


@dataclass(frozen=True)
class RealRecord:
    outcome: Outcome
    journal: bytes
    left_behind: tuple[int, ...]


class RealWorld:
    """Real workers, supervised as `rankwise run` supervises them."""

    def __init__(self, directory: Path, start_method: StartMethod) -> None:
        self._directory = directory
        self._start_method = start_method

    def run(
        self,
        spec: GangSpec,
        programs: Lives,
        policy: RestartPolicy = ONE_ATTEMPT,
        *,
        stop_after: Duration | None = None,
    ) -> RealRecord:
        job = Job(
            program=Script(str(WORKER_SCRIPT), script_arguments(programs)),
            gang=spec,
            policy=policy,
            run_id=uuid.uuid4().hex,
            start_method=self._start_method,
            preload=(),
            python=sys.executable,
            logs=LogPlan(directory=str(self._directory), console_ranks=frozenset()),
            handle_signals=False,
            console=False,
        )
        supervision = Supervision(job)
        supervision.start_in_thread()
        assert supervision.wait_begun(60)
        if stop_after is not None:
            timer = threading.Timer(stop_after / SECOND, supervision.stop, [SIGTERM])
            timer.start()
        outcome = supervision.wait(60)
        assert outcome is not None
        left = leftovers.marked_processes(os.environ[leftovers.MARK_VARIABLE])
        (journal,) = self._directory.rglob("journal.jsonl")
        # How earlier attempts ended is remembered for people, and no affair of a host's.
        outcome = msgspec.structs.replace(outcome, earlier=())
        return RealRecord(outcome, journal.read_bytes(), tuple(left))


@pytest.mark.parametrize("name", PROCESS_HOST_BEHAVIOURS)
def test_the_simulated_host_keeps_what_is_expected(name: str) -> None:
    PROCESS_HOST_BEHAVIOURS[name](GangSimulator())


@pytest.mark.system
@pytest.mark.parametrize("name", PROCESS_HOST_BEHAVIOURS)
@pytest.mark.parametrize("start_method", REAL_METHODS)
def test_the_real_host_keeps_what_is_expected(
    name: str, start_method: StartMethod, tmp_path: Path
) -> None:
    PROCESS_HOST_BEHAVIOURS[name](RealWorld(tmp_path, start_method))


def test_the_whole_suite_is_one_call() -> None:
    check_process_host(GangSimulator)


def test_the_suite_says_what_was_expected() -> None:
    class ForgetsItsSignal(Gang):
        @property
        def _stop_signal(self) -> int:
            return 2

    def make_agent(spec: AgentSpec) -> Agent:
        agent = Agent(spec)
        agent.make_gang = ForgetsItsSignal
        return agent

    with pytest.raises(AssertionError) as caught:
        check_process_host(lambda: GangSimulator(make_agent=make_agent))

    assert caught.value.__notes__ == ["expected of a process host: an exit code stops the others"]


def test_what_only_a_simulation_can_do_is_refused_for_real_workers() -> None:
    with pytest.raises(ValueError, match="worker 1 in attempt 0 can only be simulated"):
        script_arguments([[WorkerProgram(), WorkerProgram(refusal="no")]])
