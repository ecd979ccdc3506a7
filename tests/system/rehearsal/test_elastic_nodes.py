"""`--on sim --nnodes MIN:MAX`: nodes die, come back and join late, under the real agents."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from running import run, write_program

import rankwise
from rankwise import collectives
from rankwise.base.failure import FailureCause, Outcome, OutcomeStatus
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.launch.inside.function_results import values_by_rank
from rankwise.launch.run.function_job import function_job
from rankwise.launch.run.job import LogPlan
from rankwise.sim.faults.reading import read_faults_of_run
from rankwise.simranks.run.rehearsal import Rehearsal
from rankwise.simranks.run.simulation_options import SimulationOptions
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.world import present_world


class Rehearsed(NamedTuple):
    outcome: Outcome
    values: dict[int, Any]
    told: str


def rehearse(
    function: Callable[..., Any], nodes: tuple[int, int], *faults: str, per_node: int = 1,
    restarts: int = 0, folder: Path,
) -> Rehearsed:  # fmt: skip
    """Run a function on simulated nodes that meet as real ones do."""
    least, most = nodes
    console = os.open(folder / "console", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        rehearsal = Rehearsal(
            function_job(
                function, (), per_node, start_method="spawn", logs=LogPlan(), max_restarts=restarts
            ),
            SimulationOptions(),
            node_count=most,
            rendezvous=RendezvousConfig(
                nodes_min=least, nodes_max=most, policy=RestartPolicy(restarts_max=restarts)
            ),
            faults=read_faults_of_run(faults, most * per_node, node_count=most).faults,
            console_fds=(console, console),
        )
        outcome = rehearsal.run()
    finally:
        os.close(console)
    return Rehearsed(
        outcome, values_by_rank(rehearsal.supervision.results), (folder / "console").read_text()
    )


def train() -> tuple[int, str, str, str]:
    """Take twelve steps of a second; where it has ended up."""
    for _ in range(12):
        time.sleep(1)
        total = collectives.all_reduce(np.ones(1))
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    node, nodes, restarts = (os.environ[name] for name in names)
    return int(total[0]), node, nodes, restarts


def test_nodes_meet_when_all_of_them_have_come(tmp_path: Path) -> None:
    run = rehearse(train, (2, 3), per_node=2, folder=tmp_path)

    assert run.told == "rankwise: round 0: 6 ranks; 3 nodes (h0, h1, h2)\n" + _waits(run.told)
    assert run.values == {rank: (6, str(rank // 2), "3", "0") for rank in range(6)}


def test_the_others_go_on_without_a_node_that_dies_and_it_costs_no_restart(tmp_path: Path) -> None:
    run = rehearse(train, (2, 3), "kill:node=2@collective=9", per_node=2, folder=tmp_path)

    assert run.values == {rank: (4, str(rank // 2), "2", "0") for rank in range(4)}
    assert "fault: node 2 is killed at operation #9 of group rankwise.collectives" in run.told
    assert "round 0 is over: node h2 was lost, and rank " in run.told
    assert (
        "round 1: 4 ranks; 2 nodes (h0, h1); left: h2; round 0 ended because node n2.0 on h2 is"
        " lost" in run.told
    )
    assert (run.outcome.status, run.outcome.attempts) == (OutcomeStatus.SUCCEEDED, 1)


def train_in_torch() -> float:
    import torch  # noqa: PLC0415  # as programs of torch, in ranks that have it
    import torch.distributed as dist  # noqa: PLC0415  # the same

    dist.init_process_group("gloo")
    total = torch.ones(1)
    for _ in range(4):
        time.sleep(1)
        total = torch.ones(1)
        dist.all_reduce(total)
    return float(total)


@pytest.mark.torch
def test_ranks_of_torch_wait_until_the_lost_node_s_lease_ends(tmp_path: Path) -> None:
    run = rehearse(train_in_torch, (2, 3), "kill:node=1@collective=2", folder=tmp_path)

    assert run.values == {0: 2.0, 1: 2.0}
    assert "round 0 is over: node n1.0 on h1 is lost\n" in run.told


def test_the_node_that_leads_may_die(tmp_path: Path) -> None:
    run = rehearse(train, (1, 3), "kill:node=0,at=3s", folder=tmp_path)

    assert [total for total, *_ in run.values.values()] == [2, 2]
    assert "fault: node 0 is killed after 3 s\n" in run.told


def test_a_job_that_needs_a_node_waits_until_it_is_back(tmp_path: Path) -> None:
    run = rehearse(train, (2, 2), "kill:node=1,back_after=5min@collective=2", folder=tmp_path)

    assert run.outcome.status is OutcomeStatus.SUCCEEDED, run.told
    assert "waiting for more nodes: 1 of at least 2 nodes are ready" in run.told
    assert "round 1: 2 ranks; 2 nodes (h0, h1); came: h1; left: h1; round 0 ended" in run.told


def test_what_cannot_be_completed_is_named(tmp_path: Path) -> None:
    run = rehearse(train, (2, 2), "kill:node=1,at=1500ms", folder=tmp_path)

    _, other = run.outcome.failures
    assert other.error is not None
    assert other.error.message.startswith("all_reduce #2 (sum) of (1,) float64 cannot be completed")


def test_a_job_that_needs_a_node_gives_up_if_it_never_comes_back(tmp_path: Path) -> None:
    run = rehearse(train, (2, 2), "kill:node=1@collective=2", folder=tmp_path)

    assert run.outcome.status is OutcomeStatus.FAILED
    assert run.outcome.detail.startswith("too few nodes came within 10 min: 1 of at least 2 nodes")
    root, other = run.outcome.failures
    assert (root.rank, root.host, root.cause) == (1, "h1", FailureCause.SIGNALED)
    assert root.signal_sender == "a fault (--faults) that killed node 1"
    assert other.rank == 0
    assert run.values == {}


def test_a_late_node_is_taken_in(tmp_path: Path) -> None:
    run = rehearse(train, (2, 3), "late:node=2,by=5s", folder=tmp_path)

    assert run.values == {rank: (3, str(rank), "3", "0") for rank in range(3)}
    assert "fault: node 2 is late by 5 s\n" in run.told
    assert "round 0 is over: node n2.0 on h2 is joining" in run.told


def test_the_lease_is_what_the_others_wait_for(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        "import time\nimport rankwise\nwhile rankwise.world_size() > 1: time.sleep(0.5)\n"
        "print(round(time.perf_counter()))\n",
    )
    seconds = [
        run(
            "run", "--on=sim", "--nnodes=1:2", "--faults=kill:node=1,at=3s", "--virtual-clock",
            f"--rdzv-conf=lease_ttl={ttl}", "--no-prefix", program, cwd=tmp_path,
        ).stdout
        for ttl in (4, 20)
    ]  # fmt: skip

    early, late = map(int, seconds)
    assert 3 + 4 <= early <= 3 + 4 + 3
    assert 3 + 20 <= late <= 3 + 20 + 3


def test_a_run_whose_nodes_are_all_killed_fails(tmp_path: Path) -> None:
    run = rehearse(train, (1, 2), "kill:node=0,at=2s", "kill:node=1,at=3s", folder=tmp_path)

    assert run.outcome.status is OutcomeStatus.FAILED
    assert run.outcome.detail == "every node was killed, and none comes back"


def test_the_only_node_of_a_function_comes_back() -> None:
    fault = "kill:node=0,at=3s,back_after=30s"

    assert rankwise.run(train, nprocs=2, on="sim", faults=fault) == [(2, "0", "1", "0")] * 2


def fail_once() -> str:
    for step in range(3):
        collectives.barrier()
        if step == 1 and rankwise.rank() == 2 and rankwise.restart_count() == 0:
            raise ValueError("broken")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_a_rank_that_fails_spends_a_restart_of_all_nodes(tmp_path: Path) -> None:
    run = rehearse(fail_once, (2, 2), per_node=2, restarts=1, folder=tmp_path)

    assert run.values == dict.fromkeys(range(4), "1")
    assert "round 0 is over: rank 2 on h1 failed: ValueError\n" in run.told


def test_without_a_restart_its_failure_is_the_root_cause_on_all_nodes(tmp_path: Path) -> None:
    run = rehearse(fail_once, (2, 2), per_node=2, folder=tmp_path)

    root, *others = run.outcome.failures
    assert (root.rank, root.local_rank, root.host) == (2, 0, "h1")
    assert root.error is not None
    assert root.error.message == "broken"
    assert {failure.rank for failure in others} == {0, 1, 3}
    assert {failure.cause for failure in others} == {FailureCause.STOPPED}


def wait_for_nobody() -> None:
    collectives.barrier()
    if rankwise.rank() == 1:
        present_world().scheduler.wait(Gate())
    collectives.barrier()


def test_a_deadlock_is_found_though_agents_have_their_timers(tmp_path: Path) -> None:
    began = time.monotonic()
    run = rehearse(wait_for_nobody, (2, 3), folder=tmp_path)

    root = run.outcome.failures[0]
    assert (root.rank, root.cause) == (1, FailureCause.OUT_OF_STEP)
    assert root.detail.startswith("rank 1 has not come to barrier #2 (test_elastic_nodes.py:")
    assert time.monotonic() - began < 60  # virtual time alone passes


def leave_early() -> None:
    collectives.barrier()
    if rankwise.rank() == 0:
        collectives.barrier()


def leave_early_in_torch() -> None:
    import torch.distributed as dist  # noqa: PLC0415  # as programs of torch, in ranks that have it

    dist.init_process_group("gloo")
    dist.barrier()
    if rankwise.rank() == 0:
        dist.barrier()


@pytest.mark.parametrize(
    "program", [leave_early, pytest.param(leave_early_in_torch, marks=pytest.mark.torch)]
)
def test_who_was_done_too_early_is_blamed_though_its_whole_node_has_ended_well(
    program: Callable[[], None], tmp_path: Path
) -> None:
    run = rehearse(program, (2, 2), folder=tmp_path)

    root = run.outcome.failures[0]
    assert (root.rank, root.host, root.cause) == (1, "h1", FailureCause.OUT_OF_STEP)
    assert root.detail.startswith("rank 1 was done after barrier #1 (test_elastic_nodes.py:")


def stop_at_a_step() -> int:
    step = 0
    while not rankwise.should_stop():
        step += 1
        time.sleep(0.01 * (1 + rankwise.rank()))
        if rankwise.rank() == 1 and step == 5:
            kill = f"import os; os.kill({os.getpid()}, {int(signal.SIGTERM)})"
            subprocess.run([sys.executable, "-c", kill], check=True)
    return step


def test_all_ranks_of_all_nodes_stop_at_one_step(tmp_path: Path) -> None:
    run = rehearse(stop_at_a_step, (2, 3), folder=tmp_path)

    assert run.outcome.status is OutcomeStatus.STOPPED
    assert len(run.values) == 3
    assert len(set(run.values.values())) == 1, run.values
    assert "SIGTERM: stopping all ranks" in run.told


def test_equal_runs_are_equal_to_the_nanosecond(tmp_path: Path) -> None:
    faults = ("kill:node=1,back_after=8s@collective=3", "late:node=2,by=5s")

    told = [rehearse(train, (1, 3), *faults, folder=tmp_path).told for _ in range(2)]

    assert told[0] == told[1]
    assert "came: h1; round 1 ended" in told[0]


def test_the_journal_has_the_agents_of_all_nodes(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        "import os, time\nimport numpy as np\nfrom rankwise import collectives\n"
        "for _ in range(3):\n    time.sleep(1)\n    collectives.all_reduce(np.ones(1))\n"
        "print(os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])\n",
    )
    finished = run(
        "run", "--on=sim", "--nnodes=1:2", "--nproc-per-node=2", "--log-dir=logs", "--tee=1",
        "--faults=kill:node=1@collective=2", program, cwd=tmp_path,
    )  # fmt: skip
    replayed = run("replay", "logs", cwd=tmp_path)

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == ["[default0]:0 0", "[default1]:0 1"]
    (log,) = tmp_path.glob("logs/*/attempt_1/1/stdout.log")
    assert log.read_text() == "0 1\n"
    assert replayed.code == 0, replayed.stderr
    assert {line[:10] for line in replayed.lines[1:]} == {"agent n0.0", "agent n1.0"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill:node=2", "--faults names node 2, and there are nodes 0 to 1"),
        ("kill:node=1,rank=0", "kill of a node has no 'rank'"),
        ("kill:node=1,back_after=3", "back_after is '3', expected a duration with its unit"),
        ("kill:node=1,at=5s,collective=3", "at and collective exclude each other"),
        ("late:node=1", "late of a node needs by (as in late:node=1,by=5s)"),
        ("slow:node=1,by=3s", "slow has no 'node' (only kill and late strike nodes)"),
        ("kill:nod=1,at=6s", "kill has no 'nod' (did you mean node?)"),
        ("kill:at=6s", "kill needs rank or node (as in kill:rank=1)"),
        ("kill:node=1,back_after=-1s", "back_after is '-1s', expected 0 s or more"),
        ("kill:node=1,at=1s,group=foo", "group is 'foo', expected @collective=N of that group"),
        ("", "--faults is empty, expected a fault, as in kill:rank=3@collective=9"),
    ],
)
def test_faults_of_nodes_that_cannot_be_are_refused(fault: str, message: str) -> None:
    with pytest.raises(rankwise.ConfigError) as refused:
        read_faults_of_run([fault], 4, node_count=2)

    hint = f" ({refused.value.hint})" if refused.value.hint else ""
    assert message in refused.value.message + hint


def test_a_node_is_late_once() -> None:
    with pytest.raises(rankwise.ConfigError, match="lets node 1 be late twice, expected once"):
        read_faults_of_run(["late:node=1,by=5s", "late:node=1,by=9s"], 4, node_count=2)


def test_a_fault_of_a_node_that_is_not_up_is_said_to_do_nothing(tmp_path: Path) -> None:
    faults = ("kill:node=1,at=1s,back_after=2s", "late:node=1,by=5s")

    run = rehearse(train, (1, 2), *faults, folder=tmp_path)

    assert "fault: node 1 is to be killed after 1 s, and is not up: nothing happens" in run.told
    assert "node 1 is killed" not in run.told


def _waits(told: str) -> str:
    """The lines that only say who made whom wait."""
    return "".join(line for line in told.splitlines(keepends=True) if " of virtual time" in line)
