"""Ctrl-C and its relatives, sent to a program that is inside `rankwise.run`."""

import signal
from pathlib import Path

import pytest
from running import Deaths, numbers_after, run_program, start_program

pytestmark = pytest.mark.system

PROGRAM = """
import os, signal, sys, time
import rankwise

def work():
    print("pid", os.getpid(), flush=True)
    signal.pause()

numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))
before = [signal.getsignal(number) for number in numbers]
try:
    rankwise.run(work, nprocs=2, grace=5)
except BaseException as error:
    print(type(error).__name__, error)
print("handlers kept", [signal.getsignal(number) for number in numbers] == before)
"""


def test_an_interrupt_ends_all_ranks_and_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    with start_program(PROGRAM, tmp_path) as running:
        deaths = Deaths(numbers_after("pid", running.wait_for("pid ", count=2)))
        running.signal_group(signal.SIGINT)
        done = running.finish()

    assert deaths.survivors(within_s=0) == []
    assert done.lines[2:] == ["KeyboardInterrupt ", "handlers kept True"]
    assert done.code == 0


def test_an_interrupt_that_nobody_catches_kills_as_python_does(tmp_path: Path) -> None:
    program = (
        "import rankwise, signal\nrankwise.run(lambda: (print('up', flush=True), signal.pause()))"
    )
    with start_program(program, tmp_path) as running:
        running.wait_for("up", count=4)
        running.signal_group(signal.SIGINT)
        done = running.finish()

    assert done.code == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_a_handler_of_the_programs_own_is_called_once_the_ranks_have_ended(tmp_path: Path) -> None:
    with start_program(PROGRAM, tmp_path, "own") as running:
        deaths = Deaths(numbers_after("pid", running.wait_for("pid ", count=2)))
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert deaths.survivors(within_s=0) == []
    assert done.lines[2:] == [
        "own handler",
        "GangError the run was stopped by SIGTERM before it had finished",
        "handlers kept True",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_without_handler_kills_once_the_ranks_have_ended(
    number: signal.Signals, tmp_path: Path
) -> None:
    with start_program(PROGRAM, tmp_path) as running:
        deaths = Deaths(numbers_after("pid", running.wait_for("pid ", count=2)))
        running.signal(number)
        done = running.finish()

    assert deaths.survivors(within_s=0) == []
    assert done.code == -number


def test_an_interrupt_is_the_main_threads_while_another_runs_a_gang(tmp_path: Path) -> None:
    done = run_program(
        """
import os, signal, threading
import rankwise

def work():
    os.kill(os.getppid(), 0)
    return rankwise.rank()

results = []
thread = threading.Thread(target=lambda: results.append(rankwise.run(work, nprocs=2)))
thread.start()
try:
    os.kill(os.getpid(), signal.SIGINT)
    thread.join()
except KeyboardInterrupt:
    print("interrupted")
thread.join()
print(results)
""",
        tmp_path,
    )

    assert done.lines == ["interrupted", "[[0, 1]]"], done.stderr
