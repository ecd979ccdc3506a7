"""CUDA devices that are modelled: what scripts for CUDA ask for is done by the CPU.

A rank with such devices has a mode in its thread that turns each `device="cuda"`, `.to("cuda:1")`
and `.cuda()` into the CPU; tensors are copied where a real device would get a copy. They say that
they are on the CPU, but that they are of CUDA (`is_cuda`) if it is not torch that asks, since
programs assert it. The part of `torch.cuda` that scripts use is replaced: one device for each rank
of the node, streams that do everything at once, events that tell time. Autocasting for CUDA is that
of the CPU, to float16 if no type is given.

Queries about memory tell what a prediction counts (`device_memory`).
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter  # noqa: F401  # warns of Triton once there seems to be CUDA

from rankwise.sim.triton import modelled_device
from rankwise.simranks.torch import streams
from rankwise.simranks.torch.cuda_extras import extras_of_cuda
from rankwise.simranks.torch.cuda_graphs import Graph, graph_pool_handle
from rankwise.simranks.torch.cuda_tools import tools_of_cuda
from rankwise.simranks.torch.device_memory import capacity, memory_names
from rankwise.simranks.torch.storages import storage_of
from rankwise.simranks.torch.streams import LaneEvent, LaneStream
from rankwise.simranks.torch.sync_batch_norm import KERNELS, synchronising
from rankwise.simranks.world.world import present_world, running_rank

_of_thread = threading.local()
_CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_KEY = "modelled cuda"
_CUDA_TYPE = "torch.cuda."
_IS_CUDA = Tensor.is_cuda.__get__
_has_torch_function = torch._C._has_torch_function  # noqa: SLF001  # `overrides` is changed
_ATTENTION = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001  # `functional` may be patched


class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Sends to the CPU what is meant for CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with other devices."""
        del types
        if func == _IS_CUDA:
            return not modelled_device.is_asked_by(sys._getframe(1), "torch") or func(*args)  # noqa: SLF001  # no other way to the caller
        kwargs = dict(kwargs or {})
        if func is Tensor.type:
            return self._typed(args, kwargs)
        if func is Tensor.cuda:
            return args[0].clone()
        if func is Tensor.pin_memory:
            return args[0] if _is_pinned(args[0]) else _pinned(args[0].clone())
        if func is torch.device:  # a program may ask for one, and what kind it is
            is_number = bool(args) and type(args[0]) is int
            return func("cuda", *args) if is_number else func(*args, **kwargs)
        is_pinned = kwargs.pop("pin_memory", None) is True
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CUDA
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CUDA, *args[2:])
        moved = tuple(map(on_cpu, args)), {name: on_cpu(each) for name, each in kwargs.items()}
        is_to_cuda = any(each is _CPU for each in (*moved[0][1:], *moved[1].values()))
        is_moved = func is Tensor.cpu or (func is Tensor.to and is_to_cuda)
        with _fused_attention() if func is _ATTENTION else nullcontext():
            result = func(*moved[0], **moved[1])
        if is_pinned and isinstance(result, Tensor):
            _pinned(result)
        return result.clone() if is_moved and result is args[0] else result

    def _typed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Tensor.type`: programs find the name of a CUDA type, and may ask for one."""
        if len(args) == 1 and not kwargs:
            name = str(Tensor.type(args[0]))
            is_torch = modelled_device.is_asked_by(sys._getframe(2), "torch")  # noqa: SLF001  # the same
            names_device = not is_torch and self._is_of_device(args[0])
            return name.replace("torch.", _CUDA_TYPE, 1) if names_device else name
        plain = [each.replace(_CUDA_TYPE, "torch.") if type(each) is str else each for each in args]
        return Tensor.type(*plain, **kwargs)

    def _is_of_device(self, _tensor: Tensor) -> bool:
        """Whether a tensor lies on the modelled device."""
        return True


def enter_for_good(make: "Callable[[], OnCpu]") -> None:
    """Have the calling thread be in such a mode as long as it lives, in backward as well."""
    _of_thread.make = make
    make().__enter__()


def _mode_of_thread() -> OnCpu:
    make: Callable[[], OnCpu] = getattr(_of_thread, "make", OnCpu)
    return make()


_pinned_storages: dict[int, Any] = {}
"""By the identity of a storage that is said to be pinned: a reference that ends with it.

Programs pin what is not: FSDP would keep another copy of its parameters than it has.
"""


def _pinned(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    identity = id(storage)
    _pinned_storages[identity] = weakref.ref(storage, lambda _: _pinned_storages.pop(identity))
    return tensor


def _is_pinned(tensor: Tensor, _device: Any = None) -> bool:
    return id(tensor.untyped_storage()) in _pinned_storages


def _record_stream(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of a tensor until a stream has passed the point at which it is freed."""
    held, clock = storage_of(getattr(tensor, "_local_tensor", tensor)), streams.queued_clock()
    if held is not None and clock is not None and isinstance(stream, LaneStream):
        held.use(clock.number_of(stream.lane_on(clock)))


def has_torch_function(args: Any) -> bool:
    """`torch.overrides.has_torch_function`, which does not count our mode.

    Modules ask it before they call one kernel for many: encoder layers, attention in inference.
    """
    count = torch._C._len_torch_function_stack()  # noqa: SLF001  # torch has no public way
    if not count or not isinstance(torch._C._get_function_stack_at(count - 1), OnCpu):  # noqa: SLF001  # the same
        return bool(_has_torch_function(args))
    ours = torch._C._pop_torch_function_stack()  # noqa: SLF001  # the same
    try:
        return bool(_has_torch_function(args))
    finally:
        torch._C._push_on_torch_function_stack(ours)  # noqa: SLF001  # the same


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Let the CPU attend if a program allows only kernels that it has not; its own is `flash`."""
    cuda = torch.backends.cuda
    is_lacking = not cuda.flash_sdp_enabled() and (
        cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )
    if is_lacking:
        cuda.enable_flash_sdp(_YES)
    try:
        yield
    finally:
        if is_lacking:
            cuda.enable_flash_sdp(_NO)


def on_cpu(value: Any) -> Any:
    """The CPU instead of a CUDA device; what is no device stays."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return value


class Stream(LaneStream):
    """A stream of a modelled CUDA device."""

    def __init__(self, _device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(priority=priority)
        self.device = torch.device("cuda", present_device())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return False
        return other.device == self.device and other.lanes is self.lanes

    def __hash__(self) -> int:
        return hash(self.device)


Event = LaneEvent


def _on_device(find: Callable[[], LaneStream]) -> Callable[..., Stream]:
    """What gives a stream of the present device on the same lane as the one that is found."""

    def stream_of(_device: Any = None) -> Stream:
        stream = Stream()
        stream.lanes = find().lanes
        return stream

    return stream_of


def present_device() -> int:
    """The number of the device that the calling rank has chosen on its node."""
    rank = running_rank()
    return 0 if rank is None else rank.own_state.get(_KEY, 0)


def _index(device: Any) -> int:
    if device is None:
        return present_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return present_device() if index is None else index


def _set_device(device: Any) -> None:
    index, count = _index(device), _count()
    if not 0 <= index < count:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of {count}")
    rank = running_rank()
    if rank is not None:
        rank.own_state[_KEY] = index


def _count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class DeviceGuard:
    """Makes a device the present one; a class, since torch asks for instances of it."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = present_device()
        _set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _set_device(self.prev_idx)


def _properties(_device: Any = None) -> SimpleNamespace:
    return modelled_device.properties(capacity(), _identity())


def _name(_device: Any = None) -> str:
    return _identity().name


def _capability(_device: Any = None) -> tuple[int, int]:
    return _identity().capability


def _identity() -> modelled_device.DeviceIdentity:
    prediction = None if running_rank() is None else present_world().prediction
    return modelled_device.UNNAMED if prediction is None else prediction.identity


def _answers(value: Any = None) -> Callable[..., Any]:
    """A function that always gives this; a new one each time, as `torch.compile` wants them."""
    return lambda *_, **__: value


def _cpu_random_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _cpu_random_states() -> list[Tensor]:
    return [torch.get_rng_state() for _ in range(_count())]


class _DefaultGenerators:
    """`torch.cuda.default_generators`: one of the CPU for each device, of each rank its own."""

    def __len__(self) -> int:
        """How many devices there are."""
        return int(_count())

    def __getitem__(self, index: int) -> torch.Generator:
        """That of a device; what a rank draws without a generator does not change with it."""
        rank = running_rank()
        made = {} if rank is None else rank.own_state.setdefault(_GENERATORS, {})
        place = range(len(self))[index]
        if place not in made:
            made[place] = torch.Generator()
        generator: torch.Generator = made[place]
        return generator


_GENERATORS = "generators of devices"


def _unless_torch_asks(name: str, original: Any, modelled: Callable[..., Any]) -> Any:
    """A function that tells programs of a device; torch itself has to go on as on the CPU."""

    def tell(*args: Any, **options: Any) -> Any:
        is_torch = modelled_device.is_asked_by(sys._getframe(1), "torch")  # noqa: SLF001  # no other way to the caller
        return (original if is_torch else modelled)(*args, **options)

    tell.__name__ = name
    return tell


def _initialised() -> None:
    """Torch's Python code may ask for CUDA; its C++ code, below a program's call, may not."""
    if not modelled_device.is_asked_by(sys._getframe(1), "torch"):  # noqa: SLF001  # no other way to the caller
        raise RuntimeError("this would use a real GPU: only threads of ranks find the modelled one")


_YES, _NO = True, False
_MEMORY = memory_names(lambda device: _index(device) == present_device())
_NAMES: dict[str, Any] = {
    "device_count": _count, "current_device": present_device, "set_device": _set_device,
    "_lazy_init": _initialised, "device": DeviceGuard, "get_device_properties": _properties,
    "get_device_name": _name,
    "get_device_capability": _capability,
    **_MEMORY, "get_rng_state": _cpu_random_state, "default_generators": _DefaultGenerators(),
    "Stream": Stream, "Event": Event, "current_stream": _on_device(streams.current_stream),
    "default_stream": _on_device(streams.default_stream), "stream": streams.InStream,
    "set_stream": streams.use_stream, "synchronize": streams.synchronize,
    "is_current_stream_capturing": _answers(_NO),
    **{
        name: _answers(_YES)
        for name in ("is_available", "is_initialized", "is_bf16_supported")
    },
    **{
        name: _answers()
        for name in ("init", "ipc_collect", "manual_seed", "manual_seed_all",
                     "set_rng_state", "reset_accumulated_memory_stats", "seed",
                     "seed_all", "set_per_process_memory_fraction", "set_rng_state_all")
    },
    "get_rng_state_all": _cpu_random_states, "initial_seed": torch.initial_seed,
    "get_arch_list": _answers(["sm_90"]),
}  # fmt: skip
"""What of `torch.cuda` is replaced. There is no random state but the CPU's."""
_OF_ACCELERATOR: dict[str, Any] = {
    "current_accelerator": _answers(CUDA), "current_device_index": present_device,
    "current_device_idx": present_device,
    "set_device_index": _set_device, "set_device_idx": _set_device,
    "get_memory_info": _NAMES["mem_get_info"],
    **{
        name: _NAMES[name]
        for name in ("current_stream", "device_count", "empty_cache", "is_available",
                     "reset_accumulated_memory_stats", "reset_peak_memory_stats", "set_stream",
                     "synchronize")
    },
    **{
        name: getattr(torch.cuda, name)
        for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated",
                     "memory_reserved", "memory_stats")
    },
}  # fmt: skip
"""The same of `torch.accelerator`."""


def model_cuda() -> Callable[[], None]:
    """Let ranks find CUDA devices; returns what undoes it."""
    stack = ExitStack()

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    # Programs find the same function in several modules, each of which has its own name for it.
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name in _NAMES.keys() & vars(owner).keys():
            replace(owner, name, _NAMES[name])
    for name, value in _OF_ACCELERATOR.items():
        told = _unless_torch_asks(name, getattr(torch.accelerator, name), value)
        replace(torch.accelerator, name, told)
    for owner, name, tool in (*tools_of_cuda(), *extras_of_cuda()):
        replace(owner, name, tool)
    replace(Tensor, "is_pinned", _is_pinned)
    replace(Tensor, "record_stream", _record_stream)  # C++ looks at the stream before any mode
    replace(torch.version, "cuda", "13.0")  # it also tells torch.compile that this is no AMD device
    replace(torch.cuda.nccl, "version", _answers((2, 27, 7)))
    for owner in (torch.cuda, torch.cuda.graphs):
        replace(owner, "CUDAGraph", Graph)
        replace(owner, "graph_pool_handle", graph_pool_handle)
    if not hasattr(torch._C, "_host_emptyCache"):  # noqa: SLF001  # a build for the CPU has none
        torch._C._host_emptyCache = _answers()  # noqa: SLF001  # the same
        stack.callback(delattr, torch._C, "_host_emptyCache")  # noqa: SLF001  # the same
    for kernel in KERNELS:
        replace(torch, kernel.__name__, kernel)
    replace(torch.overrides, "has_torch_function", has_torch_function)
    replace(torch.nn.SyncBatchNorm, "forward", synchronising(torch.nn.SyncBatchNorm.forward))
    replace(torch.autocast, "__init__", _for_cpu(torch.autocast.__init__, torch.float16))
    replace(torch.amp.GradScaler, "__init__", _for_cpu(torch.amp.GradScaler.__init__))
    made = DistributedDataParallel.__init__

    # DDP compares device ids with where the parameters are, which is the CPU.
    def make(self: Any, module: Any, *_ids: Any, **options: Any) -> None:
        made(self, module, **{**options, "device_ids": None, "output_device": None})

    replace(DistributedDataParallel, "__init__", make)
    begin = torch.distributed.init_process_group

    def begin_group(*args: Any, device_id: Any = None, **options: Any) -> None:
        del device_id  # torch would ask this build of it for an accelerator
        begin(*args, **options)

    replace(torch.distributed, "init_process_group", begin_group)
    engine = torch.autograd._engine_run_backward  # noqa: SLF001  # no mode is entered below it

    def run_backward(*args: Any, **options: Any) -> Any:
        with _mode_of_thread():
            return engine(*args, **options)

    replace(torch.autograd, "_engine_run_backward", run_backward)
    saving = torch.autograd.graph.save_on_cpu.__init__

    def save_unpinned(self: Any, _pin_memory: Any = None, *args: Any, **options: Any) -> None:
        options.pop("pin_memory", None)  # C++ calls what packs a tensor: no mode is entered there
        saving(self, False, *args, **options)  # noqa: FBT003  # as torch's parameters are

    replace(torch.autograd.graph.save_on_cpu, "__init__", save_unpinned)
    to = torch.nn.Module.to

    # C++ reads what `Module.to` is given, before any mode sees a tensor.
    def module_to(self: Any, *args: Any, **options: Any) -> Any:
        return to(self, *(CUDA if type(each) is int else each for each in args), **options)

    replace(torch.nn.Module, "to", module_to)
    set_default, load = torch.set_default_device, torch.load
    replace(torch, "set_default_device", lambda device: set_default(on_cpu(device)))

    # A file names the devices that its tensors were on, and torch refuses those it does not find.
    def load_to_cpu(file: Any, map_location: Any = None, **options: Any) -> Any:
        return load(file, map_location=on_cpu(map_location or _CPU), **options)

    replace(torch, "load", load_to_cpu)
    replace(torch, "Generator", _generators(torch.Generator))
    mesh = torch.distributed.device_mesh.init_device_mesh

    # The name of a mesh's device chooses its backend, which is the one for CPUs.
    def make_mesh(device_type: str, *args: Any, **options: Any) -> Any:
        return mesh(on_cpu(device_type) and "cpu", *args, **options)

    replace(torch.distributed.device_mesh, "init_device_mesh", make_mesh)
    replace(torch.distributed, "init_device_mesh", make_mesh)
    return stack.close


def shard_on_cpu() -> Callable[[], None]:
    """Have FSDP 1 compute on the CPU, whatever device a program gives; returns what undoes it."""
    from torch.distributed.fsdp import (  # noqa: PLC0415  # few programs need it
        FullyShardedDataParallel,
        _flat_param,
        _runtime_utils,
    )
    from torch.distributed.fsdp._flat_param import FlatParamHandle  # noqa: PLC0415  # the same

    move, original = FlatParamHandle.flat_param_to, FullyShardedDataParallel.__init__

    def make(self: Any, *args: Any, device_id: Any = None, **options: Any) -> None:
        del device_id
        original(self, *args, device_id=_CPU, **options)

    def move_to(self: Any, *args: Any, **options: Any) -> None:
        # FSDP frees the parameters of the device when they are on the CPU, for a full state dict.
        move(self, *args, **{**options, "copy": True})

    # FSDP passes over tensors of the CPU.
    recording = "_no_dispatch_record_stream"
    using = {each: getattr(each, recording) for each in (_flat_param, _runtime_utils)}
    for each in using:
        setattr(each, recording, _record_stream)

    def undo() -> None:
        for each, original_recording in using.items():
            setattr(each, recording, original_recording)
        FullyShardedDataParallel.__init__ = original
        FlatParamHandle.flat_param_to = move
        if has_no_wait:
            del torch.cpu.Stream.synchronize

    # With parameters on the CPU, FSDP waits for the stream of its device; a stream of CUDA has it.
    has_no_wait = not hasattr(torch.cpu.Stream, "synchronize")
    if has_no_wait:
        torch.cpu.Stream.synchronize = _answers()
    FullyShardedDataParallel.__init__ = make
    FlatParamHandle.flat_param_to = move_to
    return undo


def _generators(original: Any) -> type:
    """`torch.Generator`, whose instances are all of the CPU."""

    class OfCpu(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return original(device=on_cpu(device))

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    return OfCpu("Generator", (), {})


def _for_cpu(original: Any, dtype: Any = None) -> Any:
    """A constructor whose first argument is a device, and perhaps another default type."""

    def make(self: Any, device: Any = "cuda", *args: Any, **options: Any) -> None:
        device = options.pop("device_type", device)
        if on_cpu(device) is not device:
            device = "cpu"
            if dtype is not None and not args and options.get("dtype") is None:
                options["dtype"] = dtype
        original(self, device, *args, **options)

    return make
