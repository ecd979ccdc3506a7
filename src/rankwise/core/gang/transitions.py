"""All transitions between the phases of a gang, with the facts that cause them.

A fact that is not listed for a phase causes no transition. One fact may cause several transitions
at once. A test explores all lives of small gangs, and finds exactly these transitions.
docs/development/state-machines.md shows them as a diagram.
"""

from rankwise.base.machine import Ticked
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    GuardianLost,
    ProgressLooked,
    RanksBlamed,
    RecallRequested,
    RecoveryMessageSent,
    Resumed,
    StacksDumped,
    Started,
    StopRequested,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerSpawned,
)

TRANSITIONS: dict[GangPhase, dict[GangPhase, tuple[type, ...]]] = {
    GangPhase.IDLE: {GangPhase.STARTING: (Started,)},
    GangPhase.STARTING: {
        GangPhase.RUNNING: (Resumed, Swept, WorkerSpawned),
        GangPhase.STOPPING: (
            ProgressLooked,
            RecallRequested,
            StopRequested,
            Ticked,
            WorkerExited,
            WorkerRefused,
        ),
        GangPhase.KILLING: (
            ProgressLooked,
            RecallRequested,
            StopRequested,
            Ticked,
            WorkerExited,
            WorkerRefused,
        ),
        GangPhase.SWEEPING: (RecallRequested, StopRequested),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.RUNNING: {
        GangPhase.DUMPING: (ProgressLooked, RanksBlamed),
        GangPhase.RECALLING: (DumpsLooked, RecallRequested, WorkerExited, WorkerSpawned),
        GangPhase.STOPPING: (
            DumpsLooked,
            RecallRequested,
            StopRequested,
            Ticked,
            WorkerExited,
            WorkerSpawned,
        ),
        GangPhase.KILLING: (
            DumpsLooked,
            RecallRequested,
            StopRequested,
            Ticked,
            WorkerExited,
            WorkerSpawned,
        ),
        GangPhase.SWEEPING: (WorkerExited,),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.DUMPING: {
        GangPhase.STOPPING: (StacksDumped, StopRequested, Ticked),
        GangPhase.KILLING: (StacksDumped, StopRequested, Ticked),
        GangPhase.SWEEPING: (WorkerExited,),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.RECALLING: {
        GangPhase.CLEARING: (WorkerExited, RecoveryMessageSent),
        GangPhase.STOPPING: (StopRequested,),
        GangPhase.KILLING: (StopRequested, Ticked),
        GangPhase.SWEEPING: (WorkerExited,),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.CLEARING: {
        GangPhase.PAUSED: (Swept,),
        GangPhase.STOPPING: (StopRequested, Swept, Ticked),
        GangPhase.KILLING: (StopRequested, Swept, Ticked),
        GangPhase.SWEEPING: (StopRequested,),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.PAUSED: {
        GangPhase.STARTING: (Resumed, Swept),
        GangPhase.CLEARING: (WorkerExited,),
        GangPhase.STOPPING: (StopRequested,),
        GangPhase.KILLING: (StopRequested,),
        GangPhase.SWEEPING: (StopRequested,),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.STOPPING: {
        GangPhase.KILLING: (StopRequested, Ticked),
        GangPhase.SWEEPING: (
            ProgressLooked,
            StopRequested,
            Swept,
            Ticked,
            WorkerExited,
            WorkerRefused,
        ),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.KILLING: {
        GangPhase.SWEEPING: (ProgressLooked, Swept, Ticked, WorkerExited, WorkerRefused),
        GangPhase.FINISHED: (GuardianLost,),
    },
    GangPhase.SWEEPING: {GangPhase.FINISHED: (GuardianLost, Swept, Ticked)},
}
