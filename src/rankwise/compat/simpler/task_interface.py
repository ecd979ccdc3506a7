"""What `simpler.task_interface` and its native part `_task_interface` have."""

from ctypes import c_int32
from typing import Any

from rankwise.compat.simpler.task_errors import with_text
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tasks.tensors import (
    CONTINUOUS_TENSOR_MAX_DIMS,
    ContinuousTensor,
    DataType,
    TensorArgType,
    get_dtype_name,
    get_element_size,
)
from rankwise.workers import chip_worker
from rankwise.workers.arguments import (
    ChipStorageTaskArgs,
    TaskArgs,
    read_args_from_blob,
    scalar_to_uint64,
)
from rankwise.workers.bootstrap import (
    ChannelState,
    ChipBootstrapChannel,
    ChipBootstrapConfig,
    ChipBootstrapResult,
    ChipBufferSpec,
    ChipCommBootstrapConfig,
    ChipContext,
    HostBufferStaging,
    channel_bytes,
)
from rankwise.workers.callables import ArgDirection, ChipCallable, CoreCallable, arg_direction_name
from rankwise.workers.orchestrator import Orchestrator as _Orchestrator
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
from rankwise.workers.worker import Worker as _Worker

__all__ = [
    "CHIP_BOOTSTRAP_MAILBOX_SIZE",
    "CONTINUOUS_TENSOR_MAX_DIMS",
    "DEFAULT_HEAP_RING_SIZE",
    "MAILBOX_ERROR_MSG_SIZE",
    "MAILBOX_OFF_ERROR_MSG",
    "MAILBOX_SIZE",
    "MAX_RING_DEPTH",
    "MAX_SCOPE_DEPTH",
    "ArgDirection",
    "ChipBootstrapChannel",
    "ChipBootstrapConfig",
    "ChipBootstrapMailboxState",
    "ChipBootstrapResult",
    "ChipBufferSpec",
    "ChipCallConfig",
    "ChipCallable",
    "ChipCommBootstrapConfig",
    "ChipContext",
    "ChipStorageTaskArgs",
    "ChipWorker",
    "ContinuousTensor",
    "CoreCallable",
    "DataType",
    "HostBufferStaging",
    "SubmitResult",
    "TaskArgs",
    "TaskState",
    "TensorArgType",
    "WorkerType",
    "_ChipWorker",
    "_Orchestrator",
    "_Worker",
    "_mailbox_load_i32",
    "_mailbox_store_i32",
    "arg_direction_name",
    "get_dtype_name",
    "get_element_size",
    "read_args_from_blob",
    "scalar_to_uint64",
]

ChipBootstrapMailboxState = ChannelState
CHIP_BOOTSTRAP_MAILBOX_SIZE = channel_bytes(376)
_SIMULATED = frozenset({"a2a3sim", "a5sim"})


def platform_of(name: Any) -> Any:
    """The platform that stands for one of the model's."""
    return "sim" if name in _SIMULATED else name


class ChipWorker(chip_worker.ChipWorker):
    """One chip; the model's binaries have no meaning here, and a simulated chip takes their place.

    `init(host_path, aicpu_path, aicore_path[, sim_context_lib_path])` chooses `sim`, and
    `init(platform)` what it says.
    """

    def init(self, platform: Any = "sim", *binaries: object, **named: object) -> None:
        """Choose what the chip is made of."""
        super().init("sim" if binaries or named else platform_of(platform))

    @property
    def initialized(self) -> bool:
        """Whether `init` was called, and `finalize` was not."""
        return self.platform != "" and not self.is_finalized

    @property
    def device_set(self) -> bool:
        """Whether there is a chip."""
        return super().device_id is not None

    @property
    def device_id(self) -> int:
        """The number of the chip; -1 while there is none."""
        number = super().device_id
        return -1 if number is None else number

    def run(self, callable_: ChipCallable, args: Any = None, *rest: Any, **options: Any) -> int:
        """Run a task; whatever it raises is a `RuntimeError` too."""
        try:
            return super().run(callable_, args, *rest, **options)
        except Exception as error:
            if isinstance(error, RuntimeError):
                raise
            raise with_text(error, f"{type(error).__name__}: {error}") from error


_ChipWorker = ChipWorker


def _mailbox_load_i32(address: int) -> int:
    """The word at an address. On machines that reorder loads, nothing is promised."""
    return c_int32.from_address(address).value


def _mailbox_store_i32(address: int, value: int) -> None:
    """Write the word at an address. On machines that reorder stores, nothing is promised."""
    c_int32.from_address(address).value = value
