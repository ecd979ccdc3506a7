"""The time of each simulated rank on a modelled machine.

Theory of operation
===================

Each rank has a clock of its own, in picoseconds. Its computations move its own clock only: that
costs no hand-over. A collective begins when its last member has come, by the members' clocks, and
when the operation of the group before it is over; a rank that waits for it goes on at its end, or
at once if that has passed by then. So an operation under way overlaps with what its ranks compute
meanwhile, as on a stream for each group.

Nothing of this depends on the order in which ranks get the run token: a rank whose clock is behind
may run after one whose clock is ahead. Only a receive from any source, which depends on the order,
follows the token and not the clocks.

The time of a rank is one of five: it computes; it waits for an operation that is under way (that is
*exposed* communication); it waits for others to come to one; it sleeps; or it has ended.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import Instant
from rankwise.core.matching import NO_RANK, CallSignature, describe_call
from rankwise.sim.hardware.cost_models import plugged_costs
from rankwise.sim.hardware.op_log import OpLog
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.breakdown import ASLEEP, BUBBLE, EXPOSED, MESSAGES, WAITING
from rankwise.sim.triton import modelled_device
from rankwise.simranks.prediction.bill import Bill
from rankwise.simranks.prediction.costs import DeviceCosts, DeviceOperation, NetworkCosts
from rankwise.simranks.prediction.device_memory import DeviceMemory
from rankwise.simranks.prediction.machines.catalogue import MachineTopology
from rankwise.simranks.prediction.machines.device import DevicePrices
from rankwise.simranks.prediction.machines.fabric import FabricPrices
from rankwise.simranks.prediction.recordings import Recording, Repetition
from rankwise.simranks.prediction.useful_work import Achieved, UsefulWork
from rankwise.simranks.world.collective_groups import CollectiveGroup
from rankwise.simranks.world.equals import Equals, RankChoice, kind_of_group
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.scheduler import Scheduler

if TYPE_CHECKING:
    from rankwise.simranks.prediction.values import ValuePolicy, ValueRecord

PICOSECONDS_PER_NANOSECOND = 1_000
CONTEXT_BYTES = 600 << 20
"""What CUDA's context, its libraries and NCCL take of a device before a program takes any."""
_KEY = "prediction"


class Passage:
    """One rank's way through a collective or a message.

    Attributes:
        load: what it brings; None once it has been carried out.
        size: in bytes.
        came_at: when it came.
        begins_at, ends_at: when the operation begins and ends; 0 until all ranks have come.
        kind: of the operation, such as `all_gather`; `messages` of messages. Not known before all
            have come.
        is_paid: whether what it took of the rank's own processor has been counted.
        late: from when to when the rank's device had nothing to do but to wait for its host to
            launch it; both 0 if it did not wait.
    """

    __slots__ = ("begins_at", "came_at", "ends_at", "is_paid", "kind", "late", "load", "size")

    def __init__(self, load: Any, size: int, came_at: int) -> None:
        self.load = load
        self.size = size
        self.came_at = came_at
        self.begins_at = self.ends_at = 0
        self.kind = ""
        self.is_paid = False
        self.late = (0, 0)


class Account(NamedTuple):
    """What a rank has spent its time with until `time`, in picoseconds.

    Attributes:
        computing, exposed, waiting, asleep: see the module's text.
        communicating: the durations of all operations that it took part in, hidden or not.
        for_peers: the part of `waiting` before a message, for the peer to come to it.
        behind: how long the device had nothing to do since its host was late; see `queued_clocks`.
    """

    time: int = 0
    computing: int = 0
    exposed: int = 0
    waiting: int = 0
    asleep: int = 0
    communicating: int = 0
    for_peers: int = 0
    behind: int = 0

    def since(self, before: "Account") -> "Account":
        """What came after another account of the same rank."""
        return Account(*(now - then for now, then in zip(self, before, strict=True)))


class RankClock:
    """The time and the memory of one rank.

    Attributes:
        number: of the rank.
        device: that it has; it keeps it if it lives on as another number.
        time: its time, in picoseconds.
        steps: its account at the end of each of its steps; `bills` are its bills at these ends.
        bill: what it has spent its time with, by kind of operation.
        phase: says which phase of the training it is in.
        is_updating: whether an optimiser is making a step.
        work: what it has achieved; `work_of_steps` keeps it at the end of each step.
        counts: how often it has carried each operation out; `counts_of_steps` keeps it at the end
            of the first step and of the last one.
        memory: of its device.
        record: keeps the numbers that the program asks for, if that is wanted.
        captured: what a graph under capture gets: what its replay has the device do; else None.
        trail: what it has computed, and the bytes of what it has communicated, if that is compared.
        recording: notes what it does, while a microbatch is recorded; else None.
        carry_out, deliver: those of the prediction.
    """

    def __init__(self, prediction: "Prediction", number: int, begun_at: int) -> None:
        self.number = self.device = number
        self.time = begun_at
        self.steps: list[Account] = []
        self.bill = Bill()
        self.bills: list[Bill] = []
        self.phase: Callable[[], str] = str  # of what knows no phases: no name
        self.is_updating = False
        self.work = UsefulWork()
        self.work_of_steps: list[Achieved] = []
        self.counts: Counter[PricedWork] = Counter()
        self.counts_of_steps: list[Counter[PricedWork]] = []
        self.memory = DeviceMemory()
        self.record = prediction.record
        self.captured: list[Callable[[], object]] | None = None
        self.trail = None if prediction.equals is None else Trail(prediction.done)
        self.recording: Recording | None = None
        self._prediction = prediction
        self.carry_out, self.deliver = prediction.carry_out, prediction.deliver
        self._times = prediction.costs.times(number)
        self._computing = self._exposed = self._waiting = self._asleep = 0
        self._communicating = self._for_peers = 0

    @property
    def account(self) -> Account:
        """What it has spent its time with so far."""
        return Account(
            self.time, self._computing, self._exposed, self._waiting, self._asleep,
            self._communicating, self._for_peers,
        )  # fmt: skip

    @property
    def asleep_in_steps(self) -> int:
        """How long it has slept until its last step ended; in all if it has no steps."""
        return self.steps[-1].asleep if self.steps else self._asleep

    @property
    def latest(self) -> int:
        """When all that it has begun is done."""
        return self.time

    @property
    def stream_number(self) -> int:
        """The stream that gets what is launched now; 0 is the default one."""
        return 0

    def stream_ends(self) -> dict[int, int]:
        """When each stream has done what it was given until now."""
        return {}

    def price(self, work: DeviceOperation) -> "PricedWork":
        """How long an operation takes on its device."""
        return self._prediction.price(work._replace(times=self._times))

    def bound(self, work: DeviceOperation) -> "PricedWork":
        """The same of what a kernel does on its way: what the roofline gives, and no start."""
        return self._prediction.bound(work._replace(times=self._times))

    def note_unknown(self, priced: "PricedWork") -> None:
        """An operation of the matrix kind has no formula; see `Prediction.unknown`."""
        self._prediction.note_unknown(priced)

    def compute(self, priced: "PricedWork") -> None:
        """Let the time of an operation pass, which `price` has priced."""
        if self.captured is not None:  # the device does nothing until the graph is replayed
            self.captured.append(partial(self.compute_again, priced))
            return
        self.compute_again(priced)

    def compute_again(self, priced: "PricedWork") -> None:
        """The same of an operation of a graph."""
        begun, duration = self.time, priced.duration
        priced.count += 1
        self.counts[priced] += 1
        if priced.at_peak:
            self.work.count_products(priced.work, priced.at_peak)
        if self.trail is not None:
            self.trail.add(priced, 0)
        self._computing += duration
        self.bill.add_work(priced, self.phase())
        self.time = begun + duration
        if self._prediction.keeps_log:
            self._prediction.log(
                self, "KernelLaunch", priced.work.name, begun, self.time, priced.work
            )

    def note_free(self) -> None:
        """An operation has no kernel: it takes no time."""

    def note_subclass(self) -> None:
        """An operation goes by a tensor subclass first: that takes no time."""

    def note_taken(self, block: object, size: int) -> None:
        """A tensor takes memory: that takes no time."""

    def note_freed(self, block: object, size: int) -> None:
        """A tensor frees memory."""

    def synchronize(self, until: int | None = None) -> None:
        """Wait for the device, which is never behind."""

    def come(
        self,
        load: Any,
        size: int,
        call: CallSignature | None = None,
        ranks: tuple[int, ...] = (),
        at: int = NO_RANK,
    ) -> Passage:
        """Come to an operation of some ranks now, with so many bytes.

        `at` is the position of the call's root or peer among the ranks, if it has one.
        """
        if self.trail is not None:
            self.trail.add(Communicated.of(call, size, ranks, at), 0)
        return Passage(load, size, self.time)

    def come_to_message(
        self, load: Any, size: int, call: CallSignature, ranks: tuple[int, ...], at: int
    ) -> Passage:
        """The same of a message in a group: its members are the stages of a pipeline."""
        if self.recording is not None:
            self.recording.refuse("it has messages")
        if ranks not in self._prediction.pipelines:
            self._prediction.pipelines[ranks] = {rank: at for at, rank in enumerate(ranks)}
        return self.come(load, size, call, ranks, at)

    def wait(self, passage: Passage) -> None:
        """Go on when an operation is over."""
        begun = self.time
        if passage.ends_at <= begun:
            return
        under_way = max(passage.begins_at, begun)
        self._waiting += under_way - begun
        is_message = passage.kind == MESSAGES
        if is_message:
            self._for_peers += under_way - begun
        self._exposed += passage.ends_at - under_way
        phase = self.phase()
        self.bill.add(WAITING, BUBBLE if is_message else passage.kind, phase, under_way - begun)
        self.bill.add(EXPOSED, passage.kind, phase, passage.ends_at - under_way)
        self.time = passage.ends_at
        self._prediction.log(self, "Wait", "waits for others", begun, under_way)
        self._prediction.log(self, "Wait", "waits for the transfer", under_way, self.time)

    def begin_capture(self) -> None:
        """What the device is given from now on belongs to a graph."""
        self.captured = []

    def end_capture(self) -> Callable[[], None]:
        """The graph is complete; returns what replays it, at the cost of one launch."""
        calls, self.captured = self.captured or [], None

        def replay() -> None:
            self.note_free()
            for call in calls:
                call()

        return replay

    def placed(self, run: Callable[[], object]) -> Callable[[], object]:
        """What a replay calls to have something done where it was captured."""
        return run

    def wait_until(self, time: int) -> None:
        """Go on at an instant, if it is to come."""
        self._waiting += max(time - self.time, 0)
        self.bill.add(WAITING, "restarts", "", max(time - self.time, 0))
        self.time = max(time, self.time)

    def sleep(self, scheduler: Scheduler, nanoseconds: int) -> None:
        """Let time pass, for the world too."""
        self.oversleep(nanoseconds)
        scheduler.wait(scheduler.at(Instant(self.time // PICOSECONDS_PER_NANOSECOND)))

    def oversleep(self, nanoseconds: int) -> None:
        """Let time pass that the world knows of."""
        if self.recording is not None:
            self.recording.refuse("it sleeps")
        duration = max(nanoseconds, 0) * PICOSECONDS_PER_NANOSECOND
        self._prediction.log(self, "Wait", "sleeps", self.time, self.time + duration)
        self._asleep += duration
        self.bill.add(ASLEEP, "sleep", self.phase(), duration)
        self.time += duration

    def message_arrives(self, target: int, size: int) -> int:
        """When bytes that are sent now are at another rank; this one goes on meanwhile."""
        return self.time + self._prediction.network.message_time(
            self.number, target, size, self.time
        )

    def communicate(self, duration: int) -> None:
        """Take part in an operation, whether it will be waited for or not."""
        self._communicating += duration

    def end_step(self) -> None:
        """A step of the training is over."""
        self.steps.append(self.account)
        self.bills.append(self.bill.copy())
        self.counts_of_steps[1:] = [self.counts.copy()]
        self.work.end_step()
        self.work_of_steps.append(self.work.achieved)


class Trail:
    """What a rank has done, in order: numbers of a table that all ranks of a run share.

    Attributes:
        numbers: of what was done on which stream.
    """

    __slots__ = ("_table", "numbers")

    def __init__(self, table: "dict[Done, int]") -> None:
        self._table = table
        self.numbers = array("I")

    def add(self, done: "PricedWork | Communicated", stream: int) -> None:
        """A rank has done something on a stream."""
        table, key = self._table, (done, stream)
        number = table.get(key)
        if number is None:
            number = table[key] = len(table)
        self.numbers.append(number)


class Communicated(NamedTuple):
    """A collective or a message, as equal ranks are compared.

    Attributes:
        call: with shapes and types, and without a root: equal ranks have other groups.
        group: how many members it has, and how far apart their numbers are.
        at: the position of the root or peer in the group; `NO_RANK` if there is none.
    """

    call: CallSignature | None
    size: int
    group: tuple[int, ...]
    at: int = NO_RANK

    @classmethod
    def of(
        cls, call: CallSignature | None, size: int, ranks: tuple[int, ...], at: int
    ) -> "Communicated":
        """What a rank does in a group of these ranks."""
        if call is not None and call.root >= 0:
            call = msgspec.structs.replace(call, root=NO_RANK)
        return cls(call, size, kind_of_group(ranks)[:2], at)


class PricedWork:
    """An operation, how long it takes in picoseconds, and how often it has been carried out.

    Attributes:
        at_peak: how long it takes at the peak of the matrix engine; 0 of other operations.
    """

    __slots__ = ("at_peak", "count", "duration", "work")

    def __init__(self, work: DeviceOperation, duration: int, at_peak: int = 0) -> None:
        self.work = work
        self.duration = duration
        self.at_peak = at_peak
        self.count = 0

    def __repr__(self) -> str:
        """What is compared of it: no time, as that follows."""
        work = self.work
        return f"{work.name} {work.shapes} {work.dtype} {work.size} {work.flops}"


Done = tuple[PricedWork | Communicated, int]
"""Something that was done, and on which stream."""


class Prediction:
    """The time of a run on a machine.

    Args:
        topology: the machine; rank r has its device r.
        size: how many ranks there are.
        keeps_log: also keep each operation with its times.

    Attributes:
        costs, network: what takes how long.
        clocks: of the ranks of the last attempt, by number.
        op_log: what each rank did when; empty unless it is kept.
        works: all operations that any rank has carried out.
        unknown: those of them that are too cheap, since their flops are not known.
        keeps_log: see the arguments.
        size: how many ranks the last attempt has.
        equals: which ranks are simulated, if the others do the same.
        repetition: whether equal microbatches are carried out once.
        done: all that ranks have done, if they are compared: each has a number.
        pipelines: the groups whose members send messages, and the places of these in them.
        record: keeps the numbers that programs ask for, if that is wanted.
        remarks: what the run has left out.
        is_upper_bound: whether a part is predicted as slower code than the program has.
        carried_out: the kinds of operations that there were, and the numbers of their members.
        has_synthetic_data: whether data loaders repeat their first batch instead of running.
        tokens_per_step: of all ranks together, if the user says so; None counts them.
        values: of a run without data, what programs get that ask for numbers; otherwise None.

    Raises:
        ConfigError: the machine has fewer devices.
    """

    def __init__(self, topology: Topology, size: int, *, keeps_log: bool = False) -> None:
        if size > topology.sip_count:
            raise ConfigError(
                f"{topology.name} has {topology.sip_count} devices, and there are {size} ranks",
                hint="each rank has a device of its own; a topology file with a larger "
                "system.sips.count has more",
            )
        self.topology = topology
        self.size = size
        self.costs, self.network, self._make_clock = _models_of(topology)
        self.clocks: dict[int, RankClock] = {}
        self.op_log = OpLog()
        self.works: list[PricedWork] = []
        self.unknown: dict[DeviceOperation, PricedWork] = {}
        self.keeps_log = keeps_log
        self.values: ValuePolicy | None = None
        self.equals: Equals | None = None
        self.repetition = Repetition()
        self.done: dict[Done, int] = {}
        self.pipelines: dict[tuple[int, ...], dict[int, int]] = {}
        self.record: ValueRecord | None = None
        self.remarks: list[str] = []
        self.is_upper_bound = False
        self.carried_out: set[tuple[str, int]] = set()
        self.tokens_per_step: int | None = None
        self.has_synthetic_data = False
        self._begun_at = 0
        self._prices: dict[DeviceOperation, PricedWork] = {}
        self._bounds: dict[DeviceOperation, PricedWork] = {}
        self._group_free: dict[str, int] = {}
        """When the last collective of a group is over: the next one begins no earlier."""
        self._way_free: dict[tuple[int, int], int] = {}
        """The same of messages from one rank to another."""

    @property
    def capacity(self) -> int:
        """How many bytes a device holds."""
        machine = self.topology.machine
        return machine.sip.cubes.count * machine.cube.hbm.capacity

    @property
    def identity(self) -> modelled_device.DeviceIdentity:
        """What CUDA tells of the devices."""
        topology = self.topology
        if not isinstance(topology, MachineTopology):
            return modelled_device.UNNAMED
        device = topology.real.device
        name = device.cuda_name or modelled_device.UNNAMED.name
        return modelled_device.DeviceIdentity(name, device.capability, device.sms)

    @property
    def memory_limit(self) -> int:
        """How many bytes a program can have: CUDA's context takes some of them."""
        return self.capacity - min(CONTEXT_BYTES, self.capacity // 100)

    @property
    def now(self) -> int:
        """The latest time of any rank."""
        return max((clock.latest for clock in self.clocks.values()), default=self._begun_at)

    @property
    def simulated_count(self) -> int:
        """How many of the ranks have run the program."""
        return self.size if self.equals is None else len(self.equals.simulated)

    def weight(self, number: int) -> float:
        """For how many ranks a simulated one stands."""
        return 1.0 if self.equals is None else self.equals.weight(number)

    @property
    def digests(self) -> dict[int, bytes]:
        """What each simulated rank has done: operations, shapes, types, kinds of groups, streams.

        How long it has slept counts, too, but not when: threads of a program may sleep in between.
        Its sleep after the last step decides no figure. Empty if all ranks are simulated.
        """
        parts = [
            blake2b(f"{done!r} on {stream}".encode(), digest_size=8).digest()
            for done, stream in self.done
        ]
        return {
            number: blake2b(
                b"".join([parts[each] for each in clock.trail.numbers])
                + (b"sleeps %d" % clock.asleep_in_steps if clock.asleep_in_steps else b""),
                digest_size=8,
            ).digest()
            for number, clock in sorted(self.clocks.items())
            if clock.trail is not None
        }

    def difference(self, digests: Mapping[int, bytes]) -> str:
        """What a simulated rank does that another of its class does not, if digests differ."""
        assert self.equals is not None, "ranks are compared"
        for _, (first, *others) in self.equals.classes:
            for other in others:
                if digests[first] != digests[other]:
                    return self._difference_between(first, other)
        return ""

    def _difference_between(self, first: int, other: int) -> str:
        assert self.equals is not None, "ranks are compared"
        done, ranks = list(self.done), (first, other)
        trails = [self.clocks[each].trail or Trail({}) for each in ranks]
        pairs = zip_longest(*(trail.numbers for trail in trails))
        differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
        told = (
            (_sleep_in_words(self.clocks[each].asleep_in_steps) for each in ranks)
            if differing is None
            else (_describe(None if number is None else done[number][0]) for number in differing)
        )
        one, another = (
            f"rank {rank}{self.equals.places(rank)} {doing}"
            for rank, doing in zip(ranks, told, strict=True)
        )
        return f"{one}, {another}"

    def following(self) -> RankChoice | None:
        """Which ranks to run next, since some of a class differ; None if none do.

        If no other classes explain it, `difference` of the classes says that all have to run.
        """
        if self.equals is None:
            return None
        digests = self.digests
        difference = self.difference(digests)
        if not difference:
            return None
        choice = self.equals.divided_by(digests, difference)
        if choice is None:
            self.equals.differ(difference)
        return choice

    def begin_attempt(self, size: int) -> None:
        """New ranks begin where the latest of the old ones was."""
        self.size = size
        self._begun_at = self.now
        self.clocks = {}
        self._group_free, self._way_free = {}, {}

    def rejoin(self, rank: Rank) -> None:
        """A rank that has lived on waits for where the new ones begin, and has a new number."""
        clock: RankClock | None = rank.own_state.get(_KEY)
        if clock is not None:
            clock.number = rank.number
            clock.wait_until(self._begun_at)
            self.clocks[rank.number] = clock

    def clock_of(self, rank: Rank) -> RankClock:
        """The clock of a rank."""
        clock: RankClock | None = rank.own_state.get(_KEY)
        if clock is None:
            clock = self._make_clock(self, rank.number, self._begun_at)
            rank.own_state[_KEY] = clock
            if self.equals is None or rank.number in self.equals.simulated:
                self.clocks[rank.number] = clock
        return clock

    def delay(self, rank: Rank, nanoseconds: int, load: Any) -> None:
        """A fault has let a rank come later to what it brings a load to, if to anything."""
        clock = self.clock_of(rank)
        clock.oversleep(nanoseconds)
        if isinstance(load, Passage):
            load.came_at = max(load.came_at, clock.time)

    def carry_out(
        self,
        group: CollectiveGroup,
        kind: str,
        root: int,
        carry_out: Callable[[Sequence[Any]], None],
        passages: Sequence[Passage],
    ) -> None:
        """Do a collective for which all members have come, and say when it begins and ends."""
        loads = [passage.load for passage in passages]
        for passage in passages:
            passage.load = None  # a handle keeps it, perhaps for longer than the tensors live
        carry_out(loads)
        members = (*group.ranks[root:], *group.ranks[:root])
        free = self._group_free.get(group.name, 0)
        begin = max(free, *(passage.came_at for passage in passages))
        duration = self.network.time(kind, max(each.size for each in passages), members, begin)
        self._group_free[group.name] = begin + duration
        for passage in passages:
            passage.kind = kind
        self.carried_out.add((kind, len(members)))
        for rank, passage in zip(group.ranks, passages, strict=True):
            if self.equals is None or rank in self.equals.simulated:
                self._pass(rank, passage, kind, begin, duration)

    def deliver(self, source: int, target: int, sent: Passage, received: Passage) -> None:
        """Say when a message begins and ends for which both ends are there."""
        sent.load = received.load = None
        way = (source, target)
        begin = max(sent.came_at, received.came_at, self._way_free.get(way, 0))
        duration = self.network.message_time(source, target, sent.size, begin)
        self._way_free[way] = begin + duration
        self.carried_out.add((MESSAGES, 2))
        sent.kind = received.kind = MESSAGES
        self._pass(source, sent, f"send to {target}", begin, duration)
        self._pass(target, received, f"recv from {source}", begin, duration)

    def price(self, work: DeviceOperation) -> PricedWork:
        """How long an operation takes; the same work has one price."""
        priced = self._prices.get(work)
        if priced is None:
            priced = self._prices[work] = PricedWork(
                work, self.costs.time(work), self.costs.at_peak(work)
            )
            self.note(priced)
        return priced

    def price_as(self, work: DeviceOperation, duration: int) -> PricedWork:
        """An operation of which the time is known, in picoseconds."""
        priced = self._prices.get(work)
        if priced is None:
            priced = self._prices[work] = PricedWork(work, duration)
            self.note(priced)
        return priced

    def bound(self, work: DeviceOperation) -> PricedWork:
        """The same of what a kernel does on its way: what the roofline gives, and no start."""
        priced = self._bounds.get(work)
        if priced is None:
            priced = self._bounds[work] = PricedWork(
                work, self.costs.bound(work)[1], self.costs.at_peak(work)
            )
            self.note(priced)
        return priced

    def note_unknown(self, priced: PricedWork) -> None:
        """Have an operation reported as too cheap, unless a cost model of a plug-in prices it."""
        if not self.costs.is_plugged(priced.work):
            self.unknown[priced.work] = priced

    def note(self, priced: PricedWork) -> None:
        """Have an operation reported, with how often it has been carried out."""
        self.works.append(priced)

    def log(  # noqa: PLR0917  # a row of a table
        self,
        clock: RankClock,
        kind: str,
        name: str,
        start: int,
        end: int,
        work: DeviceOperation | None = None,
    ) -> None:
        """Keep what a rank did, if that is wanted, and if it took any time."""
        if self.keeps_log and end > start:
            size, flops = (0, 0) if work is None else (work.size, work.flops)
            place = f"sip{clock.number}"
            self.op_log.append(kind, name, place, start, end, size=size, flops=flops)

    def _pass(self, rank: int, passage: Passage, name: str, begin: int, duration: int) -> None:
        passage.begins_at, passage.ends_at = begin, begin + duration
        clock = self.clocks[rank]
        clock.communicate(duration)
        if self.keeps_log:
            self.op_log.append(
                "collective", name, f"sip{rank}", begin, begin + duration, size=passage.size
            )


def _describe(done: "PricedWork | Communicated | None") -> str:
    """What a rank has done, for a difference between two."""
    if done is None:
        return "has ended"
    if isinstance(done, Communicated):
        at = "" if done.at == NO_RANK else f" at position {done.at}"
        return f"calls {_call_in_words(done.call)}{at} with {done.size:,} bytes"
    shapes = ", ".join("x".join(map(str, each)) or "()" for each in done.work.shapes[:3])
    size = f"{done.work.size:,} bytes"  # of what takes no tensor, such as random numbers
    return f"computes {done.work.name} of {shapes or size}"


def _sleep_in_words(asleep: int) -> str:
    return f"sleeps {format_picoseconds(asleep)}" if asleep else "never sleeps"


def _call_in_words(call: CallSignature | None) -> str:
    if call is None:
        return "an operation"
    if call.is_message:
        return f"{describe_call(call, tells_tag=True)},"
    return describe_call(call, "?")


def _models_of(
    topology: Topology,
) -> tuple[
    DeviceCosts | DevicePrices,
    NetworkCosts | FabricPrices,
    "Callable[[Prediction, int, int], RankClock]",
]:
    """What prices operations and collectives, and what kind of clock ranks have."""
    if not isinstance(topology, MachineTopology):
        return DeviceCosts(topology), NetworkCosts(topology), RankClock
    from rankwise.simranks.prediction.queued_clocks import QueuedClock  # noqa: PLC0415  # derived from ours

    real = topology.real
    prices = DevicePrices(real.device, plugged_costs(topology.machine))
    return prices, FabricPrices(real, topology.per_node), QueuedClock
