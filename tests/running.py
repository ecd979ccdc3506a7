"""Commands that run while a test looks on: their output is read as it comes, never slept for."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol, Self

PATIENCE_S = 200.0
"""No test waits this long: it is the deadline after which something is wrong."""

WITHIN_S = 25.0
"""How soon everything must be gone: within a second, as is promised, wherever processes get to run.
A machine with much else to do takes longer, but a fault would use up the 30 s of a grace."""

RANKWISE = (sys.executable, "-m", "rankwise")


@dataclass(frozen=True)
class Finished:
    """What became of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


class StartedProcess(Protocol):
    """The part of `subprocess.Popen` that `Running` needs."""

    pid: int
    returncode: int | Any
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Running:
    """A command that has been started, with pipes for its output."""

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        process: "StartedProcess | None" = None,
    ) -> None:
        self.process: StartedProcess = process or subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            # As a job of a shell, so that a test can send it what a terminal sends.
            process_group=0,
        )
        self._received = {"stdout": bytearray(), "stderr": bytearray()}
        self._open: dict[int, tuple[str, IO[bytes]]] = {}
        for name in self._received:
            pipe = getattr(self.process, name)
            os.set_blocking(pipe.fileno(), False)
            self._open[pipe.fileno()] = (name, pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self._received["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._received["stderr"].decode(errors="replace")

    def wait_for(self, text: str, *, count: int = 1, stream: str = "stdout") -> str:
        """Read until `text` has appeared `count` times; return all that has come so far."""
        deadline = time.monotonic() + PATIENCE_S
        while self._received[stream].count(text.encode()) < count:
            assert self._open, f"{text!r} never came\n{self.stdout}\n{self.stderr}"
            assert self._read(deadline), f"{text!r} has not come\n{self._all_there_is()}"
        return self._received[stream].decode(errors="replace")

    @property
    def open_pipes(self) -> list[int]:
        """What can be waited on for more of its output."""
        return list(self._open)

    def read_what_is_there(self) -> None:
        """Take in its output without waiting."""
        self._read(time.monotonic())

    def signal(self, signum: int) -> None:
        """Send a signal to the command alone."""
        self.process.send_signal(signum)

    def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signum)

    def finish(self, patience_s: float = PATIENCE_S) -> Finished:
        """Read to the end of both streams and wait for the command."""
        deadline = time.monotonic() + patience_s
        while self._open:
            assert self._read(deadline), f"it does not end\n{self._all_there_is()}"
        code = self.process.wait(max(0.1, deadline - time.monotonic()))
        return Finished(code, self.stdout, self.stderr)

    def wait_over(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the command's own end, whoever still holds its streams."""
        return self.process.wait(patience_s)

    def _all_there_is(self) -> str:
        """What it has written, and the processes that keep its output open or are beneath them."""
        keepers = {self.pid, *keepers_of(list(self._open))}
        below = {pid for keeper in keepers for pid in descendants_of(keeper)}
        states = map(state_of, sorted(keepers | below))
        return "\n".join((self.stdout, self.stderr, *states))

    def _read(self, deadline: float) -> bool:
        remaining = max(0.0, deadline - time.monotonic())
        ready = select.select(list(self._open), [], [], remaining)[0]
        for fd in ready:
            name, _ = self._open[fd]
            data = os.read(fd, 1 << 20)
            self._received[name] += data
            if not data:
                del self._open[fd]
        return bool(ready)


class OnTerminal:
    """A command that a terminal controls: what it shows, typed words, Ctrl-C and Ctrl-Z."""

    def __init__(self, *command: str, cwd: Path | None = None) -> None:
        self.keyboard, terminal = pty.openpty()
        self.shown = ""
        try:
            self.process = subprocess.Popen(
                ("setsid", "--ctty", *command),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                cwd=cwd,
                env={**os.environ, "NO_COLOR": "1"},
            )
        finally:
            os.close(terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.keyboard)  # everything that it controls gets SIGHUP
        try:
            self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def type(self, text: str) -> None:
        """Type on the keyboard; control characters have their usual meaning."""
        os.write(self.keyboard, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until `text` is shown, and forget what was shown up to it; return that."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            remaining = max(0.0, deadline - time.monotonic())
            assert select.select([self.keyboard], [], [], remaining)[0], self.shown
            try:
                data = os.read(self.keyboard, 1 << 16)
            except OSError:  # nobody has the terminal open any more
                data = b""
            assert data, f"{text!r} never came\n{self.shown}"
            self.shown += data.decode(errors="replace")
        seen, _, self.shown = self.shown.partition(text)
        return seen + text


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what the kernel tells nobody of, such as the state of another's child."""
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_child(child: "subprocess.Popen[Any]") -> None:
    """Send SIGSTOP, and wait until none of its threads runs any more: they go on for a moment."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def wait_for_any(
    commands: Sequence[Running], text: str, *, count: int = 1, stream: str = "stdout"
) -> None:
    """Read the output of several commands until `text` has appeared `count` times in all."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(getattr(one, stream).count(text) for one in commands) < count:
        told = "\n".join(f"{one.stdout}\n{one.stderr}" for one in commands)
        pipes = [fd for one in commands for fd in one.open_pipes]
        assert pipes, f"{text!r} never came {count} times\n{told}"
        ready = select.select(pipes, [], [], max(0.0, deadline - time.monotonic()))[0]
        assert ready, f"{text!r} has not come {count} times\n{told}"
        for one in commands:
            one.read_what_is_there()


def start(
    *words: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Running:
    """Start `rankwise` with these words."""
    return Running(*RANKWISE, *map(str, words), environment=environment, cwd=cwd)


def run(
    *words: str | Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run `rankwise` with these words to its end."""
    with start(*words, environment=environment, cwd=cwd) as running:
        return running.finish()


def run_program(text: str, directory: Path, *arguments: str) -> Finished:
    """Run a Python program, given as text, to its end."""
    with start_program(text, directory, *arguments) as running:
        return running.finish()


def start_program(text: str, directory: Path, *arguments: str) -> Running:
    """Start a Python program, given as text."""
    return Running(sys.executable, str(write_program(directory, text)), *arguments)


def write_program(directory: Path, text: str, name: str = "program.py") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def descendants_of(pid: int) -> list[int]:
    """All living processes below one."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        with suppress(OSError):
            # The name stands in parentheses and may hold anything.
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(each)
    found: list[int] = []
    left = [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def keepers_of(fds: Sequence[int]) -> list[int]:
    """The other processes that have one of these pipes open."""
    pipes = {Path(f"/proc/self/fd/{fd}").readlink() for fd in fds}
    found = []
    for pid in _pids():
        with suppress(OSError):  # it has ended, or belongs to another user
            links = [each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir()]
            if pid != os.getpid() and pipes.intersection(links):
                found.append(pid)
    return found


def state_of(pid: int) -> str:
    """What the kernel tells of a process that does not do what it should."""
    shown = ("State", "PPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        lines = [f"process {pid}: {command}"]
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            status = [line.split(":\t") for line in (task / "status").read_text().splitlines()]
            words = [f"{name} {value}" for name, value in status if name in shown]
            lines.append(f"  {task.name} in {(task / 'wchan').read_text()}: {', '.join(words)}")
    except OSError as error:
        return f"process {pid}: {error.strerror}"
    return "\n".join(lines)


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


class Deaths:
    """Watches processes by pid, so that a test can tell when all of them are gone."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):  # gone already
                self._pidfds[os.pidfd_open(pid)] = pid

    def survivors(self, within_s: float) -> list[int]:
        """Wait until all have died, or for this long; return who lives."""
        deadline = time.monotonic() + within_s
        while self._pidfds:
            remaining = max(0.0, deadline - time.monotonic())
            dead = select.select(list(self._pidfds), [], [], remaining)[0]
            if not dead:
                break
            for pidfd in dead:
                del self._pidfds[pidfd]
                os.close(pidfd)
        left = sorted(self._pidfds.values())
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        return left


def numbers_after(word: str, text: str) -> list[int]:
    """The numbers that follow a word: `numbers_after("pid", "[0]:pid 12")` is `[12]`."""
    words = text.split()
    return [
        int(following) for first, following in pairwise(words) if first.rpartition(":")[2] == word
    ]


def plain(lines: Sequence[str]) -> list[str]:
    """Lines without their ranks, sorted: the order between ranks means nothing."""
    return sorted(line.partition("]:")[2] for line in lines)
