"""What each signal to `rankwise run` does, by its number: the table of docs/signals.md."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import free_ports
from preloaded import Preloaded
from running import Running, descendants_of, start, write_program

pytestmark = pytest.mark.system

TABLE = Path(__file__).parents[3] / "docs" / "signals.md"
SHELL = """#!/bin/sh
trap 'echo caught' USR1 USR2 ALRM XCPU
sleep 1000 & child=$!
trap 'kill $child; exit 0' TERM INT HUP QUIT
echo up
while :; do wait $child && exit 0; done
"""
"""Catches what may be passed on, and lives until it is told to end. A wait ends by each signal."""
FIRST_REAL_TIME, LAST_REAL_TIME = 34, 64
OF_THE_C_LIBRARY = (32, 33)


def name_of(number: int) -> str:
    if number in OF_THE_C_LIBRARY:
        return str(number)
    if number >= FIRST_REAL_TIME:
        return "real-time"
    return signal.Signals(number).name


def table() -> dict[str, str]:
    """What the documentation says that each signal does, by its name."""
    rows = re.findall(r"^\| ([^|]+) \| (\w[^|:]*)(?::[^|]*)? \|", TABLE.read_text(), re.MULTILINE)
    return {name: what.strip() for names, what in rows for name in re.split(r", | and ", names)}


def under_way(folder: Path, *words: str, started: Callable[..., Running] = start) -> Running:
    program = write_program(folder, SHELL, "rank.sh")
    program.chmod(0o755)
    running = started("run", "--nproc-per-node=1", *words, "--no-python", program)
    running.wait_for("up")
    return running


@pytest.fixture(scope="module")
def imported() -> Iterator[Preloaded]:
    """What `rankwise run` imports takes most of its CPU time: once for all signals."""
    with Preloaded("rankwise.launch.run.supervision", "rankwise.cli.run") as preloaded:
        yield preloaded


def is_ignored(pid: int, number: int) -> bool:
    """Whether a process ignores a signal, as the kernel shows it."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(re.findall(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return bool(ignored >> (number - 1) & 1)


@pytest.mark.parametrize("number", range(1, LAST_REAL_TIME + 1))
def test_signal_does_what_the_table_says(number: int, imported: Preloaded, tmp_path: Path) -> None:
    effect = table()[name_of(number)]
    # Only a parent can see that a process is stopped.
    started = start if effect == "pauses the run" else imported.start
    with under_way(tmp_path, started=started) as running:
        if number in OF_THE_C_LIBRARY and is_ignored(running.pid, number):
            effect = "does nothing"  # what starts programs by posix_spawn, as make does
        running.signal(number)
        match effect:
            case "stops the run":
                code = 128 + number
            case "stops the run as SIGTERM does":
                code = 128 + signal.SIGTERM
            case "goes to the ranks that catch it":
                running.wait_for("caught")
                running.signal(signal.SIGTERM)
                code = 128 + signal.SIGTERM
            case "does nothing":
                running.signal(signal.SIGTERM)
                code = 128 + signal.SIGTERM
            case "pauses the run":
                os.waitid(os.P_PID, running.pid, os.WSTOPPED)
                running.signal(signal.SIGCONT)
                running.signal(signal.SIGTERM)
                code = 128 + signal.SIGTERM
            case "ends rankwise at once":
                code = -number
            case other:
                pytest.fail(f"no test of a signal that {other!r}")
        done = running.finish()

    assert done.code == code, done.stderr


def test_stop_as_by_sigterm_names_the_signal(tmp_path: Path) -> None:
    with under_way(tmp_path) as running:
        running.signal(signal.SIGXCPU)
        done = running.finish()

    assert "rankwise: SIGXCPU: the run is stopped as by SIGTERM\n" in done.stderr
    assert "caught" not in done.stdout


SAVES = """
import os, pathlib, signal
here = pathlib.Path(__file__).parent
def save(*_):
    print("saving", flush=True)
    while not (here / "go on").exists():
        signal.sigtimedwait([], 0.01)
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("words", [(), ("--on=sim",)])
def test_signal_that_stops_as_sigterm_kills_no_rank_that_saves(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    if words:
        pytest.importorskip("numpy")
    script = write_program(tmp_path, SAVES if not words else SAVES_SIMULATED)
    with start("run", "--nproc-per-node=1", *words, script) as running:
        running.wait_for("up")
        running.signal(signal.SIGTERM)
        running.wait_for("saving")
        running.signal(signal.SIGXCPU)
        running.wait_for("SIGXCPU: the run is already stopping", stream="stderr")
        (tmp_path / "go on").touch()
        done = running.finish()

    assert "saved" in done.stdout
    assert done.code == 128 + signal.SIGTERM, done.stderr


SAVES_SIMULATED = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).parent
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not told:
    time.sleep(1)
print("saving", flush=True)
while not (here / "go on").exists():
    time.sleep(0.001)
print("saved", flush=True)
"""


def test_line_on_a_signal_comes_again_when_other_ranks_catch_it(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("up", flush=True)
while not pathlib.Path(__file__).with_name("go on").exists():
    signal.sigtimedwait([], 0.01)
signal.signal(signal.SIGUSR2, lambda *_: print("caught", flush=True))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
print("catches", flush=True)
while True:
    signal.pause()
""",
    )
    with start("run", "--nproc-per-node=1", script) as running:
        running.wait_for("up")
        running.signal(signal.SIGUSR2)
        running.wait_for("SIGUSR2: not passed on, since no rank catches it", stream="stderr")
        (tmp_path / "go on").touch()
        running.wait_for("catches")
        for count in (1, 2):
            running.signal(signal.SIGUSR2)
            running.wait_for("caught", count=count)
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.stderr.count("SIGUSR2: passed on to rank 0\n") == 1


def test_torchrun_as_a_module_outlives_user_signals_and_passes_them_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = write_program(tmp_path, SHELL, "rank.sh")
    program.chmod(0o755)
    module = ("-m", "rankwise.compat.torch.run", "--nproc-per-node=1", "--no-python")
    with Running(sys.executable, *module, str(program)) as running:
        running.wait_for("up")
        running.signal(signal.SIGUSR1)
        running.wait_for("caught")
        running.signal(signal.SIGVTALRM)
        done = running.finish()

    assert "rankwise: SIGUSR1: passed on to rank 0\n" in done.stderr
    assert "rankwise: SIGVTALRM: the run is stopped as by SIGTERM\n" in done.stderr
    assert "got signal: 15" in done.stderr


def test_user_signal_stops_the_run_if_the_user_says_so(tmp_path: Path) -> None:
    with under_way(tmp_path, "--signals-to-handle=SIGUSR1,SIGTERM") as running:
        running.signal(signal.SIGUSR1)
        running.wait_for("caught")
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.code == 128 + signal.SIGUSR1, done.stderr


def test_forward_signals_none_passes_nothing_on(tmp_path: Path) -> None:
    with under_way(tmp_path, "--forward-signals=none") as running:
        running.signal(signal.SIGUSR1)
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.code == 128 + signal.SIGTERM, done.stderr
    assert "caught" not in done.stdout
    assert "SIGUSR1" not in done.stderr


def test_forward_signals_passes_on_what_it_names(tmp_path: Path) -> None:
    with under_way(tmp_path, "--forward-signals=SIGALRM") as running:
        running.signal(signal.SIGUSR1)
        running.signal(signal.SIGALRM)
        running.wait_for("caught")
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.stdout.count("caught") == 1
    assert "rankwise: SIGALRM: passed on to rank 0\n" in done.stderr


def test_signal_to_every_process_ends_neither_guardian_nor_fork_server(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("caught", flush=True))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("up", flush=True)
while True:
    signal.pause()
""",
    )
    with start("run", "--nproc-per-node=2", "--start-method=forkserver", script) as running:
        running.wait_for("up", count=2)
        every = [running.pid, *descendants_of(running.pid)]
        assert len(every) == 5, "launcher, guardian, fork server and two ranks"
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for pid in every:
                os.kill(pid, number)
        running.wait_for("SIGUSR2: not passed on, since no rank catches it", stream="stderr")
        running.wait_for("caught", count=2)
        running.signal(signal.SIGTERM)
        done = running.finish()

    assert "rankwise: SIGUSR1: passed on to ranks 0-1\n" in done.stderr
    assert done.code == 128 + signal.SIGTERM, done.stderr


def test_rank_says_that_it_does_not_catch_a_signal_which_others_catch(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal
if os.environ["RANK"] != "1":
    signal.signal(signal.SIGUSR1, lambda *_: None)
print("up", flush=True)
signal.pause()
""",
    )
    with start("run", "--nproc-per-node=2", script) as running:
        running.wait_for("up", count=2)
        running.signal(signal.SIGUSR1)
        running.wait_for("rank 1 does not catch it", stream="stderr")
        running.signal(signal.SIGTERM)
        running.finish()


def test_simulated_ranks_take_the_signals_that_they_catch(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    script = write_program(
        tmp_path,
        """
import os, signal, time
got = []
if os.environ["RANK"] != "1":
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
if os.environ["RANK"] == "0":
    print("up", flush=True)
    while not got:
        time.sleep(1)
    print("rank 0 goes on", flush=True)
""",
    )
    with start("run", "--on=sim", "--nproc-per-node=2", script) as running:
        running.wait_for("up")
        running.signal(signal.SIGUSR1)
        done = running.finish()

    assert "rank 0 goes on" in done.stdout
    assert "rankwise: SIGUSR1: passed on to rank 0" in done.stderr
    assert done.code == 0


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGALRM])
def test_signal_to_simulated_ranks_does_what_it_does_on_processes(
    number: int, tmp_path: Path
) -> None:
    pytest.importorskip("numpy")
    script = write_program(
        tmp_path, "import time\nprint('up', flush=True)\nwhile True: time.sleep(1)"
    )
    with start("run", "--on=sim", "--nproc-per-node=1", script) as running:
        running.wait_for("up")
        running.signal(number)
        if number == signal.SIGUSR2:
            running.wait_for("not passed on", stream="stderr")
            running.signal(signal.SIGTERM)
        done = running.finish()

    assert done.code == 128 + signal.SIGTERM, done.stderr


def test_each_of_several_nodes_passes_a_signal_on_to_its_own_ranks(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("caught", flush=True))
print("up", flush=True)
while True:
    signal.pause()
""",
    )
    words = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=embedded", "--rdzv-id=signals")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(start("run", *words, endpoint, script)) for _ in range(2)
        )
        first.wait_for("up")
        second.wait_for("up")
        second.signal(signal.SIGUSR1)
        second.wait_for("caught")
        second.signal(signal.SIGTERM)
        codes = [each.finish().code for each in (first, second)]

    assert "caught" not in first.stdout
    assert codes == [128 + signal.SIGTERM] * 2
