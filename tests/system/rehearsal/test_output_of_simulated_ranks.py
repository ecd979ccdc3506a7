"""What simulated ranks write goes through the sinks of real ranks: files, limits, full disks."""

import os
import select
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from running import RANKWISE, run, write_program

pytestmark = pytest.mark.system

PIPE_BYTES = 4096
"""The smallest pipe that there is."""
WORLDS = pytest.mark.parametrize("world", [(), ("--on", "sim")], ids=["processes", "simulated"])


@WORLDS
def test_full_log_file_is_renamed(world: tuple[str, ...], tmp_path: Path) -> None:
    program = write_program(
        tmp_path, "for i in range(200):\n    print(f'line {i:04d} ' + '.' * 53)\n"
    )
    logs = tmp_path / "logs"

    finished = run(
        "run", *world, "--redirects=3", "--log-size=4K", f"--log-dir={logs}", str(program)
    )

    assert finished.code == 0, finished.stderr
    sizes = {path.name: path.stat().st_size for path in logs.glob("*/attempt_0/0/stdout*")}
    # Files of 64 lines of 64 bytes: the second last is whole, the last has what is left.
    assert sizes == {"stdout.log": 64 * (200 % 64), "stdout.log.1": 4096}


FILLS_ITS_LOG_DISK = """
import os, sys, time
disk = sys.argv[1]
with open(disk + "/filler", "wb") as filler:
    filler.write(b"x" * 150_000)
for i in range(4000):
    print(f"line {i:05d} " + "." * 40)
sys.stdout.flush()
time.sleep(2)
os.remove(disk + "/filler")
print("again", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@WORLDS
def test_full_log_disk_leaves_a_mark_and_a_total(world: tuple[str, ...], tmp_path: Path) -> None:
    program = write_program(tmp_path, FILLS_ITS_LOG_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        finished = run("run", *world, "--redirects=3", f"--log-dir={disk}", str(program), str(disk))
        (log,) = (path.read_text() for path in disk.glob("*/attempt_0/0/stdout.log"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    assert finished.code == 0
    assert log.count("bytes are missing here: No space left on device]\n") == 1
    assert finished.stderr.count("of output could not be written to the disk of") == 1


CHILDREN = """
import multiprocessing, os, subprocess, sys

def say(text):
    print(text)

print("rank")
subprocess.run(["echo", "subprocess"], check=True)
subprocess.run("echo to stderr >&2", shell=True, check=True)
subprocess.run("echo both >&2", shell=True, check=True, stderr=subprocess.STDOUT)
if (pid := os.fork()) == 0:
    print("fork")
    os.system("echo system")
    os._exit(0)
os.waitpid(pid, 0)
child = multiprocessing.get_context("fork").Process(target=say, args=("process",))
child.start()
child.join()
subprocess.run([sys.executable, "-c", "print('x' * 3_000_000)"], check=True)
print("end")
"""


@WORLDS
def test_children_of_a_rank_write_as_the_rank(world: tuple[str, ...], tmp_path: Path) -> None:
    program = write_program(tmp_path, CHILDREN)
    logs = tmp_path / "logs"

    finished = run(
        "run", *world, "--nproc-per-node=2", "--tee=3", f"--log-dir={logs}", str(program)
    )

    assert finished.code == 0, finished.stderr
    expected = ["rank", "subprocess", "both", "fork", "system", "process", "x" * 3_000_000, "end"]
    for rank in range(2):
        out, err = (
            next(logs.glob(f"*/attempt_0/{rank}/{name}.log")).read_text().splitlines()
            for name in ("stdout", "stderr")
        )
        assert out == expected
        assert err == ["to stderr"]
        shown = [line for line in finished.stdout.splitlines() if f"[default{rank}]" in line]
        assert [line.partition("]:")[2] for line in shown][:6] == expected[:6]
        assert f"[default{rank}]:to stderr" in finished.stderr


def test_slow_console_gets_everything(tmp_path: Path) -> None:
    program = write_program(tmp_path, "for i in range(60_000):\n    print(f'{i:063d}')\n")
    words = [*RANKWISE, "run", "--on", "sim", "--no-prefix", str(program)]

    with subprocess.Popen(words, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        first = launcher.stdout.readline()  # by now more is written than the pipe holds
        rest = launcher.stdout.read()

    assert launcher.returncode == 0
    assert first + rest == b"".join(b"%063d\n" % number for number in range(60_000))


def test_writer_waits_until_the_console_has_all_that_it_wrote(tmp_path: Path) -> None:
    size = 1 << 20
    told_fd, tells_fd = os.pipe()
    program = write_program(
        tmp_path,
        "import os, sys\n"
        f"sys.stdout.write(('x' * 63 + '\\n') * {size // 64})\n"
        f"os.write({tells_fd}, b'written')\n",
    )
    words = [*RANKWISE, "run", "--on", "sim", "--no-prefix", str(program)]

    with subprocess.Popen(
        words, stdout=subprocess.PIPE, pipesize=PIPE_BYTES, bufsize=0, pass_fds=[tells_fd]
    ) as launcher:
        os.close(tells_fd)
        assert launcher.stdout is not None
        taken = 0
        while taken < size - 2 * PIPE_BYTES:  # of the rest, half is not even in the pipe
            taken += len(launcher.stdout.read(PIPE_BYTES))
        is_told_early, _, _ = select.select([told_fd], [], [], 0)
        taken += len(launcher.stdout.read())
        told = os.read(told_fd, 100)
    os.close(told_fd)

    assert (is_told_early, told, taken) == ([], b"written", size)


IN_ORDER = """
import os, subprocess, time
rank = int(os.environ["RANK"])
for i in range(4):
    print(f"{i} of rank " + "." * 1000)
    if (pid := os.fork()) == 0:
        for part in range(3):
            print(f"{i} of its fork, {part} " + "-" * 1000)
        os._exit(0)
    os.waitpid(pid, 0)
    subprocess.run(["echo", f"{i} of its command"], check=True)
    time.sleep(0.01 * (1 + (rank + i) % 3))
"""


def test_lines_of_ranks_and_their_children_have_one_order_however_slow_the_console_is(
    tmp_path: Path,
) -> None:
    program = write_program(tmp_path, IN_ORDER)
    words = [*RANKWISE, "run", "--on", "sim", "--nproc-per-node=3", str(program)]
    shown = []
    for at_once in (1 << 20, 512):
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, pipesize=PIPE_BYTES, bufsize=0
        ) as launcher:
            assert launcher.stdout is not None
            shown.append(b"".join(iter(partial(launcher.stdout.read, at_once), b"")))
        assert launcher.returncode == 0

    quick, slow = (each.decode().splitlines() for each in shown)
    assert slow == quick
    assert len(quick) == 3 * 4 * (1 + 3 + 1)
    for rank in range(3):
        own = [line for line in quick if line.startswith(f"[default{rank}]:")]
        assert [line.partition("]:")[2].rstrip(" .-") for line in own[:5]] == [
            "0 of rank", *(f"0 of its fork, {part}" for part in range(3)), "0 of its command"
        ]  # fmt: skip


def test_run_whose_console_takes_nothing_can_be_stopped(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = write_program(
        tmp_path,
        f"open({str(begun)!r}, 'w').close()\nwhile True:\n    print('.' * 60_000)\n",
    )
    os.mkfifo(begun)
    reading, writing = os.pipe()
    words = [*RANKWISE, "run", "--on", "sim", "--shutdown-timeout=1", str(program)]

    with subprocess.Popen(words, stdout=writing, stderr=subprocess.DEVNULL) as launcher:
        os.close(writing)
        begun.read_bytes()  # returns when the program has opened and closed it
        launcher.send_signal(signal.SIGTERM)
        code = launcher.wait(timeout=60)
    os.close(reading)

    assert code == 128 + signal.SIGTERM
