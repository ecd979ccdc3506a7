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
_HOMES: dict[str, str] = {
    "ArgDirection": "rankwise.workers.callables",
    "BadArguments": "rankwise.workers.errors",
    "BadPointer": "rankwise.workers.errors",
    "CONTINUOUS_TENSOR_MAX_DIMS": "rankwise.core.tasks.tensors",
    "ChildContext": "rankwise.workers.child_context",
    "ChipBootstrapChannel": "rankwise.workers.bootstrap",
    "ChipBootstrapConfig": "rankwise.workers.bootstrap",
    "ChipBootstrapResult": "rankwise.workers.bootstrap",
    "ChipBufferSpec": "rankwise.workers.bootstrap",
    "ChipCallConfig": "rankwise.core.tasks.calls",
    "ChipCallable": "rankwise.workers.callables",
    "ChipCommBootstrapConfig": "rankwise.workers.bootstrap",
    "ChipContext": "rankwise.workers.bootstrap",
    "ChipShutdownFailed": "rankwise.workers.chip_worker",
    "ChipStorageTaskArgs": "rankwise.workers.arguments",
    "ChipWorker": "rankwise.workers.chip_worker",
    "CommHandle": "rankwise.workers.comm",
    "ContinuousTensor": "rankwise.core.tasks.tensors",
    "CoreCallable": "rankwise.workers.callables",
    "DEFAULT_HEAP_RING_SIZE": "rankwise.workers.states",
    "DataType": "rankwise.core.tasks.tensors",
    "Device": "rankwise.workers.platforms.port",
    "DeviceMemoryExhausted": "rankwise.workers.errors",
    "DomainSpec": "rankwise.workers.domains",
    "HostBufferStaging": "rankwise.workers.bootstrap",
    "IndexOutOfRange": "rankwise.workers.errors",
    "Leak": "rankwise.workers.platforms.port",
    "MAILBOX_ERROR_MSG_SIZE": "rankwise.workers.states",
    "MAILBOX_OFF_ERROR_MSG": "rankwise.workers.states",
    "MAILBOX_SIZE": "rankwise.workers.states",
    "MAX_RING_DEPTH": "rankwise.workers.states",
    "MAX_SCOPE_DEPTH": "rankwise.workers.states",
    "Member": "rankwise.workers.member",
    "Orchestrator": "rankwise.workers.orchestrator",
    "Parameter": "rankwise.workers.callables",
    "PeerWatch": "rankwise.drivers.real.windows",
    "Platform": "rankwise.workers.platforms.port",
    "RecordedGraph": "rankwise.workers.recording",
    "Span": "rankwise.workers.platforms.port",
    "SubmitResult": "rankwise.workers.states",
    "TaskArgs": "rankwise.workers.arguments",
    "TaskFailure": "rankwise.workers.failures",
    "TaskReport": "rankwise.workers.platforms.port",
    "TaskState": "rankwise.workers.states",
    "TensorArgType": "rankwise.core.tasks.tensors",
    "TensorSummary": "rankwise.workers.platforms.port",
    "Timeline": "rankwise.workers.timeline",
    "TimelineEntry": "rankwise.workers.timeline",
    "UnknownName": "rankwise.workers.errors",
    "Window": "rankwise.workers.member",
    "WindowRegion": "rankwise.drivers.real.windows",
    "Worker": "rankwise.workers.worker",
    "WorkerType": "rankwise.workers.states",
    "arg_direction_name": "rankwise.workers.callables",
    "array_at": "rankwise.workers.arrays",
    "context": "rankwise.workers.child_context",
    "create_domain": "rankwise.workers.domains",
    "get_dtype_name": "rankwise.core.tasks.tensors",
    "get_element_size": "rankwise.core.tasks.tensors",
    "load_platform": "rankwise.workers.platforms.registry",
    "make_tensor_arg": "rankwise.workers.torch_bridge",
    "place_domain": "rankwise.workers.domains",
    "plan_domain": "rankwise.workers.domains",
    "platform_names": "rankwise.workers.platforms.registry",
    "read_args_from_blob": "rankwise.workers.arguments",
    "scalar_to_uint64": "rankwise.workers.arguments",
    "torch_dtype_to_datatype": "rankwise.workers.torch_bridge",
}
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
