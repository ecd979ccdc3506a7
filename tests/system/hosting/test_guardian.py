"""The guardian makes workers, says how they end, and leaves nobody behind."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted import PATIENCE, Hosted, all_ended, read_line, read_to_end

from rankwise.drivers.real.hosting import wire

pytestmark = pytest.mark.system

BOMBS_S = 4 * PATIENCE
"""How long programs go on that fork all the time, should a guardian die and not end them."""
STUBBORN = """
exec 3>&1
trap '' TERM INT HUP
setsid sh -c 'trap "" TERM INT HUP; echo $$ >&3; sleep 600' &
(setsid sh -c 'echo $$ >&3; exec sleep 600' &)
sh -c 'echo $$ >&3; kill -STOP $$' &
echo $$ >&3
wait
"""
"""A worker that ignores signals, with children in sessions of their own, orphans and stopped."""


@pytest.fixture
def guardian() -> Iterator[Hosted]:
    with Hosted("guardian") as guardian:
        yield guardian


def start_stubborn_worker(guardian: Hosted, worker: int) -> list[int]:
    """Start a stubborn worker; return pidfds of its four processes."""
    read_fd, write_fd = os.pipe()
    guardian.order(worker, {1: write_fd}, argv=["sh", "-c", STUBBORN])
    os.close(write_fd)
    pidfds = [os.pidfd_open(int(read_line(read_fd))) for _ in range(4)]
    os.close(read_fd)
    return pidfds


def test_it_loads_nothing_but_the_cheapest_modules() -> None:
    code = (
        "import runpy, sys; known = set(sys.modules);"
        f"sys.path.append({str(Path(wire.__file__).parents[4])!r});"
        "import rankwise.drivers.real.hosting.guardian;"
        "print(*sorted(set(sys.modules) - known))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )

    dear = {"typing", "enum", "re", "signal", "socket", "subprocess", "ctypes", "msgspec"}
    assert not dear & set(run.stdout.split())


def test_exit_codes_and_signals_are_reported_with_their_instants(guardian: Hosted) -> None:
    before = time.monotonic_ns()
    guardian.order(1, argv=["true"])
    assert guardian.next()[:2] == ("spawned", 1)
    _, worker, code, instant = guardian.next()

    assert (worker, code) == (1, 0)
    assert before < instant < time.monotonic_ns()
    assert guardian.run(2, argv=["sh", "-c", "exit 7"]) == 7
    assert guardian.run(3, argv=["sh", "-c", "kill -SEGV $$"]) == -signal.SIGSEGV


def test_a_worker_leads_its_own_session_and_its_parent_is_the_guardian(guardian: Hosted) -> None:
    guardian.order(1, argv=["sleep", "600"])
    _, _, pid = guardian.wait_for("spawned", 1)

    assert os.getsid(pid) == os.getpgid(pid) == pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"PPid:\t{guardian.pid}\n" in status


def test_a_worker_gets_its_descriptors_environment_and_directory(
    guardian: Hosted, tmp_path: Path
) -> None:
    (tmp_path / "input").write_text("fed\n")
    program = "pwd; cat; echo $COLOUR >&2; echo extra >/proc/self/fd/$EXTRA_FD; ls /proc/self/fd"
    input_fd = os.open(tmp_path / "input", os.O_RDONLY)
    read_fd, write_fd = os.pipe()

    guardian.order(
        1,
        {0: input_fd, 1: write_fd, 2: write_fd, "EXTRA_FD": write_fd},
        argv=["sh", "-c", program],
        env={"PATH": os.environ["PATH"], "COLOUR": "blue"},
        cwd=str(tmp_path),
    )
    os.close(write_fd)
    os.close(input_fd)

    directory, fed, colour, extra, *descriptors = read_to_end(read_fd).decode().split()
    assert (directory, fed, colour, extra) == (str(tmp_path), "fed", "blue", "extra")
    assert len(descriptors) == 5, "0, 1, 2, the extra one, and that of the directory being listed"


def test_a_worker_may_differ_in_variables_from_the_others(guardian: Hosted) -> None:
    show = ["/bin/sh", "-c", "echo $COLOUR ${TASTE-none} ${SIZE-none}"]
    guardian.send("environment", {"COLOUR": "blue", "TASTE": "sweet"})

    outputs = []
    for worker, changes in enumerate(
        [{}, {"TASTE": None, "SIZE": "L"}, {"COLOUR": "red"}], start=1
    ):
        read_fd, write_fd = os.pipe()
        order = {"argv": show, "env": changes, "fds": [1]}
        guardian.send("spawn", worker, order, fds=[write_fd])
        os.close(write_fd)
        outputs.append(read_to_end(read_fd).decode().strip())

    assert outputs == ["blue sweet none", "blue none L", "red sweet none"]


def test_a_worker_starts_with_default_signals_and_its_own_limits(guardian: Hosted) -> None:
    cpu = min(os.sched_getaffinity(0))
    program = (
        "import os, resource, signal\n"
        "print([s.name for s in signal.valid_signals() if isinstance(s, signal.Signals)"
        " and signal.getsignal(s) == signal.SIG_IGN])\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    code, text = guardian.output_of(
        1, argv=[sys.executable, "-c", program], cpus=[cpu], nofile=(128, hard)
    )

    assert code == 0, text
    # Python itself ignores these two.
    assert text.splitlines() == ["['SIGPIPE', 'SIGXFSZ']", "set()", f"{{{cpu}}} (128, {hard})"]


def test_programs_that_cannot_be_started_are_refused_in_words(
    guardian: Hosted, tmp_path: Path
) -> None:
    def program(name: str, text: str, mode: int = 0o755) -> str:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    (tmp_path / "dangling").symlink_to("nowhere")
    refusals = {
        "no-such-program": "no such file in PATH (",
        str(tmp_path / "nothing"): f"no such file: '{tmp_path}/nothing'",
        str(tmp_path): "it is a directory",
        program("plain", "#!/bin/sh\n", 0o644): "has no run bit (try: chmod +x ",
        program("odd", "#!/no/such/sh -e\n"): "interpreter does not exist: '/no/such/sh -e'",
        program("dos", "#!/bin/sh\r\n"): "the line ends in a carriage return",
        program("text", "echo hello\n"): "neither a binary nor a script that begins with #!",
        str(tmp_path / "dangling"): "a link to a file that does not exist",
    }

    for worker, (path, words) in enumerate(refusals.items()):
        guardian.order(worker, argv=[path])
        kind, refused, message = guardian.next()

        assert (kind, refused) == ("refused", worker)
        assert words in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"argv": ["true", "x" * 200_000]}, "longer than the kernel allows"),
        ({"argv": ["true"], "cwd": "/no/where"}, "working directory '/no/where': No such file"),
        ({"argv": ["true"], "cpus": [9999]}, "cannot bind it to CPUs [9999]"),
        ({"argv": ["true\0"]}, "embedded null"),
    ],
)
def test_impossible_orders_are_refused_in_words(
    guardian: Hosted, order: dict[str, object], words: str
) -> None:
    guardian.order(1, **order)
    kind, worker, message = guardian.next()

    assert (kind, worker) == ("refused", 1)
    assert words in message
    assert guardian.run(2, argv=["true"]) == 0, "it goes on"


def test_the_path_that_is_searched_is_the_workers(guardian: Hosted, tmp_path: Path) -> None:
    program = tmp_path / "bespoke"
    program.write_text("#!/bin/sh\nexit 5\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    assert guardian.run(1, argv=["bespoke"], env={"PATH": f"/nowhere:{tmp_path}"}) == 5


def test_a_lack_of_descriptors_refuses_a_worker_and_harms_nobody(guardian: Hosted) -> None:
    resource.prlimit(guardian.pid, resource.RLIMIT_NOFILE, (16, 16))
    read_fd, write_fd = os.pipe()
    guardian.order(1, {f"FD{number}": write_fd for number in range(30)}, argv=["true"])
    kind, worker, message = guardian.next()
    os.close(write_fd)

    assert (kind, worker) == ("refused", 1)
    assert "under the limit of 16 open files" in message
    assert guardian.run(2, argv=["true"]) == 0
    assert read_to_end(read_fd) == b"", "it has kept none of them"


def test_a_signal_reaches_the_process_or_its_whole_group(guardian: Hosted) -> None:
    read_fd, write_fd = os.pipe()
    guardian.order(
        1,
        {1: write_fd},
        argv=["sh", "-c", "trap 'echo usr1' USR1; sleep 600 & echo $!; while :; do wait; done"],
    )
    os.close(write_fd)
    child = os.pidfd_open(int(read_line(read_fd)))

    guardian.signal(1, signal.SIGUSR1, group=False)
    assert read_line(read_fd) == "usr1"
    guardian.signal(1, signal.SIGKILL, group=True)
    assert guardian.wait_for("exited", 1)[2] == -signal.SIGKILL
    os.close(read_fd)

    assert all_ended([child], PATIENCE)


def test_signals_to_workers_that_have_ended_or_never_were_go_nowhere(guardian: Hosted) -> None:
    assert guardian.run(1, argv=["true"]) == 0

    guardian.signal(1, signal.SIGKILL, group=True)
    guardian.signal(99, signal.SIGKILL, group=False)

    assert guardian.run(2, argv=["true"]) == 0


def test_a_sweep_kills_what_tried_to_get_away_and_spares_what_is_kept(guardian: Hosted) -> None:
    gate, write_gate = os.pipe()
    read_fd, write_fd = os.pipe()
    guardian.order(
        1,
        {0: gate, 1: write_fd},
        argv=["sh", "-c", "sleep 600 & echo $!; read line; exit 3"],
        keep=True,
    )
    os.close(gate)
    os.close(write_fd)
    child_of_kept = os.pidfd_open(int(read_line(read_fd)))
    os.close(read_fd)
    escapees = start_stubborn_worker(guardian, 2)

    guardian.send("sweep", 77)

    assert guardian.wait_for("swept", 77)[2] == []
    assert all_ended([*escapees, child_of_kept], 0.0)
    assert guardian.wait_for("exited", 2)[2] == -signal.SIGKILL
    os.close(write_gate)
    assert guardian.wait_for("exited", 1)[2] == 3, "it was alive and well until now"


def test_behind_its_fence_no_worker_lives_but_those_that_are_kept(guardian: Hosted) -> None:
    gate, write_gate = os.pipe()
    guardian.order(1, {0: gate}, argv=["sh", "-c", "read line; exit 3"], keep=True)
    os.close(gate)
    guardian.wait_for("spawned", 1)
    stubborn = start_stubborn_worker(guardian, 2)

    guardian.send("fence", time.monotonic_ns() + 100_000_000)
    ended = guardian.wait_for("exited", 2)

    assert ended[2] == -signal.SIGKILL
    assert all_ended(stubborn, PATIENCE)
    os.close(write_gate)
    assert guardian.wait_for("exited", 1)[2] == 3, "it was alive and well until now"


LOOKS_AT_NOBODY = """
import os
from rankwise.drivers.real.hosting import prctl
from rankwise.drivers.real.hosting.descendants import kill_descendants

prctl.adopt_orphans()
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
os.listdir = lambda path: exit(f"it has looked at {path}")
assert kill_descendants(10**9) == []
"""


def test_a_sweep_of_who_has_no_child_looks_at_no_other_process() -> None:
    looking = [sys.executable, "-c", LOOKS_AT_NOBODY]
    done = subprocess.run(looking, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_fence_that_is_put_off_or_taken_away_harms_nobody(guardian: Hosted) -> None:
    past = time.monotonic_ns() - 1
    guardian.order(1, argv=["sleep", "600"])
    guardian.wait_for("spawned", 1)

    # Frames that come together are read together, before anybody looks at the time.
    frames = [("fence", past), ("fence", past + 10**15), ("fence", past), ("fence", None)]
    guardian.socket.sendall(b"".join(wire.encode(frame) for frame in frames))

    assert guardian.run(2, argv=["true"]) == 0
    guardian.signal(1, signal.SIGTERM, group=False)
    assert guardian.wait_for("exited", 1)[2] == -signal.SIGTERM


def test_a_fence_that_is_put_off_while_the_guardian_is_stopped_harms_nobody(
    guardian: Hosted,
) -> None:
    guardian.order(1, argv=["sleep", "600"])
    guardian.wait_for("spawned", 1)
    fence = time.monotonic_ns() + 500_000_000
    guardian.send("fence", fence)
    assert guardian.run(2, argv=["true"]) == 0, "it waits for the fence now"

    os.kill(guardian.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, guardian.pid, os.WSTOPPED)
    guardian.send("fence", fence + 10**15)
    time.sleep(max(0, fence + 10_000_000 - time.monotonic_ns()) / 1e9)
    os.kill(guardian.pid, signal.SIGCONT)

    assert guardian.run(3, argv=["true"]) == 0
    guardian.signal(1, signal.SIGTERM, group=False)
    assert guardian.wait_for("exited", 1)[2] == -signal.SIGTERM


def test_a_sweep_is_over_when_a_fork_bomb_is(guardian: Hosted) -> None:
    """Processes that fork all the time are born between the look and the kill."""
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"end = time.monotonic() + {BOMBS_S}\n"
        "print('on', flush=True)\n"
        "while time.monotonic() < end:\n"
        "    if os.fork():\n"
        "        os.setsid() if os.getpid() != os.getsid(0) else None\n"
        "        os._exit(0)\n"
    )
    read_fd, write_fd = os.pipe()
    guardian.order(1, {1: write_fd}, argv=[sys.executable, "-c", program])
    os.close(write_fd)
    assert read_line(read_fd) == "on"

    guardian.send("sweep", 1)

    assert guardian.wait_for("swept")[2] == []
    assert read_to_end(read_fd) == b"", "nobody is left who holds the pipe"


def test_a_sweep_ends_many_chains_that_run_away_from_it(guardian: Hosted) -> None:
    """Each link of a chain makes a session of its own and a successor, and ends."""
    program = f"""
import os, time
end = time.monotonic() + {BOMBS_S}
for _ in range(16):
    if not os.fork():
        while time.monotonic() < end:
            os.setsid()
            if os.fork():
                break
        os._exit(0)
print('on', flush=True)
"""
    read_fd, write_fd = os.pipe()
    guardian.order(1, {1: write_fd}, argv=[sys.executable, "-c", program])
    os.close(write_fd)
    assert read_line(read_fd) == "on"
    guardian.wait_for("exited", 1)

    guardian.send("sweep", 1)

    assert guardian.wait_for("swept")[2] == [], "it has not given up"
    assert read_to_end(read_fd) == b"", "nobody is left who holds the pipe"


SHARER = """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=1)
print(memory.name, flush=True)
__import__("time").sleep(600)
"""


@pytest.mark.parametrize("how", ["sweep", "end of the agent"])
def test_shared_memory_of_killed_programs_is_removed_by_their_tracker(how: str) -> None:
    with Hosted("guardian") as guardian:
        read_fd, write_fd = os.pipe()
        guardian.order(1, {1: write_fd}, argv=[sys.executable, "-c", SHARER])
        os.close(write_fd)
        memory = Path("/dev/shm", read_line(read_fd))
        os.close(read_fd)
        assert memory.exists()

        if how == "sweep":
            guardian.send("sweep", 1)
            assert guardian.wait_for("swept")[2] == []
        else:
            guardian.socket.close()
            guardian.process.wait(PATIENCE)

        assert not memory.exists()


WITHOUT_MAIN_THREAD = """
import ctypes, threading
libc = ctypes.CDLL(None)
def live_on():
    libc.pthread_join(ctypes.c_ulong(threading.main_thread().ident), None)
    print("nameless", flush=True)
    threading.Event().wait()
threading.Thread(target=live_on).start()
libc.pthread_exit(None)
"""


def test_a_process_without_a_command_line_does_not_escape_a_sweep(guardian: Hosted) -> None:
    read_fd, write_fd = os.pipe()
    guardian.order(1, {1: write_fd}, argv=[sys.executable, "-c", WITHOUT_MAIN_THREAD])
    os.close(write_fd)
    assert read_line(read_fd) == "nameless"

    guardian.send("sweep", 1)

    assert guardian.wait_for("swept")[2] == []
    assert read_to_end(read_fd) == b"", "it is dead"


def test_a_tracker_that_does_not_end_is_killed(guardian: Hosted) -> None:
    mark = "0 and 'from multiprocessing.resource_tracker import main'"
    read_fd, write_fd = os.pipe()
    program = f"{mark}; print('on', flush=True); import time; time.sleep(600)"
    guardian.order(1, {1: write_fd}, argv=[sys.executable, "-c", program])
    os.close(write_fd)
    assert read_line(read_fd) == "on"

    guardian.send("sweep", 1)

    assert guardian.wait_for("swept")[2] == []
    assert guardian.wait_for("exited", 1)[2] == -signal.SIGKILL
    os.close(read_fd)


def test_when_the_agent_ends_everybody_dies_and_what_was_guarded_is_gone(tmp_path: Path) -> None:
    guarded = tmp_path / "guarded"
    (guarded / "deep").mkdir(parents=True)
    (guarded / "deep" / "file").write_text("x")
    (guarded / "link").symlink_to(tmp_path)
    (tmp_path / "precious").write_text("x")
    with Hosted("guardian") as guardian:
        guardian.send("guard", [str(guarded)])
        guardian.order(9, argv=["sleep", "600"], keep=True)
        _, _, kept_pid = guardian.wait_for("spawned", 9)
        everybody = [os.pidfd_open(kept_pid), *start_stubborn_worker(guardian, 1)]

        guardian.socket.close()

        assert all_ended([*everybody, os.pidfd_open(guardian.pid)], PATIENCE)
    assert not guarded.exists()
    assert (tmp_path / "precious").exists(), "links are not followed"


def test_an_agent_that_dies_in_the_middle_of_a_frame_is_an_agent_that_has_died() -> None:
    with Hosted("guardian") as guardian:
        workers = start_stubborn_worker(guardian, 1)

        guardian.socket.sendall(wire.encode(("spawn", 2, {"argv": ["true"]}))[:-3])
        guardian.socket.close()

        assert all_ended(workers, PATIENCE)


def test_an_agent_that_dies_is_noticed_although_its_fork_holds_the_socket(tmp_path: Path) -> None:
    """A child that the agent has forked without exec keeps a copy of every descriptor."""
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from hosted import Hosted
guardian = Hosted("guardian")
guardian.order(1, argv=["sleep", "600"])
worker = guardian.wait_for("spawned", 1)[2]
read_fd, write_fd = os.pipe()
if os.fork() == 0:
    os.close(write_fd)
    os.read(read_fd, 1)  # until the test ends us
    os._exit(0)
print(worker, guardian.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    gate, their_gate = socket.socketpair()
    program = program.replace("os.read(read_fd, 1)", f"os.read({their_gate.fileno()}, 1)")
    agent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        pass_fds=[their_gate.fileno()],
        text=True,
    )
    their_gate.close()
    assert agent.stdout is not None
    pidfds = []
    for pid in agent.stdout.readline().split():
        try:
            pidfds.append(os.pidfd_open(int(pid)))
        except ProcessLookupError:
            continue  # it has been quick
    agent.wait(PATIENCE)

    assert all_ended(pidfds, PATIENCE)
    gate.close()
    agent.stdout.close()


def test_when_the_guardian_is_killed_its_workers_die_with_it() -> None:
    with Hosted("guardian") as guardian:
        guardian.order(1, argv=["sleep", "600"])
        _, _, pid = guardian.wait_for("spawned", 1)
        worker = os.pidfd_open(pid)

        os.kill(guardian.pid, signal.SIGKILL)

        assert all_ended([worker], PATIENCE)


def test_terminal_signals_do_not_reach_the_guardian(guardian: Hosted) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(guardian.pid, number)

    assert guardian.run(1, argv=["true"]) == 0


def test_orphans_are_reaped(guardian: Hosted) -> None:
    read_fd, write_fd = os.pipe()
    guardian.order(1, {1: write_fd}, argv=["sh", "-c", "(sh -c 'echo $$' &)"])
    os.close(write_fd)
    orphan = int(read_to_end(read_fd))
    guardian.wait_for("exited", 1)
    guardian.send("sweep", 1)
    guardian.wait_for("swept")

    guardian.run(2, argv=["true"])  # whatever had ended before has been reaped by now

    assert not Path(f"/proc/{orphan}").exists()


def test_64_workers_with_grandchildren_are_swept(guardian: Hosted) -> None:
    for worker in range(64):
        guardian.order(worker, argv=["sh", "-c", "trap '' TERM; (setsid sleep 600 &); sleep 600"])
    for _ in range(64):
        guardian.wait_for("spawned")

    guardian.send("sweep", 5)

    assert guardian.wait_for("swept", 5)[2] == [], "it has not given up"
