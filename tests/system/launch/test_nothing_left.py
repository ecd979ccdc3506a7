"""Whatever dies, in whatever way, everything that a run has started is gone within a second."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import leftovers
import pytest
from running import (
    WITHIN_S,
    Deaths,
    Running,
    numbers_after,
    run,
    start,
    start_program,
    wait_until,
    write_program,
)

pytestmark = pytest.mark.system

FAMILY = """
import multiprocessing, os, signal, sys, time

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

def ignore_signals():
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)

def sleep(ready):
    ready.send(os.getpid())
    time.sleep(1000)

def make_daemon(ready):
    os.setsid()
    if not os.fork():
        for number in range(3):
            os.close(number)
        sleep(ready)
    os._exit(0)

def fork(*steps):
    if not os.fork():
        for step in steps:
            step()
        os._exit(0)

def main():
    heard, ready = multiprocessing.Pipe(duplex=False)
    fork(ignore_signals, lambda: sleep(ready))
    fork(os.setsid, ignore_signals, lambda: sleep(ready))
    fork(lambda: make_daemon(ready))
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        context.Process(target=sleep, args=(ready,), daemon=True).start()
    for _ in range(5):
        heard.recv()
    if "stubborn" in sys.argv:
        for number in IGNORED:
            signal.signal(number, lambda number, _: print("told", number, flush=True))
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(1000)

if __name__ == "__main__":
    main()
"""

FAMILY_SIZE = 7
"""A worker, its five children that stay, and the tracker of multiprocessing."""


RUN_ID = f"nothing-left-{os.getpid()}"
"""Ours alone, even while somebody else runs the same tests on this machine."""

_present_before: set[int] = set()
"""What earlier tests have left behind is not this one's fault; they are told so themselves."""


@pytest.fixture(autouse=True)
def _nothing_named_after_the_run_stays() -> Iterator[None]:
    _present_before.clear()
    _present_before.update(everybody())
    yield
    assert list(Path(tempfile.gettempdir()).glob("rankwise_*")) == []
    assert RUN_ID not in Path("/proc/net/unix").read_text()


@contextmanager
def start_family(tmp_path: Path, *options: str, stubborn: bool = False) -> Iterator[Running]:
    """Two workers with their families, all of whom are up."""
    script = write_program(tmp_path, FAMILY)
    words = [script, "stubborn"] if stubborn else [script]
    with start("run", "--nproc-per-node=2", f"--rdzv-id={RUN_ID}", *options, *words) as running:
        running.wait_for("pid ", count=2)
        yield running


def everybody() -> dict[int, str]:
    """All processes of this test, the agent's included, with their commands."""
    marked = leftovers.marked_processes(os.environ[leftovers.MARK_VARIABLE])
    return {pid: process.command for pid, process in marked.items() if pid not in _present_before}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork_server_of(running: Running) -> int:
    return parent_of(numbers_after("pid", running.stdout)[0])


def guardian_of(running: Running) -> int:
    (guardian,) = (pid for pid in everybody() if parent_of(pid) == running.pid)
    return guardian


METHODS = ("subprocess", "forkserver")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (signal.SIGTERM, 143)]
)
def test_when_a_worker_dies(number: int, code: int, method: str, tmp_path: Path) -> None:
    with start_family(tmp_path, "--start-method", method) as running:
        family = everybody()
        deaths = Deaths(family)
        assert len(family) >= 2 + 2 * FAMILY_SIZE

        os.kill(numbers_after("pid", running.stdout)[1], number)

        assert deaths.survivors(WITHIN_S) == []
        assert running.finish().code == code


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_when_a_signal_ends_the_run(number: signal.Signals, method: str, tmp_path: Path) -> None:
    with start_family(tmp_path, "--start-method", method) as running:
        deaths = Deaths(everybody())

        running.signal_group(number)

        assert deaths.survivors(WITHIN_S) == []
        assert running.finish().code == 128 + number


@pytest.mark.parametrize("method", METHODS)
def test_when_workers_do_not_heed_the_signal_they_are_killed_after_the_grace(
    method: str, tmp_path: Path
) -> None:
    with start_family(
        tmp_path, "--start-method", method, "--shutdown-timeout=100ms", stubborn=True
    ) as running:
        deaths = Deaths(everybody())

        running.signal(signal.SIGTERM)

        assert deaths.survivors(0.1 + WITHIN_S) == []
        done = running.finish()
    assert done.code == 128 + signal.SIGTERM
    assert "rankwise: ranks 0-1 did not end within 100 ms: killed" in done.stderr


@pytest.mark.parametrize("slow_module", ["slow_to_import", "sitecustomize"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_when_it_is_stopped_while_the_fork_server_imports(
    number: signal.Signals, slow_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_program(
        tmp_path,
        "import os, time\nif 'RANKWISE_GUARDIAN' in os.environ:\n"
        "    print('importing', flush=True)\n    time.sleep(1000)",
        f"{slow_module}.py",
    )
    script = write_program(tmp_path, "print('never')")
    preload = ["--preload=slow_to_import"] if slow_module == "slow_to_import" else []
    with start(
        "run", "--nproc-per-node=4", "--start-method=forkserver", *preload, script
    ) as running:
        running.wait_for("importing")
        deaths = Deaths(everybody())

        running.signal(number)

        assert deaths.survivors(WITHIN_S) == []
        done = running.finish()
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number)


def test_when_a_second_interrupt_says_now(tmp_path: Path) -> None:
    with start_family(tmp_path, "--shutdown-timeout=1h", stubborn=True) as running:
        deaths = Deaths(everybody())
        running.signal(signal.SIGINT)
        running.wait_for(f"told {int(signal.SIGINT)}", count=2)

        running.signal(signal.SIGINT)

        assert deaths.survivors(WITHIN_S) == []
        done = running.finish()
    assert done.code == 128 + signal.SIGINT
    assert "did not end within" not in done.stderr
    assert "rankwise: ranks 0-1 are killed immediately" in done.stderr


def test_when_all_ranks_have_ended_well_which_is_told(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import subprocess
for seconds in ("1000", "2000"):
    subprocess.Popen(["sleep", seconds], start_new_session=seconds == "2000")
""",
    )

    done = run("run", script)

    assert done.code == 0
    (line,) = [line for line in done.stderr.splitlines() if "left running" in line]
    assert line.startswith("rankwise: 2 processes that ranks had left running were killed: sleep ")
    assert {word for word in line.split() if word.endswith("000")} == {"1000", "2000"}
    assert "let the rank wait for work that must finish" in line


KEEPING = """
import os, subprocess, sys
def chatter():
    return [sys.executable, "-uc", (
        "import os, sys, time\\n"
        "os.write(1, b'up\\\\n')\\n"  # at once, or it would tear lines of its rank
        "while os.getppid() == int(sys.argv[1]): time.sleep(0.001)\\n"  # its rank lives
        "sys.stdout.write('x' * (4 << 20))\\n"  # more than a pipe holds
        "open(sys.argv[2], 'w').close()\\n"
        "time.sleep(1000)"
    )]
for number in range(2):
    child = subprocess.Popen(
        [*chatter(), str(os.getpid()), f"done-{number}-{os.environ['RANK']}"],
        start_new_session=number == 1,
    )
    os.write(1, f"child {child.pid}\\n".encode())  # in one, or what the first child says tears it
"""


@pytest.mark.parametrize("method", ["subprocess", "spawn", "forkserver"])
def test_but_what_is_to_live_on(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, KEEPING)
    options = ("--nproc-per-node=2", "--keep-children", "--start-method", method)

    done = run("run", *options, script, cwd=tmp_path)

    children = numbers_after("child", done.stdout)
    deaths = Deaths(children)
    try:
        wait_until(lambda: len([*tmp_path.glob("done-*")]) == 4)
        (line,) = [line for line in done.stderr.splitlines() if "left running" in line]
        assert line.startswith("rankwise: 4 processes that ranks had left running live on: ")
        assert done.code == 0
        assert all(Path(f"/proc/{pid}").exists() for pid in children)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    assert deaths.survivors(WITHIN_S) == []
    wait_until(lambda: everybody() == {})  # whoever has read their output ends with them


def test_nothing_lives_on_after_a_failure(tmp_path: Path) -> None:
    script = write_program(
        tmp_path, "import subprocess, sys; subprocess.Popen(['sleep', '1000']); sys.exit(3)"
    )

    done = run("run", "--keep-children", script)

    assert done.code == 3
    assert everybody() == {}


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_what_multiprocessing_has_been_told_to_leave_is_told_of(
    context: str, tmp_path: Path
) -> None:
    script = write_program(
        tmp_path,
        f"""
import multiprocessing, os, time
def upload(begun):
    begun.set()
    time.sleep(1000)
if __name__ == "__main__":
    context = multiprocessing.get_context("{context}")
    begun = context.Event()
    context.Process(target=upload, args=(begun,)).start()
    begun.wait()
    os._exit(0)
""",
    )

    done = run("run", script)

    assert done.code == 0
    (line,) = [line for line in done.stderr.splitlines() if "left running" in line]
    assert "killed: a process of multiprocessing (pid " in line


def test_helpers_of_libraries_that_end_after_their_rank_are_not_told_of(tmp_path: Path) -> None:
    # The fork server ends with the last descriptor of a pipe: here a copy keeps it alive.
    script = write_program(
        tmp_path,
        """
import multiprocessing, multiprocessing.forkserver as forkserver, os, subprocess
forkserver.ensure_running()
alive = os.dup(forkserver._forkserver._forkserver_alive_fd)
subprocess.Popen(["sleep", "600"], pass_fds=[alive], stdout=subprocess.DEVNULL)
""",
    )

    done = run("run", script)

    assert done.code == 0
    (line,) = [line for line in done.stderr.splitlines() if "left running" in line]
    assert line.startswith("rankwise: a process that a rank had left running was killed: sleep ")


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_when_the_agent_is_killed(*, method: str, stubborn: bool, tmp_path: Path) -> None:
    with start_family(tmp_path, "--start-method", method, stubborn=stubborn) as running:
        deaths = Deaths(everybody())

        running.signal(signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []


@pytest.mark.parametrize("method", METHODS)
def test_when_the_guardian_is_killed(method: str, tmp_path: Path) -> None:
    with start_family(tmp_path, "--start-method", method, stubborn=True) as running:
        deaths = Deaths(everybody())

        os.kill(guardian_of(running), signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []
        done = running.finish()
    assert done.code == 1
    assert "the guardian has died" in done.stderr


def test_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    with start_family(tmp_path, "--start-method=forkserver", stubborn=True) as running:
        deaths = Deaths(everybody())

        os.kill(fork_server_of(running), signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []
        done = running.finish()
    assert done.code == 1
    assert "the fork server has ended with signal 9 (SIGKILL)" in done.stderr


def test_when_guardian_and_agent_are_killed_together(tmp_path: Path) -> None:
    with start_family(tmp_path) as running:
        workers = numbers_after("pid", running.stdout)
        guardian = guardian_of(running)
        deaths = Deaths([*workers, guardian, running.pid])

        os.kill(running.pid, signal.SIGSTOP)
        os.kill(guardian, signal.SIGKILL)
        os.kill(running.pid, signal.SIGCONT)

        assert deaths.survivors(WITHIN_S) == []


NESTED_RUNS = """
import rankwise, time

def inner():
    print("up", flush=True)
    time.sleep(1000)

rankwise.run(lambda: rankwise.run(inner, nprocs=2), nprocs=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_a_program_whose_workers_run_gangs_is_ended(
    number: signal.Signals, tmp_path: Path
) -> None:
    with start_program(NESTED_RUNS, tmp_path) as running:
        running.wait_for("up", count=4)
        deaths = Deaths(everybody())

        running.signal(number)

        assert deaths.survivors(WITHIN_S) == []
        running.finish()


WARM_SERVER = """
import sys, time
import rankwise
server = rankwise.ForkServer(preload=["json"])
rankwise.run(rankwise.rank, nprocs=2, server=server)
print("warm", flush=True)
if "sleep" in sys.argv:
    time.sleep(1000)
"""


def test_when_a_program_that_keeps_a_warm_server_is_killed(tmp_path: Path) -> None:
    with start_program(WARM_SERVER, tmp_path, "sleep") as running:
        running.wait_for("warm")
        deaths = Deaths(everybody())

        running.signal(signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []


def test_when_a_program_ends_without_closing_its_warm_server(tmp_path: Path) -> None:
    with start_program(WARM_SERVER, tmp_path) as running:
        assert running.finish().code == 0


def test_when_a_program_is_killed_inside_a_run_of_functions(tmp_path: Path) -> None:
    program = """
import rankwise, time
rankwise.run(lambda: (print("up", flush=True), time.sleep(1000)), nprocs=2)
"""
    with start_program(program, tmp_path) as running:
        running.wait_for("up", count=2)
        deaths = Deaths(everybody())

        running.signal(signal.SIGKILL)

        assert deaths.survivors(WITHIN_S) == []


def test_when_workers_succeed_their_children_go_too(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal, time
reading, writing = os.pipe()
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writing, b"x")
    time.sleep(1000)
os.read(reading, 1)
""",
    )
    with start("run", "--nproc-per-node=2", script) as running:
        assert running.finish().code == 0

        assert [command for command in everybody().values() if "program.py" in command] == []


def test_a_stray_that_has_cleared_its_environment_and_holds_the_pipes_is_found(
    tmp_path: Path,
) -> None:
    script = write_program(
        tmp_path,
        """
import os
reading, writing = os.pipe2(os.O_CLOEXEC)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.close(writing)
os.read(reading, 1)
""",
    )
    with start("run", "--nproc-per-node=2", script) as running:
        assert running.finish(patience_s=20).code == 0


@pytest.mark.parametrize("method", METHODS)
def test_when_the_agent_is_killed_at_any_moment_of_its_life(method: str, tmp_path: Path) -> None:
    chance = random.Random(f"moments of {method}")
    script = write_program(
        tmp_path,
        """
import os, time
os.fork()
print("up", flush=True)
time.sleep(0.05)
""",
    )
    mark = os.environ[leftovers.MARK_VARIABLE]
    before = frozenset(leftovers.marked_processes(mark))

    for number in range(20):
        with start(
            "run", "--nproc-per-node=2", f"--rdzv-id={RUN_ID}", "--start-method", method, script
        ) as running:
            Deaths([running.pid]).survivors(within_s=chance.uniform(0.03, 0.35))
            running.signal(signal.SIGKILL)
            running.wait_over()

            killed_at = time.monotonic()
            left = leftovers.wait_until_gone(mark, before)
            took = time.monotonic() - killed_at

        assert left == [], f"round {number}"
        assert took < WITHIN_S, f"round {number} took {took:.3f} s"
        assert list(Path(tempfile.gettempdir()).glob("rankwise_*")) == [], f"round {number}"


def test_when_it_is_stopped_at_any_moment_of_its_life(tmp_path: Path) -> None:
    chance = random.Random("moments of a stop")
    script = write_program(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(1000)")

    for number in range(8):
        with start("run", "--nproc-per-node=2", f"--rdzv-id={RUN_ID}", script) as running:
            Deaths([running.pid]).survivors(within_s=chance.uniform(0.02, 0.3))
            running.signal(signal.SIGTERM)
            done = running.finish()

        # Before its handlers are there, a signal does what it does to any program.
        assert done.code in (128 + signal.SIGTERM, -signal.SIGTERM), f"round {number}"
        assert "Traceback" not in done.stderr
