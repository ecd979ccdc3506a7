"""Virtual time."""

import pytest

from rankwise.base.units import Duration, Instant
from rankwise.drivers.virtual.agenda import Agenda, VirtualClock


def test_time_jumps_to_what_happens_next() -> None:
    clock = VirtualClock()
    agenda = Agenda(clock)
    seen: list[tuple[str, int]] = []
    agenda.at(Instant(30), lambda: seen.append(("late", clock.now())))
    agenda.after(Duration(10), lambda: seen.append(("early", clock.now())))

    assert agenda.next_instant == 10
    agenda.run_next()
    agenda.run_next()

    assert seen == [("early", 10), ("late", 30)]
    assert agenda.next_instant is None


def test_what_happens_at_one_instant_happens_in_the_order_in_which_it_was_arranged() -> None:
    agenda = Agenda(VirtualClock())
    seen: list[int] = []
    for number in range(50):
        agenda.at(Instant(7), lambda number=number: seen.append(number))  # type: ignore[misc]

    while agenda.next_instant is not None:
        agenda.run_next()

    assert seen == list(range(50))


def test_nothing_happens_in_the_past() -> None:
    clock = VirtualClock()
    clock.advance_to(Instant(5))

    with pytest.raises(AssertionError, match="in the past"):
        Agenda(clock).at(Instant(4), lambda: None)
    with pytest.raises(AssertionError, match="cannot go back"):
        clock.advance_to(Instant(4))


def test_the_calendar_moves_with_the_clock() -> None:
    clock = VirtualClock()
    before = clock.wall_ns()

    clock.advance_to(Instant(5))

    assert clock.wall_ns() - before == 5


def test_a_deadline_passes_when_all_else_of_its_instant_has_happened() -> None:
    agenda = Agenda(VirtualClock())
    happened: list[str] = []
    agenda.at_deadline(Instant(5), lambda: happened.append("deadline"))
    agenda.at(Instant(5), lambda: happened.append("news"))

    agenda.run_next()
    agenda.run_next()

    assert happened == ["news", "deadline"]
