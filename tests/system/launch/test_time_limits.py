"""A run that takes too long is stopped as if somebody had asked it to."""

import json
import os
import re
from pathlib import Path

import pytest
from running import run, write_program

import rankwise
from rankwise import collectives

pytestmark = pytest.mark.system

SAVES = """
import time, rankwise
while not rankwise.should_stop():
    time.sleep(0.01)  # a step
print("saved", flush=True)
"""


@pytest.mark.parametrize("on", [(), ("--on", "sim")], ids=["processes", "simulated"])
def test_ranks_that_take_too_long_can_save(on: tuple[str, ...], tmp_path: Path) -> None:
    script = write_program(tmp_path, SAVES)

    done = run("run", *on, "--nproc-per-node=2", "--no-prefix", "--timeout=2s", script)

    assert done.code == 124
    assert done.stdout.splitlines() == ["saved"] * 2
    assert "the time limit of 2 s is over: stopping all ranks for up to 30 s" in done.stderr
    assert "stopped by its time limit of 2 s after" in done.stderr


def test_a_run_that_is_stopped_before_its_next_attempt_tells_the_last_one_once() -> None:
    words = ("--max-restarts=3", "--restart-backoff=30s", "--timeout=2s", "--no-python")

    done = run("run", *words, "sh", "-c", "exit 3")

    assert done.code == 3, "it had failed before its time was over"
    assert "restarting all ranks in 30 s (restart 2 of 3)" in done.stderr
    report = done.stderr.partition("failed after")[2]
    assert "in attempt 2 of 4" in report
    assert "  attempt 1, ended" in report
    assert report.count("exited with code 3") == 2


def block() -> None:
    Path(os.environ["FIFO"]).read_bytes()


def test_a_function_that_takes_too_long_is_a_time_out(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    with pytest.raises(rankwise.RunTimeout, match=r"^stopped by its time limit of 200 ms after "):
        rankwise.run(block, nprocs=1, timeout=0.2, grace=0, env={"FIFO": str(fifo)})


def hang_at_the_second_barrier() -> None:
    collectives.barrier()
    if os.environ["RANK"] == "1":
        block()
    collectives.barrier()


def test_a_time_out_tells_where_the_ranks_stood_and_for_whom_they_waited(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")

    with pytest.raises(rankwise.RunTimeout) as caught:
        rankwise.run(hang_at_the_second_barrier, nprocs=3, timeout=5, env={"FIFO": str(fifo)})

    first, *lines = str(caught.value).splitlines()
    said = r"stopped by its time limit of 5 s after ([\d.]+) s: rank 1 has not come to barrier #2 "
    found = re.match(said, first)
    assert found is not None, first
    assert float(found[1]) < 15, "5, and the stop was not held up by rank 1"
    assert first.endswith("in which ranks 0, 2 wait")
    assert [line for line in lines if line.endswith("innermost call first:")] == [
        "  ranks 0, 2, innermost call first:",
        "  rank 1, innermost call first:",
    ]
    assert lines[-1].endswith("in hang_at_the_second_barrier")
    assert "in block" in "".join(lines)
    assert [stood.rank for stood in caught.value.stood] == [0, 1, 2]
    assert "in block" in caught.value.stood[1].stacks


STOPPED = """
import os, signal
from rankwise import collectives
collectives.barrier()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
collectives.barrier()
"""


def test_a_rank_that_cannot_show_where_it_stands_holds_up_nothing(tmp_path: Path) -> None:
    script = write_program(tmp_path, STOPPED)

    done = run("run", "--nproc-per-node=2", "--timeout=4s", "--shutdown-timeout=1s", script)

    stopped = r"rank 1 is stopped by a signal \(SIGSTOP\) or a debugger"
    said = (
        rf"stopped by its time limit of 4 s after ([\d.]+) s: {stopped}; "
        "rank 1 has not come to barrier #2 "
    )
    found = re.search(said, done.stderr)
    assert found is not None, done.stderr
    assert float(found[1]) < 15, "4, a second until it is told to stop, one until it is killed"
    assert "  rank 0, innermost call first:" in done.stderr


IN_STEP = """
from rankwise import collectives
while True:
    collectives.barrier()
"""


def test_nobody_is_accused_in_a_run_that_is_only_too_long(tmp_path: Path) -> None:
    script = write_program(tmp_path, IN_STEP)

    done = run("run", "--nproc-per-node=2", "--timeout=3s", script)

    assert done.code == 124
    told = [line for line in done.stderr.splitlines() if "stopped by its time limit" in line]
    assert len(told) == 1
    assert re.search(r"after [\d.]+ s$", told[0])
    assert re.search(r'File ".*", line [34] in <module>', done.stderr)


SPINS = """
import os
from rankwise import collectives
if os.environ["RANK"] == "1":
    while True:
        pass
collectives.barrier()
"""


def test_a_simulated_rank_that_computes_for_ever_is_shown_when_the_time_is_over(
    tmp_path: Path,
) -> None:
    script = write_program(tmp_path, SPINS)
    options = ("--on=sim", "--nproc-per-node=2", "--timeout=5s", "--shutdown-timeout=1s")

    done = run("run", *options, script)

    line = SPINS.splitlines().index("        pass") + 1
    assert done.code == 124
    said = (
        # How long is told from a second on: starting may have taken the first one.
        r"stopped by its time limit of 5 s after [\d.]+ s: "
        r"rank 1 has let no other rank run(?: for \d s)?"
    )
    where = rf": it is at {Path(script).name}:({line}|{line - 1})\n"
    assert re.search(said + where, done.stderr), done.stderr
    assert re.search(rf'  rank 1, innermost call first:\n +File ".*", line {line - 1}', done.stderr)
    assert "waits for barrier #1" in done.stderr


def test_machines_are_told_where_ranks_stood_and_of_no_root_cause(tmp_path: Path) -> None:
    script = write_program(tmp_path, SPINS)
    options = ("--nproc-per-node=2", "--timeout=5s", "--log-format=json")

    done = run("run", *options, script)

    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    end = told[-1]
    assert (end["event"], end["status"]) == ("end", "stopped")
    assert end["stood"][0]["waits_for"].startswith("barrier #1")
    assert any(" in <module>" in frame for frame in end["stood"][1]["frames"])
    failures = [line for line in told if line["event"] == "failure"]
    assert len(failures) == 2
    assert not any(line["root_cause"] for line in failures)


def test_a_restart_that_is_due_after_the_limit_is_not_made() -> None:
    options = ("--max-restarts=3", "--restart-backoff=1m", "--timeout=4s", "--no-python")

    done = run("run", *options, "sh", "-c", "exit 7")

    assert done.code == 7
    assert "the time limit of 4 s is over" in done.stderr
    assert "root cause: rank 0 exited with code 7" in done.stderr
