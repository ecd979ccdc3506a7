"""`--on sim`: each simulated rank has a process's own_state, and everything is told as ever."""

import asyncio
import gc
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import RANKWISE, Finished, run, start, write_program

import rankwise
from rankwise import collectives
from rankwise.workers import CommHandle

DIGITS = Path(__file__).parents[3] / "examples" / "train_digits.py"


HANDLES = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
"""A program that does not end by SIGTERM."""


def simulate(text: str, folder: Path, *options: str) -> Finished:
    """Run a program on simulated ranks; `options` come before it."""
    program = write_program(folder, text)
    return run("run", "--on", "sim", *options, str(program), cwd=folder)


def on_sim(function: Any, *args: Any, nprocs: int = 4, **options: Any) -> list[Any]:
    return rankwise.run(function, args, nprocs, on="sim", **options)


def test_results_come_by_rank() -> None:
    assert on_sim(lambda base: base + rankwise.rank(), 10) == [10, 11, 12, 13]


def test_ranks_find_their_place_where_real_ones_do() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")

    places = on_sim(lambda: tuple(os.environ[name] for name in names), nprocs=2)

    assert places == [("0", "0", "2", "2", "0"), ("1", "1", "2", "2", "0")]
    assert not set(names) & set(os.environ)


def operations() -> list[Any]:
    """What every collective operation gives."""
    rank = collectives.rank()
    mine = np.arange(6.0) / 7 + rank
    return [
        collectives.all_reduce(mine),
        collectives.all_reduce(mine, op="mean"),
        collectives.all_reduce(np.arange(3) * rank, op="max"),
        collectives.reduce_scatter(np.outer(np.arange(collectives.size()), mine)),
        collectives.all_gather(mine[:2]),
        collectives.broadcast(mine, root=1),
        collectives.all_to_all(mine[: collectives.size()]),
    ]


def test_collectives_give_what_real_processes_give() -> None:
    simulated, real = on_sim(operations, nprocs=3), rankwise.run(operations, nprocs=3)

    assert [[np.asarray(each).tobytes() for each in rank] for rank in simulated] == [
        [np.asarray(each).tobytes() for each in rank] for rank in real
    ]


def test_each_rank_has_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("value = []\n")

    def life(folder: str) -> tuple[Any, ...]:
        sys.path.insert(0, folder)
        settings = importlib.import_module("settings")
        rank = rankwise.rank()
        settings.value.append(rank)
        os.environ["OWN"] = str(rank)
        sys.argv[:] = [f"program of {rank}"]
        directory = Path(folder) / str(rank)
        directory.mkdir()
        os.chdir(directory)
        random.seed(rank)
        np.random.seed(rank)
        collectives.barrier()
        state = (settings.value, os.environ["OWN"], sys.argv, Path.cwd().name)
        numbers = (random.random(), float(np.random.rand()))
        random.seed(rank)
        np.random.seed(rank)
        return state, numbers == (random.random(), float(np.random.rand()))

    before = Path.cwd()

    lives = on_sim(life, str(tmp_path), nprocs=3)

    assert lives == [
        (([rank], str(rank), [f"program of {rank}"], str(rank)), True) for rank in range(3)
    ]
    assert Path.cwd() == before
    assert "OWN" not in os.environ
    assert "settings" not in sys.modules


def test_unseeded_random_numbers_differ_between_ranks_and_not_between_runs() -> None:
    def numbers() -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    first = on_sim(numbers, nprocs=3)

    assert len(set(first)) == 3
    assert on_sim(numbers, nprocs=3) == first


def test_a_rank_sees_all_cores_of_the_process_and_those_that_it_has_chosen() -> None:
    def cores() -> tuple[set[int], set[int], set[int]]:
        first = os.sched_getaffinity(0)
        if rankwise.rank():
            os.sched_setaffinity(0, {max(first)})
        collectives.barrier()
        show = "import os; print(*os.sched_getaffinity(0))"
        told = subprocess.run([sys.executable, "-c", show], capture_output=True, check=True)
        return first, os.sched_getaffinity(0), set(map(int, told.stdout.split()))

    every = os.sched_getaffinity(0)

    assert on_sim(cores, nprocs=2) == [(every, every, every), (every, {max(every)}, {max(every)})]
    assert os.sched_getaffinity(0) == every


def test_sleeping_takes_no_time() -> None:
    def sleep() -> float:
        begun = time.monotonic()
        time.sleep(3600 * (rankwise.rank() + 1))
        return time.monotonic() - begun

    begun = time.monotonic()
    slept = on_sim(sleep, nprocs=2)

    assert [round(seconds / 3600) for seconds in slept] == [1, 2]
    assert time.monotonic() - begun < 1000


def test_a_rank_can_handle_its_own_signals() -> None:
    def handle() -> list[int]:
        taken: list[int] = []
        if rankwise.rank() == 1:
            signal.signal(
                signal.SIGUSR1, lambda number, frame: taken.append(number if frame else 0)
            )
            os.kill(os.getpid(), signal.SIGUSR1)
        collectives.barrier()
        return taken

    assert on_sim(handle, nprocs=2) == [[], [signal.SIGUSR1]]


def test_alarms_of_ranks_ring_in_virtual_time() -> None:
    def rung() -> tuple[list[float], tuple[float, float], int]:
        times: list[float] = []
        signal.signal(signal.SIGALRM, lambda *_: times.append(round(time.monotonic() - begun)))
        begun = time.monotonic()
        signal.alarm(3600 * (rankwise.rank() + 1))
        time.sleep(3 * 3600)
        signal.setitimer(signal.ITIMER_REAL, 600, 300)
        time.sleep(1300)
        left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.alarm(100)
        signal.pause()
        return times, (round(left), interval), signal.alarm(0)

    later = [10_800 + seconds for seconds in (600, 900, 1200, 1400)]
    assert on_sim(rung, nprocs=2, virtual_clock=True) == [
        ([3600, *later], (200, 300), 0),
        ([7200, *later], (200, 300), 0),
    ]


def test_times_of_alarms_are_refused_as_python_refuses_them() -> None:
    def refused() -> list[str]:
        told = []
        for call in (
            lambda: signal.setitimer(signal.ITIMER_REAL, -1),
            lambda: signal.setitimer(signal.ITIMER_REAL, 1, -1),
            lambda: signal.alarm(2.5),  # type: ignore[arg-type]  # that is the mistake
        ):
            try:
                call()
            except (OSError, TypeError) as error:
                told.append(f"{type(error).__name__}: {error}")
        return told

    assert on_sim(refused, nprocs=1) == [refused()]
    assert len(refused()) == 3


def test_a_rank_can_block_its_signals_and_wait_for_them() -> None:
    def wait() -> list[Any]:
        own = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGALRM})
        os.kill(own, signal.SIGUSR1)
        pending = signal.sigpending()
        first = signal.sigwait({signal.SIGUSR1})
        in_vain = signal.sigtimedwait({signal.SIGUSR1}, 5)
        signal.alarm(3600 + rankwise.rank())
        begun = time.monotonic()
        info = signal.sigwaitinfo({signal.SIGALRM})
        waited = time.monotonic() - begun
        return [pending, first, in_vain, info.si_signo, 3600 < waited < 3700]

    expected = [{signal.SIGUSR1}, signal.SIGUSR1, None, signal.SIGALRM, True]
    assert rankwise.run(wait, nprocs=2, on="sim") == [expected] * 2


def test_a_blocked_signal_is_taken_when_it_is_unblocked() -> None:
    def unblock() -> list[int]:
        taken: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: taken.append(number))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert not taken
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return taken

    assert rankwise.run(unblock, nprocs=2, on="sim") == [[signal.SIGUSR1]] * 2


def test_a_loop_of_asyncio_hears_signals_of_its_rank() -> None:
    async def hear() -> str:
        heard, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, heard.set)
        loop.call_soon(os.kill, os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(heard.wait(), 60)
        return "heard" if loop.remove_signal_handler(signal.SIGUSR2) else "not removed"

    assert rankwise.run(lambda: asyncio.run(hear()), nprocs=2, on="sim") == ["heard"] * 2


def test_settings_of_the_process_are_each_ranks_own() -> None:
    def look(rank: int) -> tuple[bool, int, str | None]:
        if rank == 0:
            gc.disable()
            sys.setrecursionlimit(5_000)
            tempfile.tempdir = "/tmp/of-rank-0"
        else:
            sys.setrecursionlimit(900)
        with pytest.raises(ValueError, match="recursion limit"):
            sys.setrecursionlimit(0)
        collectives.barrier()
        return gc.isenabled(), sys.getrecursionlimit(), tempfile.tempdir

    def run_look() -> tuple[bool, int, str | None]:
        return look(rankwise.rank())

    before = gc.isenabled(), sys.getrecursionlimit(), tempfile.tempdir

    results = rankwise.run(run_look, nprocs=2, on="sim")

    assert results == [(False, 5_000, "/tmp/of-rank-0"), (True, 900, before[2])]
    assert (gc.isenabled(), sys.getrecursionlimit(), tempfile.tempdir) == before


def test_an_alarm_without_a_handler_ends_its_rank_alone(tmp_path: Path) -> None:
    text = (
        "import rankwise, signal, time\nif rankwise.rank() == 1: signal.alarm(60)\ntime.sleep(90)"
    )

    finished = simulate(text, tmp_path, "--nproc-per-node=2")

    assert finished.code == 128 + signal.SIGALRM
    assert "root cause: rank 1 was killed by SIGALRM" in finished.stderr


def test_handlers_are_refused_as_python_refuses_them() -> None:
    def handle() -> list[str]:
        told: list[str] = []
        for number in (signal.SIGRTMIN + 1, 32, signal.SIGKILL, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError) as error:
                told.append(str(error))
            else:
                told.append("taken")
        return told

    assert on_sim(handle, nprocs=1) == [
        ["taken", "[Errno 22] Invalid argument", "[Errno 22] Invalid argument",
         "signal number out of range"],
    ]  # fmt: skip


def test_a_package_is_imported_for_each_rank_when_its_name_is_given(tmp_path: Path) -> None:
    counting = "import json, os\nassert not hasattr(json, 'rank'), json.rank\n"
    counting += "json.rank = os.environ['RANK']"

    shared = simulate(counting, tmp_path, "--nproc-per-node=2")
    own = simulate(counting, tmp_path, "--nproc-per-node=2", "--import-per-rank=json")

    assert "AssertionError: 0" in shared.stderr
    assert own.code == 0, own.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(3)", 3), ("sys.exit(4)", 4), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)],
)
def test_one_rank_ends_alone_and_ends_the_run(end: str, code: int, tmp_path: Path) -> None:
    finished = simulate(
        f"import os, sys, rankwise\nprint('hello')\nif rankwise.rank() == 2: {end}\n",
        tmp_path,
        "--nproc-per-node=4",
    )

    assert finished.code == code
    assert sorted(set(finished.lines)) == [f"[default{rank}]:hello" for rank in range(3)]
    assert "root cause: rank 2" in finished.stderr


def test_an_uncaught_keyboard_interrupt_of_a_rank_ends_it_as_sigint_does(tmp_path: Path) -> None:
    finished = simulate("raise KeyboardInterrupt\n", tmp_path)

    assert finished.code == 130
    assert "ended: signal 2: SIGINT" in finished.stderr


def test_an_exit_function_that_raises_is_told_and_changes_nothing(tmp_path: Path) -> None:
    text = "import atexit\natexit.register(print, 'last')\natexit.register(lambda: 1 / 0)\n"

    finished = simulate(text, tmp_path, "--no-prefix")

    assert finished.code == 0, finished.stderr
    assert set(finished.lines) == {"last"}
    assert "Exception ignored in atexit callback: <function <lambda>" in finished.stderr
    assert "ZeroDivisionError: division by zero" in finished.stderr
    assert "rehearsal" not in finished.stderr


def test_half_a_character_in_an_exception_is_told_as_what_it_is(tmp_path: Path) -> None:
    script = write_program(tmp_path, "raise ValueError('of \\ud800 alone')\n")

    finished = run("run", "--on=sim", "--nproc-per-node=2", script)

    assert finished.code == 1
    assert "root cause: rank 0 failed: ValueError: of \\ud800 alone" in finished.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import nothing_of_this_name",
        "open('/nowhere')",
        "import time; time.sleep(-1)",
        "import os; os.close(1); os.close(1)",
        "import os; os.close(1); print('lost')",
    ],
)
def test_tracebacks_have_no_frames_of_what_stands_for_pythons_functions(
    text: str, tmp_path: Path
) -> None:
    finished = simulate(text + "\n", tmp_path, "--schedule=random")

    assert finished.code == 1
    assert "line 1, in <module>" in finished.stderr
    assert "/rankwise/" not in finished.stderr


REDIRECTING = """
import os, sys, time
rank = os.environ["RANK"]
if rank == "1":
    saved, file = os.dup(1), os.open("own.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    print("into the file")
time.sleep(2)
os.write(1, b"from descriptor 1\\n")
if rank == "1":
    os.dup2(saved, 1)
    print("back")
"""


def test_a_rank_redirects_its_own_output(tmp_path: Path) -> None:
    finished = simulate(REDIRECTING, tmp_path, "--nproc-per-node=2")

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["from descriptor 1", "[default1]:back"]
    assert (tmp_path / "own.txt").read_text() == "into the file\nfrom descriptor 1\n"


PRINTING_MEANWHILE = """
import os, threading, time
rank = os.environ["RANK"]
if rank == "0":
    def write():
        open("go").read()
        print("from a thread")
        open("done", "w").close()
    os.mkfifo("go")
    os.mkfifo("done")
    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(2)
    thread.join()
else:
    time.sleep(1)
    os.dup2(os.open("own.txt", os.O_WRONLY | os.O_CREAT), 1)
    open("go", "w").close()
    open("done").read()
"""


def test_what_a_thread_prints_goes_to_no_file_of_another_rank(tmp_path: Path) -> None:
    finished = simulate(PRINTING_MEANWHILE, tmp_path, "--nproc-per-node=2")

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["[default0]:from a thread"]
    assert not (tmp_path / "own.txt").read_text()


CLOSING = """
import os, subprocess, sys, time
rank = os.environ["RANK"]
if rank == "1":
    HOW
    for write in print, lambda: os.write(1, b"lost"):
        try:
            write()
        except OSError as error:
            assert error.errno == 9, error
        else:
            raise AssertionError("written")
time.sleep(2)
if rank == "0":
    print(os.read(0, 10), file=sys.stderr)
    subprocess.run(["echo", "child"], check=True)
assert rank == "0", "this is told"
"""


@pytest.mark.parametrize("how", ["os.close(0); os.close(1); os.close(2)", "os.closerange(0, 99)"])
def test_a_rank_that_closes_its_streams_takes_none_of_the_others(how: str, tmp_path: Path) -> None:
    finished = simulate(CLOSING.replace("HOW", how), tmp_path, "--nproc-per-node=2")

    assert finished.code == 1
    assert finished.lines == ["[default0]:child"]
    assert "[default0]:b''" in finished.stderr
    assert "root cause: rank 1 failed: AssertionError: this is told" in finished.stderr


def test_a_function_that_raises_is_told_as_on_real_processes() -> None:
    def fail() -> None:
        if rankwise.rank() == 1:
            raise ValueError("no such thing")

    with pytest.raises(rankwise.WorkersFailed) as caught:
        on_sim(fail, nprocs=3)

    assert caught.value.failures[0].rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_ranks_are_started_again(tmp_path: Path) -> None:
    finished = simulate(
        "import rankwise\n"
        "print('life', rankwise.restart_count())\n"
        "assert rankwise.restart_count() == 1 or rankwise.rank() != 1, 'the first life fails'\n",
        tmp_path, "--nproc-per-node=2", "--max-restarts=1",
    )  # fmt: skip

    assert finished.code == 0
    assert finished.lines.count("[default1]:life 1") == 1
    assert "restarting all ranks" in finished.stderr


@pytest.mark.parametrize(
    ("options", "dies_of", "detail"),
    [
        (["--no-retry=ValueError"], "raise ValueError", "--no-retry names ValueError"),
        (["--no-retry=7"], "raise SystemExit(7)", "--no-retry names exit code 7"),
        (["--max-no-progress=2"], "raise ValueError", "2 attempts in a row without progress"),
        (["--max-node-failures=1"], "raise ValueError", "1 failure began on this node"),
    ],
)
def test_restarts_are_refused_for_the_same_reasons_as_on_real_processes(
    options: list[str], dies_of: str, detail: str, tmp_path: Path
) -> None:
    finished = simulate(dies_of + "\n", tmp_path, "--max-restarts=9", *options)

    assert finished.code != 0
    assert detail in finished.stderr


def test_a_step_farther_than_before_is_progress(tmp_path: Path) -> None:
    finished = simulate(
        "import rankwise\n"
        "for _ in range(1 + rankwise.restart_count()):\n"
        "    rankwise.should_stop()\n"
        "raise SystemExit(rankwise.restart_count() < 3)\n",
        tmp_path, "--max-restarts=9", "--max-no-progress=1",
    )  # fmt: skip

    assert finished.code == 0, finished.stderr


def test_nodes_of_ranks_write_logs_as_real_ones(tmp_path: Path) -> None:
    finished = simulate(
        "import os, sys\n"
        "print('node', os.environ['GROUP_RANK'], 'local', os.environ['LOCAL_RANK'])\n"
        "print('told', file=sys.stderr)\n",
        tmp_path, "--nnodes=2", "--nproc-per-node=2", "--tee=1", "--redirects=2", "--log-dir=logs",
    )  # fmt: skip

    assert finished.code == 0
    assert sorted(finished.lines) == [
        "[default0]:node 0 local 0",
        "[default1]:node 0 local 1",
        "[default2]:node 1 local 0",
        "[default3]:node 1 local 1",
    ]
    (log,) = tmp_path.glob("logs/*/attempt_0/3/stdout.log")
    assert log.read_text() == "node 1 local 1\n"
    assert log.with_name("stderr.log").read_text() == "told\n"
    assert list(tmp_path.glob("logs/*/journal.jsonl"))


def test_a_module_runs_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")

    finished = run(
        "run", "--on", "sim", "--nproc-per-node=2", "-m", "training", "--lr", "1",
        cwd=tmp_path,
    )  # fmt: skip

    assert sorted(finished.lines) == [
        "[default0]:['--lr', '1'] __main__",
        "[default1]:['--lr', '1'] __main__",
    ]


def test_the_digits_are_read_as_well_by_64_ranks_as_by_one(tmp_path: Path) -> None:
    epochs = ("--epochs", "3")
    alone = subprocess.run(
        [sys.executable, str(DIGITS), *epochs], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    many = run(
        "run", "--on", "sim", "--nnodes=8", "--nproc-per-node=8", "--no-prefix",
        str(DIGITS), *epochs, cwd=tmp_path,
    )  # fmt: skip

    assert many.code == 0, many.stderr
    assert many.lines[:-1] == alone[:-1]
    accuracy = re.compile(r": (.*)% of the test images")
    assert accuracy.findall(many.lines[-1]) == accuracy.findall(alone[-1]) != []


def test_all_ranks_stop_before_the_same_step_when_asked_to(tmp_path: Path) -> None:
    finished = simulate(
        "import os, signal, subprocess, sys, rankwise\n"
        "step = 0\n"
        "while not rankwise.should_stop():\n"
        "    step += 1\n"
        "    if rankwise.rank() == 1 and step == 5:\n"
        "        kill = f'import os; os.kill({os.getpid()}, 15)'\n"
        "        subprocess.run([sys.executable, '-c', kill])\n"
        "    rankwise.collectives.barrier()\n"
        "print(step)\n",
        tmp_path, "--nproc-per-node=3",
    )  # fmt: skip

    assert len({line.partition(":")[2] for line in finished.lines}) == 1, finished.lines
    assert len(finished.lines) == 3
    assert "stopped by SIGTERM" in finished.stderr


def test_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        "import rankwise\nprint('begun', flush=True)\nwhile True: rankwise.collectives.barrier()\n",
    )

    with start("run", "--on", "sim", "--nproc-per-node=2", program) as running:
        running.wait_for("[default0]:begun")
        running.signal(signal.SIGINT)
        finished = running.finish()

    assert finished.code == 130
    assert "stopped by SIGINT" in finished.stderr


def test_ranks_that_wait_are_interrupted_by_ctrl_c_as_python_is(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        "import rankwise\nprint('begun', flush=True)\ntry:\n"
        "    while True: rankwise.collectives.barrier()\n"
        "except KeyboardInterrupt:\n    print('saved')\n    raise\n",
    )

    with start("run", "--on", "sim", "--nproc-per-node=2", program) as running:
        running.wait_for("[default1]:begun")
        running.signal(signal.SIGINT)
        finished = running.finish()

    assert finished.code == 130
    assert {"[default0]:saved", "[default1]:saved"} <= set(finished.lines)
    assert "[default0]:KeyboardInterrupt in <module>" in finished.stderr
    assert "program.py:4" in finished.stderr
    assert "stopped by SIGINT" in finished.stderr


def test_ctrl_c_before_a_rank_has_begun_ends_the_run_with_a_word(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('begun', flush=True)\nwhile True:\n    pass\n")

    with start("run", "--on", "sim", "--nproc-per-node=2", program) as running:
        running.wait_for("[default0]:begun")
        running.signal(signal.SIGINT)
        finished = running.finish()

    assert finished.code == 130
    assert "stopped by SIGINT" in finished.stderr


def test_a_rank_that_keeps_a_stop_waiting_is_named_soon(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        HANDLES + "print('begun', flush=True)\nwhile True:\n    pass\n",
    )

    with start("run", "--on", "sim", "--nproc-per-node=1", program) as running:
        running.wait_for("begun")
        running.signal(signal.SIGTERM)
        running.wait_for("SIGTERM: rank 0 has not let the run stop: it is at", stream="stderr")
        running.signal(signal.SIGTERM)
        finished = running.finish()

    assert finished.code == 143, "as on real processes"
    assert "stopped by SIGTERM" in finished.stderr
    assert "it is killed after 30 s, or at once by another signal" in finished.stderr


def test_what_ranks_leave_running_ends_with_the_run(tmp_path: Path) -> None:
    text = (
        "import subprocess\n"
        "left = subprocess.Popen(['sleep', '1000'])\n"
        "words = 'sleep 1000 > /dev/null & echo $!'\n"
        "print(left.pid, subprocess.check_output(words, shell=True, text=True))\n"
    )

    finished = simulate(text, tmp_path, "--nproc-per-node=1", "--no-prefix")

    pids = finished.lines[0].split()
    assert finished.code == 0, finished.stderr
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
    assert "2 processes that ranks had left running were killed: sleep 1000" in finished.stderr
    assert "keep-children" not in finished.stderr, "which is refused"


def test_what_a_thread_of_a_rank_prints_is_that_ranks(tmp_path: Path) -> None:
    text = (
        "import string, threading, rankwise\n"  # all ranks share the module `string`
        "if rankwise.rank() == 0:\n"
        "    go = string.go = threading.Event()\n"
        "    tell = lambda: (go.wait(), print('of rank 0'))\n"
        "    string.thread = threading.Thread(target=tell)\n"
        "    string.thread.start()\n"
        "rankwise.collectives.barrier()\n"
        "if rankwise.rank() == 1:\n"
        "    string.go.set()\n"
        "    string.thread.join()\n"
    )

    finished = simulate(text, tmp_path, "--nproc-per-node=2")

    assert finished.lines == ["[default0]:of rank 0"], finished.stderr


def test_a_console_that_is_full_is_told_of_once(tmp_path: Path) -> None:
    program = write_program(tmp_path, "for _ in range(3):\n    print('lost')\n")
    words = [*RANKWISE, "run", "--on", "sim", "--nproc-per-node=2", program]
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=True)

    assert finished.stderr == (
        "rankwise: cannot write to standard output: No space left on device; output of ranks is"
        " no longer shown there, the run continues\n"
    )


def test_what_a_killed_run_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('begun', flush=True)\nimport sys\nsys.stdin.read()\n")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [*RANKWISE, "run", "--on", "sim", program]

    def left() -> list[Path]:
        return list(tmp_path.glob("rankwise_*"))

    with subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"[default0]:begun\n"
        subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, check=True)
        assert len(left()) == 1, "of the run that goes on"
        killed.kill()

    assert len(left()) == 1
    subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, check=True)
    assert left() == []


@pytest.mark.parametrize(
    ("begin", "grace", "killed"),
    [("", "100s", ""), (HANDLES, "200ms", "rank 1 did not end within 200 ms: killed")],
    ids=["at once", "after the grace if it handles it"],
)
def test_sigterm_ends_a_rank_that_blocks_outside_of_the_simulation(
    begin: str, grace: str, killed: str, tmp_path: Path
) -> None:
    program = write_program(
        tmp_path,
        f"{begin}import os, rankwise\n"
        "if rankwise.rank() == 1:\n    print('begun', flush=True)\n    os.read(os.pipe()[0], 1)\n"
        "rankwise.collectives.barrier()\n",
    )

    with start(
        "run", "--on", "sim", "--nproc-per-node=3", f"--shutdown-timeout={grace}", program
    ) as running:
        running.wait_for("[default1]:begun")
        running.signal(signal.SIGTERM)
        begun = time.monotonic()
        finished = running.finish()

    assert finished.code == 143
    assert killed in finished.stderr
    assert ("killed" in finished.stderr) == bool(killed)
    assert "stopped by SIGTERM" in finished.stderr
    assert time.monotonic() - begun < 90, "the grace is for those that use it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rdzv-backend=etcd"], "simulated nodes meet in a store of their own"),
        (["--no-python"], "--no-python has no meaning with --on sim"),
        (["--start-method=spawn"], "--start-method has no meaning with --on sim"),
        (["--node-check=true"], "--node-check has no meaning with --on sim"),
        (["--health-port=0"], "--health-port has no meaning with --on sim"),
        (["--retry-startup-errors"], "--retry-startup-errors has no meaning with --on sim"),
        (["--import-per-rank=torch"], "torch, which a process can import only once"),
    ],
)
def test_what_means_nothing_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    finished = simulate("", tmp_path, *options)

    assert finished.code == 2
    assert message in finished.stderr


def test_a_simulated_rank_cannot_simulate_others() -> None:
    def nest() -> str:
        try:
            rankwise.run(rankwise.rank, nprocs=2, on="sim")
        except rankwise.RankwiseError as error:
            return str(error)
        return ""

    (message,) = set(on_sim(nest, nprocs=2))
    assert "has a simulated world already" in message


def test_the_fixture_runs_a_function_on_simulated_ranks(rankwise_ranks: Any) -> None:
    assert rankwise_ranks(lambda: rankwise.rank() * 2, nprocs=3) == [0, 2, 4]


def test_the_fixture_takes_arguments_as_they_are_and_as_run_does(rankwise_ranks: Any) -> None:
    def scaled(factor: int) -> int:
        return rankwise.rank() * factor

    assert rankwise_ranks(scaled, 3, nprocs=2) == [0, 3]
    assert rankwise_ranks(scaled, args=(3,), nprocs=2) == [0, 3]


def test_what_ranks_set_in_their_environment_does_not_reach_later_processes() -> None:
    def change() -> None:
        os.environ["OF_A_RANK"] = str(rankwise.rank())
        os.environ.pop("PATH")

    rankwise.run(change, nprocs=2, on="sim")

    show = "import os; print(os.environ.get('OF_A_RANK'), 'PATH' in os.environ)"
    told = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert told.stdout == "None True\n"


def sleep_then_fail() -> None:
    time.sleep(3600)
    raise ValueError("after an hour of virtual time")


def meet_nobody() -> None:
    if rankwise.rank() == 0:
        CommHandle.meet(0, 2, "nobody comes")


@pytest.mark.parametrize("function", [sleep_then_fail, meet_nobody])
def test_reports_have_the_calendars_time_whatever_passed_in_virtual_time(function: Any) -> None:
    before = time.time_ns()

    with pytest.raises(rankwise.WorkersFailed) as caught:
        on_sim(function, nprocs=2)

    root = caught.value.failures[0]
    assert before <= root.wall_ns <= time.time_ns()
    assert root.error is None or before <= root.error.wall_ns <= time.time_ns()
