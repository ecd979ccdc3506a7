"""A number for what members of a group must agree on, made of a call's fields.

Ranks write it into their call records, and agents of all nodes compare it. It is the same in all
processes and versions of Python. This file runs in whatever interpreter the user chose, from Python
3.9 on, where rankwise may not be installed: the boot code of ranks loads it by its path.
"""

import zlib

TYPE_CHECKING = False  # `typing` may not be in memory
if TYPE_CHECKING:
    from collections.abc import Sequence


def digest_of(  # noqa: PLR0917 - the fields of a `CallSignature`
    operation: str,
    reduction: str = "",
    root: int = -1,
    tensors: "Sequence[tuple[Sequence[int] | None, str]]" = (),
    more: int = 0,
    lists: "Sequence[int]" = (),
    tag: int = 0,
    algorithm: str = "",
    size_bytes: int = 0,
    has_data: bool = True,
) -> int:
    """Return the digest of a call; `tensors` are shapes, which may be untold, and dtypes."""
    fields = (
        operation, reduction, root, tensors, more, lists, tag, algorithm, size_bytes, has_data,
    )  # fmt: skip
    return zlib.crc32(_packed(fields))


def _packed(value: object) -> bytes:
    """Return bytes that are equal for equal values only: kinds and lengths are part of them."""
    if value is None:
        return b"-"
    if isinstance(value, int):
        return b"%di" % value
    if isinstance(value, str):
        data = value.encode("utf-8", "replace")
        return b"%ds" % len(data) + data
    assert isinstance(value, (tuple, list)), "fields are numbers, texts and sequences of these"
    return b"%d(" % len(value) + b"".join(map(_packed, value))
