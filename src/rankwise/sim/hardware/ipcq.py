"""Queues between PEs: fixed slots, credits that return, and the cost of waiting.

A message takes one slot. The sender spends a credit, the bytes move over the links, and the slot is
taken at the receiver until the receiver frees it. Then a credit message (`credit_bytes`) returns
over the links, and the sender may fill the slot again. So the slots limit how far a sender can be
ahead of a slow receiver, and reports show a full queue as the reason of the sender's wait.

A sender without credit either sleeps or spins. A sleeper needs `wake_ns` to continue when a credit
comes. A spinner sees the credit at the next multiple of `poll_ns` after its first poll. Slots
arrive in the order in which they were sent.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.hardware_machine import HardwareMachine, Memory, Pe, SlotMessage
from rankwise.sim.hardware.links import FlowLane
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.kernel import Channel, CreditPool, Future, Steps

Backpressure = Literal["sleep", "spin"]


class Slot(NamedTuple):
    """One filled slot at the receiver: its size, and the data that came with it."""

    size: int
    payload: Any


class IpcQueue:
    """A queue from one PE to another.

    Args:
        source: the sending PE.
        destination: the receiving PE.
        slots: how many messages may be under way or unread.
        slot_bytes: how large a message may be.
        buffer: where the slots lie at the receiver; its TCM unless given.
        backpressure: what the sender does while it has no credit.
    """

    def __init__(
        self,
        machine: HardwareMachine,
        source: Pe,
        destination: Pe,
        *,
        slots: int | None = None,
        slot_bytes: int | None = None,
        credit_bytes: int | None = None,
        chunk_bytes: int | None = None,
        buffer: Memory | None = None,
        backpressure: Backpressure = "sleep",
    ) -> None:
        spec = machine.topology.machine.pe.ipcq
        self.machine = machine
        self._ends = (source.name, destination.name)
        self.name = f"queue {source.name} to {destination.name}"
        self.slot_bytes = slot_bytes or spec.slot_bytes
        self.slots = slots or spec.slots
        buffer = buffer or destination.tcm
        if self.slots * self.slot_bytes > buffer.capacity:
            raise ConfigError(
                f"{self.name}: {self.slots} slots of {self.slot_bytes} bytes do not fit into"
                f" {buffer.name}, which has {buffer.capacity} bytes"
            )
        self._simulator = machine.simulator
        self._credit_bytes = credit_bytes or spec.credit_bytes
        self._chunk_bytes = chunk_bytes
        self._backpressure = backpressure
        self._wake = picoseconds(spec.wake_ns)
        self._poll = picoseconds(spec.poll_ns)
        self._memories = source.tcm, buffer
        self._ways_back = destination.tcm, source.tcm
        self._path = machine.path(*self._memories)
        self._way_back = machine.path(*self._ways_back)
        self._credits = CreditPool(self._simulator, self.slots, f"credit of {self.name}")
        self._arrived = Channel(self._simulator, f"slot of {self.name}")
        self._last_arrival: Future | None = None
        self._size = self._pace = 0
        self._lane = FlowLane()
        wires = machine.sip_links(source.cube.sip.number, destination.cube.sip.number)
        self._latency_inside = self._path.latency - sum(wire.latency for wire in wires)
        machine.waits.queues += 1
        self.messages_sent = 0
        self.messages_read = 0
        self.bytes_sent = 0

    def send(self, size: int, payload: Any = None) -> Steps:
        """Fill one slot; returns when the bytes have left for it, not when they have arrived."""
        if not 0 < size <= self.slot_bytes:
            raise ConfigError(
                f"{self.name}: a message of {size} bytes does not fit a slot of {self.slot_bytes}"
            )
        credit = self._credits.spend()
        if not credit.is_done:
            since = self._simulator.now
            yield credit
            if self._backpressure == "sleep":
                yield self._wake
            elif self._poll:
                yield -(self._simulator.now - since) % self._poll
            self.machine.waits.credits += self._simulator.now - since
        self.messages_sent += 1
        self.bytes_sent += size
        if self._path.is_broken:
            self._path, self._size = self.machine.path(*self._memories), 0
            self._lane = FlowLane()
        transfer = self.machine.start_flow(
            self._path, size, self._chunk_bytes, self.name, lane=self._lane
        )
        before, self._last_arrival = self._last_arrival, self._simulator.future(self.name)
        pace = self._pace_of(size)
        if self.machine.messages is not None:
            self._last_arrival.add_callback(self._note(size, self._simulator.now, pace))
        self._simulator.process(
            self._deliver(transfer, before, self._last_arrival, Slot(size, payload)), self.name
        )
        yield pace

    def _pace_of(self, size: int) -> int:
        """How long the slowest link of the way is busy with a message; most have one size."""
        if size != self._size:
            self._size, self._pace = size, max(link.rate.time_for(size) for link in self._path)
        return self._pace

    def _deliver(
        self, transfer: Future, before: Future | None, arrival: Future, slot: Slot
    ) -> Steps:
        yield transfer
        if before is not None:
            yield before
        self.machine.waits.ways += self._latency_inside
        arrival.succeed()
        self._arrived.put(slot)

    def _note(self, size: int, sent_at: int, pace: int) -> Callable[[Future], None]:
        """What keeps a message for the record when it has arrived."""

        def note(_arrival: Future) -> None:
            assert self.machine.messages is not None, "messages are kept from the start, or never"
            now = self._simulator.now
            self.machine.messages.append(SlotMessage(*self._ends, size, sent_at, now, pace))
            if self.machine.samples is not None:
                self.machine.samples.take(now)

        return note

    def receive(self) -> Future:
        """Wait for the next slot; the future's value is the `Slot`. Give it back with `free`."""
        return self._arrived.get()

    def free(self) -> None:
        """Let a slot that was received be filled again: its credit sets out for the sender."""
        self.messages_read += 1
        if self._way_back.is_broken:
            self._way_back = self.machine.path(*self._ways_back)
        back = self.machine.start_flow(self._way_back, self._credit_bytes, None, self.name)
        back.add_callback(lambda _event: self._credits.give_back())
