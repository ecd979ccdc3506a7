"""The orchestrator, as `rankwise.workers` has it."""

from rankwise.workers.orchestrator import Orchestrator

__all__ = ["Orchestrator"]
