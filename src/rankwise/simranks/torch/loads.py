"""What ranks bring to an operation, and how results get into their tensors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.simranks.torch.gloo_arithmetic import data_of, flat_of
from rankwise.simranks.torch.storages import is_hollow

Loads = Sequence[Any]
FAKE_TENSOR = "FakeTensor"
"""The name of torch's class: its module takes a second to import, and few programs do so."""


def bytes_brought(name: str, load: Any) -> int:
    """How many bytes a rank puts into an operation; into a scatter, what it takes out."""
    if isinstance(load, tuple):
        load = load[0 if name == "scatter" else 1]
    return bytes_in(load)


def bytes_in(load: Any) -> int:
    """The bytes of all tensors of a load."""
    if isinstance(load, Tensor):
        if load.is_sparse:
            load = load.coalesce()
            return bytes_in([load.indices(), load.values()])
        return int(load.nbytes)
    return sum(map(bytes_in, load)) if load else 0


def has_no_data(load: Any) -> bool:
    """Whether a load has fake or meta tensors: what is done with them moves nothing."""
    if type(load) is list and len(load) == 1:  # as most are
        (load,) = load
    if type(load) is Tensor:
        return bool(load.is_meta)
    if isinstance(load, Tensor):
        return bool(load.is_meta) or type(load).__name__ == FAKE_TENSOR
    return isinstance(load, list | tuple) and any(map(has_no_data, load))


_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001  # torch has no public way


def tensors_in(load: Any) -> Iterable[Tensor]:
    """All tensors of a load."""
    if isinstance(load, Tensor):
        yield load
    elif isinstance(load, list | tuple):
        for part in load:
            yield from tensors_in(part)


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers lie in memory as its strides say."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not has_no_data(tensor) and not is_hollow(tensor)


def fake_mode() -> Any:
    """The `FakeTensorMode` that the calling thread is in, if it is in one."""
    return torch._C._get_dispatch_mode(_FAKE)  # noqa: SLF001  # the same


def makes_fake_tensors() -> bool:
    """Whether the calling thread is in a `FakeTensorMode`."""
    return fake_mode() is not None


def in_memory_order(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same values as they follow each other in memory, if all have them in the same order.

    gloo adds in that order, so a transposed tensor has other bits than a contiguous one.
    """
    first = tensors[0]
    if first.is_contiguous() or any(each.stride() != first.stride() for each in tensors):
        return tensors
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    turned = [each.permute(order) for each in tensors]
    return turned if turned[0].is_contiguous() else tensors


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor with all values; a view of a single one."""
    flats = [flat_of(tensor) for tensor in tensors]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def spread(flat: Tensor, loads: Sequence[Sequence[Tensor]]) -> None:
    """Write one flat result into the tensors of each load, one after the other."""
    for tensors in loads:
        begin = 0
        for tensor in tensors:
            part = flat[begin : begin + tensor.numel()].reshape(tensor.shape)
            write_reduced([data_of(tensor)], [part])
            begin += tensor.numel()


def fill(tensor: Tensor, flat: Tensor) -> None:
    """Write flat values into a tensor."""
    data_of(tensor).copy_(flat.reshape(tensor.shape))


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its numbers lie at one place."""
    return 0 in tensor.stride() and bool(_repeated(tensor))


def _repeated(tensor: Tensor) -> list[int]:
    """The dimensions along which its numbers lie at one place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [place for place, (extent, stride) in enumerate(sizes) if extent > 1 and not stride]


def _each_number_once(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Parts without repetitions: torch does not write into expanded tensors, and backends do."""
    for place in _repeated(target):
        target, source = target.narrow(place, 0, 1), source.narrow(place, 0, 1)
    return target, source


def check_expanded(loads: Loads) -> None:
    """Refuse tensors that are expanded on some ranks: gloo reduces memory, whatever it means."""
    for tensors in zip(*loads, strict=True):
        strides = {each.stride() for each in tensors if each.layout is torch.strided}
        if len(strides) > 1 and any(map(is_expanded, tensors)):
            told = " and ".join(map(str, sorted(strides)))
            raise RuntimeError(
                f"a tensor is expanded on some ranks only (strides {told}): gloo would mix up its"
                " numbers. Hand over a copy (`x.contiguous()`)"
            )


def copy_all(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    write: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None,
) -> None:
    """Write each source into its target, of equal size, by `write_all` unless told otherwise."""
    pairs = zip(targets, sources, strict=True)
    fitting = [
        source if source.shape == target.shape else source.reshape(target.shape)
        for target, source in pairs
    ]
    (write or write_all)([data_of(target) for target in targets], fitting)


def write_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each source into its target, of equal shape."""
    if any(map(Tensor.is_neg, targets)):  # as `x.conj().imag`: not taken in lists
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets:
        torch._foreach_copy_(targets, sources)


def write_reduced(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """The same, where gloo is right for expanded targets, too."""
    if any(map(is_expanded, targets)):
        pairs = list(map(_each_number_once, targets, sources))
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    write_all(targets, sources)
