"""SIGTERM and Ctrl-C while a run starts, at instants that are counted in calls, not in seconds."""

import os
import signal
import tempfile
from pathlib import Path

import leftovers
import pytest
from running import numbers_after, run_program, write_program

pytestmark = pytest.mark.system

INSTANTS = 16
LAUNCHER = """
import os, signal, sys
from rankwise.cli.main import main

FIRST, LAST, SIGNAL = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
launcher = os.getpid()
calls = None

def count(frame, event, _argument):
    "Count from the end of FIRST until the session turns."
    global calls
    code = frame.f_code
    if event == "return" and code.co_name == FIRST and calls is None:
        calls = 0
    if calls is None or os.getpid() != launcher:
        return
    calls += 1
    is_over = code.co_name == "run" and code.co_filename.endswith("session.py")
    if calls == LAST or is_over:
        sys.setprofile(None)
        print("calls", calls, flush=True)
        os.kill(launcher, SIGNAL)

sys.setprofile(count)
main(["run", "--nproc-per-node=2", *sys.argv[4:]])
"""
NEVER = 1_000_000_000


@pytest.mark.parametrize("first", ["end_on_sigterm", "be_interruptible"])
@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_sigterm_ends_a_run_in_the_same_way_at_any_moment_of_its_start(
    method: str, first: str, tmp_path: Path
) -> None:
    words = (f"--start-method={method}", "--no-python", "sleep", "1000")
    mark = os.environ[leftovers.MARK_VARIABLE]
    before = frozenset(leftovers.marked_processes(mark))
    sigterm = str(int(signal.SIGTERM))
    last = run_program(LAUNCHER, tmp_path, first, str(NEVER), sigterm, *words)
    (calls,) = numbers_after("calls", last.stdout)
    assert calls > 10 * INSTANTS, "the run is started in many steps"

    for instant in range(1, calls, calls // INSTANTS):
        done = run_program(LAUNCHER, tmp_path, first, str(instant), sigterm, *words)

        assert done.code == 128 + signal.SIGTERM, f"at call {instant}: {done.stderr}"
        assert "stopped by SIGTERM" in done.stderr, f"at call {instant}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"at call {instant}"
        assert leftovers.wait_until_gone(mark, before) == [], f"at call {instant}"
        assert list(Path(tempfile.gettempdir()).glob("rankwise_*")) == [], f"at call {instant}"


def test_sigterm_that_the_run_is_not_to_handle_does_what_it_does_to_any_program(
    tmp_path: Path,
) -> None:
    words = ("--signals-to-handle=SIGINT", "--no-python", "sleep", "1000")

    sigterm = str(int(signal.SIGTERM))

    done = run_program(LAUNCHER, tmp_path, "be_interruptible", str(NEVER), sigterm, *words)

    assert done.code == -signal.SIGTERM, done.stderr


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_when_ctrl_c_has_ended_the_start_of_a_run_nothing_is_left(
    method: str, tmp_path: Path
) -> None:
    words = (f"--start-method={method}", "--no-python", "sleep", "1000")
    mark = os.environ[leftovers.MARK_VARIABLE]
    before = leftovers.marked_processes(mark).keys()
    sigint, first = str(int(signal.SIGINT)), "hold_interrupts"
    last = run_program(LAUNCHER, tmp_path, first, str(NEVER), sigint, *words)
    (calls,) = numbers_after("calls", last.stdout)
    assert calls > 10 * INSTANTS, "the run is started in many steps"

    for instant in range(1, calls, calls // INSTANTS):
        done = run_program(LAUNCHER, tmp_path, first, str(instant), sigint, *words)

        # At once: whoever reads the exit code may start the next run.
        assert leftovers.marked_processes(mark).keys() <= before, f"at call {instant}"
        assert done.code == 128 + signal.SIGINT, f"at call {instant}: {done.stderr}"
        assert "stopped by SIGINT" in done.stderr, f"at call {instant}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"at call {instant}"


EARLY = """
import importlib.abc, os, signal, sys

class Sends(importlib.abc.MetaPathFinder):
    "Sends the signal when a module is looked for that is imported while a run starts."
    def find_spec(self, name, path, target=None):
        if name == sys.argv_module:
            os.kill(os.getpid(), sys.signal_number)

sys.argv_module, number, *sys.argv = sys.argv[1:]
sys.signal_number = int(number)
sys.meta_path.insert(0, Sends())
import runpy
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("module", "imported", "options"),
    [
        ("rankwise", "click", ()),
        ("rankwise", "rankwise.simranks.run.rehearsal", ("--on=sim",)),
        ("rankwise.compat.torch.run", "argparse", ("--standalone",)),
    ],
)
def test_signal_while_a_launcher_is_imported_ends_it_with_a_line_or_does_nothing(
    module: str, imported: str, options: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    script = write_program(tmp_path, "print('fine', flush=True)", "script.py")
    words = ("run", *options) if module == "rankwise" else options

    done = run_program(EARLY, tmp_path, imported, str(int(number)), module, *words, str(script))

    if number == signal.SIGUSR1:
        assert (done.code, "fine" in done.stdout) == (0, True), done.stderr
        return
    code = 128 + (number if number == signal.SIGHUP else signal.SIGTERM)
    assert (done.code, done.stderr) == (code, f"rankwise: stopped by {number.name}\n")
