"""`tl.send` and `tl.recv` on the modelled queues between processing elements.

A block travels in slots: as many as its bytes need, the values with the last of them. Sending does
not stop a program (`ProgramClock.send`), receiving does, until the last slot has arrived. The
queues of a machine are shared by all its launches, so that kernels on different devices find each
other; a collective brings queues of its own.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rankwise.sim.hardware.hardware_machine import HardwareMachine, Pe
from rankwise.sim.hardware.ipcq import IpcQueue, Slot
from rankwise.sim.kernel import Future, Steps, where_of
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import (
    Execution,
    KernelValueError,
    kernel_frames,
    place,
    tokens_of,
)
from rankwise.sim.triton.tensor import tensor
from rankwise.sim.triton.timing import ProgramClock


class QueuesOfPrograms(Protocol):
    """Which queues the programs of a launch have."""

    def to(self, program: int, peer: Any) -> IpcQueue:
        """The queue from a program to a peer; a `LookupError` says what peers there are."""
        ...

    def come_from(self, program: int, peer: Any) -> IpcQueue:
        """The queue from a peer to a program; a `LookupError` says what peers there are."""
        ...


class PeQueues:
    """All queues between the PEs of one machine, made when first used."""

    def __init__(self, machine: HardwareMachine) -> None:
        self._machine = machine
        self._queues: dict[tuple[str, str], IpcQueue] = {}

    def between(self, source: Pe, destination: Pe) -> IpcQueue:
        """The queue from one PE to another."""
        key = (source.name, destination.name)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = IpcQueue(self._machine, source, destination)
        return queue

    def unread(self) -> list[str]:
        """What was sent and never received: how many slots, from whom to whom."""
        return [
            f"{left} slot{'s' * (left > 1)} from {source} to {destination}"
            for (source, destination), queue in self._queues.items()
            if (left := queue.messages_sent - queue.messages_read)
        ]


class LaunchQueues:
    """The queues of a machine as the programs of one launch see them.

    A peer is a program of the launch, by its number, or any PE of the machine, as (SIP, PE).
    """

    def __init__(
        self,
        queues: PeQueues,
        machine: HardwareMachine,
        pe_of: Callable[[int], Pe],
        program_count: int,
    ) -> None:
        self._queues = queues
        self._machine = machine
        self._pe_of = pe_of
        self._program_count = program_count

    def to(self, program: int, peer: Any) -> IpcQueue:
        """The queue from a program's PE to that of a peer."""
        return self._queues.between(self._pe_of(program), self._pe(peer))

    def come_from(self, program: int, peer: Any) -> IpcQueue:
        """The queue from a peer's PE to that of a program."""
        return self._queues.between(self._pe(peer), self._pe_of(program))

    def _pe(self, peer: Any) -> Pe:
        if isinstance(peer, tuple) and len(peer) == 2:
            sip, index = (int(part) for part in peer)
            return self._machine.sip(sip).pe(index)
        if isinstance(peer, int) and 0 <= peer < self._program_count:
            return self._pe_of(peer)
        raise LookupError(
            f"give the number of a program (0 to {self._program_count - 1}) or (SIP, PE)"
        )


class ProgramQueues:
    """`tl.send` and `tl.recv` of the programs of one launch."""

    def __init__(
        self, queues: QueuesOfPrograms, wait_for: Callable[[Execution, Future], Any]
    ) -> None:
        self._queues = queues
        self._wait_for = wait_for

    def send(
        self,
        execution: Execution,
        peer: Any,
        block: tensor,
        mask: tensor | None,
        *,
        releases: bool,
    ) -> None:
        """Put a block, or what the mask lets through of it, into the queue to a peer.

        The program goes on; the block leaves when a slot is free.
        """
        queue = self._queue(self._queues.to, execution, peer)
        count = block.numel if mask is None else int(np.count_nonzero(mask.data))
        size = max(1, count * block.dtype.itemsize)
        sizes = [queue.slot_bytes] * (size // queue.slot_bytes)
        if size % queue.slot_bytes:
            sizes.append(size % queue.slot_bytes)
        races = execution.launch.races if releases else None
        known = None if races is None else races.snapshot(execution)
        content = (block.dtype, block.shape, block.data.copy(), known)
        clock = execution.observer
        assert isinstance(clock, ProgramClock), "a kernel with queues runs in simulated time"
        where = where_of(kernel_frames())
        clock.send(
            queue.name, self._fill(queue, sizes, content), tokens_of((block,)), lambda: where,
            releases=releases,
        )  # fmt: skip

    def receive(
        self, execution: Execution, peer: Any, shape: tuple[int, ...], type_: dtype
    ) -> tuple[Array, Any]:
        """Take the next block from a peer; wait until there is one."""
        queue = self._queue(self._queues.come_from, execution, peer)
        content = None
        while content is None:
            slot = self._wait_for(execution, queue.receive())
            assert isinstance(slot, Slot)
            content = slot.payload
            queue.free()
        sent_type, sent_shape, data, known = content
        if execution.launch.races is not None and known is not None:
            execution.launch.races.take_over(execution, known)
        if sent_type != type_ or sent_shape != shape:
            raise KernelValueError(
                f"{place()}: recv of shape {list(shape)} {type_} on {queue.name} got a block of "
                f"shape {list(sent_shape)} {sent_type}"
            )
        return data, None

    def _fill(self, queue: IpcQueue, sizes: list[int], content: Any) -> Steps:
        for size in sizes[:-1]:
            yield from queue.send(size)
        yield from queue.send(sizes[-1], content)

    def _queue(
        self, find: Callable[[int, Any], IpcQueue], execution: Execution, peer: Any
    ) -> IpcQueue:
        try:
            return find(int(execution.programs[0]), peer)
        except LookupError as error:
            raise KernelValueError(f"{place()}: {peer!r} is not a peer: {error}") from None
