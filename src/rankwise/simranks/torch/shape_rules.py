"""Which shapes and sizes an operation of a group takes, beside what its ranks must agree on."""

from collections.abc import Sequence

from torch import Tensor

from rankwise.simranks.torch.sentences import describe_shape, describe_shapes


class ShapeRules:
    """What one member's tensors must be like.

    Every check raises RuntimeError: the tensors are not like that.

    Args:
        member: the rank whose tensors they are, as the world counts it.
        count: how many members the group has.
        backend: the backend that the program has asked for.
        compares_shapes: whether it refuses tensors that have the right size alone.
    """

    def __init__(self, member: int, count: int, backend: str, compares_shapes: bool) -> None:
        self.compares_shapes = compares_shapes
        self._member = member
        self._count = count
        self._backend = backend

    def check_joined(self, name: str, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
        """Refuse a tensor that does not hold one part for each rank, one after the other."""
        (side, tensor), (other, own) = whole, part
        wanted = (self._count * (own.shape[0] if own.dim() else 1), *own.shape[1:])
        if self.compares_shapes:
            fits = tensor.shape == wanted and own.dim() > 0
        else:
            fits = tensor.numel() == self._count * own.numel()
        if not fits or tensor.dtype != own.dtype:
            expected = (
                describe_shape(wanted, own.dtype) if own.dim() else "rows, and a number has none"
            )
            raise RuntimeError(
                f"{name}: the {side} of rank {self._member} is {describe_shapes([tensor])}, and"
                f" the {other} {describe_shapes([own])}; for {self._count} ranks {self._backend}"
                f" wants {expected}"
            )

    def check_parts(
        self,
        name: str,
        parts: tuple[str, Sequence[Tensor]],
        single: tuple[str, Tensor],
        *,
        is_exact: bool = False,
    ) -> None:
        """Refuse a list in which a tensor is not like the single one.

        Args:
            name: the operation.
            parts: what the list is called, and its tensors.
            single: the same of the single one.
            is_exact: whether every backend compares shapes here.
        """
        (side, tensors), (other, own) = parts, single
        shape, size, dtype = own.shape, own.numel(), own.dtype
        is_exact = is_exact or self.compares_shapes
        for index, each in enumerate(tensors):
            fits = each.shape == shape if is_exact else each.numel() == size
            if not fits or each.dtype != dtype:
                raise RuntimeError(
                    f"{name}: {side} tensor {index} of rank {self._member} is"
                    f" {describe_shapes([each])}, and the {other} {describe_shapes([own])};"
                    f" {self._backend} wants equal shapes"
                )

    def check_count(self, name: str, side: str, tensors: Sequence[Tensor]) -> None:
        """Refuse a list that has not one tensor for each member."""
        if len(tensors) != self._count:
            raise RuntimeError(
                f"{name}: {len(tensors)} {side} tensors; expected one for each of the"
                f" {self._count} ranks of the group"
            )

    def check_splits(self, side: str, whole: Tensor, splits: list[int] | None) -> None:
        """Refuse a tensor whose rows an all_to_all_single cannot divide among the members."""
        if not whole.dim():
            raise RuntimeError(f"all_to_all_single: the {side} is a number, which has no rows")
        rows = whole.shape[0]
        if splits and (len(splits) != self._count or sum(splits) != rows):
            raise RuntimeError(
                f"all_to_all_single: the {side} has {rows} rows and splits {list(splits)};"
                f" expected {self._count} splits with this sum"
            )
        if not splits and rows % self._count:
            raise RuntimeError(
                f"all_to_all_single: the {rows} rows of the {side} cannot be divided by the"
                f" {self._count} ranks of the group; give splits"
            )
