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

The cost of a slot: to send, the bytes are loaded from the HBM next to the PE into its TCM, unless
they have just been received and are still there, and cross the links to the slot, in TCM or HBM. To
receive, they are taken out of the slot, which is free again, and stored to the HBM; to combine, the
operand is loaded into TCM meanwhile, the math engine works, and the result is stored. A slot that
comes in before its operand stays in its slot. Loads, math and stores of one slot go on while the
next one is received.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send, Span, part_of
from rankwise.sim.ccl.configuration import QueueLayout
from rankwise.sim.ccl.lanes import LaneQueues
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.ccl.switched_messages import SwitchedMessage, leaders
from rankwise.sim.hardware.hardware_machine import HardwareMachine, Pe
from rankwise.sim.hardware.ipcq import IpcQueue
from rankwise.sim.hardware.switched import SwitchedReceiver, SwitchedSender
from rankwise.sim.kernel import Future, Steps, all_of


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
            # A later user of it waits for us, and through us for all before.
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


def lane_count(plan: Plan, item_bytes: int, queues: QueueLayout, pe_count: int) -> int:
    """Over how many PEs of each rank messages are spread."""
    if queues.n_lanes:
        return min(queues.n_lanes, pe_count)
    return max(1, min(pe_count, -(-plan.longest_message * item_bytes // queues.slot_size)))


def queues_per_pe(plan: Plan) -> int:
    """How many queues end at a PE of the rank that has the most peers."""
    return plan.sources_most


@dataclass(eq=False, repr=False)
class CollectiveExecution:
    """One collective on its way.

    Attributes:
        machine: where it runs.
        plan: what its ranks do.
        lanes: the PEs of every rank; equally many for all.
        queues: between the lanes.
        item_bytes: bytes per element.
        dtype: the element type, as the machine's engines call it.
        operation: what the math engine does to combine.
        name: what deadlock reports call it.
        ranks: what they call its ranks; 0, 1, … unless given.
    """

    machine: HardwareMachine
    plan: Plan
    lanes: Sequence[Sequence[Pe]]
    queues: LaneQueues
    item_bytes: int = field(kw_only=True)
    dtype: str = field(kw_only=True)
    operation: str = field(kw_only=True)
    name: str = "collective"
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.ranks = self.ranks or range(len(self.lanes))
        self.uses_switch = self.machine.combines_in_switches

    def rank_steps(self, rank: int) -> Steps:
        """The program of one rank; the generator ends when the rank has its result."""
        simulator = self.machine.simulator
        processes: list[Future] = []
        lanes = [_Lane(self, rank, number, pe) for number, pe in enumerate(self.lanes[rank])]
        for lane in lanes:
            processes += [
                simulator.process(steps, f"{lane}: {name}") for name, steps in lane.activities()
            ]
        if processes:
            yield all_of(processes)
            stores = [future for lane in lanes for future in lane.last_futures()]
            if stores:
                since = simulator.now
                yield all_of(stores)
                self.machine.waits.dma += len(lanes) * (simulator.now - since)


class _Lane:
    """One PE's part in one rank's program."""

    def __init__(self, execution: CollectiveExecution, rank: int, number: int, pe: Pe) -> None:
        self._execution = execution
        self._rank = rank
        self._number = number
        self._pe = pe
        self._program = execution.plan.programs[rank]
        self._needs = dependencies(self._program)
        self._leaders = (
            leaders(self._program) if execution.uses_switch else range(len(self._program))
        )
        self._simulator = simulator = execution.machine.simulator
        self._sizes = [self._slot_sizes(instruction) for instruction in self._program]
        before = f"an earlier step of {self}"
        self._done = [[simulator.future(before) for _ in sizes] for sizes in self._sizes]
        """By step and slot: it was sent, or lies in HBM."""
        for step, leader in enumerate(self._leaders):
            self._done[step] = self._done[leader]
        self._there: dict[int, list[Future]] = {}
        """Of what is received and sent on: it is in TCM."""
        self._sent_on = [self._received_before(step) for step in range(len(self._program))]
        for received in self._sent_on:
            if received is not None and received not in self._there:
                leader = self._leaders[received]
                if leader not in self._there:
                    self._there[leader] = [simulator.future(before) for _ in self._sizes[leader]]
                self._there[received] = self._there[leader]

    def __str__(self) -> str:
        execution = self._execution
        return f"{execution.name}, rank {execution.ranks[self._rank]} lane {self._number}"

    def _received_before(self, step: int) -> int | None:
        """The step that received what this one sends on from TCM, if there is such a one."""
        if not isinstance(self._program[step], Send) or not self._sizes[step]:
            return None
        if sum(self._sizes[step]) > self._pe.tcm.capacity // TCM_SHARE:
            return None  # by the time it is sent, most of it is no longer there
        for other, is_same_span in self._needs[step]:
            if is_same_span and isinstance(self._program[other], Receive):
                return other
        return None

    def _slot_sizes(self, instruction: Instruction) -> list[int]:
        """Bytes of every slot of this lane's part of a message; one entry if nothing is sent."""
        execution = self._execution
        is_local = isinstance(instruction, Copy | Fold)
        span = instruction.target if isinstance(instruction, Copy | Fold) else instruction.span
        part = part_of(Span(0, span.length), self._number, len(execution.lanes[self._rank]))
        size = part.length * execution.item_bytes
        if is_local:
            return [size] if size else []
        slot_size = execution.queues.layout.slot_size
        whole, rest = divmod(size, slot_size)
        return [slot_size] * whole + ([rest] if rest else [])

    def last_futures(self) -> list[Future]:
        """The futures after which all of this lane's instructions are done, if they are not yet."""
        return [futures[-1] for futures in self._done if futures and not futures[-1].is_done]

    def activities(self) -> list[tuple[str, Steps]]:
        """A process per queue, and one for what stays on the PE."""
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        sent_by_switch: dict[SwitchedMessage, list[int]] = {}
        received_by_switch: dict[SwitchedMessage, list[int]] = {}
        local = []
        for step, instruction in enumerate(self._program):
            if not self._sizes[step] or self._leaders[step] != step:
                continue
            match instruction:
                case Send(switch="copies" | "combines") if self._execution.uses_switch:
                    sent_by_switch.setdefault(self._message(step), []).append(step)
                case Receive(switch="copies" | "combines") if self._execution.uses_switch:
                    received_by_switch.setdefault(self._message(step), []).append(step)
                case Send(peer, _, channel):
                    sends.setdefault((peer, channel), []).append(step)
                case Receive(peer, _, _, channel):
                    receives.setdefault((peer, channel), []).append(step)
                case _:
                    local.append(step)
        ranks, between = self._execution.ranks, self._execution.queues.between
        rank, lane = self._rank, self._number
        activities = [
            (f"send to rank {ranks[peer]}", self._send(between(rank, peer, lane, channel), steps))
            for (peer, channel), steps in sends.items()
        ]
        activities += [
            (
                f"receive from rank {ranks[peer]}",
                self._receive(between(peer, rank, lane, channel), steps),
            )
            for (peer, channel), steps in receives.items()
        ]
        for message, steps in sent_by_switch.items():
            name, sender = self._switched_sender(message)
            activities.append((name, self._send(sender, steps)))
        for message, steps in received_by_switch.items():
            name, receiver = self._switched_receiver(message)
            activities.append((name, self._receive(receiver, steps)))
        if local:
            activities.append(("local work", self._work(local)))
        return activities

    def _switched_sender(self, message: SwitchedMessage) -> tuple[str, SwitchedSender]:
        """The sending end of the queue of messages that a switch copies, or combines."""
        ranks = self._execution.ranks
        queue = self._execution.queues.switched(message, self._number)
        peers = ", ".join(str(ranks[each]) for each in message.destinations)
        return f"send to rank {peers}", queue.senders[message.sources.index(self._rank)]

    def _switched_receiver(self, message: SwitchedMessage) -> tuple[str, SwitchedReceiver]:
        """The receiving end."""
        ranks = self._execution.ranks
        queue = self._execution.queues.switched(message, self._number)
        peers = ", ".join(str(ranks[each]) for each in message.sources)
        end = queue.receivers[message.destinations.index(self._rank)]
        return f"receive from rank {peers}", end

    def _message(self, step: int) -> SwitchedMessage:
        return self._execution.plan.switched[self._rank, step]

    def _wait_for(self, step: int, slot: int) -> Steps:
        """Wait until a slot of a message may be read or written."""
        received = self._sent_on[step]
        for other, is_same_span in self._needs[step]:
            futures = self._there[other] if other == received else self._done[other]
            if futures:
                future = futures[slot if is_same_span and slot < len(futures) else -1]
                if not future.is_done:
                    yield future

    def _send(self, queue: IpcQueue | SwitchedSender, steps: list[int]) -> Steps:
        for step in steps:
            done, is_in_tcm = self._done[step], self._sent_on[step] is not None
            loads: deque[Future] = deque()
            for slot, size in enumerate(self._sizes[step]):
                yield from self._wait_for(step, slot)
                if not is_in_tcm:
                    self._load_ahead(step, slot, loads)
                    yield from self._waiting_for_dma(loads.popleft())
                yield from queue.send(size)
                done[slot].succeed()

    def _load_ahead(self, step: int, slot: int, loads: "deque[Future]") -> None:
        """Begin to load a slot of a message, if that has not begun, and some more that may be."""
        sizes = self._sizes[step]
        while len(loads) < LOADS_AHEAD and slot + len(loads) < len(sizes):
            following = slot + len(loads)
            if loads and not self._may_be_read(step, following):
                return
            loads.append(self._pe.start_dma(sizes[following]))

    def _may_be_read(self, step: int, slot: int) -> bool:
        for other, is_same_span in self._needs[step]:
            futures = self._done[other]
            if (
                futures
                and not futures[slot if is_same_span and slot < len(futures) else -1].is_done
            ):
                return False
        return True

    def _waiting_for_dma(self, loaded: Future) -> Steps:
        since = self._simulator.now
        yield loaded
        self._execution.machine.waits.dma += self._simulator.now - since

    def _receive(self, queue: IpcQueue | SwitchedReceiver, steps: list[int]) -> Steps:
        pe = self._pe
        for step in steps:
            instruction = self._program[step]
            assert isinstance(instruction, Receive), "the list is of receives"
            for slot, size in enumerate(self._sizes[step]):
                yield from self._wait_for(step, slot)
                if not instruction.combines:
                    yield queue.receive()
                    queue.free()
                    self._store(step, slot)
                    continue
                operand = pe.start_dma(size)
                yield queue.receive()
                combine = partial(self._combine, queue, step, slot, self._simulator.now)
                if operand.is_done:
                    combine(operand)
                else:
                    operand.add_callback(combine)

    def _combine(
        self,
        queue: IpcQueue | SwitchedReceiver,
        step: int,
        slot: int,
        received_at: int,
        _operand: Future,
    ) -> None:
        """Combine a slot with its operand, which has been loaded, and store the result."""
        # Until then it lies in its slot: if the HBM is busy, the sender gets no credit.
        queue.free()
        execution, now = self._execution, self._simulator.now
        elements = self._sizes[step][slot] // execution.item_bytes
        delay = self._pe.math_engine.request(elements, execution.operation, execution.dtype)
        execution.machine.waits.dma += now - received_at
        execution.machine.waits.math += delay
        self._simulator.call_at(now + delay, self._store, step, slot)

    def _store(self, step: int, slot: int) -> None:
        """A slot's content is in TCM: it may be sent on, and goes to the HBM."""
        if step in self._there:
            self._there[step][slot].succeed()
        stored = self._pe.start_dma(self._sizes[step][slot], self._pe.tcm, self._pe.hbm)
        stored.add_callback(partial(pass_on, self._done[step][slot]))

    def _work(self, steps: list[int]) -> Steps:
        execution, pe = self._execution, self._pe
        for step in steps:
            instruction = self._program[step]
            (size,), (done,) = self._sizes[step], self._done[step]
            yield from self._wait_for(step, -1)
            if isinstance(instruction, Fold):
                yield from self._waiting_for_dma(
                    all_of([pe.start_dma(size) for _ in instruction.sources])
                )
                for _ in instruction.sources[1:]:
                    delay = pe.math_engine.request(
                        size // execution.item_bytes, execution.operation, execution.dtype
                    )
                    execution.machine.waits.math += delay
                    yield delay
            else:
                yield from self._waiting_for_dma(pe.start_dma(size))
            yield from self._waiting_for_dma(pe.start_dma(size, pe.tcm, pe.hbm))
            done.succeed()


LOADS_AHEAD = 8
"""So many slots of a message are loaded at a time."""

TCM_SHARE = 4
"""What is received and sent on stays in TCM if it takes up no more than this part of it."""


def pass_on(future: Future, _cause: Future) -> None:
    """Let a future happen because another has."""
    future.succeed()
