"""A call as a value: the operation and the arguments that its ranks must agree on.

Its group, number and line are those of the entry that has it: a `core.ledger.Call`, an entry of a
ring, a record. Text is made from it by `describe_call`, for people only.
"""

from collections.abc import Sequence
from math import prod

import msgspec

from rankwise.core.matching.call_digest import digest_of

NO_RANK, ANY_RANK = -1, -2
_MESSAGES = frozenset(("send", "recv"))
_TO_ROOT = frozenset(("reduce", "gather", "send"))


class TensorForm(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """A tensor without its values; `shape` is None where members may bring different ones."""

    shape: tuple[int, ...] | None
    dtype: str

    @property
    def count(self) -> int | None:
        """How many elements it has, if that is told."""
        return None if self.shape is None else prod(self.shape)

    def flat(self) -> "TensorForm":
        """The same in one dimension."""
        return TensorForm(None if self.shape is None else (prod(self.shape),), self.dtype)

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.shape} {self.dtype}"


class CallSignature(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """What a rank calls.

    Attributes:
        operation: such as `all_reduce`, or `send` and `recv` for the two ends of a message.
        reduction: such as `sum`; empty where nothing is reduced.
        root: the rank that data goes to or comes from; of a message, the rank at its other end.
        tensors: those that are told; see `more` and `lists`.
        more: how many tensors follow that are left out.
        lists: lengths of the nested lists whose first tensor stands for all.
        tag: of a message.
        algorithm: the one that was asked for by name.
        size_bytes: of memory without a dtype.
        has_data: whether tensors have values; fake and meta tensors have none.
    """

    operation: str
    reduction: str = ""
    root: int = NO_RANK
    tensors: tuple[TensorForm, ...] = ()
    more: int = 0
    lists: tuple[int, ...] = ()
    tag: int = 0
    algorithm: str = ""
    size_bytes: int = 0
    has_data: bool = True

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message between two ranks."""
        return self.operation in _MESSAGES

    @property
    def is_of_one_tensor(self) -> bool:
        """Whether it is told of one tensor, with its shape."""
        one = len(self.tensors) == 1 and not self.more and not self.lists
        return one and self.tensors[0].shape is not None

    def in_sizes(self) -> "CallSignature":
        """The same with flat tensors: equal where tensors have as many elements in other shapes."""
        return msgspec.structs.replace(self, tensors=tuple(each.flat() for each in self.tensors))

    def agreed(self, *, has_one_size: bool) -> "CallSignature":
        """The fields on which members must agree, where they may bring tensors of other shapes.

        `has_one_size` is whether these must have as many elements.
        """
        tensors = tuple(
            TensorForm(each.flat().shape if has_one_size else None, each.dtype)
            for each in self.tensors
        )
        return CallSignature(self.operation, self.reduction, self.root, tensors)

    def in_kind(self) -> "CallSignature":
        """The operation, reduction and root alone: what decides which numbers come out."""
        root = NO_RANK if self.is_message else self.root
        return CallSignature(self.operation, self.reduction, root)

    @property
    def checksum(self) -> int:
        """A number that is equal in all processes for equal signatures."""
        operation, reduction, root, tensors, *others = msgspec.structs.astuple(self)
        forms = [(each.shape, each.dtype) for each in tensors]
        return digest_of(operation, reduction, root, forms, *others)

    def __str__(self) -> str:
        return describe_call(self)


def describe_call(
    call: CallSignature, number: "int | str | None" = None, *, tells_tag: bool = False
) -> str:
    """Put a call into words: `all_reduce #3 (sum) of (4, 3) float32`.

    Args:
        call: what is called.
        number: which call of its group it is; None for one without a number.
        tells_tag: whether the tag of a message is told even if it is 0.
    """
    text = call.operation if number is None else f"{call.operation} #{number}"
    if call.reduction:
        text += f" ({call.reduction})"
    if call.is_message:
        text += _of_tensors(call) + _root_in_words(call)
        return f"{text}, tag {call.tag}" if call.tag or tells_tag else text
    return text + _root_in_words(call) + _of_tensors(call)


def describe_tensors(tensors: Sequence[TensorForm], more: int = 0) -> str:
    """Put tensors into words: `(4, 3) float32, (4,) float32 and 2 more`."""
    text = ", ".join(map(str, tensors))
    return f"{text} and {more} more" if more else text


def _root_in_words(call: CallSignature) -> str:
    if call.root == NO_RANK:
        return ""
    way = "to" if call.operation in _TO_ROOT else "from"
    return f" {way} any rank" if call.root == ANY_RANK else f" {way} rank {call.root}"


def _of_tensors(call: CallSignature) -> str:
    text = "".join(f"{length} times " for length in call.lists)
    if call.tensors:
        text += describe_tensors(call.tensors, call.more)
    elif call.lists:
        text += "nothing"
    elif call.size_bytes:
        text += f"{call.size_bytes} bytes"
    text = f" of {text}" if text else ""
    if call.algorithm:
        text += f" by {call.algorithm}"
    return text if call.has_data else f"{text} without data"
