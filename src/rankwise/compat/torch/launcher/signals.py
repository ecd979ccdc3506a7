"""Has `python -m rankwise.compat.torch.run` do with signals what `rankwise run` does.

The table is in docs/signals.md. Only the process that is nothing but the launcher does this: one
that calls `main` or `elastic_launch` has said itself what signals do, or has left it to the system.
"""

import os
import signal
from contextlib import closing, suppress
from types import FrameType

from rankwise.compat.torch.elastic.multiprocessing.api import started_contexts
from rankwise.drivers.real.early_signals import usual
from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.drivers.real.worker_process import WorkerProcess
from rankwise.launch.run.signal_effects import USER_SIGNALS
from rankwise.launch.telling.announcements import as_sigterm_line, passed_on_line

_USUAL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heed_all_signals() -> None:
    """Pass the user signals on to workers that catch them; let others stop them as SIGTERM does.

    Those that `--signals-to-handle` names are caught when workers are started, in place of these.
    """
    for number in ENDING_SIGNALS:
        if number not in _USUAL and usual(signal.getsignal(number)) is signal.SIG_DFL:
            signal.signal(number, _pass_on if number in USER_SIGNALS else _Stop())


class _Stop:
    """Stops as SIGTERM does, once: the kernel repeats SIGXCPU every second."""

    def __init__(self) -> None:
        self._has_come = False

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if not self._has_come:
            self._has_come = True
            _say(as_sigterm_line(signum))
            signal.raise_signal(signal.SIGTERM)


def _pass_on(signum: int, _frame: FrameType | None) -> None:
    catching: dict[int, int] = {}
    others: list[int] = []
    for context in started_contexts:
        for local_rank, pid in context.pids().items():
            rank = int(context.envs[local_rank].get("RANK", local_rank))
            if _catches(pid, signum):
                catching[rank] = pid
            else:
                others.append(rank)
    # First the line: another signal may end this handler as soon as a worker has this one.
    _say(passed_on_line(signum, sorted(catching), sorted(others)))
    for pid in catching.values():
        with suppress(OSError), closing(WorkerProcess(pid)) as process:  # it may have ended
            process.signal(signum, group=False)


def _catches(pid: int, signum: int) -> bool:
    """Whether a worker has a handler for a signal."""
    try:
        with closing(WorkerProcess(pid)) as process:
            return process.catches(signum)
    except OSError:  # it has ended
        return False


def _say(line: str) -> None:
    # Whatever the handler has interrupted may be writing to `sys.stderr`.
    os.write(2, f"rankwise: {line}\n".encode())
