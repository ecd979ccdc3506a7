"""Windows in every order of their steps: no wake-up is lost, and no sum is invented."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from rankwise.base.errors import CollectiveError, PeerDied
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.collectives.barrier import Barrier
from rankwise.collectives.calls import describe
from rankwise.drivers.real.segments import (
    HEADER_BYTES,
    LEDGER_OPERATIONS,
    LEDGER_PHASES,
    LEDGER_WORDS,
    SegmentLayout,
)
from rankwise.drivers.real.windows.shared_signals import SignalBoard
from rankwise.testing.interleavings import (
    Interleaving,
    InterleavingError,
    ModelledWord,
    Words,
    explore,
)

LATER = Instant(1)
Programs = Sequence[Callable[[], object]]


def boards(world: Interleaving, rank_count: int, signal_count: int = 1) -> list[SignalBoard]:
    cells = world.words((1 + rank_count) * rank_count * signal_count)
    doorbells = [world.word() for _ in range(rank_count)]
    return [SignalBoard(cells, doorbells, rank, signal_count) for rank in range(rank_count)]


def wait(board: SignalBoard, reached: Callable[[int], bool], look: Any = lambda: None) -> Any:
    return board.wait(0, reached, look, lambda: 0, LATER)


def test_two_that_add_wake_one_that_waits_for_both() -> None:
    def setup(world: Interleaving) -> Programs:
        zero, one, two = boards(world, 3)
        return [
            lambda: wait(zero, (2).__le__),
            lambda: one.add(0, 0, 1),
            lambda: two.add(0, 0, 1),
        ]

    def check(world: Interleaving) -> None:
        assert world.done[0] == 2

    assert explore(setup, check) > 100


def test_two_that_wait_for_each_other_both_return() -> None:
    def setup(world: Interleaving) -> Programs:
        zero, one = boards(world, 2)

        def ping() -> Any:
            zero.add(0, 1, 1)
            return wait(zero, (1).__le__)

        def pong() -> Any:
            value = wait(one, (1).__le__)
            one.add(0, 0, 1)
            return value

        return [ping, pong]

    explore(setup)


def test_a_sum_that_never_was_is_never_seen() -> None:
    def setup(world: Interleaving) -> Programs:
        zero, one, two = boards(world, 3)

        def first_one_then_ten() -> None:
            one.add(0, 0, 1)
            one.add(0, 2, 1)

        def ten_after_one() -> None:
            wait(two, (1).__le__)
            two.add(0, 0, 10)

        return [lambda: zero.value(0), first_one_then_ten, ten_after_one]

    seen = set()
    explore(setup, lambda world: seen.add(world.done[0]))

    assert seen == {0, 1, 11}


def test_a_set_wins_over_what_was_before_and_races_with_an_addition_fairly() -> None:
    def setup(world: Interleaving) -> Programs:
        zero, one, two = boards(world, 3)
        two.set(0, 0, 40)
        two.add(0, 0, 2)
        return [lambda: one.set(0, 0, 7), lambda: two.add(0, 0, 1), lambda: zero.value(0)]

    ends, seen = set(), set()

    def check(world: Interleaving) -> None:
        seen.add(world.done[2])
        ends.add(sum(world.memory[:4]) % (1 << 64))

    explore(setup, check)

    assert ends == {7, 8}
    assert seen <= {42, 43, 7, 8}


def test_the_last_of_two_sets_in_order_wins() -> None:
    def setup(world: Interleaving) -> Programs:
        zero, one = boards(world, 2, signal_count=2)

        def first() -> None:
            one.set(0, 0, 9)
            one.add(1, 0, 1)

        def second() -> Any:
            zero.wait(1, (1).__le__, lambda: None, lambda: 0, LATER)
            zero.set(0, 0, 5)
            return zero.value(0)

        return [first, second]

    seen = set()
    explore(setup, lambda world: seen.add(world.done[1]))

    assert seen == {5}


def test_one_that_dies_anywhere_leaves_nobody_asleep() -> None:
    """The parent kills rank 1 between any two of its steps, marks it dead, and rings."""

    def setup(world: Interleaving) -> Programs:
        dead = world.words(1)
        cells = world.words(6)
        bells = [world.word(), world.word()]
        zero, one = (SignalBoard(cells, bells, rank, 1) for rank in range(2))

        def look_around() -> None:
            if dead[0]:
                raise PeerDied("rank 1")

        def waiter() -> Any:
            try:
                return wait(zero, (1).__le__, look_around)
            except PeerDied:
                return "peer died"

        def parent() -> None:
            world.kill(1)
            dead[0] = 1
            for bell in bells:
                bell.add_and_wake()

        return [waiter, lambda: one.add(0, 0, 1), parent]

    seen = set()
    explore(setup, lambda world: seen.add(world.done[0]))

    assert seen == {1, "peer died"}


def test_the_checker_finds_a_ring_that_comes_before_its_signal() -> None:
    class Hasty(SignalBoard):
        def add(self, signal: int, to: int, value: int) -> None:
            self._doorbells[to].add_and_wake()
            self._cells[self._row(to, signal) + 1 + self._rank] = value

    def setup(world: Interleaving) -> Programs:
        cells, bells = world.words(6), [world.word(), world.word()]
        zero, one = (Hasty(cells, bells, rank, 1) for rank in range(2))
        return [lambda: wait(zero, (1).__le__), lambda: one.add(0, 0, 1)]

    with pytest.raises(InterleavingError, match="no program is left to wake 0"):
        explore(setup)


def test_the_checker_finds_a_sum_read_only_once() -> None:
    class Careless(SignalBoard):
        def _snapshot(self, row: int) -> list[int]:
            return self._cells[row : row + self._row_words].tolist()

    def setup(world: Interleaving) -> Programs:
        cells, bells = world.words(12), [world.word() for _ in range(3)]
        zero, one, two = (Careless(cells, bells, rank, 1) for rank in range(3))

        def one_then_ten() -> None:
            one.add(0, 0, 1)
            two.add(0, 0, 10)

        return [lambda: zero.value(0), one_then_ten]

    seen = set()
    explore(setup, lambda world: seen.add(world.done[0]))

    assert 10 in seen


class SharedBytes:
    """The bytes of a segment that a barrier looks at: fates and headers, in words."""

    def __init__(self, world: Interleaving, layout: SegmentLayout, *, may_die: bool) -> None:
        self._world = world
        self._layout = layout
        self._may_die = may_die
        self._fates = world.words(2 * layout.worker_count)
        self._headers = bytearray(layout.slots)

    def _fate_index(self, offset: int) -> int | None:
        index, rest = divmod(offset - self._layout.deaths, 4)
        return index if rest == 0 and 0 <= index < 2 * self._layout.worker_count else None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            index = self._fate_index(key)
            return self._headers[key] if index is None else self._fates[index]
        if self._fate_index(key.start) == 0:
            if not self._may_die:
                return self._all_fates()
            return self._world.access("load all fates", self._all_fates)
        return bytes(self._headers[key])

    def _all_fates(self) -> bytes:
        first, count = self._fates.start, 2 * self._layout.worker_count
        words = self._world.memory[first : first + count]
        return b"".join(word.to_bytes(4, "little") for word in words)

    def __setitem__(self, key: Any, value: Any) -> None:
        index = self._fate_index(key) if isinstance(key, int) else None
        if index is None:
            self._headers[key] = value
        else:
            self._fates[index] = value


class SharedSegment:
    """A segment of the checker's words.

    Headers are no steps, since all ranks do the same here; nor is what a rank writes into its
    ledger for messages, or anything there as long as nobody dies.
    """

    def __init__(self, world: Interleaving, rank_count: int, *, may_die: bool) -> None:
        self.layout = SegmentLayout(rank_count, 4096)
        self.memory = SharedBytes(world, self.layout, may_die=may_die)
        steps = {LEDGER_PHASES, LEDGER_OPERATIONS} if may_die else set()
        quiet = [
            word for word in range(LEDGER_WORDS * rank_count) if word % LEDGER_WORDS not in steps
        ]
        self.ledgers: Words = world.words(LEDGER_WORDS * rank_count, quiet=quiet)
        self.arrivals: ModelledWord = world.word()

    def mark_dead(self, rank: int) -> None:
        self.memory[self.layout.deaths + 4 * rank] = 1
        self.arrivals.ring()


BARRIER = describe("barrier")
PATIENCE = Duration(60 * SECOND)


@pytest.fixture
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)


def meet(gate: Barrier, times: int) -> Any:
    try:
        for _ in range(times):
            gate.begin(BARRIER, PATIENCE)
            gate.arrive_and_wait()
    except CollectiveError as error:
        reason = f"{type(error).__name__} in barrier"
        gate.withdraw(reason, lost_peer=isinstance(error, PeerDied))
        return type(error).__name__
    return "met"


def gates(segment: SharedSegment) -> list[Barrier]:
    count = segment.layout.worker_count
    return [Barrier(segment, rank, 1 + rank) for rank in range(count)]  # type: ignore[arg-type]


@pytest.mark.usefixtures("_time_stands_still")
@pytest.mark.parametrize(("rank_count", "times"), [(2, 2), (3, 1)])
def test_a_barrier_lets_all_through_and_leaves_nobody_asleep(rank_count: int, times: int) -> None:
    def setup(world: Interleaving) -> Programs:
        ranks = gates(SharedSegment(world, rank_count, may_die=False))
        return [partial(meet, gate, times) for gate in ranks]

    def check(world: Interleaving) -> None:
        assert world.done == dict.fromkeys(range(rank_count), "met")

    assert explore(setup, check) > 100


@pytest.mark.usefixtures("_time_stands_still")
def test_a_rank_killed_at_any_step_of_a_barrier_leaves_nobody_asleep() -> None:
    def setup(world: Interleaving) -> Programs:
        segment = SharedSegment(world, 2, may_die=True)
        zero, one = gates(segment)

        def parent() -> None:
            world.kill(1)
            segment.mark_dead(1)

        return [lambda: meet(zero, 1), lambda: meet(one, 1), parent]

    seen = set()
    explore(setup, lambda world: seen.add(world.done[0]))

    assert seen == {"met", "PeerDied"}


def test_headers_fit_their_place() -> None:
    assert len(BARRIER.header) == HEADER_BYTES
