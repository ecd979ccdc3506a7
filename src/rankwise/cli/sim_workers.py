"""Processes that simulate one settings after the other, as many at a time as there are cores.

Each has a pipe to this process, on which settings go out and outcomes come back. **A worker dies**
(memory exhausted, a crash): its pipe ends, the settings that it had are told as failed, and another
one takes its place. **This process dies**: the kernel kills the workers. **Interrupted**: they are
killed immediately; they themselves never see an interrupt, since a terminal sends it to all.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import cast

from rankwise.base.failure import ExitStatus
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.hosting.prctl import die_with_parent
from rankwise.sim.benches.session import Outcome, Settings, measure_or_tell

# Spawned: a fork in a process that has threads is unsafe.
_PROCESSES = get_context("spawn")


def simulate_all(
    wanted: Sequence[Settings], tell_one_more: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Simulate all of them; their outcomes, in their order."""
    outcomes: dict[int, Outcome] = {}
    waiting = list(reversed(range(len(wanted))))
    busy: dict[Connection, tuple[_Worker, int]] = {}
    with ExitStack() as stack:

        def give(worker: _Worker | None = None) -> None:
            if waiting:
                own = worker or stack.enter_context(_worker())
                number = waiting.pop()
                with suppress(OSError):  # it is dead: its pipe will tell
                    own.connection.send(wanted[number])
                busy[own.connection] = (own, number)

        for _ in range(min(len(wanted), usable_cpu_count())):
            give()
        while busy:
            for ready in cast("list[Connection]", wait(list(busy))):
                worker, number = busy.pop(ready)
                try:
                    outcomes[number] = ready.recv()
                except (EOFError, ConnectionResetError):
                    outcomes[number] = Outcome([], 0, worker.tell_death())
                    give()
                else:
                    give(worker)
                tell_one_more()
    return [outcomes[number] for number in range(len(wanted))]


class _Worker:
    """A process, and our end of its pipe."""

    def __init__(self) -> None:
        self.connection, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        with _without_interrupts():
            self.process.start()
        theirs.close()

    def tell_death(self) -> str:
        """Say how it came to its end."""
        self.process.join()
        status = ExitStatus(self.process.exitcode or 0)
        is_killed = status.signal_number == signal.SIGKILL
        hint = ", perhaps because memory ran out" if is_killed else ""
        return f"its process {status.in_words}{hint}"


@contextmanager
def _worker() -> Iterator[_Worker]:
    worker = _Worker()
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that no interrupt reaches: they inherit what is blocked here."""
    resource_tracker.ensure_running()  # starting that with the first process would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, parent: int) -> None:
    """What runs in a worker."""
    die_with_parent(parent)
    with redirect_stdout(sys.stderr):  # standard output is for the results
        while True:
            connection.send(measure_or_tell(connection.recv()))
