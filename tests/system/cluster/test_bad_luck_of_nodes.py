"""What nodes make of each other's mistakes and deaths, with real agents on one host."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import etcd_cluster, free_ports, needs_etcd
from running import WITHIN_S, Deaths, Finished, Running, run, start, wait_for_any, write_program

pytestmark = pytest.mark.system

HELLO = """
import os
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""
STAY = HELLO + "import threading; threading.Event().wait()\n"
PIDS = """
import os, threading
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} pid {os.getpid()}", flush=True)
threading.Event().wait()
"""
FAIL_ONCE = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("not this time")
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""
FAIL_ON_RANK_1 = """
import os, threading
if os.environ["RANK"] == "1":
    raise ValueError("rank 1 has enough")
threading.Event().wait()
"""
FAIL_ON_RANK_0_ONCE = """
import os
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(os.environ["IMPORTING"]).close()  # returns when somebody opens it for writing
    raise ValueError("not this time")
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""
ENDLESS_ONCE = """
import os, pathlib, threading
mark = pathlib.Path(__file__).with_suffix(".mark")
if not mark.exists():
    mark.touch()
    open(os.environ["IMPORTING"], "w").close()
    threading.Event().wait()
"""
REDUCE = """
import numpy
from rankwise import collectives
count = 0
while True:
    collectives.all_reduce(numpy.ones(4))
    count += 1
    if count == 2:
        print("reduced", flush=True)
"""
STEP = """
import os, threading, rankwise
count = 0
while not rankwise.should_stop():
    count += 1
    threading.Event().wait(0.001 * (1 + int(os.environ["RANK"])))
    if count == 5:
        print("under way", flush=True)
print(f"stopped after {count} steps", flush=True)
"""


class Nodes:
    """Agents on this host that meet each other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port = free_ports(1)[0]
        self._folder = folder
        self._stack = stack

    def start(self, program: str, *words: str) -> Running:
        script = write_program(self._folder, program)
        return self._stack.enter_context(start("run", *words, script))

    def static(self, node_rank: int, program: str, *words: str) -> Running:
        return self.start(
            program,
            *("--nnodes", "2", "--node-rank", str(node_rank), "--master-port", str(self.port)),
            *words,
        )

    def elastic(self, nnodes: str, program: str, *words: str) -> Running:
        return self.start(
            program,
            *("--nnodes", nnodes, "--rdzv-backend", "embedded", "--rdzv-id", "run"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *words,
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def both(one: Running, two: Running) -> tuple[Finished, Finished]:
    return one.finish(), two.finish()


def test_two_nodes_share_the_ranks(nodes: Nodes) -> None:
    one, two = both(
        nodes.static(0, HELLO, "--nproc-per-node", "2"),
        nodes.static(1, HELLO, "--nproc-per-node", "2"),
    )

    assert (one.code, two.code) == (0, 0), (one, two)
    assert sorted(line.partition(":")[2] for line in one.lines) == ["rank 0 of 4", "rank 1 of 4"]
    assert sorted(line.partition(":")[2] for line in two.lines) == ["rank 2 of 4", "rank 3 of 4"]


def test_agents_of_one_run_are_listed_with_their_ranks(nodes: Nodes) -> None:
    words = ("--rdzv-id", f"listed-{nodes.port}", "--nproc-per-node", "2")
    both_nodes = [nodes.static(number, STAY, *words) for number in (1, 0)]
    wait_for_any(both_nodes, "of 4", count=4)

    listed = [line for line in run("ps").lines if f"listed-{nodes.port}" in line]
    for each in both_nodes:
        each.signal(signal.SIGTERM)
    done = both(*both_nodes)

    assert [re.split("  +", line)[2:6] for line in listed] == [
        ["0 of 2", "0", "0-1 of 4", "running"],
        ["1 of 2", "0", "2-3 of 4", "running"],
    ]
    assert [each.code for each in done] == [143, 143]


def test_every_node_shows_the_root_cause_wherever_it_happened(nodes: Nodes) -> None:
    one, two = both(nodes.static(0, FAIL_ON_RANK_1), nodes.static(1, FAIL_ON_RANK_1))

    assert (one.code, two.code) == (1, 1)
    for told in (one.stderr, two.stderr):
        assert "root cause: rank 1 failed: ValueError: rank 1 has enough" in told
        assert "1 of 2 ranks failed" in told


def test_a_hang_is_told_of_by_the_ranks_of_the_whole_job(nodes: Nodes) -> None:
    words = ("--hang-timeout", "4")
    one, two = both(nodes.static(0, STAY, *words), nodes.static(1, STAY, *words))

    assert (one.code, two.code) == (124, 124)
    stands = r"no rank has made progress for 4 s: .*; their stacks:\n  (.*), innermost"
    assert set(re.findall(stands, one.stderr)) <= {"rank 0"}
    assert set(re.findall(stands, two.stderr)) <= {"rank 1"}
    assert re.search(stands, one.stderr + two.stderr)
    # Who has found out by itself, and ended its ranks, is not told by the other.
    both_told = one.stderr + two.stderr
    for why in re.findall("round 0 is over: (.*)", both_told):
        assert re.fullmatch(r"rank [01] on \S+ hung", why)
    assert "no rank has made progress for 4 s:" in both_told


def test_a_failure_starts_all_nodes_again(nodes: Nodes) -> None:
    one, two = both(
        nodes.static(0, FAIL_ONCE, "--max-restarts", "1"),
        nodes.static(1, FAIL_ONCE, "--max-restarts", "1"),
    )

    assert (one.code, two.code) == (0, 0), (one, two)
    assert "rank 1 of 2" in two.stdout


def test_every_round_is_told_on_every_node_with_its_hosts_and_why_the_last_one_ended(
    nodes: Nodes,
) -> None:
    words = ("--max-restarts", "1")
    done = both(nodes.static(0, FAIL_ONCE, *words), nodes.static(1, FAIL_ONCE, *words))

    host = re.escape(socket.gethostname())
    why = f"rank 1 on {host} failed: ValueError"
    for rank, node in enumerate(done):
        first, over, second = re.findall(r"rankwise: (round .*)", node.stderr)
        here = rf"rank {rank} of 2 here; 2 nodes \({host}/\w+, {host}/\w+\)"
        assert re.fullmatch(f"round 0: {here}", first)
        assert re.fullmatch(f"round 0 is over: {why}", over)
        again = rf"round 1: {here}; round 0 ended because {why} \(restart 1 of 1\)"
        assert re.fullmatch(again, second)


def test_a_round_that_ends_while_a_fork_server_imports_is_not_its_last(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_once.py").write_text(ENDLESS_ONCE)
    os.mkfifo(tmp_path / "importing")
    monkeypatch.setenv("IMPORTING", str(tmp_path / "importing"))
    words = ("--max-restarts", "1", "--start-method", "forkserver")

    one, two = both(
        nodes.static(0, FAIL_ON_RANK_0_ONCE, *words),
        nodes.static(1, FAIL_ON_RANK_0_ONCE, *words, "--preload", "endless_once"),
    )

    assert (one.code, two.code) == (0, 0), (one, two)
    assert "the fork server is still importing endless_once" in two.stderr
    assert "rank 1 of 2" in two.stdout


def test_a_preempted_job_stops_everywhere_at_one_step(nodes: Nodes) -> None:
    one = nodes.static(0, STEP, "--nproc-per-node", "2")
    two = nodes.static(1, STEP, "--nproc-per-node", "2")
    wait_for_any([one, two], "under way", count=4)

    two.signal(signal.SIGTERM)
    done = both(one, two)

    assert [each.code for each in done] == [143, 143], done
    told = [
        line.partition(":")[2] for each in done for line in each.lines if "stopped after" in line
    ]
    assert len(told) == 4
    assert len(set(told)) == 1, told


def test_a_node_that_comes_later_is_taken_in_and_one_that_is_killed_is_missed(
    nodes: Nodes,
) -> None:
    # A machine that stalls for longer than a lease ends the node that lives, too.
    words = ("--rdzv-conf", "lease_ttl=10", "--max-restarts", "0")
    one = nodes.elastic("1:2", STAY, *words)
    one.wait_for("rank 0 of 1")
    two = nodes.elastic("1:2", STAY, *words)
    wait_for_any([one, two], "of 2", count=2)

    two.process.kill()
    one.wait_for("rank 0 of 1", count=2)
    one.signal(signal.SIGTERM)

    assert one.finish().code == 143
    assert "lost" in one.stderr


def test_a_node_that_leaves_is_not_the_end_of_the_others(nodes: Nodes) -> None:
    one = nodes.elastic("1:2", STAY)
    one.wait_for("rank 0 of 1")
    two = nodes.elastic("1:2", STAY, "--on-preemption", "leave")
    wait_for_any([one, two], "of 2", count=2)

    two.signal(signal.SIGTERM)
    one.wait_for("rank 0 of 1", count=2)
    one.signal(signal.SIGTERM)

    assert two.finish().code == 143
    assert one.finish().code == 143


def test_ranks_that_are_killed_have_the_numbers_that_they_have_in_the_job(nodes: Nodes) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
    one, two = (nodes.static(seat, deaf, "--shutdown-timeout", "1") for seat in range(2))
    wait_for_any([one, two], "of 2", count=2)

    one.signal(signal.SIGTERM)
    told = [each.stderr for each in both(one, two)]

    for rank, text in enumerate(told):
        assert f"rankwise: rank {rank} did not end within 1 s: killed" in text


def test_a_node_with_other_options_is_told_what_differs(nodes: Nodes) -> None:
    one = nodes.static(0, HELLO, "--max-restarts", "2")
    two = nodes.static(1, HELLO)

    # Whoever comes second is told, and the first one goes on waiting.
    wait_for_any([one, two], "was started by other nodes with restarts_max", stream="stderr")
    for each in (one, two):
        each.signal(signal.SIGTERM)
    told = [each.stderr for each in both(one, two)]

    refused = [text for text in told if "was started by other nodes with restarts_max" in text]
    assert len(refused) == 1, told
    assert "start every node with the same options" in refused[0]


def test_two_nodes_that_claim_one_rank_are_both_told(nodes: Nodes) -> None:
    words = ("--rdzv-conf", "lease_ttl=2,join_timeout=30")
    done = both(nodes.static(0, HELLO, *words), nodes.static(0, HELLO, *words))

    assert [each.code for each in done] == [1, 1]
    for each in done:
        assert "node rank 0 is claimed by" in each.stderr


def test_a_node_with_another_token_is_refused(nodes: Nodes) -> None:
    one = nodes.static(0, HELLO)
    two = nodes.static(1, HELLO, "--rdzv-conf", "token=other")

    # Whoever comes second is refused, and the first one goes on waiting.
    wait_for_any([one, two], "its token is not ours", stream="stderr")
    refused, waiting = (one, two) if "its token is not ours" in one.stderr else (two, one)
    waiting.signal(signal.SIGTERM)

    assert refused.finish().code == 2
    assert "its token" not in waiting.finish().stderr


def test_the_time_limit_of_one_node_is_told_as_such_on_the_other(nodes: Nodes) -> None:
    limited, other = both(nodes.elastic("2", STEP, "--timeout", "5s"), nodes.elastic("2", STEP))

    assert (limited.code, other.code) == (124, 124), (limited, other)
    assert "stopped by its time limit of 5 s after" in limited.stderr
    assert "stopped by the time limit of another node after" in other.stderr


def test_who_asks_a_node_that_has_no_ranks_yet_is_told_where_to_look(
    nodes: Nodes, tmp_path: Path
) -> None:
    fifo = tmp_path / "checking"
    os.mkfifo(fifo)
    agent = nodes.elastic("2", HELLO, "--node-check", f"cat {fifo}")

    with fifo.open("w"):  # the agent is under way, and its check lasts until this is closed
        asked = [run(command, str(agent.pid)) for command in ("why", "stacks")]
    agent.signal(signal.SIGTERM)

    assert agent.finish().code == 143
    for each in asked:
        assert each.code == 1
        assert f"run 'run' (pid {agent.pid}) refused: no rank runs before " in each.stderr
        assert "the nodes have met; its stderr tells" in each.stderr


def test_nodes_that_never_come_are_named(nodes: Nodes) -> None:
    alone = nodes.static(1, HELLO, "--rdzv-conf", "join_timeout=5,is_host=true").finish()

    assert alone.code == 1
    assert "too few nodes came within 5 s: 1 of at least 2 nodes are ready" in alone.stderr
    assert "missing node ranks 0" in alone.stderr


def test_a_store_that_is_not_there_is_named(nodes: Nodes) -> None:
    conf = ("--rdzv-conf", "join_timeout=5")
    words = ("--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-id", "n", *conf)
    done = nodes.start(HELLO, *words, "--rdzv-endpoint", f"127.0.0.1:{nodes.port}").finish()

    assert done.code == 1
    assert f"etcd at 127.0.0.1:{nodes.port}: Connection refused" in done.stderr


def test_a_node_that_is_not_fit_stays_out(nodes: Nodes) -> None:
    done = nodes.static(0, HELLO, "--node-check", "echo no accelerator; exit 3").finish()

    assert done.code == 1
    assert (
        "the node check 'echo no accelerator; exit 3' ended with exit code 3: no accelerator"
        in done.stderr
    )


@pytest.mark.parametrize("backend", ["embedded", "c10d"])
def test_the_loss_of_the_agent_that_serves_the_store_ends_all_others(
    nodes: Nodes, backend: str
) -> None:
    meeting = ("--nnodes", "1:2", "--rdzv-backend", backend, "--max-restarts", "3")
    words = (*meeting, "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "--rdzv-conf")
    host = nodes.start(PIDS, *words, "is_host=true,lease_ttl=3")
    other = nodes.start(PIDS, *words, "is_host=false,lease_ttl=3")
    wait_for_any([host, other], "of 2", count=2)
    deaths = Deaths([int(pid) for pid in re.findall(r"pid (\d+)", other.stdout)])

    host.signal(signal.SIGKILL)
    done = other.finish(WITHIN_S)

    assert done.code == 1
    assert "the run ends here: the agent that serves its store, or its machine, is" in done.stderr
    assert "\n  time: " in done.stderr
    assert deaths.survivors(within_s=0) == []


def test_the_loss_of_the_store_and_no_innocent_rank_is_what_machines_are_told(nodes: Nodes) -> None:
    words = ("--nnodes", "2", "--rdzv-backend", "embedded", "--log-format", "json")
    place = ("--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "--rdzv-conf")
    host = nodes.start(REDUCE, *words, *place, "is_host=true,lease_ttl=3")
    other = nodes.start(REDUCE, *words, *place, "is_host=false,lease_ttl=3")
    wait_for_any([host, other], "reduced", count=2)

    host.signal(signal.SIGKILL)
    done = other.finish(WITHIN_S)

    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    failures = [each for each in told if each["event"] == "failure"]
    assert [each["root_cause"] for each in failures] == [True, False]
    loss, consequence = failures
    assert (loss["cause"], loss.get("rank")) == ("store-lost", None)
    assert "the agent that serves its store, or its machine, is lost" in loss["error"]
    assert "PeerDied" in consequence["error"]
    assert done.code == 1


@pytest.mark.torch
def test_sigterm_ends_an_agent_though_torchs_store_is_silent(nodes: Nodes) -> None:
    words = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf")
    place = ("--rdzv-endpoint", f"127.0.0.1:{nodes.port}")
    host = nodes.start(STAY, *place, *words, "is_host=true,lease_ttl=3")
    other = nodes.start(STAY, *place, *words, "is_host=false,lease_ttl=3")
    wait_for_any([host, other], "of 2", count=2)

    host.signal(signal.SIGSTOP)
    other.signal(signal.SIGTERM)
    done = other.finish(WITHIN_S)

    assert done.code == 143, done


@needs_etcd
def test_a_quorum_that_was_lost_for_longer_than_a_lease_brings_all_nodes_back(
    nodes: Nodes, tmp_path: Path
) -> None:
    with etcd_cluster(tmp_path, 3) as cluster:
        endpoints = ",".join(f"{host}:{port}" for host, port in cluster.endpoints)
        words = (
            *("--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints),
            *("--rdzv-id", "run", "--rdzv-conf", "lease_ttl=2"),
        )
        one, two = nodes.start(STAY, *words), nodes.start(STAY, *words)
        wait_for_any([one, two], "of 2", count=2)

        for member in cluster.members[:2]:
            member.kill()
        for each in (one, two):
            each.wait_for("cut off from the store", stream="stderr")
        cluster.heal()
        wait_for_any([one, two], "of 2", count=4)
        one.signal(signal.SIGTERM)
        done = both(one, two)

    assert [each.code for each in done] == [143, 143], done


@needs_etcd
def test_a_stopped_agents_workers_are_gone_before_others_get_their_ranks(
    nodes: Nodes, tmp_path: Path
) -> None:
    with etcd_cluster(tmp_path) as cluster:
        (host, port), *_ = cluster.endpoints
        words = (
            *("--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}"),
            *("--rdzv-id", "run", "--rdzv-conf", "lease_ttl=4"),
        )
        one, two = nodes.start(PIDS, *words), nodes.start(PIDS, *words)
        wait_for_any([one, two], "of 2", count=2)
        workers = [int(pid) for pid in re.findall(r"pid (\d+)", one.stdout)]
        deaths = Deaths(workers)

        one.signal(signal.SIGSTOP)
        two.wait_for("of 1")
        left = deaths.survivors(within_s=0)
        one.signal(signal.SIGCONT)
        wait_for_any([one, two], "of 2", count=4)
        one.signal(signal.SIGTERM)
        done = both(one, two)

    assert workers
    assert left == []
    assert [each.code for each in done] == [143, 143], done
    assert "failed" not in one.stderr + two.stderr


@needs_etcd
def test_etcd_may_be_gone_for_less_than_a_lease_and_for_more(nodes: Nodes, tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster:
        (host, port), *_ = cluster.endpoints
        words = (
            *("--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}"),
            *("--rdzv-id", "run", "--rdzv-conf", "lease_ttl=3"),
        )
        one = nodes.start(STAY, *words)
        one.wait_for("rank 0 of 1")
        (member,) = cluster.members

        member.stop()
        one.wait_for("cut off from the store", stream="stderr")
        member.go_on()
        one.wait_for("rank 0 of 1", count=2)
        cluster.kill()
        cluster.heal()
        one.signal(signal.SIGTERM)

        assert one.finish().code == 143
