"""The error of a pool that can run no task any more."""

from concurrent.futures import BrokenExecutor

from rankwise.base.errors import RankwiseError


class BrokenPool(RankwiseError, BrokenExecutor):
    """The pool cannot run any task any more; the message says why."""
