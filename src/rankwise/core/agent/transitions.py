"""Every way from one phase of an agent to another, and the facts that lead there.

As for gangs (`core/gang/transitions.py`). `Answer` is whatever the store says.
"""

from rankwise.base.machine import Ticked
from rankwise.core.agent.machine import Phase
from rankwise.core.agent.vocabulary import (
    AgentStarted,
    FailuresDescribed,
    LeaveRequested,
    PreparationFailed,
    RoundPrepared,
)
from rankwise.core.gang.vocabulary import GuardianLost, RanksBlamed, StopRequested, Swept


class Answer:
    """Stands for all that the store may say."""


TRANSITIONS: dict[Phase, dict[Phase, tuple[type, ...]]] = {
    Phase.IDLE: {Phase.PREPARING: (AgentStarted,)},
    Phase.PREPARING: {
        Phase.WAITING: (RoundPrepared,),
        Phase.ENDED: (StopRequested,),
        Phase.LEAVING: (
            Answer,
            GuardianLost,
            LeaveRequested,
            PreparationFailed,
            StopRequested,
            Ticked,
        ),
        Phase.DISMISSING: (LeaveRequested, PreparationFailed, Ticked),
    },
    Phase.WAITING: {
        Phase.RUNNING: (Answer, RoundPrepared, Ticked),
        Phase.ENDED: (StopRequested,),
        Phase.LEAVING: (Answer, GuardianLost, LeaveRequested, StopRequested, Ticked),
        Phase.DISMISSING: (Answer, LeaveRequested, StopRequested),
    },
    Phase.RUNNING: {
        Phase.DESCRIBING: (GuardianLost, Swept, Ticked),
        Phase.ENDED: (GuardianLost, Swept, Ticked),
    },
    Phase.DESCRIBING: {Phase.ENDED: (FailuresDescribed, Ticked)},
    Phase.ENDED: {
        Phase.DESCRIBING: (Answer, RanksBlamed),
        Phase.PREPARING: (Answer, FailuresDescribed, Swept, Ticked),
        Phase.LEAVING: (
            Answer,
            FailuresDescribed,
            GuardianLost,
            LeaveRequested,
            StopRequested,
            Swept,
            Ticked,
        ),
        Phase.DISMISSING: (Answer, FailuresDescribed, StopRequested, Ticked),
    },
    Phase.DISMISSING: {Phase.ENDED: (GuardianLost, Swept, Ticked)},
    Phase.LEAVING: {
        Phase.FINISHED: (
            Answer,
            FailuresDescribed,
            GuardianLost,
            LeaveRequested,
            PreparationFailed,
            StopRequested,
            Swept,
            Ticked,
        ),
    },
}
