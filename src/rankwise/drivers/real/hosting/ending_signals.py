"""The signals that end a process which has not said otherwise, and that it can catch or ignore.

Those that tell of a fault are not among them: a process cannot go on after one.
"""

import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums

FAULT_SIGNALS = (
    _signal.SIGILL, _signal.SIGTRAP, _signal.SIGABRT, _signal.SIGBUS, _signal.SIGFPE,
    _signal.SIGSEGV, _signal.SIGSYS,
)  # fmt: skip
_WITHOUT_END = (
    _signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD, _signal.SIGCONT, _signal.SIGTSTP,
    _signal.SIGTTIN, _signal.SIGTTOU, _signal.SIGURG, _signal.SIGWINCH,
)  # fmt: skip
"""Those that cannot be caught, and those that end no process."""
ENDING_SIGNALS: tuple[int, ...] = tuple(
    sorted(_signal.valid_signals() - {*FAULT_SIGNALS, *_WITHOUT_END})
)
