"""Where the `rankwise` command begins: imports next to nothing before it can be interrupted."""

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long
import os

TYPE_CHECKING = False  # an interrupt while `typing` is imported would show a traceback
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def start() -> "NoReturn":
    """The console script. Ctrl-C while it still imports ends it without a word."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end_interrupted)
    from rankwise.cli.main import main  # noqa: PLC0415  # an interrupt may come before this

    main()


def end_interrupted(_signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process, in which nothing has happened yet, as one that was interrupted."""
    os._exit(128 + 2)


def hold_interrupts() -> None:
    """Let Ctrl-C wait until the run catches it: what is started meanwhile must be taken down.

    The run lets it come; see `Supervision.run`.
    """
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))


def end_on_sigterm() -> None:
    """Let SIGTERM end this process with a line until the run itself catches it.

    The guardian takes down what has been started, as it does whenever this process ends. The run
    finds this handler, and leaves another one when it has succeeded.
    """
    if _signal.getsignal(_signal.SIGTERM) == _signal.SIG_DFL:
        _signal.signal(_signal.SIGTERM, end_stopped)


def die_of_sigterm() -> None:
    """Let SIGTERM do again what it does without a handler, for who expects that."""
    if _signal.getsignal(_signal.SIGTERM) is end_stopped:
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)


def end_stopped(signum: int, _frame: "FrameType | None") -> "NoReturn":
    """End this process as a run that SIGTERM has stopped."""
    try:
        os.write(2, b"rankwise: stopped by SIGTERM\n")
    finally:
        os._exit(128 + signum)


def be_interruptible() -> None:
    """From now on there is something to be taken down: raise KeyboardInterrupt."""
    if _signal.getsignal(_signal.SIGINT) is end_interrupted:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
