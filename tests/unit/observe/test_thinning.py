"""However long a run lasts, its records stay within a limit."""

from rankwise.observe.thinning import Thinning

LIMIT = 1 << 20
LOOK = 300


def test_a_short_run_is_recorded_whole() -> None:
    thinning = Thinning(LIMIT)

    for _ in range(LIMIT // 4 // LOOK):
        assert thinning.takes_look()
        thinning.note(LOOK)


def test_a_week_of_looks_stays_within_the_limit_and_is_recorded_to_its_end() -> None:
    thinning = Thinning(LIMIT)
    written, taken = 0, []

    for look in range(7 * 24 * 3600 * 2):
        if thinning.takes_look():
            thinning.note(LOOK)
            written += LOOK
            taken.append(look)

    assert LIMIT // 2 < written <= LIMIT + LOOK
    assert thinning.every > 100
    assert taken[-1] > 0.95 * 7 * 24 * 3600 * 2


def test_looks_that_take_more_than_a_stage_end_the_recording_within_the_limit() -> None:
    thinning = Thinning(LIMIT)
    written = 0

    for _ in range(1 << 20):
        if thinning.takes_look():
            thinning.note(LIMIT // 3)
            written += LIMIT // 3

    assert written <= LIMIT + LIMIT // 3
