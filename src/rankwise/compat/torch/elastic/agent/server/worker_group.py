"""What an agent looks after: a group of workers, from a specification to a result."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rankwise.compat.torch.elastic.multiprocessing.errors import ProcessFailure
from rankwise.compat.torch.elastic.rendezvous import RendezvousHandler


@dataclass
class WorkerSpec:
    """What the workers of one role on one node are.

    Attributes:
        role: what they are called; workers of one role are counted together.
        local_world_size: how many this node has.
        rdzv_handler: where the nodes meet.
        fn: deprecated name of `entrypoint`.
        entrypoint: a function, or a program.
        args: its arguments, the same for all.
        max_restarts: how often all may be started again after a failure.
        monitor_interval: seconds between two questions to the rendezvous.
        master_port, master_addr: where rank 0 listens; None leaves it to the rendezvous.
        local_addr: this node's address.
        event_log_handler: where events go, by a name in `elastic.events.handlers`.
        numa_options: torch's `NumaOptions`.
        duplicate_stdout_filters, duplicate_stderr_filters: see `start_processes`.
        virtual_local_rank: every worker sees LOCAL_RANK=0 and one device.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        assert self.local_world_size > 0, f"local_world_size is {self.local_world_size}"
        assert self.monitor_interval > 0, f"monitor_interval is {self.monitor_interval}"
        if self.fn:
            warnings.warn(
                "WorkerSpec.fn will be deprecated, please use WorkerSpec.entrypoint instead",
                category=DeprecationWarning,
                stacklevel=3,
            )
            self.entrypoint = self.fn
        assert self.entrypoint, "there is no entrypoint"

    def get_entrypoint_name(self) -> str:
        """The program's file name, or the function's qualified name."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        assert self.entrypoint is not None, "checked when made"
        return str(self.entrypoint.__qualname__)


@dataclass(eq=False, repr=False, slots=True)
class Worker:
    """One worker's place. `id` is whatever its agent tells it by: the pid, for a local one."""

    id: Any = field(default=None, init=False)
    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank},"
            f"role_rank={self.role_rank},world_size={self.world_size},"
            f"role_world_size={self.role_world_size}"
        )

    __repr__ = __str__


class WorkerState(str, Enum):  # noqa: UP042  # str() of a member is torch's, with the class name
    """How all workers of a group stand; they change together."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: "WorkerState") -> bool:
        """Whether there are processes, healthy or not."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of one specification on one node, and what their last rendezvous gave them."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """What became of a group; values and failures by global rank."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether it failed for good."""
        return self.state == WorkerState.FAILED


@dataclass(eq=False, slots=True)
class _RoleInstanceInfo:
    """What a node tells the others of its group, so that ranks can be counted."""

    role: str
    rank: int
    local_world_size: int

    def serialize(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def deserialize(data: bytes) -> "_RoleInstanceInfo":
        """Read what `serialize` has written."""
        return _RoleInstanceInfo(**json.loads(data))

    @staticmethod
    def compare(obj1: "_RoleInstanceInfo", obj2: "_RoleInstanceInfo") -> int:
        """Order by role, then by rank."""
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: "list[_RoleInstanceInfo]", role: str) -> tuple[int, int]:
        """The first and the last index of a role in a sorted list; -1 and -1 if it has none."""
        places = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)
