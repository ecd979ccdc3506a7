"""Where the `rankwise` command begins: imports next to nothing before it can be interrupted."""

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long
import os
import sys

TYPE_CHECKING = False  # an interrupt while `typing` is imported would show a traceback
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def start() -> "NoReturn":
    """The console script. Ctrl-C while it still imports ends it with one line."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end_interrupted)
    if sys.argv[1:2] == ["run"]:
        outlive_user_signals()
    from rankwise.cli.main import main  # noqa: PLC0415  # an interrupt may come before this

    main()


def end_interrupted(_signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process, in which nothing has happened yet, as one that was interrupted."""
    try:
        os.write(2, b"rankwise: interrupted\n")
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
    """Let SIGTERM end this process with a line until the run itself catches it.

    So do the signals that end a run as SIGTERM does. The guardian takes down what has been started,
    as it does whenever this process ends. The run finds this handler, and leaves another one when
    it has succeeded.
    """
    from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS  # noqa: PLC0415  # not before Ctrl-C is heard

    left_alone = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT)
    for number in ENDING_SIGNALS:
        if number not in left_alone and _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, end_stopped)


def die_of_sigterm() -> None:
    """Let SIGTERM do again what it does without a handler, for who expects that."""
    if _signal.getsignal(_signal.SIGTERM) is end_stopped:
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)


def end_stopped(signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process as a run that SIGTERM has stopped."""
    try:
        os.write(2, f"rankwise: stopped by {_name_of(signum)}\n".encode())
    finally:
        os._exit(128 + _signal.SIGTERM)


def _name_of(signum: int) -> str:
    """What other lines call it; nothing more may be imported here."""
    if _signal.SIGRTMIN <= signum <= _signal.SIGRTMAX:
        return f"SIGRTMIN+{signum - _signal.SIGRTMIN}"
    names = (name for name, number in vars(_signal).items() if number == signum)
    own = (name for name in names if name.startswith("SIG") and not name.startswith("SIG_"))
    return next(own, f"signal {signum}")


def be_interruptible() -> None:
    """From now on there is something to be taken down: raise KeyboardInterrupt."""
    if _signal.getsignal(_signal.SIGINT) is end_interrupted:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
