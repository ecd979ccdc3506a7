"""How fast failures are noticed, repaired and cleaned up after.

    python benchmarks/failures.py [--repetitions 9] [--quick]

Instants are taken with the machine's monotonic clock by the ranks themselves.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    end_processes,
    environment,
    ratio,
    scratch_directory,
    seconds,
    take_turns,
)

RANKS = 4
FAILING, LIVING = str(PROGRAMS / "failing.py"), str(PROGRAMS / "living.py")
PATIENCE = 60.0
FLAGS = ("--standalone", "--nproc-per-node", str(RANKS))
TORCH_NEVER_SECONDS = 3.0
"""How long orphans of torchrun are watched before they are counted as left for ever."""


def wait_for(directory: Path, names: Sequence[str]) -> None:
    """Wait until files are there; coarse, since no figure depends on it."""
    deadline = time.monotonic() + PATIENCE
    while not all((directory / name).exists() for name in names):
        if time.monotonic() > deadline:
            raise SystemExit(f"{', '.join(names)} did not all come within {PATIENCE} s")
        time.sleep(0.02)


def read(directory: Path, name: str) -> int:
    return int((directory / name).read_text())


def failure(launcher: Sequence[str], how: str, *, restarts: int = 0, torch: bool = False) -> float:
    """Seconds from the death of a rank until the last sibling is told, or all are back."""
    with scratch_directory() as directory:
        os.mkfifo(directory / "go")
        process = subprocess.Popen(
            [*launcher, "--max-restarts", str(restarts), FAILING, str(directory), how],
            env=environment(**({"WITH_TORCH": "1"} if torch else {})),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(directory, [f"started.0.{rank}" for rank in range(RANKS)])
            time.sleep(0.2 + os.urandom(1)[0] / 2560)  # so that a peer's polling is hit at random
            (directory / "go").write_text("now\n")
            process.wait(PATIENCE)
        finally:
            end_processes([process])
        if restarts:
            ends = [read(directory, f"started.1.{rank}") for rank in range(RANKS)]
        else:
            ends = [read(directory, f"told.{rank}") for rank in range(RANKS) if rank != 2]
        return (max(ends) - read(directory, "failed")) / 1e9


def orphans(launcher: Sequence[str], patience: float) -> float:
    """Seconds from the SIGKILL of an agent until its last descendant is gone; inf for never."""
    with scratch_directory() as directory:
        process = subprocess.Popen(
            [*launcher, LIVING, str(directory)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        names = [str(rank) for rank in range(RANKS)]
        wait_for(directory, names)
        pids = [int(pid) for name in names for pid in (directory / name).read_text().split()]
        left = {os.pidfd_open(pid) for pid in pids}
        waiting = select.poll()
        for fd in left:
            waiting.register(fd, select.POLLIN)
        start = time.monotonic()
        process.kill()
        process.wait()
        while left and (remaining := start + patience - time.monotonic()) > 0:
            for fd, _ in waiting.poll(remaining * 1000):
                waiting.unregister(fd)
                os.close(fd)
                left.discard(fd)
        elapsed = time.monotonic() - start
        for fd in left:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        return float("inf") if left else elapsed


def compare(
    table: Table,
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    repetitions: int,
) -> None:
    peers = {"rankwise": ours, **({"torchrun": theirs} if HAS_TORCH else {})}
    median = take_turns(peers, repetitions)
    peer = median.get("torchrun")
    if peer == float("inf"):
        table.row(name, seconds(median["rankwise"]), "never", "-")
    else:
        table.row(name, seconds(median["rankwise"]), seconds(peer), ratio(median["rankwise"], peer))


def main() -> None:
    options = arguments(__doc__, repetitions=9)
    describe_machine()
    ours = [*RANKWISE, "run", *FLAGS]
    warm = [*ours, "--start-method", "forkserver"]
    theirs = [*TORCHRUN, *FLAGS]
    columns = ("what", "rankwise", "torchrun", "ratio")
    table = Table("Failures, 4 ranks", columns, options.json)
    for how in ("exit", "kill"):
        compare(
            table,
            f"a rank dies ({how}) -> the last sibling gets SIGTERM",
            partial(failure, ours, how),
            partial(failure, theirs, how),
            options.repetitions,
        )
    few = min(options.repetitions, 5)
    compare(
        table,
        "a rank dies -> all restarted, without torch, subprocess",
        partial(failure, ours, "exit", restarts=1),
        partial(failure, theirs, "exit", restarts=1),
        few,
    )
    compare(
        table,
        "a rank dies -> all restarted, without torch, fork server",
        partial(failure, warm, "exit", restarts=1),
        partial(failure, theirs, "exit", restarts=1),
        few,
    )
    if HAS_TORCH and not options.quick:
        compare(
            table,
            "a rank dies -> all restarted, torch imported, fork server",
            partial(failure, [*warm, "--preload", "torch"], "exit", restarts=1, torch=True),
            partial(failure, theirs, "exit", restarts=1, torch=True),
            3,
        )
    compare(
        table,
        "the agent is SIGKILLed -> the last of 4 ranks and 4 grandchildren is gone",
        partial(orphans, ours, PATIENCE),
        partial(orphans, theirs, TORCH_NEVER_SECONDS),
        few,
    )


if __name__ == "__main__":
    main()
