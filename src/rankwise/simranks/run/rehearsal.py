"""What is simulated in a run on simulated ranks, and how: the settings, and what they come to.

A `Rehearsal` makes the host of its run (`run_host`), which a `Supervision` runs as one of real
processes. That must be in the main thread for Ctrl-C and other signals to stop the run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError
from rankwise.base.failure import Outcome, OutcomeStatus
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.launch.run.job import Executable, Job
from rankwise.launch.run.session import Session
from rankwise.launch.run.supervision import Supervision
from rankwise.sim.faults.vocabulary import FaultOfChip, FaultOfNode, FaultOfRank
from rankwise.simranks.run.run_host import SimulatedRunHost
from rankwise.simranks.run.simulation_options import SimulationOptions
from rankwise.simranks.world.equals import Equals, RankChoice
from rankwise.simranks.world.schedules import Schedule

if TYPE_CHECKING:
    from rankwise.simranks.prediction import Prediction

_SIMULATED_OF_EQUALS = 2
_PROBED_BYTES = 1 << 24


class Rehearsal:
    """One run of a job on simulated ranks.

    Args:
        job: what each node runs.
        options: those for simulated ranks. `schedule`, `explore`, `replay` and `faults` decide
            nothing here: what they come to is in the arguments below.
        node_count: how many nodes of `job.gang.size` ranks run at most; as many as the rendezvous
            keeps in reserve (`spares`) come on top.
        rendezvous: how nodes that come and go meet; None has `node_count` of them all the time,
            unless a fault strikes one.
        console_fds: what stands for standard output and standard error.
        schedule: decides what the run leaves open; None takes what comes first.
        faults: the faults of ranks and nodes.
        chip_faults: those of the machine: what errors call each, and the fault.
        machine: a preset or a topology file, each device of which is a rank's; None: no time but
            what is slept.
        keeps_log: keep what each rank does when, for `write_files` of the prediction.
        simulates_all: simulate all ranks of `timing_only`, as with `every_rank`.
        repeats: whether equal microbatches are carried out once; unless all ranks are simulated, if
            not given.
        choice: those that are simulated then, if it is known that two are too few.

    Attributes:
        supervision: that run; when it is over it has the results, by rank.
        prediction: how long the ranks take on the machine, if one is given.
        equals: which ranks stand for all; None if all are simulated.
        missed_faults: says of each fault that has not struck why, when the run is over.

    Raises:
        ConfigError: this job cannot be simulated.
    """

    def __init__(
        self,
        job: Job,
        options: SimulationOptions,
        *,
        node_count: int = 1,
        rendezvous: RendezvousConfig | None = None,
        console_fds: tuple[int, int] = (1, 2),
        schedule: Schedule | None = None,
        faults: Sequence[FaultOfRank | FaultOfNode] = (),
        chip_faults: Sequence[tuple[str, FaultOfChip]] = (),
        machine: str | None = None,
        keeps_log: bool = False,
        simulates_all: bool = False,
        repeats: bool | None = None,
        choice: RankChoice | None = None,
    ) -> None:
        if isinstance(job.program, Executable):
            raise ConfigError(
                f"{job.program.path} is not a Python program, and simulated ranks run in Python",
                hint="leave out --no-python, or --on sim",
            )
        self.size = node_count * job.gang.size
        self.prediction: Prediction | None = None
        if machine is not None:
            from rankwise.sim.hardware.faults import checked_faults  # noqa: PLC0415  # the same
            from rankwise.simranks import prediction  # noqa: PLC0415  # only there
            from rankwise.simranks.prediction.machines import open_machine  # noqa: PLC0415  # the same

            topology = open_machine(machine, node_count, job.gang.size)
            self.prediction = prediction.Prediction(
                topology.with_faults(checked_faults(chip_faults, topology)),
                self.size,
                keeps_log=keeps_log,
            )
            self.prediction.tokens_per_step = options.tokens_per_step
            self.prediction.has_synthetic_data = options.synthetic_data
        self.options = options
        self.device = options.device
        self.equals: Equals | None = None
        if options.record_values is not None and self.prediction is not None:
            from rankwise.simranks.prediction.values import ValueRecord  # noqa: PLC0415  # only there

            self.prediction.record = ValueRecord()
        if options.timing_only and self.prediction is not None:
            from rankwise.simranks.prediction.values import ValuePolicy  # noqa: PLC0415  # only there

            self.prediction.values = ValuePolicy(options.values, options.seed)
            self.device = "cuda"  # a time without data is that of a device, never of this CPU
            # A fault makes one rank, or its links, another one than those of its class.
            is_well = not (faults or chip_faults)
            every_rank = options.every_rank or simulates_all
            repeats = not every_rank if repeats is None else repeats
            self.prediction.repetition.is_wanted = (
                repeats and is_well and (choice is None or choice.repeats)
            )
            if not every_rank and is_well and self.size > _SIMULATED_OF_EQUALS:
                self.equals = Equals(choice or RankChoice(), self.size, options.seed)
                self.equals.price = partial(_price, self.prediction)
                self.prediction.equals = self.equals
        self.node_count = node_count + (0 if rendezvous is None else rendezvous.spares)
        self.rendezvous = rendezvous
        if rendezvous is None and any(isinstance(fault, FaultOfNode) for fault in faults):
            self.rendezvous = RendezvousConfig(
                nodes_min=node_count, nodes_max=node_count, policy=job.plan.rendezvous.policy
            )
        self.schedule = schedule
        self.faults = faults
        self.missed_faults: list[str] = []
        self._console_fds = console_fds
        self.supervision = Supervision(job, make_host=self._make_host, size=self.size)

    def run(self) -> Outcome:
        """Run the job to its end, in this thread and those of the ranks; once."""
        return self.supervision.run()

    def _make_host(self, session: Session, stack: ExitStack) -> SimulatedRunHost:
        return SimulatedRunHost(session, stack, self, console_fds=self._console_fds)

    def following(self, outcome: Outcome) -> RankChoice | None:
        """Which ranks to run next, since these are too few for all; None if they are enough."""
        if self.prediction is None:
            return None
        everyone = frozenset(range(self.size))
        if why := self.prediction.repetition.difference:
            present = RankChoice(simulated=everyone) if self.equals is None else self.equals.choice
            return present._replace(why=why, repeats=False)
        if self.equals is None:
            return None
        choice = self.equals.wanted
        is_whole = outcome.status is OutcomeStatus.SUCCEEDED  # a rank that fails ends earlier
        if choice is None and is_whole and not self.equals.difference:
            choice = self.prediction.following()
        if self.equals.difference:
            why = f"ranks are not equal: {self.equals.difference}"
            choice = RankChoice(simulated=everyone, why=why)
        return choice


def _price(prediction: "Prediction", ranks: tuple[int, ...]) -> object:
    """What the links among some ranks give: the time of a collective, and of messages."""
    network = prediction.network
    messages = [network.message_time(*pair, _PROBED_BYTES) for pair in pairwise(ranks)]
    return network.time("all_reduce", _PROBED_BYTES, ranks), messages
