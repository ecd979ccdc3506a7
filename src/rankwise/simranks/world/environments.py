"""`os.environ` in threads that ranks have started: it has the variables of the thread's rank.

Such a thread may run while another rank has the run token, so `os.environ` has the variables of
that rank. Once a rank has threads, each access finds the variables by the thread that asks.
"""

import os
from collections.abc import Callable
from threading import get_ident

from rankwise.simranks.world.per_rank_state import ProcessState
from rankwise.simranks.world.places import CallSite, place_of_caller
from rankwise.simranks.world.scheduler import Scheduler

_plain: type = type(os.environ)
_environs = (os.environ, os.environb)


def begin(scheduler: Scheduler, own_state: ProcessState) -> None:
    """A rank starts a thread."""
    if type(os.environ) is not _plain:
        return

    def data(environ: object) -> dict[bytes, bytes]:
        strand = scheduler.helpers.get(get_ident())
        if strand is None:
            present: dict[bytes, bytes] = vars(environ)["_data"]
            return present
        return own_state.environment_of(strand.rank)

    kind = type(_plain.__name__, (_plain,), {"_data": property(data)})
    for environ in _environs:
        environ.__class__ = kind


def end() -> None:
    """The world is over."""
    for environ in _environs:
        environ.__class__ = _plain


_NUMBER = b"RANK"
"""LOCAL_RANK chooses the device in nearly every program, and says less."""
_INTERFACE = ("/os.py", "/_collections_abc.py")


class _WatchedVariables(dict[bytes, bytes]):
    """The variables of a rank, which tell where its number is read."""

    note: Callable[[str, CallSite], None]

    def __getitem__(self, name: bytes) -> bytes:
        if name == _NUMBER and (place := place_of_caller(_INTERFACE)) is not None:
            self.note("RANK", place)
        return super().__getitem__(name)


def watch(note: Callable[[str, CallSite], None]) -> None:
    """Have the lines noted at which the program of the running rank reads its number."""
    watched = _WatchedVariables(vars(os.environ)["_data"])
    watched.note = note
    for environ in _environs:
        vars(environ)["_data"] = watched
