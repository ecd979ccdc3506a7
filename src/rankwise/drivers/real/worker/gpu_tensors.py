"""What of a rank holds the memory of its GPUs, when there is no more: for the report.

It runs in a rank that dies of that, so it allocates nothing there, and imports nothing.
"""

import gc
import os
import sys
from types import ModuleType
from typing import Any

_TENSORS_SHOWN = 3


def note_on_memory(error: BaseException, device_type: str = "cuda") -> str:
    """Add what the tensors of this rank hold to an error of torch that memory is short.

    Return it, too: the report shows it without a look at the traceback. Empty for other errors.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(error) is not getattr(torch, "OutOfMemoryError", None):
        return ""
    if "RANKWISE_SIMULATED" in os.environ:
        return ""  # the tensors of all ranks are in this process, and the prediction tells more
    held = held_in_words(torch, device_type)
    note = f"this rank's tensors: {held}"
    if held and hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return held


def held_in_words(torch: ModuleType, device_type: str) -> str:
    """What tensors of these devices hold, by kind, and the largest that are no parameters.

    Empty if there are none. Each storage counts once, for the first kind that it belongs to.
    """
    tensors, optimizers = _living(torch, device_type)
    parameters = [each for each in tensors if isinstance(each, torch.nn.Parameter)]
    gradients = [each.grad for each in parameters if each.grad is not None]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in (values.values() if isinstance(values, dict) else ())
        if isinstance(value, torch.Tensor) and value.device.type == device_type
    ]
    counted: set[int] = set()
    kinds = (
        ("parameters", parameters),
        ("gradients", gradients),
        ("optimizer state", state),
        ("other tensors", tensors),
    )
    told: "list[str]" = []  # noqa: UP037 - ranks may run an older Python
    others: "dict[str, tuple[int, int]]" = {}  # noqa: UP037 - the same
    for name, members in kinds:
        total = 0
        for tensor in _plain(torch, members):
            storage = tensor.untyped_storage()
            if storage._cdata in counted:  # noqa: SLF001 - tensors without data have no pointer
                continue
            counted.add(storage._cdata)  # noqa: SLF001 - the same
            total += storage.nbytes()
            if members is tensors:
                kind = f"{tuple(tensor.shape)} {str(tensor.dtype).rpartition('.')[2]}"
                size, count = others.get(kind, (0, 0))
                others[kind] = size + storage.nbytes(), count + 1
        if total:
            told.append(f"{name} {_size(total)}")
    if not told:
        return ""
    largest = sorted(others.items(), key=lambda item: -item[1][0])[:_TENSORS_SHOWN]
    shown = ", ".join(f"{count} of {kind} {_size(size)}" for kind, (size, count) in largest)
    return ", ".join(told) + (f" ({shown})" if shown else "")


def _plain(torch: ModuleType, tensors: "list[Any]") -> "list[Any]":
    """The tensors that hold memory: those of FSDP2 are DTensors, whose own storage holds none."""
    found: "list[Any]" = []  # noqa: UP037 - the same
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        parts = [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
        found += [each for each in parts if isinstance(each, torch.Tensor)]
    return found


def _living(torch: ModuleType, device_type: str) -> tuple[list[Any], list[Any]]:
    tensors, optimizers = [], []
    for each in gc.get_objects():
        kind = type(each)  # `isinstance` would ask objects that pretend, and so run their code
        if issubclass(kind, torch.Tensor):
            if each.device.type == device_type:
                tensors.append(each)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(each)
    return tensors, optimizers


def _size(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return f"{count / 1024:.3g} KiB"
