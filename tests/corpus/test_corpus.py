"""Programs with a known culprit: it is named, in the same words on processes and simulated ranks.

Healthy programs raise no alarm.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from busy import busy_loops, loops_wanted
from corpus import PRELOADED, Program, programs
from etcd_servers import free_ports
from running import RANKWISE, Running

import rankwise
from rankwise.launch.inside.run_path import run_script_path

pytestmark = pytest.mark.system

CULPRITS = programs("culprits")
HEALTHY = programs("healthy")
HANG = re.compile("^the gang hung: no progress for [0-9.]+ s; ")
DEADLOCK = re.compile("^the gang hung: (deadlock: no rank can continue; )?")
PATIENCE_S = 200.0
"""So long no program lasts: the collectives' time-out is longer, and must not be what ends it."""


@pytest.fixture(scope="module")
def server() -> Iterator[rankwise.ForkServer]:
    """Torch is imported once for all programs."""
    has_torch = sys.modules.get("torch", ...) is not None
    with rankwise.ForkServer(preload=PRELOADED if has_torch else PRELOADED[:1]) as server:
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [
            0
        ]  # or the first test would have begun it
        yield server


@pytest.fixture(scope="module", autouse=True)
def loops() -> Iterator[None]:
    """What `make corpus-busy` wants to run beside the programs."""
    with busy_loops(loops_wanted()):
        yield


def of(chosen: list[Program]) -> "list[pytest.ParameterSet]":
    marks = {True: [pytest.mark.torch], False: []}
    return [pytest.param(each, id=each.name, marks=marks[each.is_of_torch]) for each in chosen]


def run(program: Program, server: rankwise.ForkServer | None = None) -> str:
    """Run it, on simulated ranks if there is no server; what is told if it fails, or nothing."""
    try:
        rankwise.run(
            run_script_path, (str(program.path),), program.ranks,
            env=program.environment, hang_timeout=program.hang_timeout, server=server,
            timeout=PATIENCE_S, on=None if server else "sim", grace=1,
        )  # fmt: skip
    except rankwise.WorkersFailed as failed:
        return str(failed)
    return ""


def root_cause_in(told: str) -> str:
    return told.partition("root cause: ")[2].partition("\n")[0]


@pytest.mark.parametrize("program", of([each for each in CULPRITS if each.says]))
def test_the_culprit_is_named(program: Program, server: rankwise.ForkServer) -> None:
    told = run(program, server)

    root_cause = root_cause_in(told)
    assert bool(HANG.match(root_cause)) == (program.hang_timeout is not None), told
    root_cause = HANG.sub("", root_cause)
    assert program.names_the_culprit(root_cause), told
    if program.stands:
        place = f'{program.path.name}", line {program.line(program.stands.strip("{}"))} in '
        assert place in told, told


@pytest.mark.parametrize(
    "program", of([each for each in CULPRITS if each.says and not each.simulated])
)
def test_simulated_ranks_come_to_the_same_verdict(program: Program) -> None:
    told = run(program)

    root_cause = DEADLOCK.sub("", root_cause_in(told))
    assert program.names_the_culprit(root_cause, is_simulated=True), told


@pytest.mark.parametrize("program", of([each for each in CULPRITS if each.two_nodes]))
def test_agents_of_two_nodes_both_name_the_culprit(program: Program) -> None:
    hang = () if program.hang_timeout is None else (f"--hang-timeout={program.hang_timeout}s",)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    command = (
        *(*RANKWISE, "run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=corpus", *hang),
        *("--rdzv-backend=embedded", f"--rdzv-endpoint={endpoint}", str(program.path)),
    )
    with ExitStack() as stack:
        agents = [
            stack.enter_context(Running(*command, environment=program.environment))
            for _ in range(2)
        ]
        ended = [agent.finish() for agent in agents]

    for agent in ended:
        root_cause = HANG.sub("", root_cause_in(agent.stderr))
        assert program.names_the_culprit(root_cause, is_of_two=True), agent.stderr


@pytest.mark.parametrize("program", of([each for each in CULPRITS if each.tells]))
def test_the_culprit_is_told_of_though_the_run_succeeds(
    program: Program, server: rankwise.ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(program, server) == ""

    assert program.tells in capfd.readouterr().err


@pytest.mark.parametrize("program", of(HEALTHY))
def test_a_healthy_program_raises_no_alarm(
    program: Program, server: rankwise.ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(program, server) == ""

    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rankwise: ")]
    # Who is waited for as it should be is told of; and of a machine that is busy, for whom.
    expected = (program.tells or "nobody", "; it had to wait for a CPU itself ")
    assert [line for line in told if not any(each in line for each in expected)] == []
