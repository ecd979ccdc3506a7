"""Looks into the books of this node's ranks: when one fails, when all hang, and twice a second.

A rank writes its book into shared memory, which tells nobody, so what shows in books alone is
looked for in intervals, while ranks make calls that do not watch their peers themselves (torch's).
A look reads a word of each book. Only where a rank has begun no call since the last look all books
are read, and a verdict counts when two looks running have come to it: no healthy run is ended by
what was read while it moved.

Who is merely late is accused only when an exception tells that patience is over. What lateness has
cost is summed up by the way: each look takes in the calls that are new, of many the latest, so that
a look costs a millisecond whatever the ranks do.
"""

import re
from collections.abc import Callable, Mapping

import msgspec

from rankwise.base.failure import ErrorRecord
from rankwise.base.root_cause import tells_of_lost_peer
from rankwise.base.units import MILLISECOND, Duration, after, between
from rankwise.core.gang.vocabulary import RanksBlamed
from rankwise.core.ledger import (
    Book,
    Delay,
    Fate,
    Lateness,
    Verdict,
    delay_in_words,
    find_verdict,
    wait_in_words,
    waits_of,
)
from rankwise.drivers.real.call_rings import ArrivalReader, calls_begun, read_book
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.planning import JobPlanner
from rankwise.ports.clock import Clock

INTERVAL = Duration(500 * MILLISECOND)
_ARRIVALS_MAX, _ARRIVALS_MIN = 1024, 16
"""How many calls a look takes in: of all ranks together, and of each at least."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_OURS = "rankwise.base.errors.Collective"


class CallWatch:
    """Looks into the books of one run.

    Args:
        host: knows what has become of each rank.
        planner: knows the memory that holds the books.
        reactor: wakes for the next look.
        clock: tells for how long a rank has stood in a call.
        blame: is told who is to blame.
    """

    def __init__(
        self,
        host: RealProcessHost,
        planner: JobPlanner,
        reactor: Reactor,
        clock: Clock,
        blame: Callable[[RanksBlamed], None],
    ) -> None:
        self._host = host
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._blame = blame
        self._looks_at: int | None = None
        self._begun: dict[int, int] = {}
        self._suspicion = ""
        self._began_at = clock.now()
        self._lateness = Lateness(())
        self._readers: dict[int, ArrivalReader] = {}

    def begin(self) -> None:
        """Look at the present attempt in intervals, as long as it lasts."""
        if self._looks_at == self._attempt:
            return
        is_looking = self._looks_at is not None
        self._looks_at = self._attempt
        self._begun, self._suspicion = {}, ""
        self._begin_lateness()
        if not is_looking:
            self._look_later()

    def on_error(self, local_rank: int, error: ErrorRecord) -> None:
        """A rank dies of this exception: tell who is to blame, if it is another one."""
        if not _may_be_of_others(error):
            return
        books = self._books()
        rank = self._planner.world.rank(local_rank)
        book = next((each for each in books if each.rank == rank), None)
        if book is None or not book.standing:
            return
        verdict = find_verdict(books, patience_is_over=_tells_of_time(error))
        if verdict is not None:
            self._accuse(verdict)

    def explain_hang(self) -> tuple[str, Mapping[int, str]]:
        """Who is to blame for a hang, if that can be told; and what each rank waits for."""
        books = {book.rank: book for book in self._books()}
        verdict = find_verdict(books.values(), patience_is_over=True)
        told = {
            self._planner.world.local_rank(rank): wait_in_words(wait, books[rank])
            for rank, wait in waits_of(books.values()).items()
        }
        return "" if verdict is None else verdict.text, told

    def delays(self) -> tuple[Delay, ...]:
        """What each rank has cost the others so far, as far as was seen."""
        return self._lateness.delays()

    def take_last_look(self) -> tuple[Delay, str] | None:
        """Who made the others wait for a notable part of the run, and that in a sentence."""
        self._see_arrivals()
        lasted = between(self._began_at, self._clock.now())
        worst = self._lateness.worst(lasted)
        if worst is None:
            return None
        return worst, delay_in_words(worst, lasted, self._lateness.seen)

    @property
    def _attempt(self) -> int:
        return max((link.attempt for link in self._host.links.values()), default=-1)

    def _look_later(self) -> None:
        self._reactor.call_at(after(self._clock.now(), INTERVAL), self._look)

    def _look(self) -> None:
        if all(link.is_over for link in self._host.links.values()):
            self._looks_at = None
            return
        self._see_arrivals()
        verdict = self._certain_verdict() if self._is_somebody_standing() else None
        text = "" if verdict is None or not verdict.is_certain else verdict.text
        if verdict is not None and text and text == self._suspicion:
            self._accuse(verdict)
            self._looks_at = None
            return
        self._suspicion = text
        self._look_later()

    def _begin_lateness(self) -> None:
        """Read the books of this attempt; sums go on where the ranks are those of the last one."""
        first_rank, segment = self._planner.world.rank(0), self._planner.segment
        if segment is None:
            return
        ranks = tuple(first_rank + local_rank for local_rank in range(segment.worker_count))
        self._lateness.forget_groups()
        if self._lateness.ranks != ranks:
            self._lateness = Lateness(ranks)
        self._readers = {
            local_rank: ArrivalReader(segment, local_rank, first_rank)
            for local_rank in range(segment.worker_count)
        }

    def _see_arrivals(self) -> None:
        if self._looks_at is None or len(self._readers) < 2 or self._looks_at != self._attempt:
            return
        most = max(_ARRIVALS_MIN, _ARRIVALS_MAX // len(self._readers))
        for rank, reader in zip(self._lateness.ranks, self._readers.values(), strict=True):
            arrivals = reader.read(most)
            self._lateness.see(rank, reader.groups, arrivals)

    def _is_somebody_standing(self) -> bool:
        """Whether a rank has begun no call since the last look, and has begun some before."""
        segment = self._planner.segment
        if segment is None:
            return False
        alive = [rank for rank, link in self._host.links.items() if not link.is_over]
        begun = {rank: calls_begun(segment, rank) for rank in alive}
        last, self._begun = self._begun, begun
        return any(count and last.get(rank) == count for rank, count in begun.items())

    def _certain_verdict(self) -> Verdict | None:
        """A verdict on those who have stood for the time between two looks, if there is one."""
        books = [self._without_haste(book) for book in self._books()]
        return find_verdict(books, patience_is_over=False)

    def _without_haste(self, book: Book) -> Book:
        """A book of a rank that is not known to have ended: it may yet call something."""
        local_rank = self._planner.world.local_rank(book.rank)
        if book.fate is Fate.LEFT and self._host.links[local_rank].exit_code != 0:
            return msgspec.structs.replace(book, fate=Fate.LIVES)
        return book

    def _accuse(self, verdict: Verdict) -> None:
        world = self._planner.world
        blamed = tuple(world.local_rank(rank) for rank in verdict.blamed)
        self._blame(RanksBlamed(blamed, self._attempt, verdict.text))

    def _books(self) -> list[Book]:
        segment = self._planner.segment
        if segment is None:
            return []
        first_rank = self._planner.world.rank(0)
        books = []
        for local_rank in sorted(self._host.links):
            book = read_book(segment, local_rank, first_rank)
            if book is not None:
                books.append(msgspec.structs.replace(book, fate=self._fate_of(local_rank, book)))
        return books

    def _fate_of(self, local_rank: int, book: Book) -> Fate:
        link = self._host.links[local_rank]
        if link.error is not None:
            return Fate.RAISED if _may_be_of_others(link.error) else Fate.DIED
        if link.exit_code is not None:
            return Fate.LEFT if link.exit_code == 0 else Fate.DIED
        has_ended = link.process is not None and link.process.has_ended
        return Fate.DIED if has_ended and book.fate is Fate.LIVES else book.fate


def _may_be_of_others(error: ErrorRecord) -> bool:
    return error.type.startswith(_OURS) or tells_of_lost_peer(error)


def _tells_of_time(error: ErrorRecord) -> bool:
    return bool(_TIMED_OUT.search(f"{error.type} {error.message[-20_000:]}"))
