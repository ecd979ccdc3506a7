"""Agents that programs compose by hand, on one etcd or one c10d store: ours alone."""

import json
import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agents_of_a_job as job
import pytest
from agents_of_a_job import LONG_S, Node
from etcd_servers import find_etcd, needs_etcd

from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError
from rankwise.compat.torch.elastic.rendezvous.etcd_server import EtcdServer
from rankwise.compat.torch.elastic.utils.distributed import get_free_port

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def etcd() -> Iterator[str]:
    """One server for all; the tests that need it are skipped where there is none."""
    if find_etcd() is None:
        yield ""
        return
    server = EtcdServer()
    server.start()
    yield server.get_endpoint()
    server.stop()


@pytest.fixture
def etcd_place(etcd: str) -> dict[str, str]:
    return {"backend": "etcd", "endpoint": etcd, "run_id": uuid.uuid4().hex}


def nodes_for(place: dict[str, str], sizes: list[tuple[str, int]], **fields: Any) -> list[Node]:
    return [
        Node(
            **place,
            role=role,
            size=size,
            nodes_min=len(sizes),
            nodes_max=len(sizes),
            is_host=index == 0,
            **fields,
        )
        for index, (role, size) in enumerate(sizes)
    ]


@needs_etcd
def test_ranks_are_counted_over_roles_and_nodes(etcd_place: dict[str, str]) -> None:
    sizes = [("master", 2), ("trainer", 1), ("trainer", 3)]

    results = job.run_job(nodes_for(etcd_place, sizes, function=job.places))

    values = [result.return_values for result in results]
    assert sorted(rank for ranks in values for rank in ranks) == list(range(6))
    of_role = {
        role: sorted(
            place
            for (own, _), ranks in zip(sizes, values, strict=True)
            for place in ranks.values()
            if own == role
        )
        for role in ("master", "trainer")
    }
    assert all(rank == place[0] for ranks in values for rank, place in ranks.items())
    assert sorted(place[1] for place in of_role["trainer"]) == [0, 1, 2, 3]
    assert {place[2:] for place in of_role["master"]} == {(2, 6, 3)}
    assert {place[2:] for place in of_role["trainer"]} == {(4, 6, 3)}


@pytest.mark.torch
def test_two_nodes_meet_in_torchs_store() -> None:
    pytest.importorskip("torch")
    place = {"backend": "c10d", "endpoint": f"localhost:{get_free_port()}", "run_id": "run"}

    results = job.run_job(nodes_for(place, [("trainer", 1)] * 2, function=job.places))

    assert {rank: value for result in results for rank, value in result.return_values.items()} == {
        rank: (rank, rank, 2, 2, 2) for rank in range(2)
    }


@needs_etcd
def test_a_killed_agent_is_replaced(etcd_place: dict[str, str], tmp_path: Path) -> None:
    fifo, told = tmp_path / "fifo", tmp_path / "told"
    os.mkfifo(fifo)
    node = Node(
        **etcd_place,
        function=job.come_and_wait_unless_told,
        args=(str(fifo), str(told)),
        nodes_min=2,
        nodes_max=2,
    )
    context = multiprocessing.get_context("spawn")
    first, doomed, heir = (context.Process(target=job.run_agent, args=(node,)) for _ in range(3))
    with open(fifo, "r+b", buffering=0) as workers:  # noqa: PTH123
        first.start()
        doomed.start()
        assert workers.read(1) + workers.read(1) == b".."
        told.touch()
        doomed.kill()
        heir.start()
        first.join(LONG_S)
        heir.join(LONG_S)
    doomed.join()

    assert (first.exitcode, heir.exitcode) == (0, 0)


@needs_etcd
def test_workers_that_fail_are_started_again(etcd_place: dict[str, str]) -> None:
    node = Node(**etcd_place, function=job.fail_once_on_rank_1, args=("x",), size=2, restarts_max=3)

    assert job.run_agent(node).return_values == {0: 1, 1: 1}


@needs_etcd
def test_the_first_failure_ends_up_in_the_launchers_error_file(
    etcd_place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))

    with pytest.raises(ChildFailedError) as raised:
        job.run_agent(Node(**etcd_place, function=job.raise_on_all, size=2))

    rank, failure = raised.value.get_first_failure()
    written = json.loads(reply.read_text())["message"]
    assert failure.exitcode == 1
    assert written["message"] == f"LookupError: rank {rank} has nothing"
    assert written["message"] == failure.error_file_data["message"]["message"]
    assert int(written["extraInfo"]["timestamp"]) == failure.timestamp


def test_a_signal_ends_a_launch_and_leaves_nothing(tmp_path: Path) -> None:
    fifo, report = tmp_path / "pid", tmp_path / "report.json"
    os.mkfifo(fifo)
    context = multiprocessing.get_context("spawn")
    launch = context.Process(target=job.launch_and_tell, args=(str(fifo), str(report)))
    launch.start()
    worker = int(fifo.read_text())

    assert launch.pid is not None
    os.kill(launch.pid, signal.SIGTERM)
    launch.join(LONG_S)

    assert launch.exitcode == 0
    assert json.loads(report.read_text()) == {
        "error": "SignalException",
        "signal": int(signal.SIGTERM),
        "handlers_are_back": True,
    }
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
