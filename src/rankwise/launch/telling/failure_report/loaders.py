"""Ranks that fail since a worker process of their own data loader has died.

torch says so where it notices first. Where it does not, a rank that fetches what such a worker had
sent cannot reach it any more, and raises that a connection was reset, as if another rank were gone.
"""

import re

from rankwise.base.failure import ErrorRecord, Failure, FailureCause

_KILLED = re.compile(r"DataLoader worker \(pid.{0,40}\) is killed by signal: Killed")
_FETCHING = re.compile(
    r'File "[^"]*torch/utils/data/dataloader\.py".*'
    r'File "[^"]*multiprocessing/resource_sharer\.py", line \d+, in detach',
    re.DOTALL,
)
_CUT_OFF = ("ConnectionResetError", "ConnectionRefusedError", "FileNotFoundError", "EOFError")


def lost_loader(failure: Failure) -> bool:
    """Whether it raised since a data loader's worker of its own was killed, as by lack of memory.

    torch says so in an exception, or in the one from which that was raised.
    """
    error = failure.error
    if failure.cause is not FailureCause.RAISED or error is None:
        return False
    is_told = _KILLED.search(error.message) or _KILLED.search(error.traceback)
    return bool(is_told) or is_cut_off_from_loader(error)


def is_cut_off_from_loader(error: ErrorRecord) -> bool:
    """Whether it was raised since what a data loader's worker had sent was gone with it."""
    return error.type in _CUT_OFF and bool(_FETCHING.search(error.traceback))
