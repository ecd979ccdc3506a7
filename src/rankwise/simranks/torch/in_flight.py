"""Tensors of operations in flight: were they left alone until the program has waited?

A direct write moves a tensor's version. One through a view of its base, `.data`, `.numpy()` or
memory that C++ shares does not, so the numbers themselves are compared: from the call to when the
operation is carried out, and from then to the wait. Of large tensors it is a sample.

A read leaves no trace; `reads_in_flight` looks at what torch does meanwhile.
"""

import zlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rankwise.simranks.torch.gloo_arithmetic import data_of, plainly
from rankwise.simranks.torch.loads import Loads, is_readable, tensors_in
from rankwise.simranks.torch.reads_in_flight import Filled, forget, look_for
from rankwise.simranks.torch.sentences import describe_shapes
from rankwise.simranks.torch.storages import is_hollow, mark_hollow
from rankwise.simranks.world.places import CallSite

_WHOLE_BYTES_MAX = 1 << 20
"""Larger tensors are compared by a sample."""
_SAMPLE = 1 << 14
"""How many of their numbers that is."""


class TensorGuard:
    """Looks after the tensors of one operation, as long as the handle of it lives.

    Args:
        load: what the rank has brought.
        filled: what of it the operation fills, so that it must not even be read.

    Attributes:
        storages: the addresses of their memory.
        written: the shape of one that was written; empty if none was.
    """

    def __init__(self, load: Any, filled: Any) -> None:
        self._tensors = [each for each in tensors_in(load) if is_readable(each)]
        self._versions = [(each, _version(each)) for each in self._tensors if _has_version(each)]
        self.storages = {each.untyped_storage().data_ptr() for each in self._tensors}
        self.written = ""
        self._read = ""
        self._sums = self._present()
        _open[self] = None
        if memory := Filled(tensors_in(filled)):
            look_for(self, memory)

    def note_read(self, tensor: Tensor, place: CallSite | None) -> None:
        """The program has read a tensor too early; it is told with the wait."""
        self._read = f"read a tensor of {describe_shapes([tensor])} at {place}"

    def look(self) -> None:
        """Compare the tensors with what they were."""
        if not self.written:
            written = [each for each, version in self._versions if _version(each) != version]
            pairs = zip(self._tensors, self._sums, self._present(), strict=True)
            written += [each for each, before, now in pairs if before != now]
            self.written = describe_shapes(written[:1])

    def renew(self) -> None:
        """An operation has been carried out, and may have filled them."""
        self._sums = self._present()

    def close(self) -> str:
        """The program has waited; says what it has done to a tensor before, if anything."""
        forget(self)
        self.look()
        _open.pop(self, None)
        return f"wrote to a tensor of {self.written}" if self.written else self._read

    def _present(self) -> list[int]:
        sums: list[int] = []
        plainly(sums.extend, map(_sum_of, self._tensors))
        return sums


_open: WeakKeyDictionary[TensorGuard, None] = WeakKeyDictionary()
"""Those of all ranks whose operations have not been waited for."""


def carry(carry_out: Any, *loads: Any) -> None:
    """Carry an operation out, and look whether tensors in flight were left alone until now."""
    if is_hollow(loads):  # of a run without data: what is filled has no numbers either
        mark_hollow(loads)
        return
    if len(loads) == 1 and len(set(map(id, loads[0]))) < len(loads[0]):
        loads = (_with_copies(loads[0]),)  # of equal ranks, of which a few are simulated
    watches = _watches_of(loads) if _open else []
    for watch in watches:
        watch.look()
    plainly(carry_out, *loads)
    for watch in watches:
        watch.renew()


def _with_copies(loads: Loads) -> Loads:
    """The same, where a load that stands for several ranks has tensors for each."""
    seen: set[int] = set()
    copied = []
    for load in loads:
        copied.append(_copy_of(load) if id(load) in seen else load)
        seen.add(id(load))
    return tuple(copied)


def _copy_of(load: Any) -> Any:
    if isinstance(load, Tensor):
        copies: list[Tensor] = []
        plainly(lambda: copies.append(load.detach().clone()))
        return copies[0]
    return type(load)(map(_copy_of, load)) if isinstance(load, list | tuple) else load


def _watches_of(loads: Loads) -> list[TensorGuard]:
    tensors = [each for each in tensors_in(loads) if is_readable(each)]
    storages = {each.untyped_storage().data_ptr() for each in tensors}
    return [each for each in _open if not storages.isdisjoint(each.storages)]


def _has_version(tensor: Tensor) -> bool:
    """Whether a write to another tensor leaves its version alone: not so for views."""
    return not (tensor._is_view() or tensor.is_inference())  # noqa: SLF001  # no other name


def _version(tensor: Tensor) -> int:
    return int(tensor._version)  # noqa: SLF001  # the same


def _sum_of(tensor: Tensor) -> int:
    """A checksum of its numbers; of a copy, as storage that numpy has seen cannot be resized."""
    if not tensor.numel() or not tensor.untyped_storage().nbytes():  # its memory has been freed
        return 0
    values = data_of(tensor)
    if tensor.nbytes > _WHOLE_BYTES_MAX:
        if not values.is_contiguous():
            return 0
        values = values.reshape(-1)[:: -(-values.numel() // _SAMPLE)]
    copied = values.clone(memory_format=torch.contiguous_format).reshape(-1)
    return zlib.crc32(copied.resolve_conj().resolve_neg().view(torch.uint8).numpy())
