"""What happened in a job, as records for a log.

An `Event` is one line of JSON with free metadata; an `RdzvEvent` is one about a rendezvous. The
word is torch's: inside rankwise, machines have stimuli and journals have records.
"""

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Union

__all__ = ["Event", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):  # noqa: UP042  # str() of a member is torch's, with the class name
    """The source of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042  # the same
    """How a node stands in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened, for example `torchelastic.worker.status.FAILED`.

    Attributes:
        name: what happened.
        source: who tells.
        timestamp: when, in milliseconds since 1970; 0 if unknown.
        metadata: everything else, in plain values.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: Union[str, "Event"]) -> "Event":
        """Read an event from its JSON; an event is returned as it is."""
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        fields["source"] = EventSource[fields["source"]]
        return Event(**fields)

    def serialize(self) -> str:
        """Write the event as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class RdzvEvent:
    """Something that happened in a rendezvous.

    Attributes:
        name: where it happened, as `<file>:<function>`.
        run_id: the job.
        message: what happened.
        hostname: the node.
        pid: the process on the node.
        node_state: how the node stands.
        master_endpoint: where the rendezvous store listens.
        rank: the node's rank, once it has one.
        local_id: tells apart the members on one host.
        error_trace: the traceback, when something failed.
    """

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: Union[str, "RdzvEvent"]) -> "RdzvEvent":
        """Read an event from its JSON; an event is returned as it is."""
        if isinstance(data, RdzvEvent):
            return data
        fields = json.loads(data)
        fields["node_state"] = NodeState[fields["node_state"]]
        return RdzvEvent(**fields)

    def serialize(self) -> str:
        """Write the event as one line of JSON."""
        return json.dumps(asdict(self))
