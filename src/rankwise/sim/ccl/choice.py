"""`auto`: the algorithm that carries out a collective fastest, found by trying all of them.

Each configured algorithm of the collective is timed by messages, on the machine as it is, with the
lanes and queues that it would have. That is how long it takes alone, and costs milliseconds. Where
messages do not tell for sure, since others are within `CLOSE` of the fastest, these are tried queue
by queue on a machine of their own, if they are small enough to be simulated by queues at all. So
the choice is as exact as the level that the collective then runs on.

The choice is remembered: a program that repeats a collective pays once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.sim.ccl.algorithm_modules import INSTRUCTIONS_MOST, algorithm_module, instructions_of
from rankwise.sim.ccl.configuration import Algorithm, CollectiveConfiguration
from rankwise.sim.ccl.execution import CollectiveExecution
from rankwise.sim.ccl.fidelity import QUEUE_SLOTS_MOST, has_more_slots
from rankwise.sim.ccl.lanes import LaneQueues
from rankwise.sim.ccl.layout import LaneLayout, laid_out
from rankwise.sim.ccl.message_execution import MessageExecution
from rankwise.sim.ccl.message_pes import Elements, Lanes
from rankwise.sim.ccl.plan import CollectiveRequest, Plan, plan, requested
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.kernel import Simulator, all_of


class Wanted(NamedTuple):
    """A collective for which an algorithm is chosen.

    Attributes:
        collective: which one.
        elements: elements per rank, as `CollectiveRequest` counts them.
        root: the root, if it has one.
        sips: the device of each rank.
        pes: the PEs of each rank.
        work: what is done with the elements.
    """

    collective: str
    elements: int
    root: int
    sips: tuple[int, ...]
    pes: tuple[tuple[int, ...], ...]
    work: Elements


class AlgorithmTrial(NamedTuple):
    """How long an algorithm takes for what is wanted: by messages, in picoseconds."""

    algorithm: Algorithm
    plan: Plan
    layout: LaneLayout
    time: int


class Chooser:
    """Chooses algorithms for the collectives of one machine.

    Args:
        machine: where they run.
        configuration: the algorithms that there are.
    """

    def __init__(self, machine: HardwareMachine, configuration: CollectiveConfiguration) -> None:
        self._machine, self._configuration = machine, configuration
        self._known: dict[Wanted, Algorithm] = {}

    def fastest(self, wanted: Wanted) -> Algorithm:
        """The algorithm that carries out a collective fastest.

        Raises:
            ConfigError: there is none that can be used.
        """
        found = self._known.get(wanted)
        if found is None:
            found = self._known[wanted] = self._found(wanted)
        return found

    def trials(self, wanted: Wanted) -> list[AlgorithmTrial]:
        """All algorithms that can be used, by messages, the fastest first.

        Raises:
            ConfigError: none can; the message is that of the first one.
        """
        found: list[AlgorithmTrial] = []
        problems: list[ConfigError] = []
        seen = set()
        for algorithm in self._configuration.algorithms.values():
            key = (algorithm.module, algorithm.topology, algorithm.queues)
            if algorithm.collective != wanted.collective or key in seen:
                continue
            seen.add(key)
            try:
                trial = self._tried(algorithm, wanted)
            except ConfigError as problem:
                problems.append(problem)
                continue
            if trial is not None:
                found.append(trial)
        if not found:
            raise (
                problems[0]
                if problems
                else ConfigError(
                    f"no algorithm for {wanted.collective} has a program that could be tried",
                    hint="name the algorithm instead of auto",
                )
            )
        return sorted(found, key=lambda each: each.time)

    def by_queues(self, trial: AlgorithmTrial, wanted: Wanted) -> int:
        """Picoseconds that an algorithm takes alone, queue by queue."""
        machine = HardwareMachine(Simulator(), self._machine.topology)
        count, queues = trial.layout
        lanes = [
            [machine.sip(sip).pe(number) for number in pes[:count]]
            for sip, pes in zip(wanted.sips, wanted.pes, strict=True)
        ]
        work = wanted.work
        execution = CollectiveExecution(
            machine, trial.plan, lanes, LaneQueues(machine, lanes, queues),
            item_bytes=work.item_bytes, dtype=work.dtype, operation=work.operation,
        )  # fmt: skip
        ranks = range(len(lanes))
        machine.simulator.run(
            all_of([machine.simulator.process(execution.rank_steps(rank)) for rank in ranks])
        )
        return machine.simulator.now

    def _found(self, wanted: Wanted) -> Algorithm:
        trials = self.trials(wanted)
        close = [each for each in trials if each.time <= trials[0].time * CLOSE]
        faults = self._machine.topology.faults
        is_known = len(close) == 1 or (faults is not None and bool(faults.deaths))
        if not is_known and all(self.is_small(each, wanted) for each in close):
            return min(close, key=lambda each: self.by_queues(each, wanted)).algorithm
        return trials[0].algorithm

    @staticmethod
    def is_small(trial: AlgorithmTrial, wanted: Wanted) -> bool:
        """Whether it can be simulated by queues, as `fidelity: auto` sees it."""
        slot_size = trial.algorithm.queues.slot_size
        return not has_more_slots(
            trial.plan, wanted.work.item_bytes, trial.layout.lane_count, slot_size, QUEUE_SLOTS_MOST
        )

    def _tried(self, algorithm: Algorithm, wanted: Wanted) -> AlgorithmTrial | None:
        """How long it takes by messages; None if it has no program, or one that is too long."""
        machine, work = self._machine, wanted.work
        module = algorithm_module(algorithm.module)
        if not hasattr(module, "program"):
            return None
        request = requested(
            algorithm, wanted.collective, wanted.elements, wanted.root, wanted.sips,
            machine.topology.machine.system.sips,
        )  # fmt: skip
        planned = plan(request)
        if planned.rounds is None and planned.symmetry is None and _is_long(request):
            return None
        fewest = min(map(len, wanted.pes))
        layout = laid_out(machine, planned, algorithm, work.item_bytes, wanted.sips, fewest)
        lanes = _lanes(wanted.sips, wanted.pes, layout.lane_count)
        execution = MessageExecution(machine, planned, lanes, layout.queues, work)
        return AlgorithmTrial(algorithm, planned, layout, execution.time_alone())


def _lanes(sips: Sequence[int], pes: Sequence[tuple[int, ...]], lane_count: int) -> list[Lanes]:
    return [Lanes(sip, own[:lane_count]) for sip, own in zip(sips, pes, strict=True)]


def _is_long(request: CollectiveRequest) -> bool:
    """Whether the programs of all ranks together are too long to be written for a trial."""
    module = algorithm_module(request.module)
    count = sum(1 for _ in instructions_of(module, request.task(0)))
    return count * request.size > INSTRUCTIONS_MOST


CLOSE = 1.5
"""Messages are from 28 % below queues (direct, on two lanes) to 28 % above them (halving and
doubling of 64 KiB on a ring); between algorithms of one case, it has been less than this."""
