"""A collective, planned: the checked programs of all ranks and where the operands lie.

Plans depend on sizes alone, so they are kept and used again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.levels import grid_of_homes
from rankwise.core.collectives.program import Instruction, Receive, Send, Span, Task
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.collectives.workspace import REDUCING, frame_elements, operand_of, result_of
from rankwise.sim.ccl.algorithm_modules import (
    MULTICAST_HINT,
    AlgorithmError,
    algorithm_module,
    instructions_of,
    is_ours,
    needs_multicast,
    place_in,
    scratch_of,
)
from rankwise.sim.ccl.calculation import InstructionOrder, calculate, order_of
from rankwise.sim.ccl.configuration import Algorithm
from rankwise.sim.ccl.rounded_reductions import finish
from rankwise.sim.ccl.switched_messages import SwitchedMessage, leaders, switched_messages
from rankwise.sim.hardware.routing import axes_of
from rankwise.sim.hardware.specification import SipsSpec
from rankwise.sim.triton.dtypes import Array, dtype

if TYPE_CHECKING:
    from rankwise.core.collectives.levels import Grid
    from rankwise.core.collectives.ring import RingRound

Indexes = npt.NDArray[np.int64]


class CollectiveRequest(NamedTuple):
    """What ranks want together.

    Attributes:
        module: the importable name of the algorithm.
        collective: which collective it is.
        size: how many ranks take part.
        elements: elements per rank: of an operand, or of a block where operands have blocks.
        root: the root of a broadcast or a reduction.
        ring: the ranks in the order of the ring; empty for their own.
        homes: the device of each rank; empty if each has one of its own.
        axes: how many devices are in a unit of each level of the network; empty if not known.
        multicast: how many devices are at each switch that copies and combines; 0 if none does.
    """

    module: str
    collective: str
    size: int
    elements: int
    root: int = 0
    ring: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    multicast: int = 0

    def task(self, rank: int) -> Task:
        """What the program of one rank is given."""
        return Task(
            rank, self.size, self.elements, self.root, self.ring, self.homes, self.axes,
            self.multicast,
        )  # fmt: skip


def requested(  # noqa: PLR0917 (what a call says, in its order)
    algorithm: Algorithm,
    collective: str,
    elements: int,
    root: int,
    homes: tuple[int, ...],
    network: SipsSpec,
) -> CollectiveRequest:
    """What ranks on the given devices want of an algorithm.

    Raises:
        ConfigError: it needs switches that the network does not have.
    """
    follows_grid = algorithm.topology in {"mesh_2d", "torus_2d"}
    ring = _snake(homes, network.shape[1]) if follows_grid and network.shape else ()
    axes, unit = axes_of(network), network.multicast_unit
    if needs_multicast(algorithm.module):
        _check_multicast(algorithm.name, homes, axes, unit)
    return CollectiveRequest(
        algorithm.module, collective, len(homes), elements, root, ring, homes, axes, unit
    )


def _check_multicast(name: str, homes: tuple[int, ...], axes: tuple[int, ...], unit: int) -> None:
    """Refuse what needs switches that copy and combine, where ranks do not share such ones."""
    grid = grid_of_homes(homes, axes)
    at_switch = Counter(home // unit for home in homes) if unit else Counter[int]()
    if (
        grid is None
        or set(at_switch.values()) != {grid.lengths[0]}
        or len(set(homes)) != len(homes)
        or len(homes) == 1
    ):
        raise ConfigError(
            f"algorithm {name} needs switches with multicast: true, and equally many ranks at each,"
            " on devices of their own",
            hint=MULTICAST_HINT,
        )


def _snake(homes: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """The ranks along the rows of the grid of SIPs, every other row backwards."""

    def place(rank: int) -> tuple[int, int, int]:
        row, column = divmod(homes[rank], columns)
        return row, -column if row % 2 else column, rank

    return tuple(sorted(range(len(homes)), key=place))


class Plan:
    """The programs of all ranks, the lengths of their workspaces, and what is calculated there.

    An algorithm that is a kernel alone has empty programs: which ranks exchange messages is not
    known. One that goes in the rounds of a ring has its programs and their order made when they are
    first asked for, since its messages are known without: among 1,024 ranks those are four million
    instructions, and the message level needs none of them. Of an algorithm that treats all ranks
    alike, one program is made first (`model`), for the same reason.

    Attributes:
        request: what the ranks want.
        rounds: of a ring; None of other algorithms.
        symmetry: the grid under whose translations all programs are alike; None if they are not.
    """

    def __init__(self, request: CollectiveRequest) -> None:
        self.request = request
        self._module = module = algorithm_module(request.module)
        self.rounds: list[RingRound] | None = (
            module.rounds(request.task(0)) if hasattr(module, "rounds") else None
        )
        alike = getattr(module, "symmetry", None) if is_ours(module) else None
        self.symmetry: Grid | None = alike(request.task(0)) if alike is not None else None
        # Shipped algorithms are tested; of thousands of ranks, messages need no order.
        if self.rounds is None and not is_ours(
            module
        ):  # all errors come now, from the line that called
            # Not through the properties: the line that called would be one of `functools`.
            self.programs = self._written()
            self.order = self._played()

    @cached_property
    def programs(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of every rank; what moves nothing is left out."""
        return self._written()

    @cached_property
    def model(self) -> tuple[Instruction, ...]:
        """The program of the rank at place 0 of the symmetry, which tells those of all others."""
        assert self.symmetry is not None, "it was looked at"
        return self._program_of(self.request.task(self.symmetry.ranks[0]))

    def _program_of(self, task: Task) -> tuple[Instruction, ...]:
        return tuple(each for each in instructions_of(self._module, task) if not _is_empty(each))

    def _written(self) -> tuple[tuple[Instruction, ...], ...]:
        if not hasattr(self._module, "program"):
            return ((),) * self.request.size
        return tuple(map(self._program_of, self._tasks()))

    @cached_property
    def switched(self) -> dict[tuple[int, int], SwitchedMessage]:
        """By rank and instruction: the messages that a switch copies or combines, if it can."""
        return switched_messages(self.programs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many elements the workspace of every rank has."""
        collective = self.request.collective
        return tuple(
            frame_elements(collective, task) + scratch_of(self._module, task)
            for task in self._tasks()
        )

    @cached_property
    def order(self) -> InstructionOrder:
        """What is calculated.

        Raises:
            AlgorithmError: the programs do not fit each other.
        """
        return self._played()

    def _played(self) -> InstructionOrder:
        programs, lengths = self.programs, self.lengths
        try:
            return order_of(programs, lengths)
        except ConfigError as error:
            module = algorithm_module(self.request.module)
            raise AlgorithmError(
                f"algorithm {self.request.module} with {self.request.size} ranks: {error}"
                f" (its program is at {place_in(module, getattr(module, 'program', None))})"
            ) from None

    @cached_property
    def part_elements(self) -> Indexes:
        """Of a ring: how many elements each part has."""
        task = self.request.task(0)
        parts = (self._module.part(task, index) for index in range(self.request.size))
        return np.array([each.length for each in parts], np.int64)

    @property
    def ring(self) -> tuple[int, ...]:
        """The ranks in the order of the ring."""
        return self.request.ring or tuple(range(self.request.size))

    def _tasks(self) -> Iterator[Task]:
        return map(self.request.task, range(self.request.size))

    def results(
        self,
        operands: Sequence[Array],
        op: ReduceOp,
        kind: dtype,
        *,
        may_overwrite: bool = False,
    ) -> list[Array | None]:
        """Work out every rank's result from every rank's operand, in the compute type of `kind`.

        None where a rank has no result: at a reduction, all but the root. With `may_overwrite`, the
        operands may be used as workspaces, and results may lie in them.
        """
        workspaces = [
            self.workspace(rank, operand, kind, may_overwrite=may_overwrite)
            for rank, operand in enumerate(operands)
        ]
        calculate(self.order, workspaces, op, kind)
        return [self.values(rank, space, op, kind) for rank, space in enumerate(workspaces)]

    def workspace(
        self, rank: int, operand: Array, kind: dtype, *, may_overwrite: bool = False
    ) -> Array:
        """A rank's workspace at the beginning, which may be the operand itself if it may."""
        length, place = self.lengths[rank], self.operand(rank)
        if place == (0, length):
            return operand.astype(kind.compute, copy=not may_overwrite)
        space = np.zeros(length, kind.compute)
        space[place.start : place.stop] = operand
        return space

    def values(self, rank: int, workspace: Array, op: ReduceOp, kind: dtype) -> Array | None:
        """A rank's result from its workspace at the end; None if it has none."""
        lies = self.result(rank)
        if lies is None:
            return None
        values = workspace[lies.start : lies.stop]
        if self.request.collective in REDUCING:
            values = finish(op, kind, values, self.request.size)
        return values

    def operand(self, rank: int) -> Span:
        """Where the operand of a rank lies in its workspace."""
        return operand_of(self.request.collective, self.request.task(rank))

    def result(self, rank: int) -> Span | None:
        """Where the result of a rank lies; None if it has none."""
        return result_of(self.request.collective, self.request.task(rank))

    def ways(self) -> set[tuple[int, int]]:
        """From whom to whom messages go; round the ring, where that is not known."""
        if self.rounds is not None:
            return set(zip(self.ring, (*self.ring[1:], self.ring[0]), strict=True))
        ways = {
            (rank, each.peer)
            for rank, program in enumerate(self.programs)
            for each in program
            if isinstance(each, Send)
        }
        return ways or {(task.rank, task.at(task.position + 1)) for task in self._tasks()}

    def ways_of_one(self) -> set[tuple[int, int]]:
        """To whom the first rank of the symmetry sends; others do it as far away."""
        assert self.symmetry is not None, "it was looked at"
        first = self.symmetry.ranks[0]
        return {(first, each.peer) for each in self.model if isinstance(each, Send)}

    @cached_property
    def sources_most(self) -> int:
        """From how many others the rank that has the most receives, channels counted by each."""
        if self.rounds is not None:
            return 1
        programs = [self.model] if self.symmetry is not None else self.programs
        return max(map(_sources_of, programs), default=1) or 1

    @property
    def moves_anything(self) -> bool:
        """Whether there is anything to do."""
        if self.rounds is not None:
            return bool(self.rounds)
        return bool(self.model) if self.symmetry is not None else any(self.programs)

    @property
    def longest_message(self) -> int:
        """Elements of the longest message; of a workspace, where messages are not known."""
        if self.rounds is not None:
            return int(self.part_elements.max()) if self.rounds else max(self.lengths)
        known = [
            each.span.length
            for program in ([self.model] if self.symmetry is not None else self.programs)
            for each in program
            if isinstance(each, Send)
        ]
        return max(known or self.lengths)

    def saved_by_switches(self, rank: int) -> tuple[int, int]:
        """How many elements fewer a rank sends and receives, if switches copy and combine."""
        program = self.model if self.symmetry is not None else self.programs[rank]
        copied = combined = 0
        for step, leader in enumerate(leaders(program)):
            instruction = program[step]
            if leader == step:
                continue
            if isinstance(instruction, Send):
                copied += instruction.span.length
            elif isinstance(instruction, Receive):
                combined += instruction.span.length
        return copied, combined

    def elements_sent(self) -> dict[tuple[int, int], int]:
        """How many elements go from whom to whom: what the laws of an algorithm are about."""
        return {
            (rank, peer): count
            for rank in range(self.request.size)
            for peer, count in self.elements_sent_by(rank).items()
        }

    def elements_sent_by(self, rank: int) -> dict[int, int]:
        """How many elements a rank sends to whom."""
        if self.rounds is not None:
            task = self.request.task(rank)
            sent = int(self._sent_by_positions[task.position])
            return {task.at(task.position + 1): sent} if sent else {}
        if self.symmetry is not None:
            return {
                self.symmetry.moved(rank, place): count
                for place, count in self._sent_by_places.items()
            }
        return self._sent(self.programs[rank])

    def all_elements_sent_by(self, rank: int) -> int:
        """How many elements a rank sends to others in all."""
        if self.symmetry is not None and self.rounds is None:
            return sum(self._sent_by_places.values())
        return sum(self.elements_sent_by(rank).values())

    @cached_property
    def _sent_by_positions(self) -> Indexes:
        """Of a ring: how many elements the rank at each position sends."""
        assert self.rounds is not None, "it was looked at"
        parts = self.part_elements
        if parts.min() == parts.max():
            return parts * len(self.rounds)
        sent = np.zeros_like(parts)
        for offset, times in Counter(each.offset % len(parts) for each in self.rounds).items():
            sent += np.roll(parts, -offset) * times
        return sent

    @cached_property
    def _sent_by_places(self) -> dict[int, int]:
        """Of a symmetry: how many elements each rank sends to the one as far as a place is."""
        assert self.symmetry is not None, "it was looked at"
        places = self.symmetry.places
        return {places[peer]: count for peer, count in self._sent(self.model).items()}

    @staticmethod
    def _sent(program: Sequence[Instruction]) -> dict[int, int]:
        sent: dict[int, int] = {}
        for instruction in program:
            if isinstance(instruction, Send):
                sent[instruction.peer] = sent.get(instruction.peer, 0) + instruction.span.length
        return sent


@lru_cache(maxsize=256)
def plan(request: CollectiveRequest) -> Plan:
    """Have an algorithm write the programs of all ranks, and check that they fit.

    Raises:
        ConfigError: the algorithm is for another collective, has failed (with the line of its
            module), or its programs do not fit.
    """
    module = algorithm_module(request.module)
    if request.collective != module.COLLECTIVE:
        raise ConfigError(
            f"algorithm {request.module} is for {module.COLLECTIVE}, not for {request.collective}"
        )
    if not 0 <= request.root < request.size:
        raise ConfigError(f"root {request.root} is not one of ranks 0 to {request.size - 1}")
    return Plan(request)


def _sources_of(program: Sequence[Instruction]) -> int:
    return len({
        "combines" if each.switch == "combines" else (each.peer, each.channel)
        for each in program
        if isinstance(each, Receive)
    })  # fmt: skip


def _is_empty(instruction: Instruction) -> bool:
    """Whether nothing moves: both ends leave such a message out, because lengths agree."""
    start, stop = instruction[1]  # of every instruction, where it writes or what it sends
    return start == stop
