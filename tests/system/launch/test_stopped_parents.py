"""A fork server or guardian that is stopped neither obeys nor speaks: nobody depends on it."""

import os
import signal
from pathlib import Path

import pytest
from running import WITHIN_S, Deaths, Running, numbers_after, start, write_program

import rankwise
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.hosting import connection

pytestmark = pytest.mark.system

SLEEPER = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(1000)"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stop_parent(running: Running) -> tuple[list[int], int]:
    """Stop the parent of all workers; return the workers and the parent."""
    running.wait_for("pid ", count=2)
    workers = numbers_after("pid", running.stdout)
    parent = parent_of(workers[0])
    os.kill(parent, signal.SIGSTOP)
    return workers, parent


def test_a_run_whose_fork_server_is_stopped_can_be_stopped(tmp_path: Path) -> None:
    script = write_program(tmp_path, SLEEPER)
    with start("run", "--nproc-per-node=2", "--start-method=forkserver", script) as running:
        workers, server = stop_parent(running)
        deaths = Deaths([*workers, server])

        running.signal(signal.SIGINT)

        done = running.finish()
        assert deaths.survivors(0.0) == []
    assert done.code == 128 + signal.SIGINT
    assert "killed" not in done.stderr
    assert "stuck" not in done.stderr


def test_the_ends_of_ranks_are_seen_although_their_fork_server_is_stopped(tmp_path: Path) -> None:
    script = write_program(tmp_path, SLEEPER)
    with start("run", "--nproc-per-node=2", "--start-method=forkserver", script) as running:
        workers, server = stop_parent(running)
        deaths = Deaths([*workers, server])

        os.kill(workers[0], signal.SIGUSR1)

        done = running.finish()
        assert deaths.survivors(0.0) == []
    assert done.code == 128 + signal.SIGUSR1
    assert "was killed by SIGUSR1" in done.stderr


def test_a_fork_server_that_is_stopped_and_makes_no_ranks_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SPAWN_PATIENCE", Duration(SECOND // 2))

    with rankwise.ForkServer() as server:
        (parent,) = rankwise.run(os.getppid, nprocs=1, server=server)
        deaths = Deaths([parent])
        os.kill(parent, signal.SIGSTOP)
        with pytest.raises(rankwise.WorkersFailed) as caught:
            rankwise.run(os.getpid, nprocs=2, server=server, timeout=60)

    assert deaths.survivors(0.0) == []
    assert [each.detail for each in caught.value.failures] == [
        "the fork server has not answered for 500 ms, as if stopped"
    ] * 2


def test_a_run_whose_guardian_is_stopped_tells_ranks_to_stop_all_the_same(tmp_path: Path) -> None:
    script = write_program(tmp_path, SLEEPER)
    with start("run", "--nproc-per-node=2", script) as running:
        workers, guardian = stop_parent(running)
        deaths = Deaths([*workers, guardian])

        running.signal(signal.SIGTERM)

        done = running.finish()
        assert deaths.survivors(0.0) == []
    assert done.code == 128 + signal.SIGTERM
    assert "killed" not in done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_guardian_that_is_stopped_ends_with_its_program(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, SLEEPER)
    with start("run", "--nproc-per-node=2", f"--start-method={method}", script) as running:
        running.wait_for("pid ", count=2)
        workers = numbers_after("pid", running.stdout)
        parents = {parent_of(workers[0]), parent_of(parent_of(workers[0]))} - {running.pid}
        deaths = Deaths([*workers, *parents])
        for parent in parents - {os.getpid()}:
            os.kill(parent, signal.SIGSTOP)

        running.signal(signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []
