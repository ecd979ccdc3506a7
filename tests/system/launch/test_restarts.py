"""A gang that fails is started again, as often as the user allows and no more."""

from pathlib import Path

import pytest
from running import plain, run, start, write_program

import rankwise

pytestmark = pytest.mark.system

RAISE_THEN_WRITE = """
import json, os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("of attempt 0")
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    details = {"py_callstack": "KeyError: of attempt 1"}
    json.dump({"message": {"message": "KeyError", "extraInfo": details}}, file)
os._exit(3)
"""

FAIL_UNTIL = """
import os, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
if os.environ["RANK"] == "1" and attempt < int(sys.argv[1]):
    raise ValueError(f"attempt {attempt} fails")
"""


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_all_ranks_start_again_until_they_succeed(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, FAIL_UNTIL)

    done = run(
        "run", "--nproc-per-node=2", "--max-restarts=3", "--restart-backoff=1ms",
        "--start-method", method, script, "2",
    )  # fmt: skip

    assert done.code == 0
    assert done.stdout.count("[default1]:attempt 0") == 1
    assert done.stdout.count("[default1]:attempt 1") == 1
    assert done.lines.count("[default0]:attempt 2") == 1
    assert done.lines.count("[default1]:attempt 2") == 1
    announcements = [line for line in done.stderr.splitlines() if "restarting" in line]
    assert [line.partition("restarting")[2] for line in announcements] == [
        " all ranks (restart 1 of 3)",
        " all ranks in 1 ms (restart 2 of 3)",
    ]
    assert announcements[1].startswith("rankwise: rank 1")
    assert "ValueError: attempt 1 fails" in announcements[1]


def test_when_restarts_are_used_up_the_last_attempts_root_cause_is_told(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAIL_UNTIL)

    done = run(
        "run", "--nproc-per-node=2", "--max-restarts=1", "--log-dir", tmp_path / "logs",
        "--redirects=3", script, "9",
    )  # fmt: skip

    assert done.code == 1
    report = done.stderr.partition("(restart 1 of 1)")[2]
    assert "ValueError: attempt 1 fails" in report
    assert report.count("attempt 0 fails") == 1
    assert "rank 1 failed (ValueError: attempt 0 fails)\n" in report  # in one line
    assert "attempt_1/1/stderr.log" in report
    (run_directory,) = (tmp_path / "logs").iterdir()
    for attempt in (0, 1):
        log = run_directory / f"attempt_{attempt}" / "1" / "stderr.log"
        assert f"ValueError: attempt {attempt} fails" in log.read_text()


def test_an_exception_of_an_earlier_attempt_hides_no_error_file(tmp_path: Path) -> None:
    script = write_program(tmp_path, RAISE_THEN_WRITE)

    done = run(
        "run", "--nproc-per-node=1", "--max-restarts=1", "--restart-backoff=1ms",
        "--log-dir", tmp_path / "logs", script,
    )  # fmt: skip

    assert "KeyError: of attempt 1" in done.stderr.partition("root cause")[2]


def test_functions_know_how_often_they_were_started_again(server: rankwise.ForkServer) -> None:
    def fail_twice() -> int:
        if rankwise.restart_count() < 1:
            raise ValueError
        return rankwise.restart_count()

    assert rankwise.run(fail_twice, nprocs=2, max_restarts=1, server=server) == [1, 1]


def test_a_stray_of_the_last_attempt_is_gone_before_the_next_begins(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal, socket, sys
port = int(os.environ["MASTER_PORT"])
server = socket.create_server(("", port))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if not os.fork():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    sys.exit(1)
print("listening again")
""",
    )

    done = run("run", "--nproc-per-node=1", "--max-restarts=1", script)

    assert plain(done.lines) == ["listening again"], done.stderr
    assert done.code == 0


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_a_script_that_was_mended_meanwhile_is_run_as_it_is_now(
    method: str, tmp_path: Path
) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal
from pathlib import Path
if os.environ["RANK"] == "1":
    signal.pause()
mended = Path(__file__).with_name("mended.py")
mended.write_text("import os; print('mended', os.environ['TORCHELASTIC_RESTART_COUNT'])")
mended.replace(__file__)
raise SystemExit(1)
""",
    )

    done = run("run", "--nproc-per-node=2", "--max-restarts=1", "--start-method", method, script)

    assert plain(done.lines).count("mended 1") == 2, done.stderr
    assert done.code == 0


def test_a_stop_during_the_back_off_ends_the_run(tmp_path: Path) -> None:
    script = write_program(tmp_path, "raise SystemExit(3)")
    with start(
        "run", "--nproc-per-node=1", "--max-restarts=5", "--restart-backoff=1h", script
    ) as running:
        running.wait_for("in 1 h", stream="stderr")
        running.signal(15)
        done = running.finish()

    assert done.code == 3
