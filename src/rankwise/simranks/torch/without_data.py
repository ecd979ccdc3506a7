"""Ranks that compute nothing (`--timing-only`): what of torch is replaced for them.

See `timing_only` for tensors, `placing` for devices and `cuda_choices` for operators.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankwise.simranks.prediction.holders import GRADIENTS, OPTIMIZER, PARAMETERS, HolderRecords
from rankwise.simranks.torch import cuda, cuda_choices, storages
from rankwise.simranks.torch.compiled_graphs import GraphPrices
from rankwise.simranks.torch.cuda_graphs import WITHOUT_DATA
from rankwise.simranks.torch.device_memory import settings_of
from rankwise.simranks.torch.module_paths import follow_modules, with_paths
from rankwise.simranks.torch.operations import charge_thread
from rankwise.simranks.torch.placing import Placing, relocate
from rankwise.simranks.torch.storages import PLACEMENT, name_cuda, storage_of, strided_in
from rankwise.simranks.torch.synthetic_data import repeat_first_batch
from rankwise.simranks.torch.timing_only import TimingMode
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld, present_world, running_rank


def compute_nothing() -> Callable[[], None]:
    """Replace of torch what such ranks must not call; returns what undoes it."""
    storages.be_without_data(is_so=True)
    stack = ExitStack()
    stack.callback(storages.be_without_data, is_so=False)

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        stack.callback(setattr, owner, name, original)

    stack.callback(cuda_choices.choose_as_cuda())
    replace(torch.nn.Module, "__call__", with_paths)
    replace(torch.nn.Module, "to", _with_target)
    graphs = GraphPrices(_mode, remark_upper_bound)
    stack.callback(graphs.close)
    replace(torch, "compile", graphs.compile)
    replace(torch, "save", _unwritten)
    replace(torch, "load", _unread)
    loader = import_module("torch.utils.data").DataLoader
    replace(loader, "__iter__", lambda original: repeat_first_batch(original, remark))
    replace(torch, "set_default_device", _default)
    replace(torch.cuda, "set_device", _naming)
    stack.callback(register_optimizer_step_pre_hook(_note_roles).remove)
    return stack.close


def begin_rank(world: SimulatedWorld, rank: Rank) -> None:
    """Let the calling thread's rank compute nothing, for as long as it lives."""
    clock = world.prediction.clock_of(rank)
    clock.memory.be_limited(world.prediction.memory_limit, lambda: settings_of(os.environ))
    clock.memory.holder_records = HolderRecords()
    mode = TimingMode(clock, world.timing_only, follow_modules())
    rank.own_state[WITHOUT_DATA] = mode
    charge_thread(mode)
    cuda.enter_for_good(lambda: Placing(mode))
    torch._C._push_on_torch_dispatch_stack(mode)  # noqa: SLF001  # see `hooks`


def shard_on_device() -> Callable[[], None]:
    """Have `fully_shard` move what it shards to the device; returns what undoes it."""
    sharding: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    original = sharding._move_states_to_device  # noqa: SLF001  # no public way

    def move(params: list[Any], buffers: list[Any], device: Any) -> None:
        if PLACEMENT.names_cuda and _mode() is not None:
            for tensor in (*params, *buffers):
                relocate(tensor, hint=True)
        original(params, buffers, device)

    sharding._move_states_to_device = move  # noqa: SLF001  # the same

    def undo() -> None:
        sharding._move_states_to_device = original  # noqa: SLF001  # the same

    return undo


def _mode() -> TimingMode | None:
    rank = running_rank()
    return None if rank is None else rank.own_state.get(WITHOUT_DATA)


def _with_target(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to`, which hands on a device that it has parsed."""

    def to(self: Any, *args: Any, **options: Any) -> Any:
        mode = _mode()
        if mode is None:
            return original(self, *args, **options)
        given = [options.get("device"), *args[:1]]
        is_cuda = any(type(each) is int or cuda.on_cpu(each) is not each for each in given)
        is_cpu = any(str(each) == "cpu" for each in given)
        if is_cuda:
            name_cuda(mode.clock)
        before = PLACEMENT.target
        PLACEMENT.target = True if is_cuda else False if is_cpu else before
        try:
            return original(self, *args, **options)
        finally:
            PLACEMENT.target = before

    return to


_UNWRITTEN = "checkpoints are not written"
_UNREAD = "checkpoints are not read, but for the shapes in them"


def _unwritten(_original: Callable[..., Any]) -> Callable[..., Any]:
    def save(*_args: Any, **_options: Any) -> None:
        remark(_UNWRITTEN)

    return save


def _unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(file: Any, *args: Any, **options: Any) -> Any:
        remark(_UNREAD)
        if isinstance(file, str | os.PathLike):  # its numbers stay on the disk
            options["mmap"] = True
        return original(file, *args, **options)

    return load


def _unread_in_place(_original: Callable[..., Any]) -> Callable[..., Any]:
    def load(*_args: Any, **_options: Any) -> None:
        remark(_UNREAD)

    return load


def _unwritten_later(_original: Callable[..., Any]) -> Callable[..., Any]:
    def save(*_args: Any, **_options: Any) -> Future[None]:
        remark(_UNWRITTEN)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return save


_CHECKPOINTS = {
    "save": _unwritten, "async_save": _unwritten_later, "load": _unread_in_place,
    "save_state_dict": _unwritten, "load_state_dict": _unread_in_place,
}  # fmt: skip


def leave_checkpoints() -> Callable[[], None]:
    """Have `torch.distributed.checkpoint` neither read nor write; returns what undoes it."""
    stack = ExitStack()
    for module in ("", ".state_dict_saver", ".state_dict_loader"):
        owner = import_module(f"torch.distributed.checkpoint{module}")
        for name, make in _CHECKPOINTS.items():
            if (original := getattr(owner, name, None)) is not None:
                setattr(owner, name, make(original))
                stack.callback(setattr, owner, name, original)
    return stack.close


def remark(text: str) -> None:
    """Have the user told once of what this run leaves out."""
    remarks = present_world().prediction.remarks
    if text not in remarks:
        remarks.append(text)


def remark_upper_bound(text: str) -> None:
    """Have the user told once of a part that is predicted as slower code than the program has."""
    present_world().prediction.is_upper_bound = True
    remark(f"upper bound: {text}")


def _default(original: Callable[..., None]) -> Callable[..., None]:
    def set_default_device(device: Any) -> None:
        mode = _mode()
        if mode is not None and cuda.on_cpu(device) is not device:
            name_cuda(mode.clock)
            PLACEMENT.is_default = True
            return
        PLACEMENT.is_default = False
        original(device)

    return set_default_device


def _naming(original: Callable[..., None]) -> Callable[..., None]:
    def set_device(device: Any) -> None:
        original(device)
        if (mode := _mode()) is not None:
            name_cuda(mode.clock)

    return set_device


def _note_roles(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Tell parameters, gradients and the state of an optimiser from other tensors."""
    if _mode() is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _be(parameter, PARAMETERS)
            if parameter.grad is not None:
                _be(parameter.grad, GRADIENTS)
    for state in optimizer.state.values():
        for value in state.values():
            _be(value, OPTIMIZER)


def _be(value: Any, kind: str) -> None:
    for tensor in strided_in(getattr(value, "_local_tensor", value)):
        held = storage_of(tensor)
        if held is not None and held.holder is not None:
            held.holder.kind = kind


def end_step(rank: Rank) -> None:
    """A step of a rank is over."""
    mode: TimingMode | None = rank.own_state.get(WITHOUT_DATA)
    if mode is not None and mode.clock.memory.holder_records is not None:
        mode.paths.end_step()
        mode.clock.memory.holder_records.end_step()
