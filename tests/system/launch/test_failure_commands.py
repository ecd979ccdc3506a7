"""`--on-failure` tells somebody of every failure, and a run never waits for it in the middle."""

import json
import signal
from pathlib import Path

import pytest
from running import WITHIN_S, run, start, write_program

pytestmark = pytest.mark.system

FAILS = """
import os, sys
print("epoch", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(7)
"""


def test_a_command_is_told_of_each_failure(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS)
    told = tmp_path / "told"

    command = f"cat >>{told}; exit 3"
    done = run("run", "--rdzv-id=night", "--max-restarts=1", "--on-failure", command, script)

    assert done.code == 7
    assert done.stderr.count("rankwise: the command of --on-failure ended with 3") == 2
    restart, failure = map(json.loads, told.read_text().splitlines())
    assert restart["event"] == "restart"
    assert restart["restarts_left"] == 0
    assert failure["event"] == "failure"
    assert failure["starts"] == 2
    for line in (restart, failure):
        assert line["run"] == "night"
        assert line["message"] == f"rank 0 exited with code 7: SystemExit at {Path(script).name}:4"
        assert [(each["rank"], each["exit_code"]) for each in line["failures"]] == [(0, 7)]
    # The report that the user is shown is the one that is sent, but for the time that it took.
    assert "root cause: rank 0 exited with code 7" in failure["report"]
    assert "attempt 1, ended 20" in failure["report"]
    assert failure["report"].endswith("  last line of stdout:\n    epoch 1")
    assert all(line in done.stderr for line in failure["report"].splitlines()[1:])


HANGS = """
import os, threading
from rankwise import collectives
collectives.barrier()
if os.environ["RANK"] == "1":
    threading.Event().wait()
collectives.barrier()
"""


def test_a_command_is_told_of_a_time_limit_and_of_whom_the_ranks_waited_for(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANGS)
    told = tmp_path / "told"

    options = ("--nproc-per-node=2", "--timeout=8s", "--shutdown-timeout=1s")
    done = run("run", *options, "--on-failure", f"cat >>{told}", script)

    assert done.code == 124
    (line,) = map(json.loads, told.read_text().splitlines())
    assert (line["event"], line["failures"]) == ("timeout", [])
    assert line["message"].startswith("stopped by its time limit of 8 s after ")
    assert "rank 1 has not come to barrier #2" in line["message"]
    _, *stood = line["report"].splitlines()  # the first line tells for how long it has run by then
    assert "  rank 1, innermost call first:" in stood
    assert set(stood) <= {*done.stderr.splitlines()}


@pytest.mark.parametrize("world", [(), ("--on=sim",)], ids=["processes", "simulated ranks"])
def test_success_is_no_failure(world: tuple[str, ...], tmp_path: Path) -> None:
    script = write_program(tmp_path, "")
    told = tmp_path / "told"

    done = run("run", *world, "--on-failure", f"touch {told}", script)

    assert (done.code, told.exists()) == (0, False), done.stderr


def test_command_is_told_of_failures_of_simulated_ranks(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS)
    told = tmp_path / "told"
    options = ("--on=sim", "--nproc-per-node=2", "--max-restarts=1")

    done = run("run", *options, "--on-failure", f"cat >>{told}; echo told", script)

    assert done.code == 7
    assert done.stderr.count("told\n") == 2
    restart, failure = map(json.loads, told.read_text().splitlines())
    assert (restart["event"], restart["restarts_left"]) == ("restart", 0)
    assert (failure["event"], failure["starts"]) == ("failure", 2)
    assert [each["rank"] for each in failure["failures"]] == [0, 1]
    assert "root cause: rank 0 exited with code 7" in failure["report"]


def test_command_is_told_once_of_a_round_of_simulated_nodes_that_fails(tmp_path: Path) -> None:
    program = """
import os
from rankwise import collectives
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad shape")
collectives.barrier()
"""
    script = write_program(tmp_path, program)
    told = tmp_path / "told"
    options = ("--on=sim", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1")

    done = run("run", *options, "--on-failure", f"cat >>{told}", script)

    assert done.code == 0, done.stderr
    (line,) = map(json.loads, told.read_text().splitlines())
    assert (line["event"], line["message"]) == ("restart", "rank 1 failed (ValueError: bad shape)")


def test_exploration_is_one_event(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS)
    told = tmp_path / "told"
    options = ("--on=sim", "--nproc-per-node=2", "--max-restarts=1", "--explore=3")

    done = run("run", *options, "--on-failure", f"cat >>{told}", script, cwd=tmp_path)

    assert done.code == 7, done.stderr
    (line,) = map(json.loads, told.read_text().splitlines())
    assert line["event"] == "failure"


def test_a_run_that_is_told_to_stop_waits_for_a_command_for_the_grace_alone(tmp_path: Path) -> None:
    program = (
        "import os, threading\nif os.environ['TORCHELASTIC_RESTART_COUNT'] != '2': os._exit(1)\n"
    )
    script = write_program(
        tmp_path, program + "print('again', flush=True)\nthreading.Event().wait()\n"
    )
    words = ("--max-restarts=2", "--shutdown-timeout=1", "--on-failure", "exec sleep 1000")

    with start("run", *words, script) as stopped:
        stopped.wait_for("again")
        stopped.signal(signal.SIGTERM)
        done = stopped.finish(WITHIN_S)

    assert done.code == 143
    assert [line for line in done.stderr.splitlines() if "--on-failure" in line] == [
        "rankwise: the command of --on-failure was killed, since the run was stopped",
        "rankwise: the command of --on-failure was not run again, since the run was stopped",
    ]


def test_a_run_that_waits_for_its_last_command_answers_a_signal_and_kills_it_at_the_second(
    tmp_path: Path,
) -> None:
    script = write_program(tmp_path, FAILS)

    command = f"echo $$ > {tmp_path}/pid; kill $PPID; exec sleep 1000"

    with start("run", "--on-failure", command, script) as failed:
        failed.wait_for("SIGTERM: waiting 30 s for the command", stream="stderr")
        failed.signal(signal.SIGTERM)
        done = failed.finish(WITHIN_S)

    assert done.code == 7, done
    assert "the command of --on-failure was killed, since the run was stopped" in done.stderr
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
