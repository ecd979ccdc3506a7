"""CUDA graphs on modelled devices: a capture notes what is called, and a replay calls it again.

A device does nothing while a graph is captured. Here all is carried out once, so that every tensor
exists; then what has been written that was there before gets back what it held, and the
random state, too. A replay calls each operation with the very tensors of the capture, and puts the
results where those of the capture are. A capture carries out no collective and no message: each
replay calls them, as calls of their group, so that a rank without a graph meets the replays.

Without data (`--timing-only`) a graph keeps the times of its operations with their streams, and no
tensors: a capture takes no time of the device, and a replay is one launch. Its pool holds what the
capture has held at once, until the graph is gone.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankwise.simranks.prediction.clocks import RankClock
from rankwise.simranks.prediction.device_memory import DeviceFull
from rankwise.simranks.torch.gloo_arithmetic import data_of
from rankwise.simranks.world.world import running_rank

if TYPE_CHECKING:
    from rankwise.simranks.prediction.caching_allocator import CachedBlock
    from rankwise.simranks.world.ranks import Rank

WITHOUT_DATA = "timing only"
"""Under which name a rank that computes nothing has its mode (`without_data`)."""
_POOLS = "pools of graphs"
_FUNCTIONAL = frozenset(("_c10d_functional", "_c10d_functional_autograd", "c10d_functional"))
"""Namespaces of collectives that call a process group, and give tensors to be waited for."""
_captures: "weakref.WeakKeyDictionary[Rank, Capture | TimedCapture]" = weakref.WeakKeyDictionary()
"""Those under way, by rank: a later rank of the same number has none."""


def present_capture() -> "Capture | TimedCapture | None":
    """The capture of the rank that runs; None if there is none."""
    if not _captures:
        return None
    rank = running_rank()
    return None if rank is None else _captures.get(rank)


class Capture(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Notes the operations of a rank, while it is entered.

    Attributes:
        calls: what a replay calls, in order.
        is_in_functional: whether a functional collective is called; a replay calls it as a whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.is_in_functional = False
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
        is_functional = func.namespace in _FUNCTIONAL
        self.is_in_functional = is_functional
        try:
            result = func(*args, **kwargs)
        finally:
            self.is_in_functional = False
        if not func.is_view:
            self._note(func, args, kwargs, result)
        return result

    def keep(self, written: object) -> None:
        """Keep what tensors hold that are about to be written, unless the capture has made them."""
        for tensor in _tensors(written):
            place = _place(tensor)
            if place not in self._made and place not in self._before:
                self._before[place] = _whole(tensor), _whole(tensor).clone()

    def note(self, call: Callable[[], object]) -> None:
        """A replay calls this, too."""
        self.calls.append(call)

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
            found = list(_tensors(func(*args, **kwargs)))
            if func.namespace in _FUNCTIONAL:  # the program waits for the tensors of the capture
                found = [torch.ops._c10d_functional.wait_tensor(each) for each in found]  # noqa: SLF001  # it has no other name
            for target, new in zip(targets, found, strict=True):
                if target is not None:
                    target.copy_(new)

        self.calls.append(again)


class TimedCapture:
    """Notes what a rank would compute, and how much of its device's memory that takes at once."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        clock.begin_capture()
        requested = clock.memory.requested
        self._peak_before, requested.peak = requested.peak, requested.current

    def note(self, call: Callable[[], object]) -> None:
        """A replay calls this, too, on the present stream."""
        assert self._clock.captured is not None, "it is under way"
        self._clock.captured.append(self._clock.placed(call))

    def close(self) -> tuple[Callable[[], None], int]:
        """End the capture; returns its replay, and how many bytes have been freed in it."""
        requested = self._clock.memory.requested
        freed = requested.peak - requested.current
        requested.peak = max(requested.peak, self._peak_before)
        return self._clock.end_capture(), freed


class _GraphPool:
    """Bytes that the graphs of one pool keep, beside tensors that live."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._size = 0
        self._graphs = 0
        self._blocks: list[CachedBlock] = []

    def enter(self, size: int) -> None:
        """Keep so many bytes for another graph: all graphs of the pool use them in turn."""
        clock, more = self._clock, max(0, size - self._size)
        block = clock.memory.take(more, None, clock.stream_number, clock.time)
        self._blocks += [] if block is None else [block]
        self._size += more
        self._graphs += 1

    def leave(self) -> None:
        """One graph fewer needs them."""
        self._graphs -= 1
        if not self._graphs:
            for block in self._blocks:
                self._clock.memory.give_back(block, None, self._clock.time)
            self._blocks, self._size = [], 0


class _Pools(dict[tuple[int, int], _GraphPool]):
    """The pools of one rank, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names = count(1)


def _pools() -> _Pools:
    rank = running_rank()
    pools: _Pools = _Pools() if rank is None else rank.own_state.setdefault(_POOLS, _Pools())
    return pools


class Graph:
    """What a program finds as `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:  # torch's signature
        del keep_graph
        self._calls: list[Callable[[], object]] | None = None
        self._pool = graph_pool_handle()
        self._leave: weakref.finalize[..., Graph] | None = None

    def capture_begin(self, pool: Any = None, **_options: Any) -> None:
        """Note what the rank computes from now on."""
        self._pool = self._pool if pool is None else pool
        rank = running_rank()
        assert rank is not None, "only ranks find modelled devices"
        if rank in _captures:
            raise RuntimeError("a CUDA graph is captured already")
        mode = rank.own_state.get(WITHOUT_DATA)
        if mode is not None:
            _captures[rank] = TimedCapture(mode.clock)
            return
        capture = _captures[rank] = Capture()
        capture.__enter__()

    def capture_end(self) -> None:
        """The graph is complete."""
        rank = running_rank()
        capture = None if rank is None else _captures.pop(rank, None)
        if capture is None:
            raise RuntimeError("no CUDA graph is captured")
        if isinstance(capture, TimedCapture):
            self._end_timed(rank, capture)
            return
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
        if self._leave is not None:
            self._leave()

    def pool(self) -> tuple[int, int]:
        """A name of the memory, which other graphs may share."""
        return self._pool

    def _end_timed(self, rank: Any, capture: TimedCapture) -> None:
        mode = rank.own_state[WITHOUT_DATA]
        pool = _pools().setdefault(self._pool, _GraphPool(mode.clock))
        replay, freed = capture.close()
        try:
            pool.enter(freed)
        except DeviceFull as full:
            raise mode.out_of_memory(full) from None
        self._leave = weakref.finalize(self, pool.leave)
        self._calls = [replay]

    def instantiate(self) -> None:
        """It is ready."""

    enable_debug_mode = instantiate

    def debug_dump(self, _debug_path: str) -> None:
        """There is nothing to be seen."""


def graph_pool_handle() -> tuple[int, int]:
    """A new name of memory, for graphs that share it."""
    return (0, next(_pools().names))


def _tensors(values: object) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # its identity, as long as it lives


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory, as numbers of its type."""
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(tensor.untyped_storage())
