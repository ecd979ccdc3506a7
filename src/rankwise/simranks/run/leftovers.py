"""What simulated ranks have started ends with the command that has run them.

On real processes a guardian kills what a rank leaves, when the rank is over. Here all ranks are one
process, and libraries keep helpers in it that several ranks use, and runs after this one. So what
is left is killed last of all, when libraries have ended what is theirs.
"""

import atexit
import sys
from collections.abc import Callable, Mapping

from rankwise.drivers.real.hosting.descendants import (
    has_children,
    kill_descendants,
    left_descendants,
)
from rankwise.drivers.real.hosting.prctl import adopt_orphans

_PATIENCE_NS = 2_000_000_000
_HELPERS = (
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
)
"""Where multiprocessing keeps the numbers of processes that end when this one has."""


class Leftovers:
    """Kills what is left of this process's descendants when it exits; for a command alone.

    Args:
        tell: takes the command lines of those that were killed, by pid.

    Attributes:
        are_shown: whether they are reported; after a failure, they are not.
    """

    def __init__(self, tell: Callable[[Mapping[int, str]], None]) -> None:
        self.are_shown = False
        self._tell = tell
        self._spared: set[int] = set()
        if has_children():  # a shell had them, before it became this process
            _, self._spared = left_descendants(spared=(), spared_trees=(), awaited=())
        adopt_orphans()
        atexit.register(self._kill)

    def _kill(self) -> None:
        killed: dict[int, str] = {}
        kill_descendants(_PATIENCE_NS, spared=self._spared | _helpers(), killed=killed)
        if killed and self.are_shown:
            self._tell(killed)


def _helpers() -> set[int]:
    pids = set()
    for module, name, attribute in _HELPERS:
        if (found := sys.modules.get(module)) is not None:
            pids.add(getattr(getattr(found, name), attribute, None))
    return {pid for pid in pids if pid is not None}
