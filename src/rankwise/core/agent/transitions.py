"""Every way from one phase of an agent to another, and the facts that lead there.

As for gangs (`core/gang/transitions.py`). `Answer` is whatever the store says.
"""

from rankwise.base.machine import Ticked
from rankwise.core.agent.state import AgentPhase
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


TRANSITIONS: dict[AgentPhase, dict[AgentPhase, tuple[type, ...]]] = {
    AgentPhase.IDLE: {AgentPhase.PREPARING: (AgentStarted,)},
    AgentPhase.PREPARING: {
        AgentPhase.WAITING: (RoundPrepared,),
        AgentPhase.ENDED: (StopRequested,),
        AgentPhase.LEAVING: (
            Answer,
            GuardianLost,
            LeaveRequested,
            PreparationFailed,
            StopRequested,
            Ticked,
        ),
        AgentPhase.DISMISSING: (LeaveRequested, PreparationFailed, Ticked),
    },
    AgentPhase.WAITING: {
        AgentPhase.RUNNING: (Answer, RoundPrepared, Ticked),
        AgentPhase.ENDED: (StopRequested,),
        AgentPhase.LEAVING: (Answer, GuardianLost, LeaveRequested, StopRequested, Ticked),
        AgentPhase.DISMISSING: (Answer, LeaveRequested, StopRequested),
    },
    AgentPhase.RUNNING: {
        AgentPhase.DESCRIBING: (GuardianLost, Swept, Ticked),
        AgentPhase.ENDED: (GuardianLost, Swept, Ticked),
    },
    AgentPhase.DESCRIBING: {AgentPhase.ENDED: (FailuresDescribed, Ticked)},
    AgentPhase.ENDED: {
        AgentPhase.DESCRIBING: (Answer, RanksBlamed),
        AgentPhase.PREPARING: (Answer, FailuresDescribed, Swept, Ticked),
        AgentPhase.LEAVING: (
            Answer,
            FailuresDescribed,
            GuardianLost,
            LeaveRequested,
            StopRequested,
            Swept,
            Ticked,
        ),
        AgentPhase.DISMISSING: (Answer, FailuresDescribed, StopRequested, Ticked),
    },
    AgentPhase.DISMISSING: {AgentPhase.ENDED: (GuardianLost, Swept, Ticked)},
    AgentPhase.LEAVING: {
        AgentPhase.FINISHED: (
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
