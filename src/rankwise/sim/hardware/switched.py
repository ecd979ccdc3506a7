"""Queues through a switch that combines what several PEs send, and copies it to several others.

Each sender fills a slot and sends it to the switch. When the slots of all senders are there, the
switch has combined them, and sends one slot to each receiver. Combining takes no time of its own:
the switch works at the rate of its links. When all receivers have freed the slot, one credit goes
back to all senders.

A slot crosses the links to the switch and those behind it one after the other, so a message of one
slot takes longer than over a queue by the time of that slot on a link.
"""

from collections.abc import Sequence

from rankwise.sim.hardware.hardware_machine import HardwareMachine, Memory, Pe
from rankwise.sim.hardware.ipcq import Slot
from rankwise.sim.hardware.links import FlowLane
from rankwise.sim.hardware.paths import Path
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.kernel import Channel, CreditPool, Future, Steps


class SwitchedQueue:
    """Slots from some PEs to others, through one switch.

    Args:
        machine: where they are.
        senders: what they send is combined.
        receivers: each gets a copy, into the memory named beside it.
        slots: how many may be under way or unread.
        chunk_bytes: in what pieces slots cross links.
        credit_bytes: size of the message that gives a slot back.

    Attributes:
        senders, receivers: their ends, in the same order.
    """

    def __init__(
        self,
        machine: HardwareMachine,
        senders: Sequence[Pe],
        receivers: Sequence[tuple[Pe, Memory]],
        *,
        slots: int,
        chunk_bytes: int,
        credit_bytes: int,
    ) -> None:
        self.machine = machine
        self.chunk_bytes, self._credit_bytes = chunk_bytes, credit_bytes
        first, (last, buffer) = senders[0], receivers[0]
        self.name = f"switched queue {first.name} to {last.name}"
        self.senders = [SwitchedSender(self, each, last, buffer, slots) for each in senders]
        self.receivers = [SwitchedReceiver(self, first, *each) for each in receivers]
        self._way_back = machine.path(last.tcm, first.tcm)
        self._there = self._freed = 0

    def come(self, size: int) -> None:
        """A slot of one sender has come to the switch; they come in the order of each sender."""
        self._there += 1
        if not self._there % len(self.senders):
            for receiver in self.receivers:
                receiver.copy(size)

    def free(self) -> None:
        """One receiver has freed a slot."""
        self._freed += 1
        if not self._freed % len(self.receivers):
            back = self.machine.start_flow(self._way_back, self._credit_bytes, None, self.name)
            back.add_callback(self._give_back)

    def _give_back(self, _event: Future) -> None:
        for sender in self.senders:
            sender.credits.give_back()


class SwitchedSender:
    """One PE's end of a switched queue."""

    def __init__(
        self, queue: SwitchedQueue, pe: Pe, receiver: Pe, buffer: Memory, slots: int
    ) -> None:
        self._queue, self._machine = queue, queue.machine
        simulator = queue.machine.simulator
        self.credits = CreditPool(simulator, slots, f"credit of {queue.name}")
        self._way, _ = _divided(queue.machine, pe, receiver, buffer)
        self._lane = FlowLane()
        self._wake = picoseconds(queue.machine.topology.machine.pe.ipcq.wake_ns)
        self.bytes_sent = 0

    def send(self, size: int) -> Steps:
        """Fill one slot; returns when the bytes have left for it."""
        credit = self.credits.spend()
        if not credit.is_done:
            since = self._machine.simulator.now
            yield credit
            yield self._wake
            self._machine.waits.credits += self._machine.simulator.now - since
        self.bytes_sent += size
        queue = self._queue
        came = self._machine.start_flow(
            self._way, size, queue.chunk_bytes, queue.name, lane=self._lane
        )
        came.add_callback(lambda _event: queue.come(size))
        assert self._way.slowest is not None, "there are links on the way"
        yield self._way.slowest.time_for(size)


class SwitchedReceiver:
    """The other end: of one PE."""

    def __init__(self, queue: SwitchedQueue, sender: Pe, pe: Pe, buffer: Memory) -> None:
        self._queue = queue
        _, self._way = _divided(queue.machine, sender, pe, buffer)
        self._lane = FlowLane()
        self._arrived = Channel(queue.machine.simulator, f"slot of {queue.name}")

    def copy(self, size: int) -> None:
        """Let a slot come from the switch; those of a lane keep their order."""
        queue = self._queue
        came = queue.machine.start_flow(
            self._way, size, queue.chunk_bytes, queue.name, lane=self._lane
        )
        came.add_callback(lambda _event: self._arrived.put(Slot(size, None)))

    def receive(self) -> Future:
        """Wait for the next slot. Give it back with `free`."""
        return self._arrived.get()

    def free(self) -> None:
        """Let a slot that was received be filled again, if the others have freed it, too."""
        self._queue.free()


def _divided(
    machine: HardwareMachine, sender: Pe, receiver: Pe, buffer: Memory
) -> tuple[Path, Path]:
    """The ways to the switch between two devices, and from it."""
    path = machine.path(sender.tcm, buffer)
    ends = sender.cube.sip.number, receiver.cube.sip.number
    up, _ = machine.sip_links(*ends)
    behind = path.index(up) + 1
    return Path(path[:behind], path.sips), Path(path[behind:], path.sips)
