"""Chip workers: a tree of processes that run tasks on chips, on next-level workers and on helpers.

Names are loaded when they are first used; each module says what it offers.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwise.core.tasks.calls import ChipCallConfig as ChipCallConfig
    from rankwise.core.tasks.tensors import CONTINUOUS_TENSOR_MAX_DIMS as CONTINUOUS_TENSOR_MAX_DIMS
    from rankwise.core.tasks.tensors import ContinuousTensor as ContinuousTensor
    from rankwise.core.tasks.tensors import DataType as DataType
    from rankwise.core.tasks.tensors import TensorArgType as TensorArgType
    from rankwise.core.tasks.tensors import get_dtype_name as get_dtype_name
    from rankwise.core.tasks.tensors import get_element_size as get_element_size
    from rankwise.drivers.real.windows import PeerWatch as PeerWatch
    from rankwise.drivers.real.windows import WindowRegion as WindowRegion
    from rankwise.workers.arguments import ChipStorageTaskArgs as ChipStorageTaskArgs
    from rankwise.workers.arguments import TaskArgs as TaskArgs
    from rankwise.workers.arguments import read_args_from_blob as read_args_from_blob
    from rankwise.workers.arguments import scalar_to_uint64 as scalar_to_uint64
    from rankwise.workers.arrays import array_at as array_at
    from rankwise.workers.bootstrap import ChipBootstrapChannel as ChipBootstrapChannel
    from rankwise.workers.bootstrap import ChipBootstrapConfig as ChipBootstrapConfig
    from rankwise.workers.bootstrap import ChipBootstrapResult as ChipBootstrapResult
    from rankwise.workers.bootstrap import ChipBufferSpec as ChipBufferSpec
    from rankwise.workers.bootstrap import ChipCommBootstrapConfig as ChipCommBootstrapConfig
    from rankwise.workers.bootstrap import ChipContext as ChipContext
    from rankwise.workers.bootstrap import HostBufferStaging as HostBufferStaging
    from rankwise.workers.callables import ArgDirection as ArgDirection
    from rankwise.workers.callables import ChipCallable as ChipCallable
    from rankwise.workers.callables import CoreCallable as CoreCallable
    from rankwise.workers.callables import Parameter as Parameter
    from rankwise.workers.callables import arg_direction_name as arg_direction_name
    from rankwise.workers.child_context import ChildContext as ChildContext
    from rankwise.workers.child_context import context as context
    from rankwise.workers.chip_timeline import Timeline as Timeline
    from rankwise.workers.chip_timeline import TimelineEntry as TimelineEntry
    from rankwise.workers.chip_worker import ChipShutdownFailed as ChipShutdownFailed
    from rankwise.workers.chip_worker import ChipWorker as ChipWorker
    from rankwise.workers.comm import CommHandle as CommHandle
    from rankwise.workers.domains import DomainSpec as DomainSpec
    from rankwise.workers.domains import create_domain as create_domain
    from rankwise.workers.domains import place_domain as place_domain
    from rankwise.workers.domains import plan_domain as plan_domain
    from rankwise.workers.errors import BadArguments as BadArguments
    from rankwise.workers.errors import BadPointer as BadPointer
    from rankwise.workers.errors import DeviceMemoryExhausted as DeviceMemoryExhausted
    from rankwise.workers.errors import IndexOutOfRange as IndexOutOfRange
    from rankwise.workers.errors import InputWritten as InputWritten
    from rankwise.workers.errors import UnknownName as UnknownName
    from rankwise.workers.failures import TaskFailure as TaskFailure
    from rankwise.workers.member import Member as Member
    from rankwise.workers.member import Window as Window
    from rankwise.workers.orchestrator import Orchestrator as Orchestrator
    from rankwise.workers.platforms.port import Device as Device
    from rankwise.workers.platforms.port import Leak as Leak
    from rankwise.workers.platforms.port import Platform as Platform
    from rankwise.workers.platforms.port import Span as Span
    from rankwise.workers.platforms.port import TaskReport as TaskReport
    from rankwise.workers.platforms.port import TensorSummary as TensorSummary
    from rankwise.workers.platforms.registry import load_platform as load_platform
    from rankwise.workers.platforms.registry import platform_names as platform_names
    from rankwise.workers.recorded_graphs import RecordedGraph as RecordedGraph
    from rankwise.workers.states import DEFAULT_HEAP_RING_SIZE as DEFAULT_HEAP_RING_SIZE
    from rankwise.workers.states import MAILBOX_ERROR_MSG_SIZE as MAILBOX_ERROR_MSG_SIZE
    from rankwise.workers.states import MAILBOX_OFF_ERROR_MSG as MAILBOX_OFF_ERROR_MSG
    from rankwise.workers.states import MAILBOX_SIZE as MAILBOX_SIZE
    from rankwise.workers.states import MAX_RING_DEPTH as MAX_RING_DEPTH
    from rankwise.workers.states import MAX_SCOPE_DEPTH as MAX_SCOPE_DEPTH
    from rankwise.workers.states import SubmitResult as SubmitResult
    from rankwise.workers.states import TaskState as TaskState
    from rankwise.workers.states import WorkerType as WorkerType
    from rankwise.workers.torch_bridge import make_tensor_arg as make_tensor_arg
    from rankwise.workers.torch_bridge import torch_dtype_to_datatype as torch_dtype_to_datatype
    from rankwise.workers.worker import Worker as Worker
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
        "BadArguments BadPointer DeviceMemoryExhausted IndexOutOfRange InputWritten UnknownName"
    ),
    "rankwise.workers.failures": "TaskFailure",
    "rankwise.workers.member": "Member Window",
    "rankwise.workers.orchestrator": "Orchestrator",
    "rankwise.workers.platforms.port": "Device Leak Platform Span TaskReport TensorSummary",
    "rankwise.workers.platforms.registry": "load_platform platform_names",
    "rankwise.workers.recorded_graphs": "RecordedGraph",
    "rankwise.workers.states": (
        "DEFAULT_HEAP_RING_SIZE MAILBOX_ERROR_MSG_SIZE MAILBOX_OFF_ERROR_MSG MAILBOX_SIZE "
        "MAX_RING_DEPTH MAX_SCOPE_DEPTH SubmitResult TaskState WorkerType"
    ),
    "rankwise.workers.chip_timeline": "Timeline TimelineEntry",
    "rankwise.workers.torch_bridge": "make_tensor_arg torch_dtype_to_datatype",
    "rankwise.workers.worker": "Worker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Which module a name lives in."""

if not TYPE_CHECKING:  # type checkers see what is imported as itself
    __all__ = sorted(_HOMES)  # noqa: PLE0605  # the names are above, once


def __getattr__(name: str) -> "Any":
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankwise.workers' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # most programs need few of the names

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
