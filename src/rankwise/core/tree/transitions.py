"""Every way from one phase of a child group to another, and the facts that lead there.

As for gangs (`core/gang/transitions.py`).
"""

from rankwise.base.machine import Ticked
from rankwise.core.tree.child_group import (
    ChildEnded,
    ChildGroupPhase,
    ChildReady,
    ChildRefused,
    CloseRequested,
    StartRequested,
    ZygoteEnded,
)

TRANSITIONS: dict[ChildGroupPhase, dict[ChildGroupPhase, tuple[type, ...]]] = {
    ChildGroupPhase.IDLE: {
        ChildGroupPhase.STARTING: (StartRequested,),
        ChildGroupPhase.UP: (StartRequested,),
    },
    ChildGroupPhase.STARTING: {
        ChildGroupPhase.UP: (ChildReady,),
        ChildGroupPhase.ABORTING: (ChildEnded, ChildRefused, CloseRequested, Ticked, ZygoteEnded),
    },
    ChildGroupPhase.ABORTING: {ChildGroupPhase.IDLE: (ChildEnded, Ticked, ZygoteEnded)},
    ChildGroupPhase.UP: {ChildGroupPhase.CLOSING: (CloseRequested,)},
    ChildGroupPhase.CLOSING: {
        ChildGroupPhase.IDLE: (ChildEnded, CloseRequested, Ticked, ZygoteEnded)
    },
}
