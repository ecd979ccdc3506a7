"""Run a collective whose algorithm is a kernel: on the lanes of its ranks, through `KernelRunner`.

Every rank launches the kernel once, a program for each of its lanes. Program i of a rank and
program i of another exchange blocks (`tl.send`, `tl.recv`; a peer is a rank of the group) through
the same queues that the form as data uses. The rank's workspace (`program`) lies in the HBM next to
each PE, as it does there.

A kernel gets these by the names of its parameters:

============= ====================================================================
`workspace`   a pointer to the rank's workspace
`elements`    `N` of the table in `program`
`rank`        the number of the rank in the group
`size`        how many ranks take part
`root`        the root of a broadcast or a reduction
`position`    where on the ring the rank is
`left`        the rank before it on the ring
`right`       the rank behind it
`OP`          how to combine (`combining.combined`)
`LANES`       how many programs each rank has
`SLOT`        elements of a slot
`SLOTS`       slots of a queue: so many may be sent before one has been received
============= ====================================================================

Whether the kernel runs, or another form of the algorithm: `fidelity`.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.sim.ccl.algorithm_modules import parameters_of
from rankwise.sim.ccl.lanes import LaneQueues
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.hardware.hardware_machine import Pe
from rankwise.sim.hardware.interleaving import Consecutive
from rankwise.sim.hardware.ipcq import IpcQueue
from rankwise.sim.hardware.memory import FIRST_ADDRESS, Mapping
from rankwise.sim.hardware.op_log import OpLog
from rankwise.sim.kernel import Future, Steps
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner


class KernelExecution:
    """One collective on its way, as kernels.

    Args:
        name: the algorithm's, for messages.
        module: the algorithm.
        plan: what the ranks want, and where it lies in their workspaces.
        queues: between the lanes.
        lanes: the PEs of every rank; equally many for all.
        kind: the type of the elements.
        operation: what the math engine does to combine.
        collective: what deadlock reports call it.
        ranks: what they call its ranks; 0, 1, … unless given.
    """

    def __init__(
        self,
        name: str,
        module: ModuleType,
        plan: Plan,
        queues: LaneQueues,
        lanes: Sequence[Sequence[Pe]],
        *,
        kind: dtype,
        operation: str,
        collective: str = "collective",
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._name = name
        self._kernel = module.kernel
        self._plan = plan
        self._queues = queues
        self._lanes = lanes
        self._kind = kind
        self._operation = operation
        self._collective = collective
        self._ranks = range(len(lanes)) if ranks is None else ranks
        self._running = len(lanes)

    def rank_steps(self, rank: int, env: KernelEnvironment, workspace: Array | None) -> Steps:
        """The program of one rank; returns its workspace at the end, None without data."""
        lanes = self._lanes[rank]
        stored = None if workspace is None else self._kind.encode(workspace)
        size = self._plan.lengths[rank] * self._kind.itemsize
        own = _LaneEnvironment(
            env, lanes, f"{self._collective}, rank {self._ranks[rank]}",
            _RankQueues(self._queues, self._plan, rank), _mapping(lanes[0], size, stored),
        )  # fmt: skip
        runner = KernelRunner(self._arguments(rank))
        yield from runner.run(own, self._kernel, (), len(lanes))
        self._running -= 1
        if not self._running and (unread := self._queues.unread()):
            raise ConfigError(
                f"algorithm {self._name}: its kernel has sent data that no rank received:"
                f" {', '.join(unread[:_UNREAD_SHOWN])}",
                hint="every tl.send needs its tl.recv at the other rank",
            )
        return None if stored is None else self._kind.decode(stored)

    def bytes_sent_by(self, rank: int) -> int:
        """How many bytes a rank has sent."""
        return self._queues.bytes_sent_by(rank)

    def _arguments(self, rank: int) -> dict[str, Any]:
        task, layout = self._plan.request.task(rank), self._queues.layout
        here, elements = task.position, self._plan.lengths[rank]
        known = {
            "workspace": DevicePointer(FIRST_ADDRESS, self._kind, elements, "workspace"),
            "elements": task.elements,
            "rank": task.rank,
            "size": task.size,
            "root": task.root,
            "position": here,
            "left": task.at(here - 1),
            "right": task.at(here + 1),
            "OP": self._operation,
            "LANES": len(self._lanes[rank]),
            "SLOT": layout.slot_size // self._kind.itemsize,
            "SLOTS": layout.n_slots,
        }
        wanted = parameters_of(self._kernel)
        return {name: value for name, value in known.items() if name in wanted}


_UNREAD_SHOWN = 8


class _RankQueues:
    """The queues of a rank's programs: peers are ranks, and program i talks to program i."""

    def __init__(self, queues: LaneQueues, plan: Plan, rank: int) -> None:
        self._queues = queues
        self._size = plan.request.size
        self._rank = rank

    def to(self, program: int, peer: Any) -> IpcQueue:
        """The queue from a program to the same one of another rank."""
        return self._queues.between(self._rank, self._checked(peer), program)

    def come_from(self, program: int, peer: Any) -> IpcQueue:
        """The queue from the same program of another rank."""
        return self._queues.between(self._checked(peer), self._rank, program)

    def _checked(self, peer: Any) -> int:
        if not isinstance(peer, int) or not 0 <= peer < self._size or peer == self._rank:
            raise LookupError(f"expected a rank from 0 to {self._size - 1} other than {self._rank}")
        return peer


class _LaneEnvironment(KernelEnvironment):
    """What the kernel of one rank finds around it: its lanes, its queues, its workspace."""

    def __init__(
        self,
        env: KernelEnvironment,
        lanes: Sequence[Pe],
        name: str,
        queues: _RankQueues,
        workspace: Mapping,
    ) -> None:
        super().__init__(env.engine, env.sip, lanes, name)
        self.queues = queues
        self._workspace = workspace
        self._log = _OperationsOfKernels(env)

    @property
    def op_log(self) -> OpLog:
        """A collective is one operation of the op log for each rank, in each form."""
        return self._log

    def mapping_at(self, address: int) -> Mapping:
        """The workspace, which is all that the kernel may touch."""
        del address
        return self._workspace

    def name_of(self, kernel: str, program: int, pe: Pe) -> str:
        """What deadlock reports call one lane of the rank."""
        return f"{self.name} lane {program}: {kernel} on {pe.name}"

    def program_ended(self, dma_waited: int) -> None:
        """Count what has not been loaded in time."""
        self.machine.waits.dma += dma_waited

    def start_dma(self, pe: Pe, address: int, size: int | Footprint, *, is_load: bool) -> Future:
        """Move bytes between a lane's scratch memory and its part of the workspace."""
        del address  # each lane has its part in the HBM next to it
        length = size if isinstance(size, int) else size.run * len(size.offsets)
        ends = (pe.hbm, pe.tcm) if is_load else (pe.tcm, pe.hbm)
        return pe.start_dma(length, *ends)


class _OperationsOfKernels(OpLog):
    """Takes note of what the kernels' operations have cost, and keeps none of them."""

    def __init__(self, env: KernelEnvironment) -> None:
        super().__init__()
        self._waits = env.machine.waits

    def append(  # type: ignore[override]  # callers do not use what is returned
        self, kind: str, name: str, place: str, start: int, end: int, **_more: Any
    ) -> None:
        """Count the time of the math engine."""
        del name, place
        if kind == "math":
            self._waits.math += end - start


def _mapping(pe: Pe, size: int, stored: Array | None) -> Mapping:
    """The addresses of a workspace, and its bytes."""
    mapping = Mapping(
        FIRST_ADDRESS, {pe.hbm: size}, Consecutive([size], [pe.hbm]), has_data=stored is not None
    )
    if stored is not None:
        mapping.lie_in(stored.view(np.uint8))
    return mapping
