"""Play a plan on the machine: what its messages cost in time.

Each rank has some PEs, its *lanes*; every message is cut in as many parts, and lane i of one rank
talks to lane i of the other. Between two lanes that exchange messages there is a queue of the
hardware, with slots, credits and back-pressure. A message moves slot by slot, and a slot may go on
its way as soon as what it depends on is there: the slots of a part that has just been received are
passed on while later ones still come in. So a ring is a pipeline, and its links do not idle.

A lane has a process per outgoing and one per incoming queue; each works off its own messages in the
order of the program. Between queues, order is kept where the program means it to be: a message that
reads a span waits for the last instruction that writes it, and one that writes waits for those that
read what was there.

What a slot costs: to send, the bytes are read from the HBM next to the PE and cross the links to
the slot, in TCM or HBM; to receive, they are stored from the slot to the HBM; to combine, the
operand is loaded into TCM beforehand, the math engine works, and the result is stored.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from rankwise.sim.ccl.configuration import Queues
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.ccl.program import Copy, Fold, Instruction, Receive, Send, Span, part_of
from rankwise.sim.hardware.ipcq import IpcQueue
from rankwise.sim.hardware.machine import Machine, Pe
from rankwise.sim.kernel import Event, Steps, all_of


class Dependency(NamedTuple):
    """An instruction that has to come first; slot by slot if both are about the same span."""

    step: int
    is_same_span: bool


@lru_cache(maxsize=4096)
def dependencies(program: tuple[Instruction, ...]) -> tuple[tuple[Dependency, ...], ...]:
    """For every instruction of a program, what it has to wait for."""
    touched = [_touched(instruction) for instruction in program]
    borders = sorted(
        {edge for reads, writes in touched for span in (*reads, *writes) for edge in span}
    )
    cell_at = {border: cell for cell, border in enumerate(borders)}
    writer: list[tuple[int, Span] | None] = [None] * len(borders)
    readers: list[list[tuple[int, Span]]] = [[] for _ in borders]
    found = []
    for step, (reads, writes) in enumerate(touched):
        needed: dict[int, bool] = {}
        for span in (*reads, *writes):
            for cell in range(cell_at[span.start], cell_at[span.stop]):
                before = writer[cell]
                if before is not None:
                    needed[before[0]] = before[1] == span
        for span in writes:
            for cell in range(cell_at[span.start], cell_at[span.stop]):
                for reader, other in readers[cell]:
                    needed[reader] = other == span
        found.append(tuple(Dependency(other, needed[other]) for other in sorted(needed)))
        for span in reads:
            for cell in range(cell_at[span.start], cell_at[span.stop]):
                readers[cell].append((step, span))
        for span in writes:
            # Who touches it from now on waits for us, and through us for all before.
            for cell in range(cell_at[span.start], cell_at[span.stop]):
                writer[cell] = (step, span)
                readers[cell] = []
    return tuple(found)


def _touched(instruction: Instruction) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The spans that an instruction reads, and those that it writes."""
    match instruction:
        case Send(_, span):
            return (span,), ()
        case Receive(_, span, combines):
            return ((span,) if combines else ()), (span,)
        case Copy(source, target):
            return (source,), (target,)
        case Fold(sources, target):
            return sources, (target,)


def lane_count(plan: Plan, item_bytes: int, queues: Queues, pe_count: int) -> int:
    """Over how many PEs of each rank messages are spread."""
    if queues.n_lanes:
        return min(queues.n_lanes, pe_count)
    longest = max(
        (
            each.span.length
            for program in plan.programs
            for each in program
            if isinstance(each, Send)
        ),
        default=0,
    )
    return max(1, min(pe_count, -(-longest * item_bytes // queues.slot_size)))


def queues_per_pe(plan: Plan) -> int:
    """How many queues end at a PE of the rank that has the most peers."""
    return max(
        len({each.peer for each in program if isinstance(each, Receive)})
        for program in plan.programs
    )


class Execution:
    """One collective on its way.

    Args:
        machine: where it runs.
        plan: what its ranks do.
        lanes: the PEs of every rank; equally many for all.
        item_bytes: bytes per element.
        dtype: the element type, as the machine's engines call it.
        operation: what the math engine does to combine.
        queues: how queues are laid out.
    """

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        lanes: Sequence[Sequence[Pe]],
        *,
        item_bytes: int,
        dtype: str,
        operation: str,
        queues: Queues,
    ) -> None:
        self.machine = machine
        self.plan = plan
        self.lanes = lanes
        self.item_bytes = item_bytes
        self.dtype = dtype
        self.operation = operation
        self.layout = queues
        self._queues: dict[tuple[int, int, int], IpcQueue] = {}

    def rank_steps(self, rank: int) -> Steps:
        """What one rank does; the generator ends when the rank has its result."""
        simulator = self.machine.simulator
        processes: list[Event] = []
        progress: list[Event] = []
        for number, pe in enumerate(self.lanes[rank]):
            lane = _Lane(self, rank, number, pe)
            progress += lane.last_events()
            processes += [
                simulator.process(steps, f"rank {rank} lane {number}: {name}")
                for name, steps in lane.activities()
            ]
        if processes:
            yield all_of([*processes, *progress])

    def queue(self, source: int, destination: int, lane: int) -> IpcQueue:
        """The queue between equal lanes of two ranks."""
        key = (source, destination, lane)
        queue = self._queues.get(key)
        if queue is None:
            sender, receiver = self.lanes[source][lane], self.lanes[destination][lane]
            layout = self.layout
            queue = self._queues[key] = IpcQueue(
                self.machine,
                sender,
                receiver,
                slots=layout.n_slots,
                slot_bytes=layout.slot_size,
                credit_bytes=layout.ipcq_credit_size_bytes,
                chunk_bytes=layout.vc_chunk_size,
                source_memory=sender.hbm,
                buffer=receiver.hbm if layout.buffer_kind == "hbm" else receiver.tcm,
                backpressure=layout.backpressure,
            )
        return queue


class _Lane:
    """One PE's part in one rank's program."""

    def __init__(self, execution: Execution, rank: int, number: int, pe: Pe) -> None:
        self._execution = execution
        self._rank = rank
        self._number = number
        self._pe = pe
        self._program = execution.plan.programs[rank]
        self._needs = dependencies(self._program)
        simulator = execution.machine.simulator
        self._sizes = [self._slot_sizes(instruction) for instruction in self._program]
        self._done = [[simulator.event() for _ in sizes] for sizes in self._sizes]

    def _slot_sizes(self, instruction: Instruction) -> list[int]:
        """Bytes of every slot of this lane's part of a message; one entry if nothing is sent."""
        execution = self._execution
        is_local = isinstance(instruction, Copy | Fold)
        span = instruction.target if isinstance(instruction, Copy | Fold) else instruction.span
        part = part_of(Span(0, span.length), self._number, len(execution.lanes[self._rank]))
        size = part.length * execution.item_bytes
        if is_local:
            return [size] if size else []
        whole, rest = divmod(size, execution.layout.slot_size)
        return [execution.layout.slot_size] * whole + ([rest] if rest else [])

    def last_events(self) -> list[Event]:
        """The events after which all of this lane's instructions are done."""
        return [events[-1] for events in self._done if events]

    def activities(self) -> list[tuple[str, Steps]]:
        """A process per queue, and one for what stays on the PE."""
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        local = []
        for step, instruction in enumerate(self._program):
            if not self._sizes[step]:
                continue
            match instruction:
                case Send(peer):
                    sends.setdefault(peer, []).append(step)
                case Receive(peer):
                    receives.setdefault(peer, []).append(step)
                case _:
                    local.append(step)
        activities = [(f"send to {peer}", self._send(peer, steps)) for peer, steps in sends.items()]
        activities += [
            (f"receive from {peer}", self._receive(peer, steps)) for peer, steps in receives.items()
        ]
        if local:
            activities.append(("local work", self._work(local)))
        return activities

    def _wait_for(self, step: int, slot: int) -> Steps:
        """Wait until a slot of a message may be read or written."""
        for other, is_same_span in self._needs[step]:
            events = self._done[other]
            if events:
                event = events[slot if is_same_span and slot < len(events) else -1]
                if not event.is_done:
                    yield event

    def _send(self, peer: int, steps: list[int]) -> Steps:
        queue = self._execution.queue(self._rank, peer, self._number)
        for step in steps:
            done = self._done[step]
            for slot, size in enumerate(self._sizes[step]):
                yield from self._wait_for(step, slot)
                yield from queue.send(size)
                done[slot].succeed()

    def _receive(self, peer: int, steps: list[int]) -> Steps:
        execution, pe = self._execution, self._pe
        queue = execution.queue(peer, self._rank, self._number)
        slots_lie = pe.hbm if execution.layout.buffer_kind == "hbm" else pe.tcm
        for step in steps:
            instruction = self._program[step]
            assert isinstance(instruction, Receive), "the list is of receives"
            done = self._done[step]
            for slot, size in enumerate(self._sizes[step]):
                yield from self._wait_for(step, slot)
                if instruction.combines:
                    operand = pe.start_dma(size)
                    yield queue.receive()
                    yield operand
                    yield from pe.math(
                        size // execution.item_bytes, execution.operation, execution.dtype
                    )
                    queue.free()
                    stored = pe.start_dma(size, pe.tcm, pe.hbm)
                else:
                    yield queue.receive()
                    stored = pe.start_dma(size, slots_lie, pe.hbm)
                    stored.add_callback(lambda _event: queue.free())
                stored.add_callback(partial(_pass_on, done[slot]))

    def _work(self, steps: list[int]) -> Steps:
        execution, pe = self._execution, self._pe
        for step in steps:
            instruction = self._program[step]
            (size,), (done,) = self._sizes[step], self._done[step]
            yield from self._wait_for(step, -1)
            if isinstance(instruction, Fold):
                yield all_of([pe.start_dma(size) for _ in instruction.sources])
                for _ in instruction.sources[1:]:
                    yield from pe.math(
                        size // execution.item_bytes, execution.operation, execution.dtype
                    )
            else:
                yield pe.start_dma(size)
            yield pe.start_dma(size, pe.tcm, pe.hbm)
            done.succeed()


def _pass_on(event: Event, _cause: Event) -> None:
    """Let an event happen because another has."""
    event.succeed()
