"""The queues of one collective: between equal lanes of its ranks, as many slots as they need.

A queue holds up its sender unless it has slots for all that is under way: what a lane may send
(its share of the link between the devices) from the moment a slot is filled until its credit is
back. Twice that is what a collective gets whose configuration names no number, since lanes take
turns on a link in bursts; at least 4, and at most what fits into half of the scratch memory.

Slots cross the links in pieces, which other flows can come between. Pieces are worth simulating as
far as the time that they take is: unless the configuration says how large they are, they take a
link between devices some 5 ns, and have 256 bytes at least.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rankwise.sim.ccl.configuration import CHUNK_LEAST, SLOTS_LEAST, QueueLayout
from rankwise.sim.ccl.switched_messages import SwitchedMessage
from rankwise.sim.hardware.hardware_machine import HardwareMachine, Pe
from rankwise.sim.hardware.ipcq import IpcQueue
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.hardware.switched import SwitchedQueue


class LaneQueues:
    """The queues between equal lanes of the ranks of a collective, made when first used.

    Args:
        machine: where they are.
        lanes: the PEs of every rank; equally many for all.
        layout: how they are laid out; the number of slots is known.
    """

    def __init__(
        self, machine: HardwareMachine, lanes: Sequence[Sequence[Pe]], layout: QueueLayout
    ) -> None:
        self._machine = machine
        self._lanes = lanes
        self.layout = layout
        self._queues: dict[tuple[int, int, int, int], IpcQueue] = {}
        self._switched: dict[tuple[SwitchedMessage, int], SwitchedQueue] = {}

    def between(self, source: int, destination: int, lane: int, channel: int = 0) -> IpcQueue:
        """The queue of a channel between equal lanes of two ranks."""
        key = (source, destination, lane, channel)
        queue = self._queues.get(key)
        if queue is None:
            sender, receiver = self._lanes[source][lane], self._lanes[destination][lane]
            layout = self.layout
            queue = self._queues[key] = IpcQueue(
                self._machine,
                sender,
                receiver,
                slots=layout.n_slots,
                slot_bytes=layout.slot_size,
                credit_bytes=layout.ipcq_credit_size_bytes,
                chunk_bytes=layout.vc_chunk_size,
                buffer=receiver.hbm if layout.buffer_kind == "hbm" else receiver.tcm,
                backpressure=layout.backpressure,
            )
        return queue

    def switched(self, message: SwitchedMessage, lane: int) -> SwitchedQueue:
        """The queue of messages that a switch combines, or copies, between equal lanes."""
        _, sources, destinations = message
        key = (message, lane)
        queue = self._switched.get(key)
        if queue is None:
            layout = self.layout
            assert layout.n_slots is not None, "it is known by now"
            assert layout.vc_chunk_size is not None, "it is known by now"
            ends = [self._lanes[rank][lane] for rank in destinations]
            in_hbm = layout.buffer_kind == "hbm"
            queue = self._switched[key] = SwitchedQueue(
                self._machine,
                [self._lanes[rank][lane] for rank in sources],
                [(pe, pe.hbm if in_hbm else pe.tcm) for pe in ends],
                slots=layout.n_slots,
                chunk_bytes=layout.vc_chunk_size,
                credit_bytes=layout.ipcq_credit_size_bytes,
            )
        return queue

    def bytes_sent_by(self, rank: int) -> int:
        """How many bytes a rank has sent; what a switch copies counts once."""
        alone = sum(
            queue.bytes_sent for (source, *_), queue in self._queues.items() if source == rank
        )
        return alone + sum(
            queue.senders[message.sources.index(rank)].bytes_sent
            for (message, _), queue in self._switched.items()
            if rank in message.sources
        )

    def unread(self) -> list[str]:
        """What was sent and never received: how many slots, from which rank to which."""
        left: dict[tuple[int, int], int] = {}
        for (source, destination, *_), queue in self._queues.items():
            unread = queue.messages_sent - queue.messages_read
            if unread:
                left[source, destination] = left.get((source, destination), 0) + unread
        return [
            f"{count} slot{'s' * (count > 1)} from rank {source} to rank {destination}"
            for (source, destination), count in left.items()
        ]


def suited_to(
    machine: HardwareMachine,
    queues: QueueLayout,
    ways: Iterable[tuple[int, int]],
    lane_count: int,
    queue_count: int,
) -> QueueLayout:
    """A layout with everything that the configuration has left to the machine.

    Args:
        machine: where the queues are.
        queues: as they were configured.
        ways: from which devices to which messages go.
        lane_count: how many lanes share a link.
        queue_count: how many queues end at the PE that has the most.
    """
    slots, chunk = queues.n_slots, queues.vc_chunk_size
    if slots is None:
        needed = max(
            (_slots_under_way(machine, queues, *way, lane_count) for way in ways), default=0
        )
        room = machine.topology.machine.pe.tcm.capacity // 2 // (queues.slot_size * queue_count)
        # Of the least that is wanted, `check_against` tells if it does not fit.
        slots = max(SLOTS_LEAST, min(2 * needed, room))
    if chunk is None:
        chunk = _chunk_for(machine, queues.slot_size)
    return msgspec.structs.replace(queues, n_slots=slots, vc_chunk_size=chunk)


def _slots_under_way(
    machine: HardwareMachine, queues: QueueLayout, source: int, destination: int, lane_count: int
) -> int:
    """How many slots a lane can fill before the credit of the first one is back."""
    sender, receiver = machine.sip(source).pe(0), machine.sip(destination).pe(0)
    there = machine.path(sender.tcm, receiver.tcm)
    back = machine.path(receiver.tcm, sender.tcm)
    shared = {link.name for link in machine.sip_links(source, destination)}
    interval = max(
        link.rate.time_for(queues.slot_size * (lane_count if link.name in shared else 1))
        for link in there
    )
    slot = max(link.rate.time_for(queues.slot_size) for link in there)
    wake = picoseconds(machine.topology.machine.pe.ipcq.wake_ns)
    return -(-(there.latency + slot + back.latency + wake) // interval)


def _chunk_for(machine: HardwareMachine, slot_size: int) -> int:
    """The largest power of two that divides a slot and takes a link no longer than wanted."""
    rate = machine.topology.machine.system.sips.fastest_link.rate
    chunk = slot_size & -slot_size
    while chunk > CHUNK_LEAST and rate.time_for(chunk) > _CHUNK_PICOSECONDS:
        chunk //= 2
    return chunk


_CHUNK_PICOSECONDS = 6_000
