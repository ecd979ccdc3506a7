"""Meetings: where the calls of all ranks for one collective come together.

The ranks of a group number their collectives; the calls with one number meet. When the first two
that differ have come, the meeting can never take place, and says who called what. When all have
come, the collective is planned and given to the engine: one process per rank, which reads its
operand when it starts, plays its part in time, and writes its result when it is done with it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwise.sim.ccl.configuration import Algorithm, check_against
from rankwise.sim.ccl.execution import Execution, lane_count, queues_per_pe
from rankwise.sim.ccl.plan import Plan, plan, requested
from rankwise.sim.ccl.reductions import ReduceOp
from rankwise.sim.hardware.commands import Handle, Run
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.machine import Pe
from rankwise.sim.kernel import Event, Steps
from rankwise.sim.runtime.tensor import Tensor, short_name
from rankwise.sim.triton.dtypes import Array, dtype

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext
    from rankwise.sim.runtime.placement import Device
    from rankwise.sim.runtime.streams import Stream

_MATH = {
    ReduceOp.SUM: "add",
    ReduceOp.AVG: "add",
    ReduceOp.PRODUCT: "mul",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


class Signature(NamedTuple):
    """What the calls of all ranks must agree on."""

    operation: str
    collective: str
    shape: tuple[int, ...]
    kind: dtype
    elements: int
    op: ReduceOp
    root: int
    algorithm: str | None


class Call:
    """One rank's call of a collective.

    Attributes:
        signature: what it asks for.
        number: counts the rank's collectives in the group, from 1.
        rank: the rank, counted over all ranks.
        operands: the tensors that together are the rank's operand.
        results: those that together take its result.
        stream: the stream that it was called in.
        handle: its part on the engine; None until all ranks have come.
        is_awaited: whether the rank waits already; if so, its part is pending from the start.
    """

    def __init__(
        self,
        signature: Signature,
        number: int,
        rank: int,
        *,
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        stream: "Stream",
    ) -> None:
        self.signature = signature
        self.number = number
        self.rank = rank
        self.operands = tuple(operands)
        self.results = tuple(results)
        self.stream = stream
        self.handle: Handle | None = None
        self.is_awaited = False

    def __str__(self) -> str:
        asked = self.signature
        about = (
            f" of {asked.shape} {short_name(asked.kind)}" if self.operands or self.results else ""
        )
        if asked.op is not ReduceOp.SUM:
            about += f" ({asked.op.value})"
        if asked.root:
            about += f" with root {asked.root}"
        if asked.algorithm is not None:
            about += f" by {asked.algorithm}"
        return f"{asked.operation} #{self.number}{about}"


class Meeting:
    """The calls for one collective of one group.

    Attributes:
        ranks: who has to come, counted over all ranks, in the order of the group.
        calls: who has come.
    """

    def __init__(self, context: "RuntimeContext", series: str, ranks: tuple[int, ...]) -> None:
        self._context = context
        self._series = series
        self.ranks = ranks
        self.calls: dict[int, Call] = {}

    def join(self, call: Call) -> None:
        """Take in a rank's call; the last one starts the collective."""
        self.calls[call.rank] = call
        if self.is_complete and not self.disagrees:
            Collective(self._context, [self.calls[rank] for rank in self.ranks]).submit(
                self._series
            )

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self.calls) == len(self.ranks)

    @property
    def disagrees(self) -> bool:
        """Whether two have come that want different things."""
        signatures = [call.signature for call in self.calls.values()]
        return any(signature != signatures[0] for signature in signatures[1:])

    def missing(self) -> list[int]:
        """Who has not come."""
        return [rank for rank in self.ranks if rank not in self.calls]


class Collective:
    """A collective on its way: the plan, and what the engine runs for every rank."""

    def __init__(self, context: "RuntimeContext", calls: Sequence[Call]) -> None:
        asked = calls[0].signature
        self._context = context
        self._calls = calls
        self._kind = asked.kind
        self._op = asked.op
        self._devices = [context.device_of(call.rank) for call in calls]
        algorithm = context.ccl.algorithm(asked.collective, asked.algorithm)
        self._plan = self._planned(algorithm, asked)
        self._execution = self._prepared(algorithm, asked)
        self._operands: list[Array | None] = [None] * len(calls)
        self._results: list[Array | None] = [None] * len(calls)
        self._started = 0
        self._all_started: Event = context.engine.simulator.event("all ranks of the collective")

    def _planned(self, algorithm: Algorithm, asked: Signature) -> Plan:
        homes = tuple(device.sip for device in self._devices)
        grid = self._context.engine.topology.machine.system.sips.shape
        return plan(requested(algorithm, asked.collective, asked.elements, asked.root, homes, grid))

    def _prepared(self, algorithm: Algorithm, asked: Signature) -> Execution:
        machine, queues = self._context.engine.machine, algorithm.queues
        tcm = machine.topology.machine.pe.tcm.capacity
        check_against(queues, tcm, queues_per_pe(self._plan), f"algorithm {algorithm.name}")
        fewest = min(len(device.pes) for device in self._devices)
        count = lane_count(self._plan, asked.kind.itemsize, queues, fewest)
        return Execution(
            machine,
            self._plan,
            [self._lanes(device, count) for device in self._devices],
            item_bytes=asked.kind.itemsize,
            dtype=short_name(asked.kind),
            operation=_MATH[asked.op],
            queues=queues,
        )

    def _lanes(self, device: "Device", count: int) -> list[Pe]:
        sip = self._context.engine.machine.sip(device.sip)
        return [sip.pe(index) for index in device.pes[:count]]

    def submit(self, series: str) -> None:
        """Give every rank's part to the engine, in the stream of the collectives of a series."""
        for index, call in enumerate(self._calls):
            before = call.stream.last
            after = () if before is None or before.is_done else (before,)
            own = self._context.collective_stream(self._devices[index], series)
            call.handle = self._context.submit(
                Run(
                    sip=own.device.sip,
                    stream=own.number,
                    after=after,
                    name=f"{call} of rank {call.rank}",
                    start=self._starter(index),
                ),
                own,
            )
            if call.is_awaited:
                self._context._pending_collectives.append(call.handle)  # noqa: SLF001 (one part in files)

    def _starter(self, index: int) -> Callable[[KernelEnvironment], Steps]:
        return lambda env: self._run_rank(index, env)

    def _run_rank(self, index: int, env: KernelEnvironment) -> Steps:
        call, start = self._calls[index], env.simulator.now
        if env.enable_data:
            self._operands[index] = self._concatenated(call.operands)
        self._started += 1
        if self._started == len(self._calls):
            if env.enable_data:
                self._compute()
            self._all_started.succeed()
        yield from self._execution.rank_steps(index)
        if call.results and not self._all_started.is_done:
            yield self._all_started
        if env.enable_data and call.results:
            self._write(call, self._results[index])
        self._log(index, env, start)

    def _concatenated(self, tensors: Sequence[Tensor]) -> Array:
        """The elements of some tensors, one after the other, in the form in which we compute."""
        if not tensors:
            return np.zeros(0, self._kind.compute)
        return np.concatenate([self._kind.decode(tensor.stored()) for tensor in tensors])

    def _compute(self) -> None:
        lengths = [self._plan.operand(index).length for index in range(len(self._calls))]
        operands = [
            np.zeros(length, self._kind.compute) if given is None or not len(given) else given
            for given, length in zip(self._operands, lengths, strict=True)
        ]
        self._results = self._plan.results(operands, self._op, self._kind, may_overwrite=True)
        self._operands = [None] * len(self._calls)

    def _write(self, call: Call, values: Array | None) -> None:
        if values is None:
            return
        stored, start = self._kind.encode(values), 0
        for tensor in call.results:
            tensor.store(stored[start : start + tensor.numel()])
            start += tensor.numel()

    def _log(self, index: int, env: KernelEnvironment, start: int) -> None:
        call = self._calls[index]
        results = call.results if self._results[index] is not None or not env.enable_data else ()
        payload = (
            [tensor.stored().view(np.uint8) for tensor in results] if env.op_log.keeps_data else []
        )
        sent = sum(self._plan.elements_sent_by(index).values())
        env.op_log.append(
            call.signature.operation,
            str(call),
            f"sip{env.sip}",
            start,
            env.simulator.now,
            size=sent * self._kind.itemsize,
            reads=[tensor.operand() for tensor in call.operands],
            writes=[tensor.operand() for tensor in results],
            compute=lambda _operands: payload,
        )


class Work:
    """What a collective with `async_op=True` gives: something to wait for."""

    def __init__(self, wait: Callable[[], None], call: Call) -> None:
        self._wait = wait
        self._call = call

    def wait(self, timeout: Any = None) -> bool:
        """Wait until this rank's part is complete. `timeout` has no meaning in simulated time."""
        del timeout
        self._call.is_awaited = True
        self._wait()
        return True

    def is_completed(self) -> bool:
        """Whether this rank's part is complete."""
        handle = self._call.handle
        return handle is not None and handle.is_done
