"""Collectives of the simulated machine: what ranks call, and what the engine runs for it.

Which calls meet, `core.matching` decides (see `pending_collectives`). When all ranks have come, the
collective is planned and given to the engine: one process per rank, which reads its operand when it
starts, plays its part in time, and writes its result when it is done with it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwise.base.wording import ranks_in_words
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.matching import (
    NO_RANK,
    CallSignature,
    Match,
    TensorForm,
    describe_call,
    parties,
)
from rankwise.sim.ccl.algorithm_modules import algorithm_module
from rankwise.sim.ccl.choice import Wanted
from rankwise.sim.ccl.configuration import AUTO, Algorithm
from rankwise.sim.ccl.execution import CollectiveExecution
from rankwise.sim.ccl.fidelity import (
    fewest_lanes,
    is_short,
    level_of,
    may_fill_pes,
    may_get_out_of_step,
)
from rankwise.sim.ccl.kernel_execution import KernelExecution
from rankwise.sim.ccl.lanes import LaneQueues
from rankwise.sim.ccl.layout import laid_out
from rankwise.sim.ccl.message_execution import MessageExecution
from rankwise.sim.ccl.message_pes import Elements, Lanes
from rankwise.sim.ccl.plan import Plan, plan, requested
from rankwise.sim.hardware.commands import CommandHandle, Run
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.hardware_machine import Pe
from rankwise.sim.hardware.op_log import LoggedCall, name_of_command
from rankwise.sim.kernel import Future, Steps, users_line
from rankwise.sim.runtime.process_groups import ProcessGroup
from rankwise.sim.runtime.tensor import Tensor, short_name
from rankwise.sim.triton.dtypes import Array, dtype

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext
    from rankwise.sim.runtime.placement import Device

_MATH = {
    ReduceOp.SUM: "add",
    ReduceOp.AVG: "add",
    ReduceOp.PRODUCT: "mul",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


class Request(NamedTuple):
    """What the calls of all ranks must agree on, as the plan needs it."""

    operation: str
    collective: str
    shape: tuple[int, ...]
    kind: dtype
    elements: int
    op: ReduceOp
    root: int
    algorithm: str | None

    @property
    def signature(self) -> CallSignature:
        """All of it as a call: of several tensors, the shape of the first and the size of all."""
        return CallSignature(
            self.operation,
            self.op.value,
            self.root,
            (TensorForm(self.shape, short_name(self.kind)),),
            algorithm=self.algorithm or "",
            size_bytes=self.elements * self.kind.itemsize,
        )


class RankContribution:
    """One rank's call of a collective.

    Attributes:
        request: what it asks for.
        signature: the same, as the matcher compares it.
        number: counts the rank's collectives in the group, from 1.
        rank: the rank, counted over all ranks.
        group: the group that it was called in.
        line: where the user's program called it.
        operands: the tensors that together are the rank's operand.
        results: those that together take its result.
        after: what it follows: the end of its stream at the time of the call.
        handle: its part on the engine; None until all ranks have come.
        series: where its number counts; known when it takes part.
        is_awaited: whether the rank waits already; if so, its part is pending from the start.
        way: who sends to whom, of a message.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        rank: int,
        *,
        group: ProcessGroup,
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        after: Sequence[CommandHandle],
        way: tuple[int, int] | None = None,
    ) -> None:
        self.request = request
        self.signature = request.signature
        self.number = number
        self.rank = rank
        self.group = group
        self.line = users_line()
        self.operands = tuple(operands)
        self.results = tuple(results)
        self.after = tuple(after)
        self.way = way
        self.handle: CommandHandle | None = None
        self.is_awaited = False
        self.series = ""

    @property
    def called(self) -> CallSignature:
        """What this rank calls: of a message, its own end."""
        return self._called_by(self.rank)

    def describe_for(self, rank: int) -> str:
        """What a rank calls to meet this call: a `send`, for one that receives."""
        text = describe_call(self._called_by(rank), self.number)
        return text if self.group.is_world else f"{text} in {self.group}"

    def __str__(self) -> str:
        return self.describe_for(self.rank)

    def _called_by(self, rank: int) -> CallSignature:
        asked, operation, root = self.request, self.request.operation, self.request.root
        if self.way is not None:
            source, target = self.way
            operation, root = ("send", target) if rank == source else ("recv", source)
        elif not root:  # rank 0 goes without saying
            root = NO_RANK
        has_tensors = bool(self.operands or self.results)
        return CallSignature(
            operation,
            "" if asked.op is ReduceOp.SUM else asked.op.value,
            root,
            (TensorForm(asked.shape, short_name(asked.kind)),) if has_tensors else (),
            algorithm=asked.algorithm or "",
        )


def wanted_of(  # noqa: PLR0917 (what a call says, in its order)
    collective: str,
    elements: int,
    root: int,
    devices: Sequence["Device"],
    kind: dtype,
    op: ReduceOp,
) -> Wanted:
    """A collective of ranks on some devices, for the choice of its algorithm."""
    work = Elements(kind.itemsize, short_name(kind), _MATH[op])
    sips = tuple(device.sip for device in devices)
    pes = tuple(tuple(device.pes) for device in devices)
    return Wanted(collective, elements, root, sips, pes, work)


def collective_in_words(match: Match[RankContribution]) -> str:
    """Which ranks have called what, and where, and which ranks are waited for."""
    calls = [
        (rank, (str(call), f"{call.line or ''}")) for rank, call in sorted(match.entries.items())
    ]
    lines: dict[str, list[str]] = {}
    for (call, line), ranks in parties(calls).items():
        lines.setdefault(call, []).append(ranks_in_words(ranks) + (f" at {line}" if line else ""))
    told = [f"{call}: called by " + ", ".join(callers) for call, callers in lines.items()]
    if missing := match.missing():
        told.append(f"waits for {ranks_in_words(missing)}")
    return "; ".join(told)


class Collective:
    """A collective on its way: the plan, and what the engine runs for every rank."""

    def __init__(self, context: "RuntimeContext", calls: Sequence[RankContribution]) -> None:
        asked = calls[0].request
        self._context = context
        self._calls = calls
        self._kind = asked.kind
        self._op = asked.op
        self._devices = [context.device_of(call.rank) for call in calls]
        algorithm = context.ccl.algorithm(asked.collective, asked.algorithm)
        if algorithm.name == AUTO:
            algorithm = context.algorithms.fastest(
                wanted_of(
                    asked.collective, asked.elements, asked.root, self._devices, asked.kind,
                    asked.op,
                )
            )  # fmt: skip
        self._plan = self._planned(algorithm, asked)
        self._execution: CollectiveExecution | MessageExecution | None = None
        self._kernels: KernelExecution | None = None
        self._prepare(algorithm, asked)
        self._operands: list[Array | None] = [None] * len(calls)
        self._results: list[Array | None] = [None] * len(calls)
        self._started = self._begun = 0
        self._all_started: Future = context.engine.simulator.future("all ranks of the collective")

    def _planned(self, algorithm: Algorithm, asked: Request) -> Plan:
        homes = tuple(device.sip for device in self._devices)
        network = self._context.engine.topology.machine.system.sips
        return plan(
            requested(algorithm, asked.collective, asked.elements, asked.root, homes, network)
        )

    def _prepare(self, algorithm: Algorithm, asked: Request) -> None:
        """Lay out queues and lanes, and decide how exactly the collective is simulated."""
        machine = self._context.engine.machine
        item_bytes = asked.kind.itemsize
        fewest = min(len(device.pes) for device in self._devices)
        sips = [device.sip for device in self._devices]
        count, queues = laid_out(machine, self._plan, algorithm, item_bytes, sips, fewest)
        module = algorithm_module(algorithm.module)
        faults = machine.topology.faults
        level = level_of(
            algorithm, module, self._plan, item_bytes, count,
            machine=machine.topology.machine, faults=faults,
            is_disturbed=partial(self._is_disturbed, count),
        )  # fmt: skip
        group = self._calls[0].group
        if not group.is_in_use:
            group.is_in_use = not is_short(self._plan, item_bytes, count, queues.slot_size)
        levels = machine.fidelities
        if level not in levels.setdefault(algorithm.name, level).split(", "):
            levels[algorithm.name] += f", {level}"
        name, ranks = str(self._calls[0]), [call.rank for call in self._calls]
        if level == "message":
            own = [Lanes(device.sip, tuple(device.pes[:count])) for device in self._devices]
            work = Elements(item_bytes, short_name(asked.kind), _MATH[asked.op])
            self._execution = MessageExecution(machine, self._plan, own, queues, work, name=name)
            return
        lanes = [self._lanes(device, count) for device in self._devices]
        lane_queues = LaneQueues(machine, lanes, queues)
        if level == "kernel":
            self._kernels = KernelExecution(
                algorithm.name, module, self._plan, lane_queues, lanes,
                kind=asked.kind, operation=_MATH[asked.op], collective=name, ranks=ranks,
            )  # fmt: skip
        else:
            _ = self._plan.order  # invalid programs are refused before anything runs
            self._execution = CollectiveExecution(
                machine, self._plan, lanes, lane_queues, item_bytes=item_bytes,
                dtype=short_name(asked.kind), operation=_MATH[asked.op], name=name, ranks=ranks,
            )  # fmt: skip

    def _is_disturbed(self, lanes: int) -> bool:
        """Whether others could meet it in a way of which messages know too little."""
        return self._may_fill_pes(lanes) or self._may_get_out_of_step()

    def _may_get_out_of_step(self) -> bool:
        distributed, group = self._context.distributed, self._calls[0].group
        if self._plan.rounds is None:  # what programs do when they meet has not been compared
            return bool(distributed.groups_beside(group))
        others = [
            distributed.wires_of(each.ranks)
            for each in distributed.groups_beside(group)
            if each.ranks != group.ranks  # it goes the same ways
        ]
        own = [self._calls[position].rank for position in self._plan.ring]
        return bool(others) and may_get_out_of_step(distributed.wires_of(own), others)

    def _may_fill_pes(self, lanes: int) -> bool:
        groups = self._context.distributed.groups_on_a_device(self._calls[0].group)
        fewest = fewest_lanes(lanes, self._context.ccl.algorithms.values())
        return may_fill_pes(self._context.engine.machine.topology.machine, fewest, groups)

    def _lanes(self, device: "Device", count: int) -> list[Pe]:
        sip = self._context.engine.machine.sip(device.sip)
        return [sip.pe(index) for index in device.pes[:count]]

    def submit(self, series: str) -> None:
        """Give every rank's part to the engine, in the stream of the collectives of a series."""
        for index, call in enumerate(self._calls):
            own = self._context.collective_stream(self._devices[index], series)
            call.handle = self._context.submit(
                Run(
                    sip=own.device.sip,
                    stream=own.number,
                    after=call.after,
                    name=name_of_command(str(call), call.rank),
                    start=partial(self._run_rank, index),
                    is_confined=True,
                ),
                own,
                call.line,
            )
            if call.is_awaited:
                self._context._pending_collective_waits.append(call.handle)  # noqa: SLF001 (one part in files)
                self._context.note_deferral(call.rank, call.handle)

    def _run_rank(self, index: int, env: KernelEnvironment) -> Steps:
        call, start = self._calls[index], env.simulator.now
        if self._context.races is not None:
            self._begun += 1
            if self._begun == len(self._calls):
                self._context.races.meet(each.rank for each in self._calls)
        run = self._run_as_data if self._kernels is None else self._run_as_kernel
        yield from run(index, env)
        if env.enable_data and call.results:
            self._write(call, self._results[index])
        self._log(index, env, start)

    def _run_as_kernel(self, index: int, env: KernelEnvironment) -> Steps:
        assert self._kernels is not None, "one of the two forms was prepared"
        workspace = None
        if env.enable_data:
            given = self._concatenated(self._calls[index].operands)
            operand = self._or_zeros(index, given)
            workspace = self._plan.workspace(index, operand, self._kind, may_overwrite=True)
        left = yield from self._kernels.rank_steps(index, env, workspace)
        if left is not None:
            self._results[index] = self._plan.values(index, left, self._op, self._kind)

    def _run_as_data(self, index: int, env: KernelEnvironment) -> Steps:
        assert self._execution is not None, "one of the two forms was prepared"
        call = self._calls[index]
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

    def _concatenated(self, tensors: Sequence[Tensor]) -> Array:
        """The elements of some tensors, one after the other, in the form in which we compute."""
        if not tensors:
            return np.zeros(0, self._kind.compute)
        parts = [self._kind.decode(tensor.stored(), may_keep=True) for tensor in tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _compute(self) -> None:
        operands = [self._or_zeros(index, given) for index, given in enumerate(self._operands)]
        self._results = self._plan.results(operands, self._op, self._kind, may_overwrite=True)
        self._operands = [None] * len(self._calls)

    def _or_zeros(self, index: int, given: Array | None) -> Array:
        """A rank's operand, or as many zeros where its values are not needed."""
        if given is None or not len(given):
            return np.zeros(self._plan.operand(index).length, self._kind.compute)
        return given

    def _write(self, call: RankContribution, values: Array | None) -> None:
        if values is None:
            return
        stored, start = self._kind.encode(values), 0
        for tensor in call.results:
            tensor.store(stored[start : start + tensor.numel()])
            start += tensor.numel()

    def _log(self, index: int, env: KernelEnvironment, start: int) -> None:
        call = self._calls[index]
        results = call.results if self._results[index] is not None or not env.enable_data else ()
        if self._kernels is not None:
            sent = self._kernels.bytes_sent_by(index)
        else:
            sent = self._plan.all_elements_sent_by(index) * self._kind.itemsize
        env.op_log.append(
            call.request.operation,
            str(call),
            f"sip{env.sip}",
            start,
            env.simulator.now,
            size=sent,
            reads=[tensor.operand() for tensor in call.operands],
            writes=[tensor.operand() for tensor in results],
            call=LoggedCall(call.rank, call.number, call.called, call.way),
        )


class Work:
    """What a collective with `async_op=True` gives: something to wait for."""

    def __init__(self, wait: Callable[[], None], call: RankContribution) -> None:
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
