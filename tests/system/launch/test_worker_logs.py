"""What workers write arrives: all of it, whole, in the right place, whatever the console does."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import PATIENCE_S, RANKWISE, run, start, write_program

import rankwise

pytestmark = pytest.mark.system

LAST_WORDS = {
    "os._exit(3)": 3,
    "os.kill(os.getpid(), signal.SIGKILL)": 128 + 9,
    "raise ValueError('the end')": 1,
}


@pytest.mark.parametrize("death", LAST_WORDS)
@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_no_line_is_lost_however_a_worker_dies(death: str, method: str, tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        f"""
import os, signal, sys
sys.stdout.write("".join(f"line {{number}}\\n" for number in range(100_000)) + "no newline")
sys.stdout.flush()
{death}
""",
    )

    done = run(
        "run", "--nproc-per-node=1", "--no-prefix", "--tee=1", "--log-dir", tmp_path / "logs",
        "--start-method", method, script,
    )  # fmt: skip

    expected = [f"line {number}" for number in range(100_000)] + ["no newline"]
    assert done.lines == expected
    (log,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert log.read_text().splitlines() == expected
    assert done.code == LAST_WORDS[death]


def test_lines_of_many_ranks_are_whole(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os
rank = int(os.environ["RANK"])
for number in range(300):
    for piece in (f"{number} ".encode(), b"abcdefghij" * (rank + 1), b"\\n"):
        os.write(1, piece)
""",
    )

    done = run("run", "--nproc-per-node=16", script)

    lines = done.lines
    assert len(lines) == 16 * 300
    for rank in range(16):
        own = [line for line in lines if line.startswith(f"[default{rank}]:")]
        assert own == [
            f"[default{rank}]:{number} " + "abcdefghij" * (rank + 1) for number in range(300)
        ]


def test_the_report_is_the_last_that_is_said(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    raise ValueError("the cause")
def end(*_):
    sys.stderr.write("".join(f"late {number}\\n" for number in range(2000)))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(1000)
""",
    )

    done = run("run", "--nproc-per-node=2", "--log-dir", tmp_path / "logs", script)

    lines = done.stderr.splitlines()
    assert done.stderr.count("late ") in (0, 2000)  # it may have been told before it listened
    last_of_workers = max(i for i, line in enumerate(lines) if line.startswith("[default"))
    report = "\n".join(lines[last_of_workers + 1 :])
    assert "ValueError: the cause" in report
    assert "exit code 1" in report
    assert re.search(r"time: +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", report)
    assert not lines[-1].startswith("rankwise: logs are in")


def test_a_success_says_where_the_logs_are(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('x')")

    done = run("run", "--log-dir", tmp_path / "logs", "--redirects=3", script)

    (directory,) = (tmp_path / "logs").iterdir()
    assert done.stderr.splitlines()[-1] == f"rankwise: logs are in {directory}"
    assert done.stdout == ""


BOTH_STREAMS = """
import os, sys
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""


def test_logs_that_were_removed_are_not_said_to_be_there(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import shutil, sys\nprint('gone', flush=True)\nshutil.rmtree(sys.argv[1])"
    )
    logs = tmp_path / "logs"

    done = run("run", "--log-dir", logs, "--tee=3", script, logs)

    assert done.code == 0
    assert done.stderr.count("was removed while the job ran") == 1
    assert "logs are in" not in done.stderr


def test_streams_go_where_each_rank_is_told_two_digit_ranks_included(tmp_path: Path) -> None:
    script = write_program(tmp_path, BOTH_STREAMS)

    done = run(
        "run", "--nproc-per-node=12", "--log-dir", tmp_path / "logs", "--redirects=0:1,11:3",
        "--tee=1:3,10:2", "--local-ranks-filter=0,1,10,11", script,
    )  # fmt: skip

    (logs,) = (tmp_path / "logs").glob("*/attempt_0")
    found = {
        f"{path.parent.name}/{path.name}": path.read_text() for path in logs.glob("*/std*.log")
    }
    assert found == {
        "0/stdout.log": "out of 0\n",
        "11/stdout.log": "out of 11\n",
        "11/stderr.log": "err of 11\n",
        "1/stdout.log": "out of 1\n",
        "1/stderr.log": "err of 1\n",
        "10/stderr.log": "err of 10\n",
    }
    assert sorted(done.lines) == ["[default10]:out of 10", "[default1]:out of 1"]
    errors = sorted(line for line in done.stderr.splitlines() if line.startswith("[default"))
    assert errors == ["[default0]:err of 0", "[default10]:err of 10", "[default1]:err of 1"]


def test_lines_with_chosen_words_are_copied_to_one_file(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import os\nfor n in range(3): print('loss', n)\nprint('noise')"
    )

    done = run(
        "run", "--nproc-per-node=2", "--log-dir", tmp_path / "logs",
        "--duplicate-stdout-filters=loss", "--log-prefix", "<${role_name} ${rank}> ", script,
    )  # fmt: skip

    (copy,) = (tmp_path / "logs").glob("*/attempt_0/filtered_stdout.log")
    expected = sorted(f"<default {rank}> loss {n}" for rank in range(2) for n in range(3))
    assert sorted(copy.read_text().splitlines()) == expected
    assert sorted(line for line in done.lines if "noise" not in line) == expected


def test_long_lines_and_binary_bytes_do_no_harm(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import os\nos.write(1, b'\\xff\\x00' + b'y' * 1_000_000 + b'\\nnext\\n')"
    )

    with subprocess.Popen(
        [*RANKWISE, "run", "--nproc-per-node=2", "--no-prefix", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        shown = process.communicate(timeout=60)[0]

    long_line = b"\xff\x00" + b"y" * 1_000_000
    assert sorted(shown.split(b"\n")) == [b"", b"next", b"next", long_line, long_line]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_once_and_the_job_goes_on(small_disk: Path, tmp_path: Path) -> None:
    script = write_program(tmp_path, "for _ in range(20_000): print('x' * 99)\nprint('finished')")

    done = run(
        "run", "--nproc-per-node=2", "--no-prefix", "--tee=3", "--log-dir", small_disk, script
    )

    assert done.code == 0
    assert done.lines.count("x" * 99) == 40_000
    assert done.lines.count("finished") == 2
    told = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert len(told) == 1
    assert "output that does not fit on this disk is lost, the job continues" in told[0]


def test_error_file_that_does_not_fit_on_the_disk_is_not_named_and_leaves_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    program = "for _ in range(20_000): print('x' * 99)\nraise ValueError('bad')"
    script = write_program(tmp_path, program)

    done = run("run", "--redirects=3", "--log-dir", small_disk, script)

    assert "root cause: rank 0 failed: ValueError: bad" in done.stderr
    assert "error file" not in done.stderr
    assert not [path for path in small_disk.rglob("error.json*") if path.stat().st_size == 0]


def test_a_console_that_goes_away_does_not_end_the_job(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        f"""
for _ in range(20_000): print("x" * 99)
open({str(tmp_path / "finished")!r}, "w").close()
""",
    )

    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "-", *RANKWISE, "run", str(script)],
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert done.stdout == b"[default0]:" + b"x" * 99 + b"\n"
    assert (tmp_path / "finished").exists()
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0


def wait_for_writer(fifo: Path, pid: int) -> None:
    """Wait until somebody has opened it and closed it, as long as that process lives."""
    opened, process = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(pid)
    try:
        ready = select.select([opened, process], [], [], PATIENCE_S)[0]
        assert ready == [opened], "the run is over" if ready else "nobody has written"
    finally:
        os.close(opened)
        os.close(process)


def test_a_console_that_takes_nothing_for_a_while_gets_everything(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = write_program(
        tmp_path,
        f"""
for _ in range(10_000): print("x" * 99)
open({str(fifo)!r}, "w").close()
""",
    )
    with start("run", "--nproc-per-node=1", "--no-prefix", script) as running:
        # Nobody reads until the worker has written ten times as much as a pipe holds.
        wait_for_writer(fifo, running.pid)
        done = running.finish()

    assert done.lines == ["x" * 99] * 10_000


def test_a_stopped_run_does_not_wait_for_ever_for_a_console_that_takes_nothing(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    script = write_program(
        tmp_path,
        f"""
import os
open({str(ready)!r}, "w").close()
while True: os.write(1, b"x" * 99 + b"\\n")
""",
    )
    reading, writing = os.pipe()
    with subprocess.Popen(
        [*RANKWISE, "run", str(script)], stdout=writing, stderr=subprocess.DEVNULL
    ) as process:
        os.close(writing)
        wait_for_writer(ready, process.pid)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)
    os.close(reading)

    assert code == 128 + signal.SIGTERM


def test_an_interrupt_ends_the_waiting_for_a_console_after_a_success(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = write_program(
        tmp_path,
        f"""
import os
for _ in range(10_000): print("x" * 99)
closed_when_the_worker_ends = os.open({str(fifo)!r}, os.O_WRONLY)
""",
    )
    reading, writing = os.pipe()
    with subprocess.Popen(
        [*RANKWISE, "run", "--nproc-per-node=1", str(script)],
        stdout=writing,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(writing)
        with fifo.open() as end_of_worker:
            end_of_worker.read()
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=30)
    os.close(reading)

    assert code == 128 + signal.SIGINT


def test_workers_never_meet_a_closed_pipe(server: rankwise.ForkServer) -> None:
    def print_much() -> str:
        for _ in range(2000):
            print("x" * 99)
        return "done"

    assert rankwise.run(print_much, nprocs=2, server=server) == ["done"] * 2
