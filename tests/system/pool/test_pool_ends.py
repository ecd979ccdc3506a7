"""Programs with a `rankwise.Pool`: how they end, and what `__main__` may hold."""

import os
import re
import signal
import sys
import termios
import time
from pathlib import Path

import pytest
from running import WITHIN_S, OnTerminal, run_program, start_program, write_program

import rankwise
from rankwise.drivers.real.pool.progress import show_progress

pytestmark = pytest.mark.system


def test_functions_and_classes_of_main_travel_both_ways(tmp_path: Path) -> None:
    done = run_program(
        """
import rankwise

class Point:
    def __init__(self, x):
        self.x = x

def moved(point):
    return Point(point.x + step)

step = 1
with rankwise.Pool(1) as pool:
    point = pool.submit(moved, Point(1)).result()
    print(point.x, type(point) is Point)
    step = 10
    print(pool.submit(moved, point).result().x)
""",
        tmp_path,
    )

    assert (done.code, done.lines) == (0, ["2 True", "12"])


def test_program_that_ends_without_shutdown_finishes_its_tasks(tmp_path: Path) -> None:
    done = run_program(
        """
import rankwise

pool = rankwise.Pool(2)
for number in range(3):
    pool.submit(abs, number).add_done_callback(lambda done: print(done.result(), flush=True))
""",
        tmp_path,
    )

    assert (done.code, sorted(done.lines), done.stderr) == (0, ["0", "1", "2"], "")


LONG = """
import os, signal, sys, time
from concurrent.futures import CancelledError
import rankwise

def say(line):
    os.write(1, f"{line}\\n".encode())  # several processes share the pipe: one write each

def stay(way, fifo):
    if way == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        say("begun")
        with open(fifo, "w") as begun:
            begun.write("x")
        time.sleep(1000)
    finally:
        if way != "stubborn":
            say("interrupted")

def is_cancelled(future):
    try:
        future.result(0)
    except CancelledError:
        return True
    return False

if __name__ == "__main__":
    fifo = __file__ + ".begun"
    os.mkfifo(fifo)
    try:
        with rankwise.Pool(2) as pool, open(fifo, "r+b", buffering=0) as begun:
            futures = [pool.submit(stay, sys.argv[1], fifo) for _ in range(2)]
            # Else one worker may run all others before the second of these begins.
            assert begun.read(1) + begun.read(1) == b"xx"
            queued = [pool.submit(abs, -1) for _ in range(20)]
            say("queued")
            futures[0].result()
    except KeyboardInterrupt:
        say(f"cancelled {sum(map(is_cancelled, queued)) > 10}")
        say(f"done {all(future.done() for future in futures + queued)}")
        raise
"""


def test_ctrl_c_interrupts_tasks_and_cancels_the_others(tmp_path: Path) -> None:
    with start_program(LONG, tmp_path, "gentle") as program:
        program.wait_for("queued\n")
        program.signal_group(signal.SIGINT)
        done = program.finish(WITHIN_S)

    assert done.code == -signal.SIGINT
    assert sorted(done.lines) == sorted(
        ["begun", "begun", "queued", "interrupted", "interrupted", "cancelled True", "done True"]
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_outside_of_a_with_block_stops_the_pool_too(tmp_path: Path) -> None:
    begin, _, _ = LONG.partition("    try:\n        with rankwise.Pool")
    text = (
        begin
        + """
    pool = rankwise.Pool(2)
    with open(fifo, "r+b", buffering=0) as begun:
        futures = [pool.submit(stay, "gentle", fifo) for _ in range(2)]
        assert begun.read(1) + begun.read(1) == b"xx"
    say("queued")
    futures[0].result()
"""
    )
    with start_program(text, tmp_path) as program:
        program.wait_for("queued\n")
        program.signal(signal.SIGINT)
        done = program.finish(WITHIN_S)

    assert done.code == -signal.SIGINT
    assert done.lines.count("interrupted") == 2


def test_pool_in_a_removed_directory_is_refused(tmp_path: Path) -> None:
    done = run_program(
        """
import os
import rankwise

os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
try:
    rankwise.Pool(1)
except rankwise.ConfigError as error:
    print(error)
""",
        tmp_path,
    )

    assert done.stdout.startswith("the working directory cannot be used")


def test_second_ctrl_c_kills_what_does_not_end(tmp_path: Path) -> None:
    with start_program(LONG, tmp_path, "stubborn") as program:
        program.wait_for("queued\n")
        program.signal_group(signal.SIGINT)
        program.signal_group(signal.SIGINT)
        done = program.finish(WITHIN_S)

    assert done.code == -signal.SIGINT


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_caller(tmp_path: Path, signum: signal.Signals) -> None:
    with start_program(LONG, tmp_path, "stubborn") as program:
        program.wait_for("queued\n")
        program.signal(signum)
        # The workers hold its output open, and the test's own end looks for processes.
        assert program.finish(WITHIN_S).code == -signum


def test_loss_of_the_fork_server_breaks_the_pool(tmp_path: Path) -> None:
    done = run_program(
        """
import os, signal
import rankwise

with rankwise.Pool(1) as pool:
    server = pool.submit(os.getppid).result()
    os.kill(server, signal.SIGKILL)
    while True:
        try:
            pool.submit(abs, -1).result()
        except rankwise.WorkerDied:
            continue  # the workers die first
        except rankwise.BrokenPool as error:
            print(error)
            break
""",
        tmp_path,
    )

    assert (done.code, done.stderr) == (0, "")
    assert "cannot run tasks any more: the fork server has ended with signal 9" in done.stdout


def test_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    write_program(
        tmp_path,
        """
import rankwise
with rankwise.Pool(2, progress=True) as pool:
    print(sum(pool.map(abs, range(100))))
""",
    )
    with OnTerminal(sys.executable, str(tmp_path / "program.py")) as terminal:
        assert "4950" in terminal.wait_for("100 done, 0 failed, 0:0")


def test_line_of_progress_is_cut_to_the_terminal_and_counts_what_workers_run() -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 40))
    with os.fdopen(master, "rb", 0) as terminal:
        with os.fdopen(slave, "w") as stream, rankwise.Pool(2) as pool:
            show_progress(pool._engine, stream)
            # Long enough to be shown.
            [*pool.map(time.sleep, [0.3, 0.3, *[0.0] * 40], chunksize=1)]
        shown = terminal.read(1 << 16).decode()

    lines = shown.split("\r\x1b[2K")[1:]
    assert max(map(len, lines[:-1])) == 39
    assert lines[-1].startswith("42 done, 0 failed, 0:0")
    running = [int(count) for line in lines for count in re.findall(r"(\d+) running", line)]
    assert max(running) <= 2


def test_progress_is_not_written_to_a_file(tmp_path: Path) -> None:
    done = run_program(
        """
import rankwise
with rankwise.Pool(2, progress=True) as pool:
    print(sum(pool.map(abs, range(100))))
""",
        tmp_path,
    )

    assert (done.stdout, done.stderr) == ("4950\n", "")


def test_import_of_the_fork_server_that_takes_too_long_breaks_the_pool(tmp_path: Path) -> None:
    write_program(tmp_path, "import time\ntime.sleep(1000)\n", "never_there.py")

    done = run_program(
        """
import rankwise

try:
    with rankwise.Pool(1, preload=["never_there"], start_timeout=1) as pool:
        pool.submit(abs, -1).result()
except rankwise.BrokenPool as error:
    print(error)
""",
        tmp_path,
    )

    why = "no worker started within 1 s: the fork server was importing never_there"
    assert (done.code, done.lines) == (0, [f"the pool cannot run tasks any more: {why}"]), done
