"""`os.environ` in threads that ranks have started: it shows the variables of the thread's rank.

Such a thread runs beside whichever rank has the run token, whose variables are in place. Once a
rank has threads, they are looked for by the thread that asks.
"""

import os
from threading import get_ident

from rankwise.sim.rehearsal.belongings import ProcessBelongings
from rankwise.sim.rehearsal.scheduler import Scheduler

_plain: type = type(os.environ)
_environs = (os.environ, os.environb)


def begin(scheduler: Scheduler, belongings: ProcessBelongings) -> None:
    """A rank starts a thread."""
    if type(os.environ) is not _plain:
        return

    def data(environ: object) -> dict[bytes, bytes]:
        strand = scheduler.helpers.get(get_ident())
        if strand is None:
            present: dict[bytes, bytes] = vars(environ)["_data"]
            return present
        return belongings.environment_of(strand.rank)

    kind = type(_plain.__name__, (_plain,), {"_data": property(data)})
    for environ in _environs:
        environ.__class__ = kind


def end() -> None:
    """The world is over."""
    for environ in _environs:
        environ.__class__ = _plain
