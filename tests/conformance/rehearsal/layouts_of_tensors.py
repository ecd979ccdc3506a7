"""What a backend does with tensors of some layout, dtype and `requires_grad`, in each operation.

Run by two ranks, simulated ones or processes, this prints a JSON object: for each operation and
role, layout, dtype and requires_grad, whether all ranks have the right values, wrong ones, or have
refused. Arguments: the backend, and the operations to try; without any, all.

    rankwise run --nproc-per-node=2 --no-prefix layouts_of_tensors.py gloo > layouts_of_gloo.json
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUTS: dict[str, Callable[[Any], Tensor]] = {
    "contiguous": lambda dtype: torch.zeros(4, 2, dtype=dtype),
    "gaps in rows": lambda dtype: torch.zeros(4, 4, dtype=dtype)[:, ::2],
    "gaps between rows": lambda dtype: torch.zeros(8, 2, dtype=dtype)[::2],
    "part of a tensor": lambda dtype: torch.zeros(8, 2, dtype=dtype)[2:6],
    "transposed": lambda dtype: torch.zeros(2, 4, dtype=dtype).t(),
    "channels last": lambda dtype: torch.zeros(2, 2, 2, 1, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    # Of a larger storage: gloo writes as many numbers as it takes this tensor for.
    "expanded": lambda dtype: torch.zeros(16, dtype=dtype)[:4].view(4, 1).expand(4, 2),
}
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.complex64)


class Cell:
    """One tensor under test, and what plain ones are needed beside it."""

    def __init__(
        self, layout: str, dtype: Any, *, requires_grad: bool, group: Any, between: Any
    ) -> None:
        self.rank = dist.get_rank()
        self.group = group
        self._between = between
        self.layout = layout
        self.dtype = dtype
        self.tensor = LAYOUTS[layout](dtype)
        self.tensor.requires_grad_(requires_grad)

    def carry_out(self, role: int, begin: Callable[[], Any]) -> None:
        """Carry out an operation in which one rank has the tensor: the other waits for no refusal.

        Raises:
            RuntimeError: that rank has refused.
        """
        work, error = None, ""
        if self.rank == role:
            try:
                work = begin()
            except (RuntimeError, ValueError, TypeError) as refusal:
                error = str(refusal)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, error, group=self._between)
        if any(told):
            raise RuntimeError(told[role])
        (begin() if work is None else work).wait()

    def filled(self, value: float) -> Tensor:
        """The tensor under test, with one value."""
        with torch.no_grad():
            self.tensor.fill_(value)
        return self.tensor

    def plain(self, value: float) -> Tensor:
        """Another tensor of the same shape."""
        return torch.full(tuple(self.tensor.shape), value, dtype=self.dtype)

    def rows(self, value: float) -> Tensor:
        """One of twice as many rows."""
        shape = (2 * self.tensor.shape[0], *self.tensor.shape[1:])
        return torch.full(shape, value, dtype=self.dtype)

    def half(self, value: float) -> Tensor:
        """One of half as many rows."""
        shape = (self.tensor.shape[0] // 2, *self.tensor.shape[1:])
        return torch.full(shape, value, dtype=self.dtype)


def has(tensor: Tensor, *values: float) -> bool:
    """Whether a tensor has these values, each in an equal part of its rows."""
    parts = tensor.detach().chunk(len(values))
    return all(bool((part == value).all()) for part, value in zip(parts, values, strict=True))


def all_reduce(cell: Cell) -> bool:
    tensor = cell.filled(cell.rank + 1)
    dist.all_reduce(tensor, group=cell.group)
    return has(tensor, 3)


def broadcast_receiver(cell: Cell) -> bool:
    tensor = cell.filled(0) if cell.rank else cell.plain(2)
    cell.carry_out(1, lambda: dist.broadcast(tensor, 0, group=cell.group, async_op=True))
    return has(tensor, 2)


def broadcast_sender(cell: Cell) -> bool:
    tensor = cell.plain(0) if cell.rank else cell.filled(2)
    cell.carry_out(0, lambda: dist.broadcast(tensor, 0, group=cell.group, async_op=True))
    return has(tensor, 2)


def reduce(cell: Cell) -> bool:
    tensor = cell.filled(cell.rank + 1)
    dist.reduce(tensor, 0, group=cell.group)
    return cell.rank != 0 or has(tensor, 3)


def send(cell: Cell) -> bool:
    tensor = cell.plain(0) if cell.rank else cell.filled(7)
    cell.carry_out(0, lambda: message(tensor, cell))
    return has(tensor, 7)


def recv(cell: Cell) -> bool:
    tensor = cell.filled(0) if cell.rank else cell.plain(7)
    cell.carry_out(1, lambda: message(tensor, cell))
    return has(tensor, 7)


def message(tensor: Tensor, cell: Cell) -> Any:
    move = dist.irecv if cell.rank else dist.isend
    return move(tensor, 1 - cell.rank, group=cell.group)


def all_gather_input(cell: Cell) -> bool:
    outputs = [cell.plain(0), cell.plain(0)]
    dist.all_gather(outputs, cell.filled(cell.rank + 1), group=cell.group)
    return has(outputs[0], 1) and has(outputs[1], 2)


def all_gather_output(cell: Cell) -> bool:
    outputs = [cell.filled(0), cell.plain(0)]
    dist.all_gather(outputs, cell.plain(cell.rank + 1), group=cell.group)
    return has(outputs[0], 1) and has(outputs[1], 2)


def all_gather_into_tensor_input(cell: Cell) -> bool:
    output = cell.rows(0)
    dist.all_gather_into_tensor(output, cell.filled(cell.rank + 1), group=cell.group)
    return has(output, 1, 2)


def all_gather_into_tensor_output(cell: Cell) -> bool:
    output = cell.filled(0)
    dist.all_gather_into_tensor(output, cell.half(cell.rank + 1), group=cell.group)
    return has(output, 1, 2)


def reduce_scatter_input(cell: Cell) -> bool:
    output = cell.plain(0)
    dist.reduce_scatter(output, [cell.filled(1), cell.plain(1)], group=cell.group)
    return has(output, 2)


def reduce_scatter_output(cell: Cell) -> bool:
    output = cell.filled(0)
    dist.reduce_scatter(output, [cell.plain(1), cell.plain(1)], group=cell.group)
    return has(output, 2)


def reduce_scatter_tensor_input(cell: Cell) -> bool:
    output = cell.half(0)
    dist.reduce_scatter_tensor(output, cell.filled(1), group=cell.group)
    return has(output, 2)


def reduce_scatter_tensor_output(cell: Cell) -> bool:
    output = cell.filled(0)
    dist.reduce_scatter_tensor(output, cell.rows(1), group=cell.group)
    return has(output, 2)


def scatter_input(cell: Cell) -> bool:
    output = cell.plain(0)
    inputs = [cell.filled(1), cell.plain(1)] if cell.rank == 0 else None
    cell.carry_out(0, lambda: dist.scatter(output, inputs, 0, group=cell.group, async_op=True))
    return has(output, 1)


def scatter_output(cell: Cell) -> bool:
    output = cell.filled(0)
    inputs = [cell.plain(1), cell.plain(1)] if cell.rank == 0 else None
    dist.scatter(output, inputs, 0, group=cell.group)
    return has(output, 1)


def gather_input(cell: Cell) -> bool:
    outputs = [cell.plain(0), cell.plain(0)] if cell.rank == 0 else None
    dist.gather(cell.filled(1), outputs, 0, group=cell.group)
    return outputs is None or (has(outputs[0], 1) and has(outputs[1], 1))


def gather_output(cell: Cell) -> bool:
    outputs = [cell.filled(0), cell.plain(0)] if cell.rank == 0 else None
    own = cell.plain(1)
    cell.carry_out(0, lambda: dist.gather(own, outputs, 0, group=cell.group, async_op=True))
    return outputs is None or (has(outputs[0], 1) and has(outputs[1], 1))


def all_to_all_single_input(cell: Cell) -> bool:
    output = cell.plain(0)
    dist.all_to_all_single(output, cell.filled(cell.rank + 1), group=cell.group)
    return has(output, 1, 2)


def all_to_all_single_output(cell: Cell) -> bool:
    output = cell.filled(0)
    dist.all_to_all_single(output, cell.plain(cell.rank + 1), group=cell.group)
    return has(output, 1, 2)


def all_to_all_input(cell: Cell) -> bool:
    outputs = [cell.plain(0), cell.plain(0)]
    mine = cell.rank + 1
    dist.all_to_all(outputs, [cell.filled(mine), cell.plain(mine)], group=cell.group)
    return has(outputs[0], 1) and has(outputs[1], 2)


def all_to_all_output(cell: Cell) -> bool:
    outputs = [cell.filled(0), cell.plain(0)]
    mine = cell.rank + 1
    dist.all_to_all(outputs, [cell.plain(mine), cell.plain(mine)], group=cell.group)
    return has(outputs[0], 1) and has(outputs[1], 2)


OPERATIONS: tuple[Callable[[Cell], bool], ...] = (
    all_reduce, broadcast_receiver, broadcast_sender, reduce, send, recv,
    all_gather_input, all_gather_output, all_gather_into_tensor_input,
    all_gather_into_tensor_output, reduce_scatter_input, reduce_scatter_output,
    reduce_scatter_tensor_input, reduce_scatter_tensor_output, scatter_input, scatter_output,
    gather_input, gather_output, all_to_all_single_input, all_to_all_single_output,
    all_to_all_input, all_to_all_output,
)  # fmt: skip


def tried(operation: Callable[[Cell], bool], cell: Cell) -> str:
    """What this rank has seen."""
    try:
        return "right" if operation(cell) else "wrong"
    except (RuntimeError, ValueError, TypeError):
        return "refused"


def cells(wanted: list[str], backend: str) -> dict[str, str]:
    """The outcome of each cell: the worst of all ranks."""
    outcomes: dict[str, str] = {}
    between = dist.new_group(backend="gloo")
    for operation in OPERATIONS:
        if wanted and operation.__name__ not in wanted:
            continue
        for layout, dtype, grad in product(LAYOUTS, DTYPES, (False, True)):
            if grad and not (dtype.is_floating_point or dtype.is_complex):
                continue
            # Of its own: a rank that refuses may leave the other one's half behind.
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=1))
            cell = Cell(layout, dtype, requires_grad=grad, group=group, between=between)
            seen = tried(operation, cell)
            told: list[Any] = [None, None]
            dist.all_gather_object(told, seen, group=between)
            name = f"{operation.__name__}, {layout}, {str(dtype)[6:]}{', grad' if grad else ''}"
            outcomes[name] = min(told, key=("wrong", "refused", "right").index)
    return outcomes


def main() -> None:
    """Try what is asked for."""
    backend, *wanted = sys.argv[1:]
    dist.init_process_group("gloo")
    found = cells(wanted, backend)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
