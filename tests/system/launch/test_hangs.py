"""A gang that makes no progress tells where it stands before it is killed; any other goes on."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Running, numbers_after, run, start, write_program

import rankwise
from rankwise import FailureCause

pytestmark = pytest.mark.system

HANG = """
import os, threading
def wait_for_the_others():
    print("waiting", flush=True)
    threading.Event().wait()
def wait_in_a_thread():
    threading.Event().wait()
if os.environ["RANK"] == "1":
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
wait_for_the_others()
"""


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_every_ranks_stacks_are_shown_before_anything_is_killed(
    method: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, HANG)

    done = run(
        "run", "--nproc-per-node=2", "--hang-timeout=1500ms", "--start-method", method, script
    )

    assert done.code == 124
    rank_0, rank_1 = (
        done.stderr.split(f"rank {rank}, innermost call first:\n")[1].split("\n  rank ")[0]
        for rank in (0, 1)
    )
    assert rank_0.count("in wait_for_the_others") == 1
    assert "in wait_in_a_thread" not in rank_0
    assert "another thread:" in rank_1
    assert "in wait_in_a_thread" in rank_1
    assert "no progress for 1.5 s" in done.stderr
    assert done.stderr.count("in wait_for_the_others") == 2, "each stack is told once"


def test_where_ranks_hung_is_told_when_they_are_started_again(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANG)

    options = ("--hang-timeout=1500ms", "--max-restarts=1", "--restart-backoff=0")
    done = run("run", "--nproc-per-node=2", *options, script)

    first, last = done.stderr.split("(restart 1 of 1)")
    assert done.code == 124
    assert "a report with their stacks follows" in first
    told = last.partition("no rank has made progress for 1.5 s:")[0]
    for text in (told, last.partition("root cause: ")[2]):
        assert text.count("in wait_for_the_others") == 2
        assert text.count("in wait_in_a_thread") == 1


def test_ranks_that_end_when_they_are_asked_have_answered_all_the_same(tmp_path: Path) -> None:
    # Any signal ends a pause, also the one that asks for stacks.
    script = write_program(tmp_path, "import signal\nsignal.pause()")

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1s", script)

    assert done.code == 124
    assert "  ranks 0-1, innermost call first:\n" in done.stderr


LETS_GO_OF_THE_SIGNAL = """
import faulthandler, os, signal
asks = signal.SIGRTMIN + 6
assert faulthandler.unregister(asks)  # as the interpreter does at its end
os.kill(os.getpid(), asks)
print("lives")
"""


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_a_rank_that_is_asked_while_its_interpreter_ends_is_not_killed(
    method: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, LETS_GO_OF_THE_SIGNAL)

    done = run("run", "--start-method", method, script)

    assert (done.code, done.lines) == (0, ["[default0]:lives"])


def test_ranks_that_cannot_answer_do_not_keep_the_others_from_answering(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANG)
    stopped = write_program(
        tmp_path,
        f"""
import os, signal
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
exec(open({str(script)!r}).read())
""",
        "stopped.py",
    )

    done = run(
        "run", "--nproc-per-node=2", "--hang-timeout=1s", "--shutdown-timeout=100ms", stopped
    )

    assert "rank 0 is stopped by a signal (SIGSTOP) or a debugger" in done.stderr
    assert "rank 1, innermost call first:" in done.stderr
    assert "no stack is available of rank 0" in done.stderr


HEALTHY = {
    "collectives": """
while all_reduce(np.array([time.monotonic() < end]), "min")[0]:
    time.sleep(0.02)
""",
    "computing": """
while time.monotonic() < end:
    pass
""",
    "sections": """
while time.monotonic() < end:
    with rankwise.section("step"):
        time.sleep(0.02)
""",
    "a checkpoint of rank 0": """
if rank == 0:
    with open(__file__ + ".checkpoint", "wb") as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 18))
            file.flush()
            file.seek(0)
            time.sleep(0.02)
barrier()
""",
    "a process that prepares data": """
code = "import time; end = time.monotonic() + 2.2\\nwhile time.monotonic() < end: pass"
subprocess.run([sys.executable, "-S", "-c", code], check=True)
""",
}


@pytest.mark.parametrize("program", HEALTHY.values(), ids=HEALTHY)
def test_what_is_silent_and_goes_on_is_no_hang(program: str, tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        f"""
import subprocess, sys, time
import numpy as np
import rankwise
from rankwise.collectives import all_reduce, barrier
rank, end = rankwise.rank(), time.monotonic() + 2.2
{program}
""",
    )

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1500ms", script)

    assert (done.code, done.stdout) == (0, "")
    assert "no rank has made progress" not in done.stderr


TORCH = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(0.1)
end = time.monotonic() + 2.2
goes_on = torch.ones(1)
while goes_on.item():
    goes_on.fill_(time.monotonic() < end)
    dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    time.sleep(0.05)
"""


def test_silent_collectives_of_torch_are_no_hang(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = write_program(tmp_path, TORCH)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1500ms", script)

    assert done.code == 0, done
    assert "no rank has made progress" not in done.stderr


HEARTBEAT = """
import threading, time, rankwise
from rankwise.collectives import barrier
def beat():
    while True:
        print("alive", flush=True)
        time.sleep(0.3)
threading.Thread(target=beat, daemon=True).start()
if rankwise.rank() == 1:
    threading.Event().wait()
barrier()
"""


def test_a_heartbeat_hides_no_hang_and_half_way_there_is_a_warning(tmp_path: Path) -> None:
    script = write_program(tmp_path, HEARTBEAT)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1500ms", script)

    assert done.code == 124
    why = r"\(rank 1 has not come to barrier #1 \(program.py:11\), in which rank 0 waits\)"
    warning = rf"no rank has made progress for \S+ m?s {why}; the hang timeout ends the run in "
    assert re.search(warning, done.stderr), done.stderr
    assert "the gang hung: no progress for 1.5 s; rank 1 has not come" in done.stderr


def test_a_hang_is_a_failure_that_carries_the_stacks(server: rankwise.ForkServer) -> None:
    def hang_here() -> None:
        time.sleep(1000)

    with pytest.raises(rankwise.WorkersFailed) as caught:
        rankwise.run(hang_here, nprocs=2, hang_timeout=2, server=server)

    assert [failure.cause for failure in caught.value.failures] == [FailureCause.HUNG] * 2
    assert all("in hang_here" in failure.stacks for failure in caught.value.failures)


def test_a_live_run_can_be_listed_and_asked_for_its_stacks(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANG)
    name = f"asked-{tmp_path.parent.name}-{tmp_path.name}"[-60:]
    with start("run", "--nproc-per-node=2", "--rdzv-id", name, script) as running:
        running.wait_for("waiting", count=2)
        listed = [json.loads(line) for line in run("ps", "--json").lines]
        asked = run("stacks", name)
        asked_json = [json.loads(line) for line in run("stacks", "--json", str(running.pid)).lines]
        running.signal(signal.SIGTERM)
        done = running.finish()

    (ours,) = [row for row in listed if row["run_id"] == name]
    assert (ours["pid"], ours["nproc"], ours["state"]) == (running.pid, 2, "running")
    assert asked.stdout.count("in wait_for_the_others") == 2
    assert asked.code == 0
    assert [rank["rank"] for rank in asked_json] == [0, 1]
    assert all("in wait_for_the_others" in rank["stacks"] for rank in asked_json)
    assert done.code == 128 + signal.SIGTERM
    assert name not in Path("/proc/net/unix").read_text()


SKIPPING = """
import sys, threading, rankwise
from rankwise.collectives import barrier
print("begun", flush=True)
if rankwise.rank() == 2:
    threading.Event().wait()
barrier()
"""


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[[str, int], Running]:
    """Starts a program under a name that only this test uses."""

    def begin(program: str, nprocs: int) -> Running:
        script = write_program(tmp_path, program)
        name = f"why-{tmp_path.parent.name}-{tmp_path.name}"[-60:]
        return start("run", f"--nproc-per-node={nprocs}", "--rdzv-id", name, script)

    return begin


def test_why_tells_who_is_missing_and_the_run_goes_on(
    run_of: Callable[[str, int], Running],
) -> None:
    with run_of(SKIPPING, 3) as running:
        running.wait_for("begun", count=3)
        asked = run("why", str(running.pid))  # by the end of which all have come to where they stay
        header, *ranks = map(json.loads, run("why", "--json", str(running.pid)).lines)
        running.signal(signal.SIGTERM)
        done = running.finish()

    missing = "rank 2 has not come to barrier #1 (program.py:7), in which ranks 0-1 wait"
    assert asked.code == 0
    assert "    ... (7 frames of rankwise)\n" in asked.stdout
    assert asked.stdout.count('program.py", line 7 in <module>') == 1
    assert header == {"verdict": missing}
    assert [rank["doing"] for rank in ranks] == ["waits", "waits", "nothing"]
    assert done.code == 128 + signal.SIGTERM


def test_why_tells_that_ranks_get_on(run_of: Callable[[str, int], Running]) -> None:
    with run_of("print('begun', flush=True)\nwhile True:\n    pass", 1) as running:
        running.wait_for("begun")
        asked = run("why", str(running.pid))
        running.signal(signal.SIGTERM)
        running.finish()

    assert asked.stdout.startswith("every rank makes progress\nrank 0 (pid ")
    assert ", computing, innermost call first:\n" in asked.stdout


def test_why_tells_that_a_rank_is_stopped(run_of: Callable[[str, int], Running]) -> None:
    with run_of(
        "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(99)", 1
    ) as running:
        (rank,) = numbers_after("pid", running.wait_for("pid"))
        os.kill(rank, signal.SIGSTOP)
        asked = run("why", str(running.pid))
        os.kill(rank, signal.SIGCONT)
        running.signal(signal.SIGTERM)
        running.finish()

    assert "it is stopped by a signal (SIGSTOP) or a debugger" in asked.stdout


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_adds_native_frames(run_of: Callable[[str, int], Running]) -> None:
    program = (
        "import ctypes\nprint('begun', flush=True)\nctypes.CDLL(None).sleep(99)\nprint('woken')"
    )
    with run_of(program, 1) as running:
        running.wait_for("begun")
        asked = run("stacks", "--native", str(running.pid))
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert "libc" in asked.stdout, asked
    assert "woken" not in done.stdout, "a signal ends that sleep"
    assert re.search(r"<module> \(.*/program.py:3\)", asked.stdout), asked
    assert "frames of rankwise)" in asked.stdout, "what has started the program is folded"


def test_to_be_asked_wakes_no_rank_of_torch_that_waits_in_c(
    run_of: Callable[[str, int], Running],
) -> None:
    pytest.importorskip("torch")
    program = """
import ctypes, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("begun", flush=True)
ctypes.CDLL(None).pause()  # until a signal is handled in this thread
print("woken", flush=True)
"""
    with run_of(program, 1) as running:
        running.wait_for("begun")
        asked = [run(word, str(running.pid)) for word in ("why", "stacks")]
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert all('program.py", line 6 in <module>' in each.stdout for each in asked)
    assert "woken" not in done.stdout


def test_ranks_that_take_their_time_to_stop_are_not_warned_of(tmp_path: Path) -> None:
    program = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
print("begun", flush=True)
time.sleep(1.8)
"""
    script = write_program(tmp_path, program)
    with start("run", "--nproc-per-node=1", "--hang-timeout=2s", script) as running:
        running.wait_for("begun")
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.code == 128 + signal.SIGTERM
    assert "no rank has made progress" not in done.stderr


def test_rank_that_does_not_wake_up_is_named_where_another_polls(tmp_path: Path) -> None:
    program = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)
while True:
    time.sleep(0.01)
"""
    script = write_program(tmp_path, program)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1500ms", script)

    assert done.code == 124
    assert (
        "root cause: the gang hung: no progress for 1.5 s; "
        "rank 1 does not wake up, while rank 0 polls\n"
    ) in done.stderr
