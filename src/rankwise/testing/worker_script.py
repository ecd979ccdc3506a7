"""Acts out one program of `rankwise.testing.programs` in a real process.

Run as a script by every worker of a test gang; the argument has the programs of all ranks and
attempts as JSON. Signals that mean "stop" stay blocked and are fetched while the script waits for
the first event, so nothing is polled and no handler interrupts anything.
"""

import atexit
import builtins
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

SECOND = 1_000_000_000
FOREVER = 1 << 62
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Find the program that is meant for this worker, and act it out."""
    lives = json.loads(sys.argv[1])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    life = lives[min(attempt, len(lives) - 1)]
    act(life[int(os.environ["LOCAL_RANK"])])


def act(program: dict[str, Any]) -> None:
    """Work, make progress, obey or not, and end as the program says."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for _ in range(program["strays"]):
        leave_stray()
    began_at = time.monotonic_ns()
    ending = program["ending"]
    ends_at = FOREVER if ending["type"] == "RunsForever" else began_at + program["after"]
    every, silent_after = program["progress_every"], program["silent_after"]
    silent_at = FOREVER if silent_after is None else began_at + silent_after
    progress_at = FOREVER if every is None else began_at
    stops_at, stopped_by = FOREVER, 0
    while True:
        now = time.monotonic_ns()
        if now >= stops_at:
            obey(stopped_by, program["stop_code"])
        if now >= ends_at:
            end(ending)
        if now >= progress_at:
            compute(min(every // 2, SECOND // 10))
            progress_at = now + every if now + every <= silent_at else FOREVER
        patience = min(stops_at, ends_at, progress_at) - now
        received = signal.sigtimedwait(STOP_SIGNALS, patience / SECOND)
        if received is not None and program["stop_takes"] is not None and not stopped_by:
            stopped_by = received.si_signo
            stops_at = time.monotonic_ns() + program["stop_takes"]


def compute(duration: int) -> None:
    """Use the CPU for so long: that is progress."""
    end_at = time.thread_time_ns() + duration
    while time.thread_time_ns() < end_at:
        pass


def obey(signum: int, code: int | None) -> NoReturn:
    """End as one that was told to stop."""
    if code is not None:
        sys.exit(code)
    die(signum)


def end(ending: dict[str, Any]) -> NoReturn:
    """End as the program says."""
    match ending["type"]:
        case "Exits":
            sys.exit(ending["code"])
        case "Dies":
            die(ending["signal"])
        case "Raises":
            atexit.register(time.sleep, ending["exit_takes"] / SECOND)
            kind = getattr(builtins, ending["exception"])
            raise kind(ending["message"])
        case other:
            raise SystemExit(f"no program ends with {other}")


def die(signum: int) -> NoReturn:
    """Die of a signal."""
    if signum != signal.SIGKILL:
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    os.kill(os.getpid(), signum)
    raise AssertionError(f"signal {signum} was survived")


def leave_stray() -> None:
    """Leave a process behind that has a session of its own and does not end by itself."""
    if os.fork() != 0:
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
