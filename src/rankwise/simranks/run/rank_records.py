"""What a run keeps of its simulated ranks: what they told, where they stand, who is to blame."""

from collections.abc import Callable, Sequence

from rankwise.base.failure import ErrorRecord, Stood
from rankwise.base.units import Duration, Instant
from rankwise.core.ledger import Blame, CallRecord, find_blame
from rankwise.drivers.real.clock import SystemClock
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import Destinations, LogPlaces
from rankwise.simranks.run.output import Output
from rankwise.simranks.run.rank_call_records import call_records_of
from rankwise.simranks.run.time_watch import TimeWatch
from rankwise.simranks.world.collective_groups import lost
from rankwise.simranks.world.places import CallSite, owner_of, place_of, places_of
from rankwise.simranks.world.ranks import Rank, Strand
from rankwise.simranks.world.world import SimulatedWorld

DEADLOCK = "deadlock: no rank can continue"


class RankRecords:
    """What a run keeps of the ranks of its present attempt, on whichever node they live.

    Args:
        job: what each node runs.
        world: where the ranks live.
        output: what they write to.
        places: where their log files go.

    Attributes:
        results: the result frame of each function rank, by number.
        errors: what ranks have told to die of, by number.
        accused: takes the blame of some of the ranks, for each agent.
        stacks: where hanging ranks stood, and `waits` what for, by number.
        destinations: the files of the present attempt.
        nodes: the number of each rank's node.
        last_alive: when a rank has run last.
        watch: whether ranks that can continue make progress.
        look_interval: how often gangs ask that, in virtual time; for them it is a time-out.
        patience: how long no rank can go on before that is a hang; not less than `look_interval`.
        hang: what is said of ranks that have hung.
        when_peers_notice: calls a function when those that wait for a rank see that it has ended.
    """

    def __init__(self, job: Job, world: SimulatedWorld, output: Output, places: LogPlaces) -> None:
        self._job = job
        self._world = world
        self._output = output
        self._places = places
        self._attempt = -1
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, ErrorRecord] = {}
        self.exits: dict[int, str] = {}
        """Where ranks have ended themselves with a code other than 0."""
        self.stacks: dict[int, str] = {}
        self.waits: dict[int, str] = {}
        self.accused: list[Callable[[Blame], None]] = []
        self.nodes: dict[int, int] = {}
        self.destinations = Destinations()
        self.last_alive = Instant(0)
        self.watch = TimeWatch(
            world, job.gang.hang_timeout, SystemClock(), lambda: output.byte_count
        )
        self.look_interval = self.patience = Duration(0)
        self.hang = DEADLOCK
        self.when_peers_notice: Callable[[Callable[[], None]], None] = _at_once

    def begin_attempt(self, number: int, size: int) -> None:
        """A node begins an attempt of so many ranks; the first one begins it for all."""
        if number == self._attempt:
            return
        self._attempt = number
        self.results, self.errors, self.exits = {}, {}, {}
        self.stacks, self.waits, self.nodes = {}, {}, {}
        self.accused, self.hang = [], DEADLOCK
        self._world.begin_attempt(size)
        self.watch.begin_attempt()
        self.destinations = self._places.prepare(number)
        self._output.begin_attempt(size, self.destinations, self.local_rank)

    def end_rank(self, number: int, code: int) -> None:
        """A rank has ended: its output does, and those that wait for it are told."""
        self._output.end_rank(number)
        waiting = [group for group in self._world.groups.values() if group.gives_up]

        def lose() -> None:
            for group in waiting:
                group.lose(number, lost(number, code))

        if waiting:
            self.when_peers_notice(lose)

    def judge(self, rank: int | None, *, patience_is_over: bool) -> Blame | None:
        """Find out who is to blame that ranks wait, and tell all agents.

        Args:
            rank: who has raised what may be another's doing; None if no rank can ever go on.
            patience_is_over: whether who may yet come is to blame too.
        """
        records = call_records_of(self._world, self.errors)
        if rank is not None and not any(
            record.standing for record in records if record.rank == rank
        ):
            return None
        blame = self._find_blame(records, patience_is_over=patience_is_over)
        if blame is not None:
            for accuse in self.accused:
                accuse(blame)
        return blame

    def _find_blame(self, records: Sequence[CallRecord], *, patience_is_over: bool) -> Blame | None:
        blame = find_blame(records, patience_is_over=patience_is_over)
        if blame is not None and any(map(self._waits_for_peers, blame.blamed)):
            return None  # call records have no signals: where each rank stands tells more
        return blame

    def _waits_for_peers(self, number: int) -> bool:
        """Whether a rank waits for what another one has to do, and for no call of a group."""
        rank = self._world.scheduler.ranks.get(number)
        gate = None if rank is None else rank.waits_for
        return gate is not None and gate.is_of_peers

    def local_rank(self, rank: int) -> int:
        """A rank's number on its node."""
        return rank % self._job.gang.size

    def standstill(self, stuck: Rank | None) -> tuple[str, tuple[Stood, ...]]:
        """The ranks that keep others waiting for ever, if any, and where each rank stands now.

        Args:
            stuck: one that was given up, but runs all the same.
        """
        ranks = [
            rank
            for rank in self._world.scheduler.ranks.values()
            if rank is stuck or not rank.is_over
        ]
        for rank in ranks:
            self.note_place(rank)
            self.note_wait(rank)
        stood = tuple(
            Stood(
                rank=rank.number,
                waits_for=self.waits.get(rank.number, ""),
                stacks=self.stacks.get(rank.number, ""),
            )
            for rank in ranks
        )
        blame = self._find_blame(call_records_of(self._world, self.errors), patience_is_over=False)
        return "" if blame is None else blame.text, stood

    def note_place(self, rank: Rank) -> None:
        """Note the user's part of a rank's stack, in the form that faulthandler has."""
        places = places_of(rank.stack())
        if rank.number not in self.errors or any(map(_is_users, places)):
            self._note_places(rank.number, places)

    def note_origin(self, number: int, error: BaseException) -> None:
        """Note where a rank has raised: when it is asked where it stands, it has left that."""
        places: list[CallSite] = []
        step = error.__traceback__
        while step is not None:
            places.append(CallSite(step.tb_frame.f_code, step.tb_lasti))
            step = step.tb_next
        self._note_places(number, [place for place in reversed(places) if _is_users(place)])

    def _note_places(self, number: int, places: list[CallSite]) -> None:
        lines = [
            f'  File "{place.code.co_filename}", line {place.line} in {place.code.co_name}\n'
            for place in places
        ]
        if lines:
            head = "Current thread 0x0 (most recent call first):\n"
            self.stacks[number] = head + "".join(lines)

    def note_wait(self, rank: Rank) -> None:
        """Note what a rank waits for."""
        waits = [text for strand in rank.strands if (text := _wait_of(strand))]
        if waits:
            self.waits[rank.number] = "; ".join(waits)
        elif not rank.has_begun:
            self.waits[rank.number] = "its first turn"


def _wait_of(strand: Strand) -> str:
    """What a thread of a rank waits for, and which thread that is."""
    text = strand.waits_in_words
    if not text or strand is strand.rank.main:
        return text
    place = place_of(strand.stack())
    return f"its thread {strand.name!r} for {text}" + (f", at {place}" if place else "")


def _is_users(place: CallSite) -> bool:
    return owner_of(place.code.co_filename) == "user"


def _at_once(function: Callable[[], None]) -> None:
    function()
