"""Every way from one phase of a child group to another, and the facts that lead there.

As for gangs (`core/gang/transitions.py`).
"""

from rankwise.base.machine import Ticked
from rankwise.core.tree.child_group import (
    ChildEnded,
    ChildGroupPhase,
    ChildReady,
    ChildRefused,
    ForkServerEnded,
    GroupCloseRequested,
    StartRequested,
)

TRANSITIONS: dict[ChildGroupPhase, dict[ChildGroupPhase, tuple[type, ...]]] = {
    ChildGroupPhase.IDLE: {
        ChildGroupPhase.STARTING: (StartRequested,),
        ChildGroupPhase.UP: (StartRequested,),
    },
    ChildGroupPhase.STARTING: {
        ChildGroupPhase.UP: (ChildReady,),
        ChildGroupPhase.ABORTING: (
            ChildEnded,
            ChildRefused,
            GroupCloseRequested,
            Ticked,
            ForkServerEnded,
        ),
    },
    ChildGroupPhase.ABORTING: {ChildGroupPhase.IDLE: (ChildEnded, Ticked, ForkServerEnded)},
    ChildGroupPhase.UP: {ChildGroupPhase.CLOSING: (GroupCloseRequested,)},
    ChildGroupPhase.CLOSING: {
        ChildGroupPhase.IDLE: (ChildEnded, GroupCloseRequested, Ticked, ForkServerEnded)
    },
}
