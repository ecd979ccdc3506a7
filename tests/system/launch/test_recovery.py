"""`rankwise.recover` calls a function again in the ranks that are alive when another one has died.

Processes are told apart by their pids, which each call prints: a rank that was called again has the
same one as before.
"""

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from running import Finished, run, start, stop_child, wait_until, write_program
from running import run_program as run_alone

pytestmark = pytest.mark.system

PROGRAM = """
import ctypes, os, signal, sys, time
import numpy as np
import rankwise
from rankwise import collectives

def call(n):
    print("call", n, rankwise.rank(), os.getpid(), os.environ["MASTER_PORT"], flush=True)

def sum_of_ranks():
    return int(collectives.all_reduce(np.array([rankwise.rank()]))[0])

def stuck_in_c():
    ctypes.PyDLL(None).sleep(600)

def train():
    rank, n = rankwise.rank(), rankwise.restart_count()
    call(n)
    sum_of_ranks()
BODY
    return sum_of_ranks()

print("result", rankwise.recover(train, timeout=TIMEOUT), flush=True)
"""


def program(body: str, timeout: float = 100.0) -> str:
    """A program whose function does this between two collectives."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return PROGRAM.replace("BODY\n", lines).replace("TIMEOUT", str(timeout))


def run_program(tmp_path: Path, body: str, *flags: str, timeout: float = 100.0) -> Finished:
    script = write_program(tmp_path, program(body, timeout))
    return run("run", "--restart-backoff=1ms", *flags, script)


def calls(done: Finished) -> dict[int, dict[int, str]]:
    """The process of each rank, by the count of restarts and by rank."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for line in done.lines:
        _, _, said = line.partition(":")
        if said.startswith("call "):
            _, restart, rank, pid, _ = said.split()
            found[int(restart)][int(rank)] = pid
    return found


def kept(done: Finished, restart: int) -> list[int]:
    """The ranks that are still the same process as before that restart."""
    before, now = calls(done)[restart - 1], calls(done)[restart]
    assert sorted(now) == sorted(before), done.stdout + done.stderr
    return [rank for rank in sorted(now) if now[rank] == before[rank]]


def results(done: Finished) -> int:
    return sum("result 6" in line or "result 3" in line for line in done.lines)


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_ranks_that_are_alive_are_called_again_beside_a_new_one(
    method: str, tmp_path: Path
) -> None:
    done = run_program(
        tmp_path,
        "if rank == 1 and n < 2: os.kill(os.getpid(), signal.SIGKILL)",
        "--nproc-per-node=4", "--max-restarts=2", "--start-method", method,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == kept(done, 2) == [0, 2, 3]
    assert results(done) == 4
    assert "calling 3 ranks again and restarting the rest (restart 1 of 2)" in done.stderr
    ports = {line.split()[-1] for line in done.lines if ":call " in line}
    assert len(ports) == 3  # a rank that lives on may hold the last one


def test_two_ranks_that_die_at_once_are_both_replaced(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        "if rank in (1, 2) and n == 0: os.kill(os.getpid(), signal.SIGKILL)",
        "--nproc-per-node=4", "--max-restarts=3",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert {0, 3} <= set(calls(done)[0])
    last = max(calls(done))
    assert [calls(done)[last][rank] == calls(done)[0][rank] for rank in (0, 1, 2, 3)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert results(done) == 4


def test_a_rank_that_sleeps_or_computes_in_python_is_interrupted(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
if rank == 0 and n == 0: time.sleep(600)
if rank == 2 and n == 0:
    while True: pass
if rank == 1 and n == 0: os.kill(os.getpid(), signal.SIGKILL)
""",
        "--nproc-per-node=3", "--max-restarts=1",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [0, 2]


def test_a_rank_that_is_stuck_in_c_code_is_replaced(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
if rank == 0 and n == 0: stuck_in_c()
if rank == 1 and n == 0: os.kill(os.getpid(), signal.SIGKILL)
""",
        "--nproc-per-node=3", "--max-restarts=1",
        timeout=1.0,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [2]
    assert (
        "rank 0 did not leave the function of recover in time: killed, and started" in done.stderr
    )


def test_a_rank_that_catches_the_recall_and_goes_on_is_replaced(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
while rank == 0 and n == 0:
    try: time.sleep(600)
    except BaseException: pass
if rank == 1 and n == 0: os.kill(os.getpid(), signal.SIGKILL)
""",
        "--nproc-per-node=3", "--max-restarts=1",
        timeout=1.0,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [2]


def test_a_rank_that_dies_while_others_are_recalled_is_replaced_too(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
if rank == 0 and n == 0:
    try: time.sleep(600)
    except rankwise.Recalled: os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and n == 0: os.kill(os.getpid(), signal.SIGKILL)
""",
        "--nproc-per-node=3", "--max-restarts=1",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [2]
    assert results(done) == 3


def test_an_exception_of_the_function_is_reported_with_its_own_traceback(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        "raise ValueError(f'loss of rank {rank} is NaN')",
        "--nproc-per-node=3", "--max-restarts=1",
    )  # fmt: skip

    assert done.code == 1
    assert "restart 1 of 1" in done.stderr
    assert "ValueError: loss of rank" in done.stderr
    assert "is NaN')" in done.stderr  # the line of the program


def test_a_rank_that_fails_by_itself_is_the_only_one_that_is_replaced(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        "if rank == 1 and n == 0: raise ValueError('bad batch')",
        "--nproc-per-node=3", "--max-restarts=1",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [0, 2]
    assert "ValueError: bad batch" in done.stderr


def test_without_restarts_a_death_ends_the_run_as_ever(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        "--nproc-per-node=3",
    )  # fmt: skip

    assert done.code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_pause_before_ranks_are_called_again_ends_the_run(
    signum: signal.Signals, tmp_path: Path
) -> None:
    script = write_program(tmp_path, program("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"))
    with start(
        "run", "--nproc-per-node=3", "--max-restarts=9", "--restart-backoff=600s", script
    ) as running:  # fmt: skip
        running.wait_for("restarting the rest in", stream="stderr")
        os.kill(running.pid, signum)
        done = running.finish()

    assert done.code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stderr


STOPPED_AFTER_A_RECALL = """
import os, signal, threading, rankwise

def train():
    if rankwise.restart_count() == 0:
        rankwise.should_stop()
        # Rank 0 can be called again from here on, and only then rank 1 dies.
        open(os.environ["THERE"], "r" if rankwise.rank() else "w").close()
        if rankwise.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    print("again", flush=True)
    open(os.environ["GO"]).close()
    while not rankwise.should_stop():
        threading.Event().wait(0.01)
    print("saved", flush=True)

rankwise.recover(train, timeout=100)
"""


def test_a_stop_before_the_first_step_since_the_recall_waits_for_that_step(tmp_path: Path) -> None:
    go, there = tmp_path / "go", tmp_path / "there"
    os.mkfifo(go)
    os.mkfifo(there)
    script = write_program(tmp_path, STOPPED_AFTER_A_RECALL)
    with start(
        "run", "--nproc-per-node=2", "--max-restarts=1", "--restart-backoff=1ms", script,
        environment={"GO": str(go), "THERE": str(there)},
    ) as running:  # fmt: skip
        running.wait_for("again", count=2)
        running.signal(signal.SIGTERM)
        running.wait_for("stopping", stream="stderr")  # rank 1 may be alive still
        go.write_text("")
        done = running.finish()

    # Rank 1 is new, and has not asked yet: it has died of the signal.
    assert [line for line in done.lines if "saved" in line] == ["[default0]:saved"], done.stderr
    assert done.code == 128 + signal.SIGTERM


def test_what_the_dead_rank_left_is_swept_and_what_the_living_have_started_is_not(
    tmp_path: Path,
) -> None:
    done = run_program(
        tmp_path,
        """
import subprocess
if n == 0:
    globals()["child"] = subprocess.Popen(["sleep", "600"])
    with open(f"{os.path.dirname(__file__)}/child.{rank}", "w") as file:
        file.write(str(child.pid))
    collectives.barrier()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
elif rank == 0:
    assert child.poll() is None
    with open(f"{os.path.dirname(__file__)}/child.1") as file:
        assert not os.path.exists(f"/proc/{file.read()}")
    print("alive", flush=True)
""",
        "--nproc-per-node=2", "--max-restarts=1",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert any("alive" in line for line in done.lines)


SLOW_MODULE = """
import os
print("importing", flush=True)
open(os.environ["GATE"]).close()
"""


def test_an_agent_that_was_slow_hears_offers_before_the_failure_that_followed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gate", "dying"):
        os.mkfifo(tmp_path / name)
    write_program(tmp_path, SLOW_MODULE, "slowmod.py")
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    body = f"""
if rank == 1 and n == 0:
    with open({str(tmp_path / "dying")!r}, "w") as dying:
        print(os.getpid(), file=dying)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = write_program(tmp_path, program(body))
    options = ("--start-method=forkserver", "--preload=slowmod", "--restart-backoff=1ms")
    logs = tmp_path / "logs"

    def has_ordered(pid: int) -> bool:
        """Whether the agent has ordered all ranks, and sleeps."""
        journals = [file.read_text() for file in logs.glob("*/journal.jsonl")]
        _, _, state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return "".join(journals).count("SpawnWorker") == 3 and state.split()[0] == "S"

    with start(
        "run", "--nproc-per-node=3", "--max-restarts=1", *options, "--log-dir", logs, script
    ) as running:
        running.wait_for("importing")
        wait_until(lambda: has_ordered(running.pid))
        stop_child(running.process)
        (tmp_path / "gate").write_bytes(b"")
        dying = Path("/proc", (tmp_path / "dying").read_text().strip())
        wait_until(lambda: not dying.exists())  # its parent has seen its end, and tells of it
        running.signal(signal.SIGCONT)
        done = running.finish()

    assert done.code == 0, done.stderr
    assert "calling 2 ranks again and restarting the rest" in done.stderr


def test_ranks_on_the_simulator_run_the_same_program(tmp_path: Path) -> None:
    script = write_program(tmp_path, program("pass"))

    done = run("run", "--on", "sim", "--nproc-per-node=3", script)

    assert done.code == 0, done.stderr
    assert results(done) == 3


def test_a_program_without_a_launcher_just_calls_the_function(tmp_path: Path) -> None:
    done = run_alone("import rankwise\nprint(rankwise.recover(lambda: 7))", tmp_path)

    assert done.stdout == "7\n"


# Who dies while the others send may leave one of them stuck: gloo forgets what it is sending when a
# connection ends. So these wait to receive, two of them from a rank that lives on.
DDP = """
import os, signal
import rankwise
import torch
import torch.distributed as dist

print("born", os.getpid(), flush=True)
def train():
    rank, n = rankwise.rank(), rankwise.restart_count()
    dist.init_process_group("gloo")
    print("call", n, rank, os.getpid(), os.environ["MASTER_PORT"], flush=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
    for step in range(6):
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        if n == 0 and step == 3:
            if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
            dist.recv(torch.zeros(1), src=2 if rank == 1 else 1)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    del model, loss
    dist.destroy_process_group()
    return int(total)

print("result", rankwise.recover(train, timeout=100), flush=True)
"""


def test_ranks_are_called_again_that_were_making_their_process_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    early = """
    rankwise.collectives.barrier()
    if n == 0 and rank == 2: os.kill(os.getpid(), signal.SIGKILL)
    dist.init"""
    early_deaths = DDP.replace("    dist.init", early).replace("timeout=100", "timeout=4")
    script = write_program(tmp_path, early_deaths)

    done = run(
        "run", "--nproc-per-node=4", "--max-restarts=1", "--start-method=forkserver",
        "--preload=torch,torch._dynamo", script,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert set(calls(done)[1]) == {0, 1, 2, 3}
    assert sum("born" in line for line in done.lines) < 8  # one may be stuck in a connect
    assert results(done) == 4


def test_a_ddp_model_trains_on_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = write_program(tmp_path, DDP)

    done = run(
        "run", "--nproc-per-node=4", "--max-restarts=1", "--start-method=forkserver",
        "--preload=torch,torch._dynamo", script,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert kept(done, 1) == [0, 1, 3]
    assert results(done) == 4


EARLY = """
import os, pathlib, signal, socket, sys
import rankwise
import torch
import torch.distributed as dist
from rankwise import collectives

def train():
    rank, n = rankwise.rank(), rankwise.restart_count()
    fifo = pathlib.Path(sys.argv[1], str(n))
    if n and rank == 1:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(address).close()  # refused, if nobody listens
        fifo.write_text("rank 1 was early")
    if n and rank == 0:
        print(fifo.read_text(), flush=True)
    dist.init_process_group("gloo")
    dist.barrier()
    dying = (2, 0, None)[n]
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    if dying is not None:
        dist.recv(torch.zeros(1), src=dying)
    dist.destroy_process_group()

rankwise.recover(train, timeout=100)
"""


def test_a_rank_that_lives_on_may_connect_before_rank_0_has_made_torchs_store(
    tmp_path: Path,
) -> None:
    """Once rank 0 lives on as well, and once it is the one that is started anew."""
    pytest.importorskip("torch")
    for restart in "12":
        os.mkfifo(tmp_path / restart)

    done = run(
        "run", "--nproc-per-node=3", "--max-restarts=2", "--start-method=forkserver",
        "--preload=torch", "--restart-backoff=1ms", write_program(tmp_path, EARLY), tmp_path,
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert sum("rank 1 was early" in line for line in done.lines) == 2
    assert "restart 2 of 2" in done.stderr


OWN_SERVER = """
import os, signal, socket
import rankwise
from rankwise import collectives

def train():
    rank, n = rankwise.rank(), rankwise.restart_count()
    if rank == 0:
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
            print("bound", n, flush=True)
    collectives.barrier()
    if rank == (1, 0, None)[n]:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.barrier()

rankwise.recover(train, timeout=100)
"""


def test_without_torch_rank_0_finds_its_port_free_each_time(tmp_path: Path) -> None:
    script = write_program(tmp_path, OWN_SERVER)

    done = run("run", "--nproc-per-node=2", "--max-restarts=2", "--restart-backoff=1ms", script)

    assert done.code == 0, done.stderr
    assert [line.partition(":")[2] for line in done.lines] == ["bound 0", "bound 1", "bound 2"]
