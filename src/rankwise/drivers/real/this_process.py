"""Whether this is still the process that something was made in, without asking the kernel."""

import os

_mark = object()


def _renew() -> None:
    global _mark  # noqa: PLW0603  # one per process is the point of it
    _mark = object()


os.register_at_fork(after_in_child=_renew)


def mark() -> object:
    """The same object each time in one process, and another one in each fork of it."""
    return _mark
