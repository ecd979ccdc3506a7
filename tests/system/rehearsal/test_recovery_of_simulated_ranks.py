"""`rankwise.recover` on simulated ranks: who dies is replaced, who lives is called again."""

import os
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

RECOVERING = """
import os, numpy as np, rankwise
calls = []

def train():
    calls.append(1)
    for _ in range(5):
        rankwise.collectives.all_reduce(np.ones(1))
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], len(calls))

rankwise.recover(train)
"""
KILL = "kill:rank=1@collective=3"


class Rehearsed(NamedTuple):
    outcome: Outcome
    values: dict[int, Any]
    told: str


def rehearse(
    function: Callable[..., Any], *faults: str, folder: Path, ranks: int = 3, restarts: int = 1,
    nodes: tuple[int, int] | None = None, spares: int = 0, machine: str | None = None,
) -> Rehearsed:  # fmt: skip
    """Run a function on simulated ranks of which some die; `ranks` are those of a node."""
    least, most = nodes or (1, 1)
    console = os.open(folder / "console", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    policy = RestartPolicy(restarts_max=restarts)
    try:
        rehearsal = Rehearsal(
            function_job(
                function, (), ranks, start_method="spawn", logs=LogPlan(), max_restarts=restarts
            ),
            SimulationOptions(),
            node_count=most,
            rendezvous=None
            if nodes is None
            else RendezvousConfig(nodes_min=least, nodes_max=most, spares=spares, policy=policy),
            faults=read_faults_of_run(faults, most * ranks, node_count=most + spares).faults,
            console_fds=(console, console),
            machine=machine,
        )
        outcome = rehearsal.run()
    finally:
        os.close(console)
    return Rehearsed(
        outcome, values_by_rank(rehearsal.supervision.results), (folder / "console").read_text()
    )


def recovering(
    step: Callable[[int, int], None] = lambda _rank, _step: None,
) -> Callable[[], tuple[int, int, int, int]]:
    """A program that takes five steps; its rank, how many there are, restarts, and calls."""

    def program() -> tuple[int, int, int, int]:
        calls: list[int] = []

        def train() -> tuple[int, int, int, int]:
            calls.append(1)
            rank = rankwise.rank()
            for number in range(5):
                step(rank, number)
                total = collectives.all_reduce(np.ones(1))
            return rank, int(total[0]), rankwise.restart_count(), len(calls)

        return rankwise.recover(train)

    return program


def test_who_lives_is_called_again_and_keeps_what_it_has(tmp_path: Path) -> None:
    run = rehearse(recovering(), KILL, folder=tmp_path)

    assert run.values == {0: (0, 3, 1, 2), 1: (1, 3, 1, 1), 2: (2, 3, 1, 2)}
    assert (
        "rank 1 was killed by SIGKILL, sent by a fault (--faults) at operation #3 of group"
        " rankwise.collectives; calling 2 ranks again and"
        " restarting the rest (restart 1 of 1)\n" in run.told
    )
    assert (run.outcome.status, run.outcome.attempts) == (OutcomeStatus.SUCCEEDED, 2)


def test_an_exception_of_its_own_costs_a_rank_its_life_and_the_others_nothing(
    tmp_path: Path,
) -> None:
    def step(rank: int, number: int) -> None:
        if rank == 1 and number == 2 and rankwise.restart_count() == 0:
            raise ValueError("mine")

    run = rehearse(recovering(step), folder=tmp_path)

    assert run.values == {0: (0, 3, 1, 2), 1: (1, 3, 1, 1), 2: (2, 3, 1, 2)}
    assert "rank 1 failed (ValueError: mine); calling 2 ranks again" in run.told


def test_without_restarts_left_the_run_fails_as_ever(tmp_path: Path) -> None:
    again = KILL.replace("rank=1", "rank=2")

    run = rehearse(recovering(), KILL, again, folder=tmp_path)

    assert run.outcome.status is OutcomeStatus.FAILED
    assert (run.outcome.failures[0].rank, run.outcome.failures[0].cause) == (
        2,
        FailureCause.SIGNALED,
    )
    assert run.outcome.attempts == 2


def test_a_rank_that_sleeps_leaves_its_function_at_once(tmp_path: Path) -> None:
    def step(rank: int, number: int) -> None:
        if rank == 0 and number == 2 and rankwise.restart_count() == 0:
            time.sleep(3_600)

    run = rehearse(recovering(step), KILL, folder=tmp_path)

    assert run.values[0] == (0, 3, 1, 2)


def test_a_rank_that_does_not_leave_is_killed_and_replaced(tmp_path: Path) -> None:
    def program() -> tuple[int, int]:
        calls: list[int] = []

        def train() -> tuple[int, int]:
            calls.append(1)
            try:
                for _ in range(5):
                    collectives.all_reduce(np.ones(1))
            except rankwise.Recalled:
                while rankwise.rank() == 0:
                    time.sleep(1)
                raise
            return rankwise.restart_count(), len(calls)

        return rankwise.recover(train, timeout=30)

    run = rehearse(program, KILL, folder=tmp_path)

    assert run.values == {0: (1, 1), 1: (1, 1), 2: (1, 2)}
    assert (
        "rank 0 did not leave the function of recover in time: killed, and started again"
        in run.told
    )


@pytest.mark.parametrize(
    ("fault", "nodes", "spares", "values"),
    [
        # A spare takes the place: its rank is new, whatever number it has.
        ("kill:node=0@collective=3", (2, 2), 1, {(4, 0, 2), (4, 0, 1)}),
        # The node itself is back.
        ("kill:node=1,back_after=1min@collective=3", (2, 2), 0, {(4, 0, 2), (4, 0, 1)}),
        # Nobody is: the others go on, with other numbers.
        ("kill:node=0@collective=3", (1, 3), 0, {(4, 0, 2)}),
        # A node comes late: the first ones are called again in the larger world.
        ("late:node=1,by=1min", (1, 2), 0, {(4, 0, 2), (4, 0, 1)}),
    ],
)
def test_ranks_of_other_nodes_are_called_again(
    fault: str, nodes: tuple[int, int], spares: int, values: set[Any], tmp_path: Path
) -> None:
    def step(_rank: int, _number: int) -> None:
        time.sleep(20)

    run = rehearse(recovering(step), fault, nodes=nodes, spares=spares, ranks=2, folder=tmp_path)

    assert {rank: value[0] for rank, value in run.values.items()} == dict(enumerate(range(4))), (
        run.told
    )
    assert {value[1:] for value in run.values.values()} == values, run.told


def test_recover_does_not_nest(tmp_path: Path) -> None:
    def program() -> str:
        def inner() -> None:
            rankwise.recover(lambda: None)

        try:
            rankwise.recover(inner)
        except Exception as error:  # noqa: BLE001  # what it is, is what is tested
            return str(error)
        return ""

    run = rehearse(program, ranks=1, folder=tmp_path)

    assert run.values[0].startswith("rankwise.recover was called in a function that")


def train_with_ddp() -> tuple[int, int, bool]:
    import torch  # noqa: PLC0415  # as programs of torch, in ranks that have it
    import torch.distributed as dist  # noqa: PLC0415  # the same

    calls: list[int] = []

    def train() -> tuple[int, int, bool]:
        calls.append(1)
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        model = torch.nn.parallel.DistributedDataParallel(net)
        for step in range(5):
            model(torch.full((3, 4), float(dist.get_rank() + step))).square().sum().backward()
        weight = net.weight.grad
        assert weight is not None
        first = weight.clone()
        dist.broadcast(first, 0)
        return rankwise.restart_count(), len(calls), bool((first == weight).all())

    return rankwise.recover(train)


@pytest.mark.torch
@pytest.mark.parametrize("machine", [None, "switch8"])
@pytest.mark.parametrize("collective", [2, 5, 9])
def test_groups_of_torch_are_made_anew(
    collective: int, machine: str | None, tmp_path: Path
) -> None:
    run = rehearse(
        train_with_ddp, f"kill:rank=1@collective={collective}", machine=machine, folder=tmp_path
    )

    assert run.values == {0: (1, 2, True), 1: (1, 1, True), 2: (1, 2, True)}, run.told


def test_spares_of_the_command_line_take_the_place_of_a_lost_node(tmp_path: Path) -> None:
    program = write_program(tmp_path, RECOVERING)

    result = run(
        "run", "--on", "sim", "--nnodes", "2", "--spares", "1", "--max-restarts", "1",
        "--faults", "kill:node=0@collective=3", "--no-prefix", str(program),
    )  # fmt: skip

    assert result.code == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 2 1", "1 2 2"]
    assert "round 0: 2 ranks; 2 nodes (h0, h1); in reserve: h2" in result.stderr
    assert "round 1: 2 ranks; 2 nodes (h2, h1); came: h2; left: h0" in result.stderr


def test_a_number_of_spares_below_zero_is_refused(tmp_path: Path) -> None:
    result = run("run", "--on", "sim", "--spares", "-1", str(write_program(tmp_path, "pass")))

    assert result.code == 2
    assert "--spares: -1 is not in the range x>=0" in result.stderr
