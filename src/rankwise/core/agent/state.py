"""The phases of an agent's life."""

from enum import StrEnum


class AgentPhase(StrEnum):
    """Where in its life an agent is."""

    IDLE = "idle"
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    DESCRIBING = "describing"
    """The gang has ended with failures, and more is being found out about them."""
    ENDED = "ended"
    """The gang has ended, and the node waits for what the others do."""
    DISMISSING = "dismissing"
    """The node leaves, and ends first what is left of a gang that has paused."""
    LEAVING = "leaving"
    FINISHED = "finished"
