"""Signal handlers of a launcher, until its run installs its own.

This module imports next to nothing: a signal may come at any moment of the start.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long
import os

from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS

TYPE_CHECKING = False  # an interrupt while `typing` is imported would show a traceback
if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = "rankwise: stopped by SIGINT"
_OWN_CODE = (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
"""Signals whose number is in the exit code; the others stop a run as SIGTERM does."""


def catch_early() -> None:
    """Handle all signals of a launcher: each ends it with a line, or does nothing yet."""
    end_on_interrupt()
    outlive_user_signals()
    end_on_sigterm()


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process with one line."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end_interrupted)


def end_interrupted(_signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process, in which nothing has happened yet, as one that was interrupted."""
    try:
        os.write(2, f"{INTERRUPTED}\n".encode())
    finally:
        os._exit(128 + 2)


def outlive_user_signals() -> None:
    """Let SIGUSR1 and SIGUSR2 never end this process; the run passes them on to its ranks.

    Schedulers send them to every process of a job. They are caught, not ignored: what this process
    starts would inherit that.
    """
    for number in (_signal.SIGUSR1, _signal.SIGUSR2):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, _go_on)


def _go_on(_signum: int, _frame: "FrameType | None") -> None:
    """Do nothing."""


def hold_interrupts() -> None:
    """Let Ctrl-C wait until the run catches it: what is started meanwhile must be taken down.

    The signals of users wait too, so that they do not end the guardian before it ignores them.
    The run lets them come; see `Supervision.run`.
    """
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT, _signal.SIGUSR1, _signal.SIGUSR2))


def end_on_sigterm() -> None:
    """Let signals that stop a run end this process with a line until the run itself catches them.

    The guardian takes down what has been started, as it does whenever this process ends. The run
    finds this handler, and leaves another one when it has succeeded.
    """
    for number in ENDING_SIGNALS:
        if number != _signal.SIGINT and _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, end_stopped)


def leave_alone(handled: "Collection[int]" = ()) -> None:
    """Let SIGTERM, SIGHUP and SIGQUIT do what they do to any program, but for those handled."""
    for number in _OWN_CODE:
        if number not in handled and _signal.getsignal(number) is end_stopped:
            _signal.signal(number, _signal.SIG_DFL)


def usual(handler: "Any") -> "Any":
    """The handler that a program would have found, had this process not begun as a launcher."""
    from signal import SIG_DFL  # noqa: PLC0415  # the enum that programs compare with

    return SIG_DFL if handler in (end_stopped, _go_on) else handler


def end_stopped(signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process as a run that SIGTERM has stopped."""
    try:
        os.write(2, f"rankwise: stopped by {_name_of(signum)}\n".encode())
    finally:
        os._exit(128 + (signum if signum in _OWN_CODE else _signal.SIGTERM))


def _name_of(signum: int) -> str:
    """The name of a signal, as in other lines; this module imports no enums."""
    if _signal.SIGRTMIN <= signum <= _signal.SIGRTMAX:
        return f"SIGRTMIN+{signum - _signal.SIGRTMIN}"
    names = (name for name, number in vars(_signal).items() if number == signum)
    own = (name for name in names if name.startswith("SIG") and not name.startswith("SIG_"))
    return next(own, f"signal {signum}")


def be_interruptible() -> None:
    """From now on there is something to be taken down: raise KeyboardInterrupt."""
    if _signal.getsignal(_signal.SIGINT) is end_interrupted:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
