"""`rankwise run` ends as its workers did."""

import os
import re
import signal
from pathlib import Path

import pytest
from running import RANKWISE, Running, run, start, write_program

pytestmark = pytest.mark.system

FAILURES = {
    "sys.exit(7)": 7,
    "sys.exit('last words')": 1,
    "raise ValueError": 1,
    "raise KeyboardInterrupt": 128 + signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGKILL)": 128 + signal.SIGKILL,
    "os.abort()": 128 + signal.SIGABRT,
    "import ctypes; ctypes.string_at(0)": 128 + signal.SIGSEGV,
    "def broken(:": 1,
}


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
@pytest.mark.parametrize("failure", FAILURES)
def test_the_code_is_that_of_the_rank_that_failed_first(
    failure: str, method: str, tmp_path: Path
) -> None:
    failing = write_program(tmp_path, f"import os, signal, sys\n{failure}", "failing.py")
    script = write_program(
        tmp_path,
        f"""
import os, sys, time
if os.environ["RANK"] == "1":
    exec(compile(open({str(failing)!r}).read(), "failing.py", "exec"))
time.sleep(1000)
""",
    )

    done = run("run", "--nproc-per-node=3", "--start-method", method, script)

    assert done.code == FAILURES[failure], done.stderr
    assert "3 of 3 ranks failed" not in done.stderr


def test_ranks_that_are_interrupted_together_take_a_line_each(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import signal
def waits():
    print("waits", flush=True)
    signal.pause()
waits()
""",
    )
    with start("run", "--nproc-per-node=2", "--no-prefix", script) as running:
        running.wait_for("waits", count=2)

        running.signal(signal.SIGINT)
        done = running.finish()

    assert done.code == 128 + signal.SIGINT
    interrupted = [line for line in done.stderr.splitlines() if not line.startswith("rankwise")]
    # A rank may still be in its `print`.
    place = re.escape(f"KeyboardInterrupt in waits, {script}:")
    assert len(interrupted) == 2
    assert all(re.fullmatch(f"{place}[45]", line) for line in interrupted), interrupted


def test_a_rank_that_is_interrupted_in_a_collective_is_where_the_program_called_it(
    tmp_path: Path,
) -> None:
    script = write_program(
        tmp_path,
        """
import signal, rankwise
from rankwise.collectives import barrier
print("waits", flush=True)
while rankwise.rank() == 1:
    signal.pause()
barrier()
""",
    )
    with start("run", "--nproc-per-node=2", "--no-prefix", script) as running:
        running.wait_for("waits", count=2)
        run("why", str(running.pid))  # by the end of which rank 0 waits

        running.signal(signal.SIGINT)
        done = running.finish()

    assert f"KeyboardInterrupt in <module>, {script}:7" in done.stderr.splitlines()


def test_a_program_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    program = write_program(tmp_path, "#!/no/such/interpreter\n", "program")
    program.chmod(0o755)

    done = run("run", "--nproc-per-node=2", "--no-python", program)

    assert done.code == 1
    assert "its interpreter does not exist: '/no/such/interpreter'" in done.stderr


def test_a_hangup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    script = write_program(
        tmp_path,
        f"""
print("up", flush=True)
open({str(fifo)!r}).read()
print("finished")
""",
    )
    os.mkfifo(fifo)
    with Running("nohup", *RANKWISE, "run", "--nproc-per-node=1", str(script)) as running:
        running.wait_for("up")
        running.signal(signal.SIGHUP)
        fifo.write_text("go on")
        done = running.finish()

    assert done.code == 0
    assert "finished" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_can_be_made_to_end_the_run(number: int, tmp_path: Path) -> None:
    script = write_program(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(1000)")
    with start(
        "run", "--nproc-per-node=1", "--signals-to-handle=SIGUSR1,SIGUSR2", script
    ) as running:
        running.wait_for("up")
        running.signal(number)
        done = running.finish()

    assert done.code == 128 + number


def test_a_stop_that_workers_take_as_a_success_is_a_stop_all_the_same(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("checkpoint saved", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(1000)
""",
    )
    with start("run", "--nproc-per-node=2", script) as running:
        running.wait_for("up", count=2)
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.code == 128 + signal.SIGTERM
    assert done.stdout.count("checkpoint saved") == 2


ON_BOTH = ((), ("--on=sim",))


@pytest.fixture
def on(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Words that say where ranks run; simulated ones need numpy."""
    words: tuple[str, ...] = request.param
    if words:
        pytest.importorskip("numpy")
    return words


PARSES = """
import argparse

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", required=True)
    parser.parse_args()

main()
"""


@pytest.mark.parametrize("on", ON_BOTH, indirect=True, ids=["processes", "simulated"])
def test_the_line_by_which_a_rank_ends_itself_is_told_and_none_of_a_library(
    on: tuple[str, ...], tmp_path: Path
) -> None:
    script = write_program(tmp_path, PARSES, "parses.py")

    done = run("run", *on, script)

    told = "root cause: rank 0 exited with code 2: SystemExit at parses.py:7, in main"
    assert told in done.stderr.splitlines()


@pytest.mark.parametrize("on", ON_BOTH, indirect=True, ids=["processes", "simulated"])
def test_no_line_is_told_of_a_rank_that_ends_without_a_word(
    on: tuple[str, ...], tmp_path: Path
) -> None:
    script = write_program(tmp_path, "import os\nos._exit(3)\n")

    done = run("run", *on, script)

    assert "root cause: rank 0 exited with code 3" in done.stderr.splitlines()
