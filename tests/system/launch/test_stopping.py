"""A stop is obeyed at once, also by those who are busy, stuck, or only now being made."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import leftovers
import pytest
from running import (
    PATIENCE_S,
    WITHIN_S,
    Deaths,
    Finished,
    Running,
    numbers_after,
    run,
    run_program,
    start,
    start_program,
    write_program,
)

from rankwise.base.failure import OutcomeStatus
from rankwise.base.units import MILLISECOND, Duration
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.drivers.real.hosting import connection
from rankwise.launch.control.addresses import socket_name
from rankwise.launch.run.job import Job, LogPlan, Script
from rankwise.launch.run.supervision import Supervision

pytestmark = pytest.mark.system

SLOW_MODULE = """
import os
print("importing", os.getpid(), flush=True)
with open(os.environ["GATE"]) as gate:
    gate.read()
"""
STEP = """
import os, signal, threading, rankwise
from rankwise import collectives
if rankwise.rank() == 1 and os.environ["RANK_1"] == "counts no steps":
    print("under way", flush=True)
    signal.pause()
count = 0
while not rankwise.should_stop():
    count += 1
    if os.environ["RANK_1"] == "meets the others":
        collectives.barrier()
    else:
        threading.Event().wait(0.001 * (1 + rankwise.rank()))
    if count == 5:
        print("under way", flush=True)
        if rankwise.rank() == 1 and os.environ["RANK_1"] == "gets stuck":
            signal.pause()
print(f"stopped after {count} steps", flush=True)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a module waits for that is found as `slowmod`."""
    write_program(tmp_path, SLOW_MODULE, "slowmod.py")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("GATE", str(gate))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return gate


def everybody() -> list[int]:
    return list(leftovers.marked_processes(os.environ[leftovers.MARK_VARIABLE]))


BLOCK_THE_SEARCH_FOR_MAIN = """
import os, signal, sys
def hook(path):
    if "/worker/" in path:
        print("starting", flush=True)
        signal.pause()
    raise ImportError
if "RANK" in os.environ:
    sys.path_hooks.insert(0, hook)
"""


def test_an_interpreter_that_would_swallow_ctrl_c_while_it_starts_does_not_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, BLOCK_THE_SEARCH_FOR_MAIN, "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = write_program(tmp_path, "import signal; signal.pause()")

    with start("run", "--shutdown-timeout=1h", script) as running:
        running.wait_for("starting")
        running.signal(signal.SIGINT)
        done = running.finish(WITHIN_S)

    assert done.code == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr


def test_an_import_that_hangs_in_the_fork_server_is_a_hang(gate: Path, tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('never')")
    options = ("--start-method=forkserver", "--preload=slowmod", "--hang-timeout=3s")
    with start("run", "--nproc-per-node=2", *options, script) as running:
        done = running.finish()

    assert done.code != 0
    assert "no rank could start: the fork server is still importing slowmod" in done.stderr
    assert "could not be started: its start made no progress for 3 s" in done.stderr


COMPUTES = """
import time
until = time.process_time() + 3
while time.process_time() < until:
    sum(range(1000))
"""


def test_import_that_computes_for_longer_than_the_hang_timeout_is_no_hang(tmp_path: Path) -> None:
    write_program(tmp_path, COMPUTES, "computes.py")
    script = write_program(tmp_path, "import computes; print('fine')")
    options = ("--start-method=forkserver", "--preload=computes", "--hang-timeout=1s")

    done = run("run", "--nproc-per-node=2", *options, script)

    assert done.code == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_start_timeout_ends_a_start_and_names_the_import(tmp_path: Path) -> None:
    write_program(tmp_path, COMPUTES.replace("+ 3", "+ 1000"), "computes.py")
    script = write_program(tmp_path, "print('never')")
    options = ("--start-method=forkserver", "--preload=json,computes", "--start-timeout=1s")

    done = run("run", "--nproc-per-node=2", *options, script)

    assert done.code == 1, done.stderr
    assert "no rank could start: the fork server is still importing computes\n" in done.stderr
    why = "it did not start within 1 s: the fork server was importing computes"
    assert f"could not be started: {why}" in done.stderr


def test_start_timeout_of_a_function_names_the_import(tmp_path: Path) -> None:
    write_program(tmp_path, COMPUTES.replace("+ 3", "+ 1000"), "computes.py")
    program = """
import rankwise
def never():
    pass
if __name__ == "__main__":
    try:
        rankwise.run(never, nprocs=2, preload=["computes"], start_timeout=1)
    except rankwise.WorkersFailed as error:
        print(error.failures[0].detail)
"""

    done = run_program(program, tmp_path)

    assert done.stdout == "it did not start within 1 s: the fork server was importing computes\n"


def test_whoever_waits_for_stubborn_ranks_is_told_how_long_and_what_helps(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(1000)",
    )
    with start("run", "--nproc-per-node=2", "--shutdown-timeout=31s", script) as running:
        running.wait_for("up", count=2)
        running.signal(signal.SIGINT)
        running.wait_for(
            "rankwise: stopping 2 ranks (SIGINT) for up to 30 s; a second signal kills them now\n",
            stream="stderr",
        )
        running.signal(signal.SIGINT)
        assert running.finish().code == 128 + signal.SIGINT


COUNTS_FIRST = """
import rankwise
from rankwise import collectives
for _ in range(3):
    assert not rankwise.should_stop()
    collectives.barrier()
print("done")
"""


def test_ranks_may_count_their_steps_before_their_first_collective(tmp_path: Path) -> None:
    script = write_program(tmp_path, COUNTS_FIRST)

    done = run("run", "--nproc-per-node=2", "--no-prefix", script)

    assert (done.code, done.lines) == (0, ["done", "done"]), done.stderr


@pytest.mark.parametrize("rank_1", ["goes on", "meets the others"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_count_their_steps_all_stop_after_the_same(
    number: signal.Signals, rank_1: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = stopped_steps(rank_1, number, tmp_path, monkeypatch, "--nproc-per-node=3")

    told = [line.partition(":")[2] for line in done.lines if "stopped after" in line]
    assert len(told) == 3, done
    assert len(set(told)) == 1, told


def test_a_rank_that_counts_no_steps_is_told_to_stop_by_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = stopped_steps(
        "counts no steps", signal.SIGTERM, tmp_path, monkeypatch, "--nproc-per-node=2"
    )

    assert done.stdout.count("stopped after") == 1, done


def test_a_rank_that_never_comes_to_its_next_step_is_killed_while_others_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--nproc-per-node=2", "--shutdown-timeout=1s")
    done = stopped_steps("gets stuck", signal.SIGTERM, tmp_path, monkeypatch, *options)

    assert done.stdout.count("stopped after") == 1, done


def stopped_steps(
    rank_1: str,
    number: signal.Signals,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> Finished:
    """Run ranks that count their steps, and ask them to stop by a signal to their agent."""
    monkeypatch.setenv("RANK_1", rank_1)
    script = write_program(folder, STEP)
    with start("run", *options, script) as running:
        running.wait_for("under way", count=int(options[0][-1]))
        running.signal(number)
        done = running.finish()
    assert done.code == 128 + number, done
    return done


@pytest.mark.parametrize("files_max", [5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 17, 20])
def test_too_few_files_are_told_in_words(files_max: int, tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('ran')")
    command = f'ulimit -n {files_max}; exec "$0" -m rankwise run --nproc-per-node=2 "$1"'
    with Running("sh", "-c", command, sys.executable, str(script)) as running:
        done = running.finish()

    assert done.code != 0
    assert "Traceback" not in done.stderr
    assert "files" in done.stderr


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_orders_that_come_together_do_not_take_more_files_than_there_are(
    method: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, "print('ran')")
    command = 'ulimit -n 96; exec "$0" -m rankwise run --nproc-per-node=16 "$1" "$2"'
    with Running(
        "sh", "-c", command, sys.executable, f"--start-method={method}", str(script)
    ) as running:
        done = running.finish()

    assert done.code == 0, done.stderr
    assert done.stdout.count("ran") == 16


def test_a_low_limit_that_may_be_raised_is_in_nobodys_way(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    command = 'ulimit -Sn 20; exec "$0" -m rankwise run --nproc-per-node=12 "$1"'
    with Running("sh", "-c", command, sys.executable, str(script)) as running:
        done = running.finish()

    assert done.code == 0
    assert [line.partition("]:")[2] for line in done.lines] == ["20"] * 12


@pytest.mark.parametrize("interrupts", [1, 2])
@pytest.mark.parametrize(("size", "padding"), [(2, 0), (32, 0), (32, 100_000)])
def test_a_fork_server_that_imports_is_not_waited_for(
    size: int, padding: int, interrupts: int, gate: Path, tmp_path: Path
) -> None:
    """Much environment does not fit into the socket that nobody reads, nor do the orders."""
    script = write_program(tmp_path, "open('ran', 'w')")
    options = ("--start-method=forkserver", "--preload=slowmod", f"--nproc-per-node={size}")
    environment = {f"PADDING{number}": "x" * padding for number in range(4)}
    with start("run", *options, script, environment=environment, cwd=tmp_path) as running:
        running.wait_for("importing")
        deaths = Deaths(everybody())
        asked_at = time.monotonic()
        for _ in range(interrupts):
            running.signal(signal.SIGINT)
        done = running.finish()
        took = time.monotonic() - asked_at

    assert done.code == 128 + signal.SIGINT
    assert took < WITHIN_S
    assert deaths.survivors(within_s=0) == []
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_no_rank_runs_after_an_interrupt_and_the_next_run_has_another_server(
    gate: Path, tmp_path: Path
) -> None:
    # Of an interrupt that comes earlier, only the caller hears: the server would go on importing.
    program = """
import os, sys
import rankwise

def work():
    open("ran", "w").close()

def tell_that_it_has_begun(event, _):
    if event == "socket.bind":  # a run's, which it makes when signals are its own already
        print("begun", flush=True)

sys.addaudithook(tell_that_it_has_begun)
with rankwise.ForkServer(preload=["slowmod"]) as server:
    try:
        rankwise.run(work, nprocs=2, server=server)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin = os.fdopen(os.open(os.environ["GATE"] + "2", os.O_RDONLY))
    sys.stdin.read()
    print(rankwise.run(rankwise.rank, nprocs=2, server=server))
"""
    os.mkfifo(f"{gate}2")
    with start_program(f"import os\nos.chdir({str(tmp_path)!r})\n{program}", tmp_path) as running:
        running.wait_for("importing")
        running.wait_for("begun")
        running.signal(signal.SIGINT)
        running.wait_for("interrupted")
        server_deaths = Deaths(numbers_after("importing", running.stdout))
        assert server_deaths.survivors(WITHIN_S) == []
        Path(f"{gate}2").write_text("go on")
        running.wait_for("importing", count=2)
        gate.write_text("import")
        done = running.finish()

    assert not (tmp_path / "ran").exists()
    assert done.lines[-1] == "[0, 1]"


def test_a_guardian_that_is_stopped_holds_up_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GUARDIAN_PATIENCE", Duration(100 * MILLISECOND))
    script = write_program(
        tmp_path,
        """
import os, signal, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
time.sleep(1000)
""",
    )
    spec = GangSpec(size=2, sweep_timeout=Duration(100 * MILLISECOND))
    logs = LogPlan(directory=os.devnull, console_ranks=frozenset())
    job = Job(program=Script(str(script)), gang=spec, run_id="stuck", logs=logs, console=False)
    before = set(everybody())
    supervision = Supervision(job)
    supervision.start_in_thread()
    assert supervision.wait_begun(PATIENCE_S)
    worker = supervision.pids()[0]
    guardian = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guardian, signal.SIGSTOP)
    deaths = Deaths(set(everybody()) - before)

    asked_at = time.monotonic()
    supervision.stop(signal.SIGINT)
    supervision.stop(signal.SIGINT)
    outcome = supervision.wait(PATIENCE_S)

    assert outcome is not None
    assert outcome.status is OutcomeStatus.STOPPED
    # The kill and the sweep are given up, then strays' output, then the guardian: no more.
    assert time.monotonic() - asked_at < WITHIN_S
    assert deaths.survivors(WITHIN_S) == []


def ask_for_stacks(running: Running, name: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(socket_name(name, running.pid))
    client.sendall(b'{"ask": "stacks"}\n')
    return client


def answer_of(client: socket.socket) -> str:
    with client, client.makefile("rb") as lines:
        return lines.read().decode()


def test_two_that_ask_for_stacks_at_once_both_get_them_all(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import threading\nprint('up', flush=True)\nthreading.Event().wait()\n"
    )
    name = f"asked-{os.getpid()}"
    with start("run", "--nproc-per-node=3", "--rdzv-id", name, script) as running:
        running.wait_for("up", count=3)

        clients = [ask_for_stacks(running, name) for _ in range(2)]
        answers = [answer_of(client) for client in clients]
        running.signal(signal.SIGTERM)
        running.finish()

    for answer in answers:
        assert answer.count(f"{script}") == 3, answer


def test_a_worker_that_has_become_another_program_survives_being_asked(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = write_program(
        tmp_path,
        f"""
import os
os.execv("/bin/sh", ["sh", "-c", "echo up; read line < '{gate}'; echo $line"])
""",
    )
    name = f"became-{os.getpid()}"
    with start("run", "--rdzv-id", name, script) as running:
        running.wait_for("up")

        asked = run("stacks", name)
        writer = os.open(gate, os.O_WRONLY)
        os.write(writer, b"alive\n")
        os.close(writer)
        done = running.finish()

    assert "(no answer)" in asked.stdout
    assert done.code == 0
    assert done.lines == ["[default0]:up", "[default0]:alive"]
