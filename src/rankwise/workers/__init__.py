"""Chip workers: a tree of processes that run tasks on chips, on next-level workers and on helpers.

Names are loaded when they are first used; each module says what it offers.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwise.core.tasks.calls import ChipCallConfig
    from rankwise.core.tasks.tensors import (
        CONTINUOUS_TENSOR_MAX_DIMS,
        ContinuousTensor,
        DataType,
        TensorArgType,
        get_dtype_name,
        get_element_size,
    )
    from rankwise.drivers.real.windows import PeerWatch, WindowRegion
    from rankwise.workers.arguments import (
        ChipStorageTaskArgs,
        TaskArgs,
        read_args_from_blob,
        scalar_to_uint64,
    )
    from rankwise.workers.arrays import array_at
    from rankwise.workers.bootstrap import (
        ChipBootstrapChannel,
        ChipBootstrapConfig,
        ChipBootstrapResult,
        ChipBufferSpec,
        ChipCommBootstrapConfig,
        ChipContext,
        HostBufferStaging,
    )
    from rankwise.workers.callables import (
        ArgDirection,
        ChipCallable,
        CoreCallable,
        Parameter,
        arg_direction_name,
    )
    from rankwise.workers.child_context import ChildContext, context
    from rankwise.workers.chip_worker import ChipShutdownFailed, ChipWorker
    from rankwise.workers.comm import CommHandle
    from rankwise.workers.domains import DomainSpec, create_domain, place_domain, plan_domain
    from rankwise.workers.errors import (
        BadArguments,
        BadPointer,
        DeviceMemoryExhausted,
        IndexOutOfRange,
        UnknownName,
    )
    from rankwise.workers.failures import TaskFailure
    from rankwise.workers.member import Member, Window
    from rankwise.workers.orchestrator import Orchestrator
    from rankwise.workers.platforms.port import (
        Device,
        Leak,
        Platform,
        Span,
        TaskReport,
        TensorSummary,
    )
    from rankwise.workers.platforms.registry import load_platform, platform_names
    from rankwise.workers.recording import RecordedGraph
    from rankwise.workers.states import (
        DEFAULT_HEAP_RING_SIZE,
        MAILBOX_ERROR_MSG_SIZE,
        MAILBOX_OFF_ERROR_MSG,
        MAILBOX_SIZE,
        MAX_RING_DEPTH,
        MAX_SCOPE_DEPTH,
        SubmitResult,
        TaskState,
        WorkerType,
    )
    from rankwise.workers.timeline import Timeline, TimelineEntry
    from rankwise.workers.torch_bridge import make_tensor_arg, torch_dtype_to_datatype
    from rankwise.workers.worker import Worker
_NAMES = {
    "rankwise.core.tasks.calls": "ChipCallConfig",
    "rankwise.core.tasks.tensors": (
        "CONTINUOUS_TENSOR_MAX_DIMS ContinuousTensor DataType TensorArgType get_dtype_name "
        "get_element_size"
    ),
    "rankwise.drivers.real.windows": "PeerWatch WindowRegion",
    "rankwise.workers.arguments": (
        "ChipStorageTaskArgs TaskArgs read_args_from_blob scalar_to_uint64"
    ),
    "rankwise.workers.arrays": "array_at",
    "rankwise.workers.bootstrap": (
        "ChipBootstrapChannel ChipBootstrapConfig ChipBootstrapResult ChipBufferSpec "
        "ChipCommBootstrapConfig ChipContext HostBufferStaging"
    ),
    "rankwise.workers.callables": (
        "ArgDirection ChipCallable CoreCallable Parameter arg_direction_name"
    ),
    "rankwise.workers.child_context": "ChildContext context",
    "rankwise.workers.chip_worker": "ChipShutdownFailed ChipWorker",
    "rankwise.workers.comm": "CommHandle",
    "rankwise.workers.domains": "DomainSpec create_domain place_domain plan_domain",
    "rankwise.workers.errors": (
        "BadArguments BadPointer DeviceMemoryExhausted IndexOutOfRange UnknownName"
    ),
    "rankwise.workers.failures": "TaskFailure",
    "rankwise.workers.member": "Member Window",
    "rankwise.workers.orchestrator": "Orchestrator",
    "rankwise.workers.platforms.port": "Device Leak Platform Span TaskReport TensorSummary",
    "rankwise.workers.platforms.registry": "load_platform platform_names",
    "rankwise.workers.recording": "RecordedGraph",
    "rankwise.workers.states": (
        "DEFAULT_HEAP_RING_SIZE MAILBOX_ERROR_MSG_SIZE MAILBOX_OFF_ERROR_MSG MAILBOX_SIZE "
        "MAX_RING_DEPTH MAX_SCOPE_DEPTH SubmitResult TaskState WorkerType"
    ),
    "rankwise.workers.timeline": "Timeline TimelineEntry",
    "rankwise.workers.torch_bridge": "make_tensor_arg torch_dtype_to_datatype",
    "rankwise.workers.worker": "Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Which module a name lives in."""

__all__ = [  # spelled out, since type checkers read this list and cannot run code
    "CONTINUOUS_TENSOR_MAX_DIMS",
    "DEFAULT_HEAP_RING_SIZE",
    "MAILBOX_ERROR_MSG_SIZE",
    "MAILBOX_OFF_ERROR_MSG",
    "MAILBOX_SIZE",
    "MAX_RING_DEPTH",
    "MAX_SCOPE_DEPTH",
    "ArgDirection",
    "BadArguments",
    "BadPointer",
    "ChildContext",
    "ChipBootstrapChannel",
    "ChipBootstrapConfig",
    "ChipBootstrapResult",
    "ChipBufferSpec",
    "ChipCallConfig",
    "ChipCallable",
    "ChipCommBootstrapConfig",
    "ChipContext",
    "ChipShutdownFailed",
    "ChipStorageTaskArgs",
    "ChipWorker",
    "CommHandle",
    "ContinuousTensor",
    "CoreCallable",
    "DataType",
    "Device",
    "DeviceMemoryExhausted",
    "DomainSpec",
    "HostBufferStaging",
    "IndexOutOfRange",
    "Leak",
    "Member",
    "Orchestrator",
    "Parameter",
    "PeerWatch",
    "Platform",
    "RecordedGraph",
    "Span",
    "SubmitResult",
    "TaskArgs",
    "TaskFailure",
    "TaskReport",
    "TaskState",
    "TensorArgType",
    "TensorSummary",
    "Timeline",
    "TimelineEntry",
    "UnknownName",
    "Window",
    "WindowRegion",
    "Worker",
    "WorkerType",
    "arg_direction_name",
    "array_at",
    "context",
    "create_domain",
    "get_dtype_name",
    "get_element_size",
    "load_platform",
    "make_tensor_arg",
    "place_domain",
    "plan_domain",
    "platform_names",
    "read_args_from_blob",
    "scalar_to_uint64",
    "torch_dtype_to_datatype",
]


def __getattr__(name: str) -> "Any":
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankwise.workers' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # most programs need few of the names

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
