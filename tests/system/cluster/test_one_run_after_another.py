"""Runs under one id, one after the other, with real agents and real stores."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, free_ports, needs_etcd
from running import (
    WITHIN_S,
    Deaths,
    Finished,
    Running,
    numbers_after,
    start,
    wait_for_any,
    write_program,
)

from rankwise.base.keys import Entry
from rankwise.core.rendezvous.records import RunKeys
from rankwise.drivers.real.stores.opening import open_store

pytestmark = pytest.mark.system

HELLO = """
import os
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""
UNTIL_OPENED = HELLO + """
import pathlib
pathlib.Path(__file__).with_name("end").read_bytes()
"""  # fmt: skip
STAY = HELLO + "import threading; threading.Event().wait()\n"
STAY_WITH_PID = "import os; print('pid', os.getpid())\n" + STAY
QUICK = "last_call_timeout=0.1"


class RankAddress:
    """Where agents of this host meet."""

    def __init__(self, folder: Path, stack: ExitStack, words: tuple[str, ...]) -> None:
        self.folder = folder
        self._stack = stack
        self._words = words

    def start(self, program: str, *words: str, name: str = "program.py") -> Running:
        script = write_program(self.folder, program, name)
        return self._stack.enter_context(start("run", *self._words, *words, script))

    def run(self, program: str, *words: str, name: str = "program.py") -> Finished:
        return self.start(program, *words, name=name).finish()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def place(etcd: EtcdCluster, tmp_path: Path) -> Iterator[RankAddress]:
    with ExitStack() as stack:
        yield RankAddress(
            tmp_path, stack, ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint(etcd))
        )


def endpoint(etcd: EtcdCluster) -> str:
    (host, port), *_ = etcd.endpoints
    return f"{host}:{port}"


def left_over(etcd: EtcdCluster) -> tuple[Entry, ...]:
    """What lies in the store."""
    with open_store("etcd", endpoint(etcd), {}, run_id="any") as store:
        return store.read("").entries


def leader_of(etcd: EtcdCluster, run_id: str) -> tuple[str, int]:
    """The node that leads a run, and its rank, where each node has one."""
    with open_store("etcd", endpoint(etcd), {}, run_id=run_id) as store:
        (node, *_) = store.read(RunKeys(run_id).leader).entries[0].value.decode().split()
        round_ = json.loads(store.read(RunKeys(run_id).round).entries[0].value)
    return node, round_["members"].index(node)


@needs_etcd
def test_an_id_in_etcd_serves_one_run_after_the_other_and_no_more_is_left_of_many(
    place: RankAddress, etcd: EtcdCluster
) -> None:
    words = ("--rdzv-id", "job1", "--rdzv-conf", QUICK)
    done = [place.run(HELLO, "--nnodes", "1:2", *words) for _ in range(2)]
    left_of_two = left_over(etcd)
    done.append(place.run(HELLO, "--nnodes", "1:3", *words, "--max-restarts", "2"))

    assert [each.code for each in done] == [0, 0, 0], done
    assert ["rank 0 of 1" in each.stdout for each in done] == [True, True, True]
    names = ["rankwise/job1/shared/charter", "rankwise/job1/shared/round"]
    assert [entry.key for entry in left_of_two] == names
    assert [entry.key for entry in left_over(etcd)] == names
    assert all(entry.lease is not None for entry in left_over(etcd))


@needs_etcd
def test_another_program_under_the_same_name_gets_no_seat_and_is_told_both(
    place: RankAddress,
) -> None:
    words = ("--nnodes", "1:2", "--rdzv-id", "shared", "--rdzv-conf", QUICK)
    one = place.start(STAY, *words)
    one.wait_for("rank 0 of 1")

    other = place.run(HELLO, *words, name="other.py")
    one.signal(signal.SIGTERM)

    assert one.finish().code == 143
    assert (other.code, other.stdout) == (2, "")
    assert "started by other nodes with program 'program.py' (here: 'other.py')" in other.stderr


@needs_etcd
def test_who_never_had_a_seat_does_not_end_like_the_run_unless_it_was_meant_to(
    place: RankAddress, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "end")
    codes = {}
    for spares in ("0", "1"):
        conf = ("--rdzv-conf", f"settle_delay=600,{QUICK}")
        words = ("--nnodes", "1:2", "--rdzv-id", f"spares{spares}", "--spares", spares, *conf)
        one = place.start(UNTIL_OPENED, *words)
        one.wait_for("rank 0 of 1")
        two = place.start(UNTIL_OPENED, *words)
        two.wait_for("this node is a spare for now", stream="stderr")
        (tmp_path / "end").write_bytes(b"")
        assert one.finish().code == 0
        codes[spares] = two.finish()
    assert {spares: done.code for spares, done in codes.items()} == {"0": 75, "1": 0}, codes
    assert "had succeeded before this node could take part" in codes["0"].stderr


@needs_etcd
def test_two_jobs_at_once_with_one_id_and_program_are_one_job_whose_others_get_no_seat(
    place: RankAddress, tmp_path: Path
) -> None:
    """Nobody can tell them apart, but that only one has run must not look like two successes."""
    ends = [tmp_path / f"end{rank}" for rank in range(2)]
    for end in ends:
        os.mkfifo(end)
    program = UNTIL_OPENED.replace('"end"', "'end' + os.environ['RANK']")
    words = ("--nnodes", "2", "--rdzv-id", "twice", "--rdzv-conf", QUICK)
    agents = [place.start(program, *words) for _ in range(4)]
    wait_for_any(agents, "rank ", count=2)
    wait_for_any(agents, "this node is a spare for now", count=2, stream="stderr")

    for end in ends:
        end.write_bytes(b"")
    done = [agent.finish() for agent in agents]

    assert sorted(each.code for each in done) == [0, 0, 75, 75], done
    for each in done:
        assert ("rank " in each.stdout) == (each.code == 0), done
        told = "had succeeded before this node could take part" in each.stderr
        assert told == (each.code == 75), done


@needs_etcd
def test_the_loss_of_the_leader_costs_the_others_a_round(
    place: RankAddress, etcd: EtcdCluster
) -> None:
    words = ("--nnodes", "2:3", "--rdzv-id", "led", "--rdzv-conf", f"lease_ttl=4,{QUICK}")
    agents = [place.start(STAY_WITH_PID, *words) for _ in range(3)]
    wait_for_any(agents, "of 3", count=3)
    leader, rank = leader_of(etcd, "led")
    (lost,) = (agent for agent in agents if f"rank {rank} of 3" in agent.stdout)
    others = [agent for agent in agents if agent is not lost]
    deaths = Deaths(numbers_after("pid", lost.stdout))

    lost.signal(signal.SIGKILL)
    wait_for_any(others, "of 2", count=2)
    survivors = deaths.survivors(within_s=0)
    new_leader, _ = leader_of(etcd, "led")
    others[0].signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in others]

    assert new_leader != leader
    assert survivors == []
    assert [each.code for each in done] == [143, 143], done
    for each in done:
        assert f"is over: node {leader} on {socket.gethostname()} is lost" in each.stderr


@needs_etcd
def test_a_late_agent_of_a_run_that_is_over_is_told_so_and_starts_nothing(
    place: RankAddress, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "end")
    words = ("--nnodes", "1:2", "--rdzv-id", "job1", "--rdzv-conf", f"lease_ttl=4,{QUICK}")
    one = place.start(UNTIL_OPENED, *words)
    one.wait_for("rank 0 of 1")
    two = place.start(UNTIL_OPENED, *words)
    wait_for_any([one, two], "of 2", count=2)

    two.signal(signal.SIGSTOP)
    one.wait_for("rank 0 of 1", count=2)
    (tmp_path / "end").write_bytes(b"")
    first = one.finish()
    second = place.run(HELLO, *words)
    two.signal(signal.SIGCONT)
    late = two.finish()

    assert (first.code, second.code) == (0, 0), (first, second)
    assert "rank 0 of 1" in second.stdout
    assert late.lines == ["[default0]:rank 1 of 2"]
    # What the store had told it before it was stopped long enough may be the verdict.
    assert late.code == 0 or "another run has started under that id" in late.stderr, late


@needs_etcd
def test_where_a_name_serves_once_who_comes_later_is_told_how_the_run_ended(
    place: RankAddress,
) -> None:
    words = ("--nnodes", "1:2", "--rdzv-id", "once", "--rdzv-conf", QUICK)

    first = place.run(HELLO, *words)
    second = place.run(HELLO, *words, "--rdzv-once")

    assert (first.code, second.code) == (0, 0)
    assert "rank 0 of 1" in first.stdout
    assert second.stdout == ""
    assert "the run once had succeeded before this node could take part" in second.stderr


@pytest.mark.parametrize(
    ("backend", "nodes"),
    # An agent that imports torch takes seconds of a processor: one of them has to do.
    [("embedded", 2), pytest.param("c10d", 1, marks=pytest.mark.torch)],
)
def test_an_id_serves_again_where_the_store_ends_with_the_run(
    backend: str, nodes: int, tmp_path: Path
) -> None:
    words = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
    meeting = ("--rdzv-id", "job1", "--nnodes", f"{nodes}:2", "--rdzv-conf", QUICK)
    with ExitStack() as stack:
        place = RankAddress(tmp_path, stack, (*words, *meeting))
        for _ in range(2):
            agents = [place.start(HELLO) for _ in range(nodes)]
            done = [each.finish() for each in agents]
            assert [each.code for each in done] == [0] * nodes, done
            assert sorted(each.stdout[-12:] for each in done) == [
                f"rank {rank} of {nodes}\n" for rank in range(nodes)
            ]
