"""`tl.send` and `tl.recv` on the modelled queues between processing elements.

A block travels in slots: as many as its bytes need, the values with the last of them. The queues of
a machine are shared by all its launches, so that kernels on different devices find each other.
"""

from collections.abc import Callable
from typing import Any

from rankwise.sim.hardware.ipcq import IpcQueue, Slot
from rankwise.sim.hardware.machine import Machine, Pe
from rankwise.sim.kernel import Event, Steps
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import Execution, KernelValueError, place
from rankwise.sim.triton.tensor import tensor


class PeQueues:
    """All queues between the PEs of one machine, made when first used."""

    def __init__(self, machine: Machine) -> None:
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


class ProgramQueues:
    """The queues as the programs of one launch see them.

    A peer is a program of the launch, by its number, or any PE of the machine, as (SIP, PE).
    """

    def __init__(
        self,
        queues: PeQueues,
        machine: Machine,
        pe_of: Callable[[int], Pe],
        program_count: int,
        wait_for: Callable[[Execution, Event], Any],
    ) -> None:
        self._queues = queues
        self._machine = machine
        self._pe_of = pe_of
        self._program_count = program_count
        self._wait_for = wait_for

    def send(self, execution: Execution, peer: Any, block: tensor) -> None:
        """Put a block into the queue to a peer; wait while no slot is free."""
        _settle(execution)
        queue = self._queues.between(self._mine(execution), self._pe(peer))
        size = max(1, block.numel * block.dtype.itemsize)
        sizes = [queue.slot_bytes] * (size // queue.slot_bytes)
        if size % queue.slot_bytes:
            sizes.append(size % queue.slot_bytes)
        content = (block.dtype, block.shape, block.data.copy())
        steps = self._fill(queue, sizes, content)
        self._wait_for(execution, self._machine.simulator.process(steps, f"send on {queue.name}"))

    def receive(
        self, execution: Execution, peer: Any, shape: tuple[int, ...], type_: dtype
    ) -> tuple[Array, Any]:
        """Take the next block from a peer; wait until there is one."""
        _settle(execution)
        queue = self._queues.between(self._pe(peer), self._mine(execution))
        content = None
        while content is None:
            slot = self._wait_for(execution, queue.receive())
            assert isinstance(slot, Slot)
            content = slot.payload
            queue.free()
        sent_type, sent_shape, data = content
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

    def _mine(self, execution: Execution) -> Pe:
        return self._pe_of(int(execution.programs[0]))

    def _pe(self, peer: Any) -> Pe:
        if isinstance(peer, tuple) and len(peer) == 2:
            sip, index = (int(part) for part in peer)
            return self._machine.sip(sip).pe(index)
        if isinstance(peer, int) and 0 <= peer < self._program_count:
            return self._pe_of(peer)
        raise KernelValueError(
            f"{place()}: {peer!r} is no peer: give the number of a program (0 to "
            f"{self._program_count - 1}) or (SIP, PE)"
        )


def _settle(execution: Execution) -> None:
    if execution.observer is not None:
        execution.observer.settle()
