"""Collectives over a segment: every rank reduces its own part, straight from its peers' slots.

A slot has three buffers, used in rotation (see `barrier`), and an array travels through them in
chunks of one buffer. In a step, a rank works on different chunks in different buffers:

    all_reduce    writes chunk k to its own slot; folds *its part* of chunk k - 1 from all
                  slots into rank 0's; copies the folded chunk k - 2 from there to the result
    others        write chunk k, barrier, read it

So there is one barrier per chunk, and while the slower rank finishes its step the faster one has
nothing to wait for but that. The buffers stay in the caches; main memory sees each array once in
and once out. A rank's own part never enters a slot: it is folded from the caller's array.

A small all_reduce takes one barrier instead of two: every rank folds everything itself. That is
more work in total and half the latency. The ranks then fold with equal calls on equally aligned
memory, so that they cannot differ by a bit even where numpy picks its loops by alignment.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration
from rankwise.collectives.barrier import Barrier, plain_fate
from rankwise.collectives.calls import AgreedCall
from rankwise.collectives.ordered_reductions import Reduction, fold
from rankwise.collectives.program_runner import ProgramRunner, fold_spans, instructions_for
from rankwise.collectives.transport import Flat
from rankwise.core.collectives.algorithms import direct_all_to_all
from rankwise.core.collectives.lockstep import (
    Action,
    PutAside,
    Rounds,
    SlotPost,
    Take,
    TakeAside,
    rounds_of,
)
from rankwise.core.collectives.program import Copy, Fold, Span, Task
from rankwise.drivers.real.segments import BUFFER_COUNT, Segment

_SMALL_BYTES_OF_ALL = 1 << 18
"""A small all_reduce is one in which every rank reads no more than this; measured."""
_ALIGNMENT = 64


class SharedMemoryTransport:
    """The transport between the workers of one node.

    Takes over the segment and closes it. `pid` is the process that claims `rank`; two processes
    cannot be the same rank.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        pid: int,
        fate_of: Callable[[int], str] = plain_fate,
        *,
        first_rank: int = 0,
    ) -> None:
        if not 0 <= rank < segment.worker_count:
            raise ConfigError(
                f"rank is {rank}, expected 0 to {segment.worker_count - 1}: "
                f"the segment has {segment.worker_count} workers"
            )
        self.rank = rank
        self.size = segment.worker_count
        self._segment = segment
        self._layout = segment.layout
        self._barrier = Barrier(segment, rank, pid, fate_of, first_rank=first_rank)
        self._programs = ProgramRunner(rank, self.size, self._carry_out, self._elements_max)
        self._small_bytes = min(_SMALL_BYTES_OF_ALL // self.size, self._layout.buffer_bytes)
        scratch = np.empty(self._small_bytes + _ALIGNMENT, np.uint8)
        self._scratch = scratch[-scratch.ctypes.data % _ALIGNMENT :]
        # Making views is slow compared with a small operation, and programs repeat themselves.
        self._views = lru_cache(maxsize=256)(self._make_views)
        self._scratch_view = lru_cache(maxsize=256)(self._make_scratch_view)

    def _make_views(self, dtype: np.dtype[Any], count: int) -> list[list[Flat]]:
        """The first `count` elements of each buffer of each slot: `[buffer][rank]`."""
        return [
            [
                np.frombuffer(self._segment.memory, dtype, count, self._layout.buffer(buffer, rank))
                for rank in range(self.size)
            ]
            for buffer in range(BUFFER_COUNT)
        ]

    def _make_scratch_view(self, dtype: np.dtype[Any], count: int) -> Flat:
        return self._scratch[: count * dtype.itemsize].view(dtype)

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._barrier.calls.begun

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Announce an operation."""
        self._barrier.begin(call, patience)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._barrier.arrive_and_wait()

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources in the order of the ranks; every rank gets the whole."""
        if source.nbytes == 0:
            self._barrier.arrive_and_wait()
        elif source.nbytes <= self._small_bytes:
            self._all_reduce_small(source, result, reduction)
        else:
            self._all_reduce_in_chunks(source, result, reduction)

    def _all_reduce_small(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        pieces = self._views(source.dtype, source.size)[self._barrier.buffer]
        np.copyto(pieces[self.rank], source)
        self._barrier.arrive_and_wait()
        folded = self._scratch_view(source.dtype, source.size)
        fold(reduction, pieces, folded)
        np.copyto(result, folded)

    def _all_reduce_in_chunks(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        barrier, me, size = self._barrier, self.rank, self.size
        chunk = self._layout.buffer_bytes // source.itemsize
        views = self._views(source.dtype, chunk)
        chunk_count = -(-source.size // chunk)
        for step in range(chunk_count + 2):
            writing = barrier.buffer
            if step < chunk_count:
                start = step * chunk
                length = min(chunk, source.size - start)
                low, high = length * me // size, length * (me + 1) // size
                slot = views[writing][me]
                np.copyto(slot[:low], source[start : start + low])
                np.copyto(slot[high:length], source[start + high : start + length])
            if 1 <= step <= chunk_count:
                start = (step - 1) * chunk
                length = min(chunk, source.size - start)
                low, high = length * me // size, length * (me + 1) // size
                slots = views[(writing - 1) % BUFFER_COUNT]
                pieces = [slot[low:high] for slot in slots]
                pieces[me] = source[start + low : start + high]
                fold(reduction, pieces, slots[0][low:high])
            if step >= 2:
                start = (step - 2) * chunk
                length = min(chunk, source.size - start)
                folded = views[(writing - 2) % BUFFER_COUNT][0]
                np.copyto(result[start : start + length], folded[:length])
            if step <= chunk_count:
                barrier.arrive_and_wait()

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources in the order of the ranks; rank r gets the r-th part."""
        barrier, me = self._barrier, self.rank
        if result.nbytes == 0:
            barrier.arrive_and_wait()
            return
        chunk = self._layout.buffer_bytes // source.itemsize // self.size
        views = self._views(source.dtype, chunk * self.size)
        parts = source.reshape(self.size, result.size)
        for start in range(0, result.size, chunk):
            length = min(chunk, result.size - start)
            slots = views[barrier.buffer]
            for peer in range(self.size):
                if peer != me:
                    place = slots[me][peer * chunk : peer * chunk + length]
                    np.copyto(place, parts[peer, start : start + length])
            barrier.arrive_and_wait()
            pieces = [slot[me * chunk : me * chunk + length] for slot in slots]
            pieces[me] = parts[me, start : start + length]
            fold(reduction, pieces, result[start : start + length])

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other, in the order of the ranks."""
        barrier, me = self._barrier, self.rank
        if source.nbytes == 0:
            barrier.arrive_and_wait()
            return
        source, result = source.view(np.uint8), result.view(np.uint8)
        chunk = self._layout.buffer_bytes
        views = self._views(source.dtype, chunk)
        parts = result.reshape(self.size, source.size)
        for start in range(0, source.size, chunk):
            end = min(start + chunk, source.size)
            slots = views[barrier.buffer]
            np.copyto(slots[me][: end - start], source[start:end])
            barrier.arrive_and_wait()
            for peer in range(self.size):
                if peer != me:
                    np.copyto(parts[peer, start:end], slots[peer][: end - start])
        np.copyto(parts[me], source)

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of `root` to all."""
        barrier, is_root = self._barrier, self.rank == root
        if source.nbytes == 0:
            barrier.arrive_and_wait()
            return
        source, result = source.view(np.uint8), result.view(np.uint8)
        chunk = self._layout.buffer_bytes
        views = self._views(source.dtype, chunk)
        for start in range(0, source.size, chunk):
            end = min(start + chunk, source.size)
            slot = views[barrier.buffer][root]
            if is_root:
                np.copyto(slot[: end - start], source[start:end])
            barrier.arrive_and_wait()
            if not is_root:
                np.copyto(result[start:end], slot[: end - start])
        if is_root:
            np.copyto(result, source)

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the r-th part of the source to rank r."""
        self.run(direct_all_to_all, source, result)

    def run(
        self,
        algorithm: ModuleType,
        source: Flat,
        result: Flat,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> None:
        """Carry out an algorithm's collective, whichever it is, by its program.

        The operations above are specialised forms of programs: they reduce straight from the
        peers' slots, where a program would copy first. A test holds both against each other.
        """
        if source.nbytes == 0:
            self._barrier.arrive_and_wait()
        else:
            self._programs.run(algorithm, source, result, reduction, root)

    def _elements_max(self, algorithm: ModuleType, task: Task, itemsize: int) -> int:
        """The longest chunk of which a round's messages fit into a slot."""
        elements = task.elements
        while (
            elements > 1
            and _rounds(algorithm, task.size, elements, task.root).slot_elements * itemsize
            > self._layout.buffer_bytes
        ):
            elements = -(-elements // 2)
        return elements

    def _carry_out(
        self, algorithm: ModuleType, task: Task, workspace: Flat, reduction: Reduction | None
    ) -> None:
        """Play all rounds of a program, with a barrier between one and the next."""
        rounds = _rounds(algorithm, task.size, task.elements, task.root).actions[self.rank]
        aside: dict[int, Flat] = {}
        views = self._views(workspace.dtype, self._layout.buffer_bytes // workspace.itemsize)
        for number, actions in enumerate(rounds):
            if number:
                self._barrier.arrive_and_wait()
            posting = views[self._barrier.buffer][self.rank]
            posted = views[(self._barrier.buffer - 1) % BUFFER_COUNT]
            for action in actions:
                _do(action, workspace, reduction, posting, posted=posted, aside=aside)
        if len(rounds) < 2:  # the ranks have not met: all must know that the operation was called
            self._barrier.arrive_and_wait()

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the peers that this rank gave up in an operation."""
        self._barrier.withdraw(reason, lost_peer=lost_peer)

    def close(self) -> None:
        """Unmap the segment."""
        self._views.cache_clear()
        self._scratch_view.cache_clear()
        self._barrier.close()
        self._segment.close()


@lru_cache(maxsize=256)
def _rounds(algorithm: ModuleType, size: int, elements: int, root: int) -> Rounds:
    tasks = [Task(rank, size, elements, root) for rank in range(size)]
    return rounds_of([instructions_for(algorithm, task) for task in tasks])


def _do(
    action: Action,
    workspace: Flat,
    reduction: Reduction | None,
    posting: Flat,
    *,
    posted: list[Flat],
    aside: dict[int, Flat],
) -> None:
    """Carry out one action of a round."""
    match action:
        case SlotPost(span, place):
            np.copyto(posting[place : place + span.length], workspace[span.start : span.stop])
        case Take(peer, place, span, combines):
            _take(workspace, span, posted[peer][place : place + span.length], reduction, combines)
        case PutAside(peer, place, length, number):
            aside[number] = posted[peer][place : place + length].copy()
        case TakeAside(number, span, combines):
            _take(workspace, span, aside.pop(number), reduction, combines)
        case Copy(source, target):
            np.copyto(workspace[target.start : target.stop], workspace[source.start : source.stop])
        case Fold():
            assert reduction is not None, "only reductions fold"
            fold_spans(workspace, action, reduction)


def _take(
    workspace: Flat, span: Span, message: Flat, reduction: Reduction | None, combines: bool
) -> None:
    mine = workspace[span.start : span.stop]
    if combines:
        assert reduction is not None, "only reductions combine"
        reduction.ufunc(mine, message, out=mine)
    else:
        np.copyto(mine, message)
