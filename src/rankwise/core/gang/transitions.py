"""Every way from one phase of a gang to another, and the facts that lead there.

A fact that is not named for a phase leaves the gang where it is. One fact may lead through several
phases at once. A test explores all lives of small gangs, and finds these transitions and no others;
docs/state-machines.md shows them as a diagram.
"""

from rankwise.base.machine import Ticked
from rankwise.core.gang.state import Phase
from rankwise.core.gang.vocabulary import (
    GuardianLost,
    ProgressLooked,
    RanksBlamed,
    RecallRequested,
    Resumed,
    StacksDumped,
    Started,
    StopRequested,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerSaid,
    WorkerSpawned,
)

TRANSITIONS: dict[Phase, dict[Phase, tuple[type, ...]]] = {
    Phase.IDLE: {Phase.STARTING: (Started,)},
    Phase.STARTING: {
        Phase.RUNNING: (Resumed, Swept, WorkerSpawned),
        Phase.STOPPING: (RecallRequested, StopRequested, Ticked, WorkerExited, WorkerRefused),
        Phase.KILLING: (RecallRequested, StopRequested, Ticked, WorkerExited, WorkerRefused),
        Phase.SWEEPING: (RecallRequested, StopRequested),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.RUNNING: {
        Phase.DUMPING: (ProgressLooked, RanksBlamed),
        Phase.RECALLING: (RecallRequested, WorkerExited, WorkerSpawned),
        Phase.STOPPING: (RecallRequested, StopRequested, Ticked, WorkerExited, WorkerSpawned),
        Phase.KILLING: (RecallRequested, StopRequested, Ticked, WorkerExited, WorkerSpawned),
        Phase.SWEEPING: (WorkerExited,),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.DUMPING: {
        Phase.STOPPING: (StacksDumped, StopRequested, Ticked),
        Phase.KILLING: (StacksDumped, StopRequested, Ticked),
        Phase.SWEEPING: (WorkerExited,),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.RECALLING: {
        Phase.CLEARING: (WorkerExited, WorkerSaid),
        Phase.STOPPING: (StopRequested,),
        Phase.KILLING: (StopRequested, Ticked),
        Phase.SWEEPING: (WorkerExited,),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.CLEARING: {
        Phase.PAUSED: (Swept,),
        Phase.STOPPING: (StopRequested, Swept, Ticked),
        Phase.KILLING: (StopRequested, Swept, Ticked),
        Phase.SWEEPING: (StopRequested,),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.PAUSED: {
        Phase.STARTING: (Resumed, Swept),
        Phase.CLEARING: (WorkerExited,),
        Phase.STOPPING: (StopRequested,),
        Phase.KILLING: (StopRequested,),
        Phase.SWEEPING: (StopRequested,),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.STOPPING: {
        Phase.KILLING: (StopRequested, Ticked),
        Phase.SWEEPING: (StopRequested, Swept, Ticked, WorkerExited, WorkerRefused),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.KILLING: {
        Phase.SWEEPING: (Swept, Ticked, WorkerExited, WorkerRefused),
        Phase.FINISHED: (GuardianLost,),
    },
    Phase.SWEEPING: {Phase.FINISHED: (GuardianLost, Swept, Ticked)},
}
