"""Records of what happened in a job, written to loggers named `torchelastic-events-…`."""

from rankwise.compat.torch.elastic.events.api import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)
from rankwise.compat.torch.elastic.events.handlers import get_logging_handler
from rankwise.compat.torch.elastic.events.recording import (
    _get_or_create_logger,
    construct_and_record_rdzv_event,
    record,
    record_rdzv_event,
)

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "_get_or_create_logger",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
