"""Interrupts runs at random moments: each must end at once, and the next one must run.

    python tests/interrupting.py [--count 1000] [--seed 1] [--keep DIR] [gang] [server] [agents] …

`gang` is `rankwise.run`, `server` the same on a warm fork server, `agents` a run on two nodes, of
which this process is one, `workers` a graph of tasks on a tree of chip workers. Half of the
interrupts are Ctrl-C, half alarms whose handler raises.

With `--keep`, a run that has not ended 5 s after its interrupt is looked at: DIR gets the stacks
and signal masks of all its processes at that moment, and the journals and words of both nodes.
"""

import argparse
import faulthandler
import operator
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import rankwise
from rankwise.cli.run import config_from_cli
from rankwise.launch.run.supervision import Supervision
from rankwise.workers import Orchestrator, Worker

PATIENCE_S = 120
SLOW_S = 5
"""A run that takes longer to its end is looked at, if asked for."""
RANKS = 2


class TimeIsUp(Exception):
    """What a time-out by alarm raises."""


@dataclass
class Findings:
    """What came of many interrupts.

    Attributes:
        raised: how many ended a run; the others came when it was over.
        waits: seconds from each interrupt to the end of its run.
        left: what a run has left behind, or how the one after it failed.
    """

    raised: int = 0
    waits: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = sorted(self.waits)
        return (
            f"{len(waits)} interrupts, {self.raised} ended a run; to its end p50 "
            f"{waits[len(waits) // 2]:.3f} s, p99 {waits[len(waits) * 99 // 100]:.3f} s, worst "
            f"{waits[-1]:.3f} s; left behind: {self.left or 'nothing'}"
        )


def work() -> int:
    """What each rank does."""
    time.sleep(0.02)
    return rankwise.rank()


class Lookout:
    """Keeps what is known of runs that are slow to end."""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place
        """Where the folders of such runs are; None to keep nothing."""
        self.folder: Path | None = None
        """That of the run that is under way."""

    @contextmanager
    def watching(self, case: str, delay_s: float) -> Iterator[None]:
        """Look at all processes if this case takes so long; forget it if it does not."""
        if self.place is None:
            yield
            return
        self.folder = folder = self.place / re.sub(r"\W+", "-", case)
        folder.mkdir(parents=True)
        timer = threading.Timer(delay_s, _look_around, (folder / "processes.txt",))
        timer.start()
        try:
            yield
        finally:
            self.folder = None
            timer.cancel()
            timer.join()
            if not (folder / "processes.txt").exists():
                shutil.rmtree(folder)


def _look_around(file: Path) -> None:
    with file.open("w") as out:
        faulthandler.dump_traceback(out, all_threads=True)
        for pid in _descendants(os.getpid()):
            out.write(_stand_of(pid))


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in task.read_text(encoding="ascii").split()]
    return [each for child in children for each in (child, *_descendants(child))]


def _stand_of(pid: int) -> str:
    """The signal masks of a process, and where in the kernel its threads wait."""
    process = Path(f"/proc/{pid}")
    lines = ["", f"process {pid}:"]
    with suppress(OSError):  # it ends meanwhile
        lines += (process / "cmdline").read_text(errors="replace").split("\0")
        status = (process / "status").read_text()
        lines += [line for line in status.splitlines() if line.startswith(("S", "PPid", "Threads"))]
        for task in (process / "task").iterdir():
            lines += [f"thread {task.name}"]
            lines += [(task / name).read_text() for name in ("wchan", "syscall", "stack")]
    return "\n".join((*lines, ""))


lookout = Lookout()


@contextmanager
def gang() -> Iterator[Callable[[], object]]:
    """Runs that make all they need."""
    yield lambda: rankwise.run(work, nprocs=RANKS)


@contextmanager
def server() -> Iterator[Callable[[], object]]:
    """Runs on a warm fork server."""
    with rankwise.ForkServer() as warm:
        yield lambda: rankwise.run(work, nprocs=RANKS, server=warm)


@contextmanager
def agents() -> Iterator[Callable[[], object]]:
    """Runs on two nodes; the other one is a process that ends with this one's part."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "work.py")
        script.write_text("import time; time.sleep(0.02)")

        def run() -> None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            words = ["--nnodes=2", "--rdzv-backend=embedded", f"--rdzv-endpoint={endpoint}"]
            words += ["--rdzv-id=interrupted", "--rdzv-conf=last_call_timeout=0.1"]
            kept = lookout.folder
            words += [f"--log-dir={kept}"] if kept else []
            words += [str(script)]
            # An interrupt in the middle of Popen would leave a process that nobody knows.
            with (
                interrupts(signal.SIG_BLOCK),
                (kept / "other" if kept else Path(os.devnull)).open("w") as said,
            ):
                other = subprocess.Popen(
                    [sys.executable, "-m", "rankwise", "run", *words],
                    stdout=said,
                    stderr=said,
                    process_group=0,
                )
                try:
                    with interrupts(signal.SIG_UNBLOCK):
                        outcome = Supervision(config_from_cli(words, os.environ)).run()
                        if outcome.stop_signal is not None:
                            raise KeyboardInterrupt
                        assert other.wait(PATIENCE_S) == 0
                finally:
                    other.kill()  # it may be waiting for more nodes
                    other.wait(PATIENCE_S)

        yield run


@contextmanager
def workers() -> Iterator[Callable[[], object]]:
    """Runs of a small graph on one tree of chip workers."""

    def graph(orch: Orchestrator, _args: object, _config: object) -> None:
        for _ in range(2 * RANKS):
            orch.submit_sub(nap)

    with Worker(level=3, num_sub_workers=RANKS, platform="host", device_ids=[0]) as tree:
        nap = tree.register(lambda _args: time.sleep(0.005))
        tree.init()
        yield lambda: tree.run(graph)


@contextmanager
def interrupts(how: int) -> Iterator[None]:
    """Hold interrupts back, or let them through."""
    before = signal.pthread_sigmask(how, (signal.SIGINT, signal.SIGALRM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


DRIVERS = {"gang": gang, "server": server, "agents": agents, "workers": workers}


def interrupt_often(driver: str, count: int, seed: int = 1) -> Findings:
    """Interrupt so many runs of a driver; in the main thread."""
    findings = Findings()
    chance = random.Random(seed)
    before = signal.signal(signal.SIGALRM, _raise_time_is_up)
    try:
        with DRIVERS[driver]() as run:
            run()
            begun = time.monotonic()
            run()
            normal_s = time.monotonic() - begun
            ours = what_is_ours()
            for number in range(count):
                signum = chance.choice((signal.SIGINT, signal.SIGALRM))
                case = f"case {number}, {signum.name}"
                delay_s = chance.uniform(0, 1.2 * normal_s)
                with lookout.watching(f"{driver} {case}", delay_s + SLOW_S):
                    _interrupt(run, delay_s, signum, findings)
                for thread in threading.enumerate():
                    if thread.daemon:  # opening a store that nobody wants any more, for instance
                        thread.join(PATIENCE_S)
                now = what_is_ours()
                if any(map(operator.gt, map(len, now), map(len, ours))):  # it may be fewer
                    news = [sorted(set(now[0]) - set(ours[0])), sorted(set(now[1]) - set(ours[1]))]
                    findings.left.append(f"{case}: children {news[0]}, files {news[1]}")
                    ours = now
                if number % 5 == 0 or number == count - 1:  # the others are followed by a case
                    run()
    finally:
        signal.signal(signal.SIGALRM, before)
    return findings


def _interrupt(
    run: Callable[[], object], delay_s: float, signum: signal.Signals, findings: Findings
) -> None:
    sent_at: list[float] = []

    def send() -> None:
        sent_at.append(time.monotonic())
        signal.pthread_kill(interrupted, signum)

    interrupted = threading.get_ident()
    timer = threading.Timer(delay_s, send)
    is_over = False
    try:
        timer.start()
        run()
        is_over = True
        timer.join(PATIENCE_S)
        threading.Event().wait(PATIENCE_S)
    except (KeyboardInterrupt, TimeIsUp):
        findings.waits.append(0 if is_over else time.monotonic() - sent_at[0])
        findings.raised += not is_over
    timer.join(PATIENCE_S)


def _raise_time_is_up(_signum: int, _frame: FrameType | None) -> None:
    raise TimeIsUp


def what_is_ours() -> tuple[list[str], list[str]]:
    """Which children this process has, and what it has opened."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    files = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the list itself
            files.append(f"{each.name} {each.readlink()}")
    return children.split(), files


def main() -> None:
    """Interrupt, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drivers", nargs="*", choices=[[], *DRIVERS])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args()
    lookout.place = options.keep
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    for driver in options.drivers or DRIVERS:
        print(f"{driver}: {interrupt_often(driver, options.count, options.seed)}", flush=True)


if __name__ == "__main__":
    main()
