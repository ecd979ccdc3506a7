"""A rank of one node keeps ranks of another one waiting: it is the root cause on every node.

The culprit is alone on its node, so no node's own call records tell who is missing.
"""

import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import etcd_cluster, free_ports, needs_etcd
from running import RANKWISE, WITHIN_S, Finished, Running, run, wait_for_any, write_program

pytestmark = pytest.mark.system

TORCH = """
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
rank, last = dist.get_rank(), dist.get_world_size() - 1
x = torch.ones(4096)
"""
NUMPY = """
import numpy, time, rankwise
from rankwise import collectives as dist
rank, last = rankwise.rank(), rankwise.world_size() - 1
x = numpy.ones(4096, numpy.float32)
"""
LATE = """
def load():
    time.sleep(600)
for step in range(8):
    if step == 5 and rank == last:
        load()
    dist.all_reduce(x)
"""
IN_A_SECTION = """
import rankwise
def load():
    time.sleep(600)
if rank == last:
    load()
with rankwise.section("step", timeout=1):
    dist.all_reduce(x)
"""
SKIPS = """
for step in range(8):
    if step != 5 or rank != last:
        dist.all_reduce(x)
"""
ANOTHER = """
dist.all_reduce(x)
print("differs at", time.time(), flush=True)
if rank == last:
    time.sleep(1)  # the others come first, and are the majority
    dist.broadcast(x, 0)
else:
    dist.all_reduce(x)
"""
STRAGGLES = """
for step in range(20):
    time.sleep(0.15 if rank == last else 0.005)
    dist.all_reduce(x)
"""
OF = "(sum) of (4096,) float32"


class Nodes:
    """Agents of one job on this machine."""

    def __init__(self, directory: Path, *options: str, endpoint: str = "") -> None:
        self._directory = directory
        self._options = options or ("--rdzv-backend", "embedded")
        self._endpoint = endpoint or f"127.0.0.1:{free_ports(1)[0]}"

    def run(
        self,
        source: str,
        local_sizes: Sequence[int],
        *options: str,
        timeout_s: int = 600,
        patience_s: float = 120,
    ) -> list[Finished]:
        program = write_program(
            self._directory, source.replace("TIMEOUT", str(timeout_s)), "train.py"
        )
        if "torch" in source:
            pytest.importorskip("torch")
            options = ("--start-method=forkserver", "--preload=torch.distributed", *options)
        with ExitStack() as stack:
            agents = [
                stack.enter_context(
                    Running(
                        *(*RANKWISE, "run", "--nnodes", str(len(local_sizes))),
                        *("--nproc-per-node", str(local_size), "--rdzv-id", "missed"),
                        *("--rdzv-endpoint", self._endpoint, *self._options, *options),
                        *("--node-topology", str(node)),  # they get their ranks in this order
                        str(program),
                        environment={"RANKWISE_COLLECTIVE_TIMEOUT": str(timeout_s)},
                    )
                )
                for node, local_size in enumerate(local_sizes)
            ]
            return [agent.finish(patience_s) for agent in agents]


def root_causes(done: Sequence[Finished]) -> list[str]:
    return [each.stderr.partition("root cause: ")[2].partition("\n")[0] for each in done]


def line_of(source: str, text: str) -> str:
    return f"train.py:{source[: source.index(text)].count(chr(10)) + 1}"


@pytest.mark.parametrize("preamble", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_a_rank_in_its_loader_is_the_root_cause_with_its_stack_and_no_time_out_is(
    preamble: str, tmp_path: Path
) -> None:
    source = preamble + LATE

    done = Nodes(tmp_path).run(source, (1, 1), timeout_s=3)

    cause = (
        f"rank 1 has not come to all_reduce #6 {OF} ({line_of(source, 'dist.all_reduce')}), in "
        f"which rank 0 waits: it is at {line_of(source, 'time.sleep')}, in load"
    )
    assert root_causes(done) == [cause, cause]
    assert any("(a consequence)" in each.stderr for each in done)
    assert [each.code for each in done] == [1, 1]


@pytest.mark.parametrize("preamble", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_the_limit_of_a_section_is_the_fault_of_the_rank_of_another_node_that_has_not_come(
    preamble: str, tmp_path: Path
) -> None:
    source = preamble + IN_A_SECTION

    done = Nodes(tmp_path).run(source, (2, 1))

    cause = (
        f"rank 2 has not come to all_reduce #1 {OF} ({line_of(source, 'dist.all_reduce')}), in "
        f"which ranks 0-1 wait: it is at {line_of(source, 'time.sleep')}, in load"
    )
    assert root_causes(done) == [cause, cause]
    assert "section 'step' is stuck" in done[0].stderr
    assert [each.code for each in done] == [1, 1]


def test_a_straggler_that_is_alone_on_its_node_is_told_of_at_the_end_on_both(
    tmp_path: Path,
) -> None:
    done = Nodes(tmp_path).run(NUMPY + STRAGGLES, (1, 1))

    for each in done:
        assert each.code == 0, each.stderr
        told = re.findall("rank 1 came last in ([0-9]+) % of the calls; ([0-9]+) % of", each.stderr)
        assert len(told) == 1, each.stderr
        assert int(told[0][0]) > 50
        assert int(told[0][1]) > 5


def test_ranks_that_are_equally_late_are_no_stragglers_of_their_nodes(tmp_path: Path) -> None:
    done = Nodes(tmp_path).run(NUMPY + STRAGGLES.replace("rank == last", "rank > 0"), (2, 2))

    for each in done:
        assert each.code == 0, each.stderr
        assert "came last" not in each.stderr


def test_the_node_of_the_culprit_is_blamed_on_all_of_three(tmp_path: Path) -> None:
    source = TORCH + LATE

    done = Nodes(tmp_path).run(source, (1, 1, 1), timeout_s=3)

    for cause in root_causes(done):
        assert re.match(r"rank 2 has not come to all_reduce #6 .*in which ranks? [01]", cause)
        assert cause.endswith("in load")
    for each in done:
        assert "round 0 is over: rank 2 on " in each.stderr


def test_a_rank_that_skips_a_call_and_ends_early_is_the_root_cause(tmp_path: Path) -> None:
    source = TORCH + SKIPS

    done = Nodes(tmp_path).run(source, (1, 1))

    where = f"{OF} ({line_of(source, 'dist.all_reduce')})"
    cause = (
        f"rank 1 was done after all_reduce #7 {where}, while rank 0 waits in all_reduce #8 {where}"
    )
    assert root_causes(done) == [cause, cause]
    assert [each.code for each in done] == [1, 1]


def test_ranks_that_are_late_by_seconds_raise_no_alarm(tmp_path: Path) -> None:
    source = (
        TORCH
        + """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(64, 64))
pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
for step in range(5):
    time.sleep({1: 1.6, 3: 0.9}.get(rank + step, 0))
    model(torch.ones(8, 64)).sum().backward()
    dist.all_reduce(x, group=pairs[rank % 2])
if rank == 0:
    time.sleep(4)
dist.barrier()
print("done", flush=True)
"""
    )

    done = Nodes(tmp_path).run(source, (2, 2))

    assert [each.code for each in done] == [0, 0], done
    assert "".join(each.stdout for each in done).count("done") == 4
    assert all("is over" not in each.stderr for each in done)


@needs_etcd
def test_ranks_of_two_nodes_that_disagree_end_the_run_within_seconds_on_etcd(
    tmp_path: Path,
) -> None:
    source = TORCH + ANOTHER
    with etcd_cluster(tmp_path, 1) as cluster:
        host, port = cluster.endpoints[0]
        nodes = Nodes(tmp_path, "--rdzv-backend", "etcd", endpoint=f"{host}:{port}")
        done = nodes.run(source, (2, 1))

    ended_at = time.time()
    differed_at = max(
        float(found) for each in done for found in re.findall(r"differs at ([\d.]+)", each.stdout)
    )
    broadcast = line_of(source, "dist.broadcast")
    for cause in root_causes(done):
        assert cause.startswith(
            f"call #2: rank 2 called broadcast from rank 0 of (4096,) float32 ({broadcast}), rank"
        )
    assert ended_at - differed_at < 30, "it waited for the time-out of torch"


def test_ranks_of_two_nodes_of_which_one_alone_compiles_what_all_call_are_no_disagreement(
    tmp_path: Path,
) -> None:
    source = (
        TORCH
        + """
def reduced(y):
    dist.all_reduce(y)
    return y + 1
step = torch.compile(reduced, backend="eager", fullgraph=True) if rank == 0 else reduced
step(torch.ones(2))
time.sleep(5)  # who stands after the pauses that follow this is asked about at once
if rank == last:
    time.sleep(5)  # the others stand in their next call
dist.barrier()
"""
    )

    done = Nodes(tmp_path).run(source, (2, 1))

    assert [each.code for each in done] == [0, 0], done


def test_without_the_ledger_nodes_ask_each_other_nothing(tmp_path: Path) -> None:
    done = Nodes(tmp_path).run(TORCH + SKIPS, (1, 1), "--no-ledger")

    assert all(" failed: " in cause for cause in root_causes(done))
    assert all("was done after" not in each.stderr for each in done)


def test_a_restart_follows_when_the_culprit_and_the_waiting_are_on_two_nodes(
    tmp_path: Path,
) -> None:
    source = (
        'import os\nfirst = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"\n'
        + TORCH
        + SKIPS.replace("rank != last", "rank != last or not first")
        + "print('sum', x[0].item())\n"
    )

    done = Nodes(tmp_path).run(source, (1, 1), "--max-restarts", "1")

    assert [each.code for each in done] == [0, 0], done
    assert any("rank 1 was done after all_reduce #7 " in each.stderr for each in done)


@needs_etcd
def test_why_tells_on_each_node_who_is_missing_and_which_node_does_not_answer(
    tmp_path: Path,
) -> None:
    source = NUMPY + LATE.replace(
        "    dist.all", "    if step == 5:\n        print('waits', flush=True)\n    dist.all"
    )
    program = write_program(tmp_path, source, "train.py")
    with ExitStack() as stack:
        cluster = stack.enter_context(etcd_cluster(tmp_path, 1))
        host, port = cluster.endpoints[0]
        agents = [
            stack.enter_context(
                Running(
                    *(*RANKWISE, "run", "--nnodes", "2", "--rdzv-id", "asked"),
                    *("--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}"),
                    *("--rdzv-conf", "lease_ttl=60", str(program)),
                    environment={"RANKWISE_COLLECTIVE_TIMEOUT": "600"},
                )
            )
            for _ in range(2)
        ]
        wait_for_any(agents, "waits")
        waiting = next(agent for agent in agents if "waits" in agent.stdout)
        late = next(agent for agent in agents if agent is not waiting)
        asked = [run("why", str(agent.pid)) for agent in agents]
        late.signal(signal.SIGSTOP)
        alone = run("why", str(waiting.pid))
        late.signal(signal.SIGCONT)
        together = run("why", "asked")
        stopped = run("stop", "asked", "--now")
        ends = [agent.finish(WITHIN_S).code for agent in agents]

    where = line_of(source, "dist.all_reduce")
    for each in asked:
        assert each.lines[0] == (
            f"rank 1 has not come to all_reduce #6 {OF} ({where}), in which rank 0 waits"
        )
        assert each.lines[1].startswith("below are the ranks of this machine; the others are on ")
    nobody = "no rank of this machine makes progress, and no call shows which rank is missing"
    assert alone.lines[0] == nobody
    assert alone.lines[1].startswith("not known are the calls of ranks on ")
    ranks = [line.partition(" (")[0] for line in together.lines if line.startswith("rank ")]
    assert (together.lines[0], ranks[1:]) == (asked[0].lines[0], ["rank 0", "rank 1"])
    assert len(stopped.lines) == 3  # a line for each agent
    assert ends == [143, 143]


@pytest.mark.parametrize("timeout_s", [600, 2], ids=["all hang", "the others time out"])
def test_a_hang_over_two_nodes_is_the_fault_of_the_rank_that_is_missing(
    timeout_s: int, tmp_path: Path
) -> None:
    source = NUMPY + LATE

    done = Nodes(tmp_path).run(source, (1, 1), "--hang-timeout", "4s", timeout_s=timeout_s)

    cause = (
        f"rank 1 has not come to all_reduce #6 {OF} ({line_of(source, 'dist.all_reduce')}), in "
        f"which rank 0 waits: it is at {line_of(source, 'time.sleep')}, in load"
    )
    assert root_causes(done) == [cause, cause]
