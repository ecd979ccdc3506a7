"""Operations on tracks: they take their turns, and nothing is counted twice."""

from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.web_page import busy_shares
from rankwise.sim.hardware.op_log import OpLog
from rankwise.sim.reporting.timeline import EngineName, by_place, got_to

intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda each: (each[0], sum(each))),
    max_size=40,
).map(sorted)


@given(intervals)
def test_an_engine_gets_to_something_when_what_was_there_before_has_ended(
    given_intervals: list[tuple[int, int]],
) -> None:
    starts = got_to(given_intervals)

    for (start, end), begun in zip(given_intervals, starts, strict=True):
        before = [
            other_end
            for other_start, other_end in given_intervals
            if other_start <= start and other_end < end
        ]
        assert begun == max([start, *before])
        assert begun <= end


def test_what_queues_at_an_engine_is_in_one_lane() -> None:
    queueing = [(0, 10), (0, 20), (0, 30), (5, 40), (50, 60)]

    starts = got_to(queueing)

    assert starts == [0, 10, 20, 30, 50]


@given(intervals)
def test_shares_add_up_to_the_time_in_which_something_went_on(
    given_intervals: list[tuple[int, int]],
) -> None:
    shares = busy_shares(given_intervals, 100, 7)

    busy = {instant for start, end in given_intervals for instant in range(start, end)}
    assert abs(sum(shares) * 100 / 7 - len(busy)) < 1e-6
    assert all(0 <= share <= 1 for share in shares)


def test_operations_go_to_the_engine_that_carries_them_out() -> None:
    log = OpLog()
    for kind, place in (
        ("dot", "sip1.cube0.pe10"), ("load", "sip1.cube0.pe2"), ("math", "sip1.cube0.pe2"),
        ("MemoryWrite", "sip0"), ("KernelLaunch", "sip0"), ("all_reduce", "sip0"),
        ("result", "sip0"),
    ):  # fmt: skip
        log.append(kind, kind, place, 0, 5)

    assert list(by_place(log)) == [
        EngineName(0, "", "host"),
        EngineName(0, "", "kernels"),
        EngineName(0, "", "collectives"),
        EngineName(1, "cube0.pe2", "dma"),
        EngineName(1, "cube0.pe2", "math"),
        EngineName(1, "cube0.pe10", "gemm"),
    ]
