"""SIGTERM that reaches the ranks too, as of SLURM or systemd, which send it to every process."""

import os
import re
import signal
from pathlib import Path

import pytest
from running import WITHIN_S, Running, start, write_program

pytestmark = pytest.mark.system

STEPS = """
import os, threading, rankwise
count = 0
while not rankwise.should_stop():
    count += 1
    if count == 3:
        print(f"pid {os.getpid()}", flush=True)
    threading.Event().wait(0.01)
print("saved", flush=True)
"""
STAYS = """
import os, threading
print(f"pid {os.getpid()}", flush=True)
threading.Event().wait()
"""
ONE_FAILS_ONE_IS_STUCK = """
import os, threading, rankwise
rankwise.should_stop()
print(f"pid {os.getpid()}", flush=True)
if os.environ["RANK"] == "0":
    input_pipe = open(os.environ["GO"]).read()
    raise ValueError("enough")
threading.Event().wait()
"""
ENDS_ITS_CHILD = """
import multiprocessing, threading, rankwise
def stay(): threading.Event().wait()
rankwise.should_stop()
child = multiprocessing.get_context("fork").Process(target=stay)
child.start()
child.terminate()
child.join()
print("ended by", child.exitcode, flush=True)
"""
LEFT_ALONE = "import rankwise; rankwise.should_stop(takes_sigterm=False)\n" + STAYS


def under_way(folder: Path, program: str, *words: str, **environment: str) -> Running:
    script = write_program(folder, program)
    words = ("run", "--nproc-per-node", "2", *words)
    run = start(*words, script, environment=environment)
    run.wait_for("pid ", count=2)
    return run


def ranks_of(run: Running) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", run.stdout)]


def test_ranks_that_ask_should_stop_save_though_they_were_sent_the_signal(tmp_path: Path) -> None:
    with under_way(tmp_path, STEPS) as run:
        for pid in ranks_of(run):
            os.kill(pid, signal.SIGTERM)
        run.signal(signal.SIGTERM)
        done = run.finish(WITHIN_S)

    assert done.code == 143
    assert done.stdout.count("saved") == 2
    assert "killed" not in done.stderr


def test_sigterm_to_one_such_rank_stops_the_whole_run(tmp_path: Path) -> None:
    with under_way(tmp_path, STEPS) as run:
        os.kill(ranks_of(run)[0], signal.SIGTERM)
        done = run.finish(WITHIN_S)

    assert done.code == 143
    assert done.stdout.count("saved") == 2


def test_ranks_that_die_of_it_before_the_agent_hears_it_have_not_failed(tmp_path: Path) -> None:
    with under_way(tmp_path, STAYS, "--max-restarts", "3") as run:
        for pid in ranks_of(run):
            os.kill(pid, signal.SIGTERM)
        run.signal(signal.SIGTERM)
        done = run.finish(WITHIN_S)

    assert done.code == 143
    assert "stopped by SIGTERM" in done.stderr
    assert "failed" not in done.stderr


@pytest.mark.parametrize("program", [STAYS, LEFT_ALONE])
def test_a_rank_that_alone_dies_of_it_has_failed(tmp_path: Path, program: str) -> None:
    with under_way(tmp_path, program) as run:
        os.kill(ranks_of(run)[0], signal.SIGTERM)
        done = run.finish(WITHIN_S)

    assert done.code == 143, "that of the rank that was killed"
    assert "killed by signal 15" in done.stderr or "SIGTERM" in done.stderr
    assert "1 of 2 ranks failed" in done.stderr


def test_such_a_rank_is_ended_at_once_when_another_fails(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    with under_way(tmp_path, ONE_FAILS_ONE_IS_STUCK, GO=str(fifo)) as run:
        fifo.write_text("")
        done = run.finish(WITHIN_S)

    assert done.code == 1
    assert "did not end within" not in done.stderr


def test_what_a_rank_forks_still_ends_of_it(tmp_path: Path) -> None:
    script = write_program(tmp_path, ENDS_ITS_CHILD)
    with start("run", "--nproc-per-node", "1", script) as run:
        done = run.finish(WITHIN_S)

    assert "ended by -15" in done.stdout
