"""Parts of `torch.cuda` that a build for the CPU lacks: sleeping kernels, tuning, copies.

- `torch.cuda._sleep` keeps the device busy for so many cycles.
- `torch.cuda.tunable` keeps its settings for each rank, and tunes nothing.
- `torch.cuda.comm` copies between the devices of one process. A rank has all its tensors on one
  device, so copies stay there and cross no link; a remark says so.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.cuda import comm as cuda_comm
from torch.cuda import tunable
from torch.nn.parallel import comm

from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.world.world import present_world, running_rank

_PICOSECONDS_PER_CYCLE = 600
"""That of an SM at 1.67 GHz."""
_REMARK = "copies of torch.cuda.comm stay on the rank's own device, and cross no link"


def extras_of_cuda() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: its owner, its name, and what takes its place."""
    yield torch.cuda, "_sleep", _sleep
    for name, replaced in _tunable().items():
        yield tunable, name, replaced
    for each in (
        broadcast, broadcast_coalesced, reduce_add, reduce_add_coalesced, scatter, gather,
    ):  # fmt: skip
        for owner in (comm, cuda_comm):
            yield owner, each.__name__, each


def _sleep(cycles: int) -> None:
    rank = running_rank()
    prediction = None if rank is None else present_world().prediction
    if prediction is None or rank is None:
        return
    work = DeviceOperation("cuda.sleep", "math", 0, 0, "", shapes=((int(cycles),),))
    prediction.clock_of(rank).compute(
        prediction.price_as(work, int(cycles) * _PICOSECONDS_PER_CYCLE)
    )


class _TunableSettings(threading.local):
    """What a rank has set; the values are torch's at the start."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "enabled": False, "tuning": True, "recording": False, "duration": 30, "iterations": 100,
            "file": "tunableop_results.csv", "buffer": -1,
        }  # fmt: skip


_settings = _TunableSettings()


def _tunable() -> dict[str, Callable[..., Any]]:
    def setter(name: str) -> Callable[..., None]:
        def keep(value: Any = True, *_: Any, **__: Any) -> None:
            _settings.values[name] = value

        return keep

    def getter(name: str) -> Callable[[], Any]:
        return lambda: _settings.values[name]

    return {
        "enable": setter("enabled"),
        "is_enabled": getter("enabled"),
        "tuning_enable": setter("tuning"),
        "tuning_is_enabled": getter("tuning"),
        "record_untuned_enable": setter("recording"),
        "record_untuned_is_enabled": getter("recording"),
        "set_max_tuning_duration": setter("duration"),
        "get_max_tuning_duration": getter("duration"),
        "set_max_tuning_iterations": setter("iterations"),
        "get_max_tuning_iterations": getter("iterations"),
        "set_filename": setter("file"),
        "get_filename": getter("file"),
        "set_rotating_buffer_size": setter("buffer"),
        "get_rotating_buffer_size": getter("buffer"),
        "set_numerical_check_tolerances": setter("tolerances"),
        "get_results": lambda: (),
        "get_validators": lambda: (),
        "read_file": lambda _filename=None: False,
        "tune_gemm_in_file": lambda _filename: None,
        "mgpu_tune_gemm_in_file": lambda _pattern, _count: None,
    }


def broadcast(tensor: Tensor, devices: Any = None, *, out: Any = None) -> tuple[Tensor, ...]:
    """A tensor for each device: the given one for the first."""
    _remark()
    if out is not None:
        for each in out:
            each.copy_(tensor)
        return tuple(out)
    return tensor, *(tensor.clone() for _ in range(len(devices) - 1))


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Any, buffer_size: int = 0
) -> tuple[tuple[Tensor, ...], ...]:
    """Several tensors for each device."""
    del buffer_size
    return tuple(zip(*(broadcast(each, devices) for each in tensors), strict=True))


def reduce_add(inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
    """The sum of tensors of several devices."""
    del destination
    _remark()
    return reduce(torch.add, inputs)


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], destination: Any = None, buffer_size: int = 0
) -> tuple[Tensor, ...]:
    """The sums of several tensors of several devices."""
    del destination, buffer_size
    return tuple(reduce_add(each) for each in zip(*inputs, strict=True))


def scatter(
    tensor: Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[Tensor, ...]:
    """A part of a tensor for each device."""
    del streams
    _remark()
    if out is not None:
        chunk_sizes = [each.shape[dim] for each in out]
    parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    if out is None:
        return tuple(part.clone() for part in parts)
    for each, part in zip(out, parts, strict=True):
        each.copy_(part)
    return tuple(out)


def gather(
    tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
) -> Tensor:
    """One tensor of the parts of several devices."""
    del destination
    _remark()
    return torch.cat(list(tensors), dim, out=out)


def _remark() -> None:
    rank = running_rank()
    prediction = None if rank is None else present_world().prediction
    if prediction is not None and _REMARK not in prediction.remarks:
        prediction.remarks.append(_REMARK)
