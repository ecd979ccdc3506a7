"""A rank's present call, in a form that other ranks can compare with their own.

Ranks that disagree on the next operation must find out before they read each other's data. So
each publishes a *header*, its call's signature field by field, and a matching header is a matching
call: the operation, the shape, the dtype, the reduction or the root. The number of the operation is
not part of it, for ranks that agreed on all operations before have counted the same.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.core.matching import NO_RANK, CallSignature, TensorForm, describe_call
from rankwise.drivers.real.call_rings import signature_in
from rankwise.drivers.real.segments import HEADER_BYTES
from rankwise.drivers.real.worker.call_ring import signature_text

if TYPE_CHECKING:
    import numpy as np

_CHECKSUM_BYTES = 4


class AgreedCall(msgspec.Struct, frozen=True, eq=False):
    """An operation with its arguments, as far as all ranks must agree on them.

    Compared by identity: `describe` returns the same object for equal arguments, as long as it
    remembers them.
    """

    signature: CallSignature
    fields: str
    """The signature as it stands in headers and rings."""
    header: bytes

    def numbered(self, number: int) -> str:
        """The text for people, as the `number`-th operation of its communicator."""
        return describe_call(self.signature, number)


@lru_cache(maxsize=1024)
def describe(
    name: str,
    dtype: "np.dtype[Any] | None" = None,
    shape: tuple[int, ...] = (),
    *,
    op: str | None = None,
    root: int | None = None,
) -> AgreedCall:
    """Return a call such as `all_reduce #1 (max) of (4, 3) float64`."""
    tensors: tuple[TensorForm, ...] = ()
    if dtype is not None:
        # `name` leaves the byte order out, and the fields of a structure.
        kind = dtype.name if dtype.isnative and dtype.names is None else str(dtype)
        tensors = (TensorForm(shape, kind),)
    signature = CallSignature(name, op or "", NO_RANK if root is None else root, tensors)
    fields = signature_text(name, op or "", root, tensors=[(shape, each.dtype) for each in tensors])
    # Fields too long for their place are cut; the checksum tells what was lost apart.
    checksum = signature.checksum.to_bytes(_CHECKSUM_BYTES, "little")
    header = (checksum + fields.encode())[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    return AgreedCall(signature, fields, header)


def read_header(header: bytes, number: int) -> str:
    """Turn a published header back into text for people."""
    return describe_call(signature_in(header[_CHECKSUM_BYTES:]), number)
