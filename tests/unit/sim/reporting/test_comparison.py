"""Two runs side by side: the parts add up, and what does not fit together is said."""

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.sim.reporting.breakdown import (
    BUBBLE,
    COMPUTE,
    EXPOSED,
    HOST,
    IDLE,
    WAITING,
    Breakdown,
    RankParts,
    as_meta,
    from_document,
    from_json,
    from_page,
    parts_of,
)
from rankwise.sim.reporting.comparison import compare
from rankwise.sim.reporting.comparison_page import comparison_page
from rankwise.sim.reporting.comparison_text import as_text

NAMES = "a.json", "b.json"
Spent = dict[tuple[str, str, str], int]


def run_of(
    *ranks: Spent, whole: int = 1_000_000, steps: int = 1, program: str = "train.py",
    machine: str = "switch8", size: int | None = None,
) -> Breakdown:  # fmt: skip
    return Breakdown(
        program=program,
        machine=machine,
        size=len(ranks) if size is None else size,
        whole_ps=whole,
        steps=steps,
        ranks=tuple(RankParts(rank, parts_of(each, whole)) for rank, each in enumerate(ranks)),
    )


KEYS = st.tuples(
    st.sampled_from([COMPUTE, EXPOSED, WAITING, HOST]),
    st.sampled_from(["matrix products", "all_reduce", "all_gather"]),
    st.sampled_from(["", "forward", "backward"]),
)
RUNS = st.builds(
    lambda ranks, steps: run_of(*ranks, whole=10_000_000, steps=steps),
    st.lists(st.dictionaries(KEYS, st.integers(1, 1_000_000), max_size=6), min_size=1, max_size=4),
    st.integers(1, 7),
)


@given(RUNS, RUNS)
def test_parts_add_up_to_the_difference_exactly(first: Breakdown, second: Breakdown) -> None:
    compared = compare(first, second, NAMES)

    for rows in (compared.rows, compared.by_kind(), compared.by_cause()):
        assert sum(row.difference for row in rows) == compared.difference
        assert sum(row.first for row in rows) == compared.first.time
    for row in compared.ranks:
        more = sum(row.second.values()) - sum(row.first.values())
        assert more == compared.difference


@given(RUNS)
def test_a_run_compared_with_itself_differs_in_nothing(run: Breakdown) -> None:
    compared = compare(run, run, NAMES)

    assert not any(row.difference for row in compared.rows)
    assert compared.headline() == "b.json is as fast as a.json"
    assert compared.notes == ()


def test_the_headline_names_what_makes_the_difference() -> None:
    first = run_of(
        {(COMPUTE, "matrix products", ""): 500_000, (EXPOSED, "all_gather", ""): 500_000}
    )
    second = run_of(
        {(COMPUTE, "matrix products", ""): 500_000, (EXPOSED, "all_gather", ""): 370_000},
        whole=870_000,
    )

    assert compare(first, second, NAMES).headline() == (
        "b.json is 13.0 % faster: 13.0 % less exposed all_gather"
    )


def test_a_run_that_takes_several_times_as_long_is_told_so() -> None:
    first = run_of({(COMPUTE, "copies", ""): 1_000_000})
    second = run_of({(COMPUTE, "copies", ""): 6_000_000}, whole=6_000_000)

    assert compare(first, second, NAMES).headline() == (
        "b.json takes 6 times as long: 5 us more copies"
    )


def test_the_headline_of_two_layouts_names_communication_and_the_bubble() -> None:
    first = run_of({(EXPOSED, "all_gather", "forward"): 500_000, (WAITING, BUBBLE, ""): 500_000})
    second = run_of(
        {(EXPOSED, "all_gather", "forward"): 410_000, (WAITING, BUBBLE, ""): 460_000},
        whole=870_000,
    )

    assert compare(first, second, NAMES).headline() == (
        "b.json is 13.0 % faster: 9.0 % less exposed all_gather, 4.0 % less pipeline bubble"
    )


def test_a_rank_counts_for_all_that_it_stands_for() -> None:
    spent: tuple[Spent, ...] = ({(COMPUTE, "copies", ""): 1_000}, {})
    ranks = tuple(
        RankParts(rank, parts_of(each, 1_000), weight)
        for rank, each, weight in zip((0, 1), spent, (1.0, 7.0), strict=True)
    )
    run = msgspec.structs.replace(run_of({}, whole=1_000), ranks=ranks)

    assert run.means()[COMPUTE, "copies", ""] == 125


def test_steps_are_compared_by_their_means() -> None:
    first = run_of({(COMPUTE, "copies", ""): 1_000_000}, steps=1)
    second = run_of({(COMPUTE, "copies", ""): 4_000_000}, whole=4_000_000, steps=4)

    assert compare(first, second, NAMES).difference == 0


def test_what_does_not_fit_together_is_said() -> None:
    first = run_of({}, {}, program="a.py", machine="switch8")
    second = run_of({}, program="b.py", machine="h100-sxm", steps=0)

    assert compare(first, second, NAMES).notes == (
        "the programs differ: a.py and b.py",
        "the machines differ: switch8 and h100-sxm",
        "the runs have 2 and 1 ranks; times are means over each",
        "b.json is a whole run, a.json is a step: the times are not of the same work",
        "1 rank can be compared by number; a.json has ranks 0-1, b.json rank 0",
    )


def test_what_is_missing_to_the_whole_is_idle() -> None:
    (part,) = parts_of({}, 700)

    assert (part.cause, part.time_ps) == (IDLE, 700)


def test_text_and_page_show_each_part_and_the_whole() -> None:
    spent: Spent = {
        (COMPUTE, "matrix products", "forward"): 600_000,
        (EXPOSED, "all_reduce", ""): 300_000,
    }
    compared = compare(run_of(spent), run_of({}, whole=500_000), NAMES)

    text = as_text(compared)

    assert "exposed communication: all_reduce  300 ns       -     -300 ns  -30.0 %" in text
    assert "whole                                1 us  500 ns     -500 ns  -50.0 %" in text
    page = comparison_page(compared)
    assert page.count("<svg") == 3
    assert "<td>all_reduce</td>" in page
    assert "https://" not in page.replace("http://www.w3.org", "")


def test_a_breakdown_travels_inside_of_a_page() -> None:
    run = run_of({(COMPUTE, 'a "kind" <b>', ""): 5})
    page = f"<!doctype html><head>{as_meta(run)}</head>"

    assert from_page(page, "p.html") == run
    assert from_document({"breakdown": msgspec.to_builtins(run)}, "p.json") == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"whole_ps": 5}', "cannot be read: Object missing required field `program`"),
        (msgspec.json.encode(run_of(whole=5)).decode(), "in which no rank took any time"),
        (
            msgspec.json.encode(msgspec.structs.replace(run_of({}), whole_ps=7)).decode(),
            "is damaged: the parts of rank 0 do not add up",
        ),
    ],
)
def test_a_breakdown_that_is_damaged_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"p\.json") as refused:
        from_json(text, "p.json")
    assert message in str(refused.value)


def test_files_without_a_breakdown_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"old\.html is an HTML page without a breakdown"):
        from_page("<!doctype html><p>", "old.html")
    with pytest.raises(ConfigError, match=r"old\.json has no field 'breakdown'"):
        from_document({"machine": "switch8"}, "old.json")


def test_means_are_exact() -> None:
    run = run_of({(COMPUTE, "copies", ""): 1}, {}, {}, whole=1)

    assert run.means()[COMPUTE, "copies", ""] == Fraction(1, 3)
