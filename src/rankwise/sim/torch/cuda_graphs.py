"""CUDA graphs on modelled devices: a capture notes what is called, and a replay calls it again.

A device does nothing while a graph is captured. Here all is carried out once, so that every tensor
exists; then what has been written that was there before gets back what it held, and the
random state, too. A replay calls each operation with the very tensors of the capture, and puts the
results where those of the capture are. Collectives of a capture are called again in each replay, as
calls of their group.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankwise.sim.rehearsal.world import running_rank
from rankwise.sim.torch.arithmetic import data_of

_captures: dict[int, "Capture"] = {}
"""Those under way, by rank."""


def present_capture() -> "Capture | None":
    """The capture of the rank that runs; None if there is none."""
    if not _captures:
        return None
    rank = running_rank()
    return None if rank is None else _captures.get(rank.number)


class Capture(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Notes the operations of a rank, while it is entered.

    Attributes:
        calls: what a replay calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._random = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and note it."""
        del types
        kwargs = kwargs or {}
        schema = func._schema  # noqa: SLF001  # as all modes of torch read it
        written = [
            kwargs.get(argument.name, args[place] if place < len(args) else None)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.keep(written)
        result = func(*args, **kwargs)
        if not func.is_view:
            self._note(func, args, kwargs, result)
        return result

    def keep(self, written: object) -> None:
        """Keep what tensors hold that are about to be written, unless the capture has made them."""
        for tensor in _tensors(written):
            place = _place(tensor)
            if place not in self._made and place not in self._before:
                self._before[place] = _whole(tensor), _whole(tensor).clone()

    def restore(self) -> None:
        """Give back what has been written."""
        for tensor, before in self._before.values():
            tensor.copy_(before)
        torch.set_rng_state(self._random)

    def _note(self, func: Any, args: Any, kwargs: Any, result: object) -> None:
        given = {_place(tensor) for tensor in _tensors((args, kwargs))}
        results = list(_tensors(result))
        targets = [None if _place(each) in given else data_of(each) for each in results]
        self._made |= {_place(each): each for each in targets if each is not None}

        def again() -> None:
            for target, new in zip(targets, _tensors(func(*args, **kwargs)), strict=True):
                if target is not None:
                    target.copy_(new)

        self.calls.append(again)


class Graph:
    """What a program finds as `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:  # torch's signature
        del keep_graph
        self._calls: list[Callable[[], object]] | None = None

    def capture_begin(self, pool: Any = None, **_options: Any) -> None:
        """Note what the rank computes from now on."""
        del pool
        rank = running_rank()
        assert rank is not None, "only ranks find modelled devices"
        if rank.number in _captures:
            raise RuntimeError("a CUDA graph is captured already")
        capture = _captures[rank.number] = Capture()
        capture.__enter__()

    def capture_end(self) -> None:
        """The graph is complete."""
        rank = running_rank()
        capture = None if rank is None else _captures.pop(rank.number, None)
        if capture is None:
            raise RuntimeError("no CUDA graph is captured")
        capture.__exit__(None, None, None)
        with torch.no_grad():
            capture.restore()
        self._calls = capture.calls

    def replay(self) -> None:
        """Compute it again."""
        if self._calls is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with torch.no_grad():
            for call in self._calls:
                call()

    def reset(self) -> None:
        """Forget what was captured."""
        self._calls = None

    def pool(self) -> tuple[int, int]:
        """A name of the memory, which all graphs share."""
        return graph_pool_handle()

    def instantiate(self) -> None:
        """It is ready."""

    enable_debug_mode = instantiate

    def debug_dump(self, _debug_path: str) -> None:
        """There is nothing to be seen."""


def graph_pool_handle() -> tuple[int, int]:
    """What graphs that share memory are told."""
    return (0, 1)


def _tensors(values: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # its identity, as long as it lives


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory, as numbers of its type."""
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(tensor.untyped_storage())
