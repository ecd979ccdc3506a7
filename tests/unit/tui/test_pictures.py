"""Runs as rows: judged, folded, sorted, and as text of 80 columns."""

import sys

import msgspec
import pytest
from samples_of_runs import NIGHTLY, four_ranks, look_of, many_ranks, rank_status, standing

from rankwise.drivers.real.gpus import GpuUse
from rankwise.launch.control.client import RunSummary
from rankwise.launch.looking.rank_status import RankStatus
from rankwise.tui import samples
from rankwise.tui.picture import SortOrder, State, Watcher, arranged
from rankwise.tui.samples import RunSample
from rankwise.tui.text import WIDTH, page


def states_of(*workers: RankStatus) -> list[State]:
    return [row.state for row in Watcher(NIGHTLY).see(look_of(workers)).rows]


def test_four_ranks_are_shown_one_by_one_with_who_waits_for_whom() -> None:
    picture = Watcher(NIGHTLY).see(look_of(four_ranks(), restarts=1, restarts_max=3))

    assert page([picture]).splitlines() == [
        "nightly  pid 4711  running  4 ranks  restarts 1 of 3  age 2m05s  train.py",
        "ranks 0, 2-3 wait for rank 1, for 41 s (see rankwise why)",
        "RANKS        STATE          STEPS/S COLLECTIVE               LATE   CPU   MEMORY",
        "1            awaited 41 s        12 #1204 all_reduce dp         -   90%  1.5 GiB",
        "0            waiting 41 s        12 #1205 all_reduce dp         -   90%  1.5 GiB",
        "2            waiting 41 s        12 #1205 all_reduce dp         -   90%  1.5 GiB",
        "3            waiting 41 s        12 #1205 all_reduce dp         -   90%  1.5 GiB",
    ]


def test_four_thousand_ranks_are_folded_by_state_the_odd_ones_first() -> None:
    failures = {"failures": {"raised": 1}, "latest_failure": "rank 77 failed (ValueError: bad)"}
    picture = Watcher(NIGHTLY).see(
        look_of(many_ranks(), gpus=GpuUse(gpus=(0,), memory_bytes=70 << 30), **failures)
    )

    assert page([picture]).splitlines() == [
        "nightly  pid 4711  running  4096 ranks  restarts 0  age 2m05s  train.py",
        "failed so far: 1 raised  rank 77 failed (ValueError: bad)",
        "RANKS        STATE          STEPS/S COLLECTIVE      LATE   CPU   MEMORY      GPU",
        "77           failed              12 #1204 all_red…     -     -        -        -",
        "  failed: ValueError",
        "1031         awaited 3 s         12 #1204 all_red…     -   90%  1.5 GiB   70 GiB",
        "+ 4084 ranks running             12 #1204 all_red…     -   90%  1.5 GiB   70 GiB",
        "+ 4000-4009  ended               12 #1204 all_red…     -     -        -        -",
    ]


@pytest.mark.parametrize("ranks", [four_ranks(), many_ranks()], ids=["4", "4096"])
@pytest.mark.parametrize("name", ["x" * 100, "wide nightly run", "\x1b[31mred"])
def test_no_line_is_wider_than_a_terminal_and_none_commands_it(
    ranks: list[RankStatus], name: str
) -> None:
    run = RunSummary(name, 1, 1)
    sample = look_of(
        ranks,
        run=run,
        program="a-very-long-name-of-a-program/" * 5,
        failures={"raised": 12345, "signaled": 12345, "out-of-step": 99999, "exited": 12345},
        latest_failure="rank 3 failed (ValueError: " + "word " * 60,
        round=12,
        nodes=128,
    )

    text = page([Watcher(run).see(sample)])

    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text


def test_rates_are_those_since_a_look_some_seconds_ago() -> None:
    watcher = Watcher(NIGHTLY)
    watcher.see(look_of([rank_status(0, steps=100), rank_status(1, steps=100)], at_s=10))

    later = [rank_status(0, steps=106), rank_status(1, steps=9, pid=77)]
    picture = watcher.see(look_of(later, at_s=12, cpu_s=lambda _: 93.0))

    goes_on, restarted = picture.rows
    assert (goes_on.step_rate, goes_on.cpu_percent) == (3.0, 150.0)
    assert restarted.step_rate == 0.09  # it is another process: on average since it began
    assert restarted.cpu_percent == 93.0


def test_a_rank_without_progress_is_still_and_one_that_computes_is_not() -> None:
    watcher = Watcher(NIGHTLY)
    pictures = [
        watcher.see(
            look_of(
                [rank_status(0), rank_status(1)], at_s=at_s, cpu_s=lambda rank, now=at_s: rank * now
            )
        )
        for at_s in (100.0, 105.0, 112.0)
    ]

    assert [row.state for row in pictures[1].rows] == [State.RUNNING, State.RUNNING]
    assert [row.state for row in pictures[2].rows] == [State.STILL, State.RUNNING]
    assert pictures[2].rows[0].for_s == 12.0


def test_who_costs_the_others_much_is_late_and_who_waits_briefly_runs() -> None:
    late = rank_status(1, came_last=0.9, waited_for_s=20.0)
    brief = rank_status(2, call=standing(9, 0.2))

    assert states_of(rank_status(0), late, brief) == [State.RUNNING, State.LATE, State.RUNNING]
    assert states_of(late) == [State.RUNNING]  # nobody is there to wait


def test_who_comes_last_at_no_cost_is_not_marked_and_what_it_costs_is_shown() -> None:
    healthy = [rank_status(rank, came_last=0.5, waited_for_s=0.6) for rank in range(2)]
    late = rank_status(2, came_last=0.5, waited_for_s=20.0)

    picture = Watcher(NIGHTLY).see(look_of([*healthy, late]))

    shown = [line.split() for line in page([picture]).splitlines()[2:]]
    assert [(words[1], words[-4]) for words in shown] == [
        ("late", "20%"),
        ("running", "-"),
        ("running", "-"),
    ]


def test_what_the_agent_tells_of_an_end_comes_before_all_else() -> None:
    ended = [
        rank_status(rank, pid=None, state=state)
        for rank, state in enumerate(State)
        if state in (State.FAILED, State.HUNG, State.ENDED, State.STOPPED)
    ]

    assert states_of(*ended) == [State.FAILED, State.HUNG, State.STOPPED, State.ENDED]


def test_ranks_are_sorted_by_what_is_asked_for() -> None:
    ranks = [
        rank_status(0, steps=30, waited_for_s=1.0),
        rank_status(1, steps=10, waited_for_s=2.0),
        rank_status(2, steps=20, waited_for_s=0.5),
    ]
    rows = Watcher(NIGHTLY).see(look_of(ranks, cpu_s=lambda rank: 10.0 + rank)).rows

    def order(by: SortOrder) -> list[int]:
        return [row.ranks[0] for row in arranged(rows, by)]

    assert order(SortOrder.STEPS) == [1, 2, 0]
    assert order(SortOrder.LATE) == [1, 0, 2]
    assert order(SortOrder.CPU) == [2, 1, 0]
    assert order(SortOrder.RANK) == order(SortOrder.MEMORY) == order(SortOrder.STATE) == [0, 1, 2]


def test_a_state_is_unfolded_and_a_few_odd_ranks_are_from_the_beginning() -> None:
    ranks = many_ranks()
    ranks[2000] = rank_status(2000, awaited_by=9, awaited_s=2.0)
    rows = Watcher(NIGHTLY).see(look_of(ranks)).rows

    folded = arranged(rows)
    unfolded = arranged(rows, unfolded={State.ENDED, State.AWAITED})

    assert [(row.state, len(row.ranks), row.depth) for row in folded] == [
        (State.FAILED, 1, 0), (State.AWAITED, 2, 0), (State.AWAITED, 1, 1), (State.AWAITED, 1, 1),
        (State.RUNNING, 4083, 0), (State.ENDED, 10, 0),
    ]  # fmt: skip
    assert [len(row.ranks) for row in unfolded] == [1, 2, 4083, 10, *[1] * 10]
    assert len({row.key for row in unfolded}) == len(unfolded)


def test_the_last_picture_stays_with_how_the_run_ended() -> None:
    watcher = Watcher(NIGHTLY)
    seen = watcher.see(look_of(four_ranks()))
    silent = watcher.see(RunSample(run=NIGHTLY, at=look_of([]).at, status=None, problem="silent"))
    ended = watcher.end("failed: rank 1 failed (ValueError: bad shape)")
    late = watcher.see(look_of([rank_status(0)]))

    assert silent == msgspec.structs.replace(seen, problem="silent")
    assert late == ended
    assert {row.state for row in ended.rows} == {State.ENDED}
    assert [row.step_rate for row in ended.rows] == [row.step_rate for row in seen.rows]
    assert page([ended]).startswith("nightly  pid 4711  failed: rank 1 failed (ValueError: bad sh")


def test_ranks_that_are_suspended_with_their_agent_are_shown_as_such() -> None:
    watcher = Watcher(NIGHTLY)
    watcher.see(look_of([rank_status(0), rank_status(1), rank_status(2, state="failed")]))
    suspended = RunSample(
        run=NIGHTLY,
        at=look_of([]).at,
        status=None,
        problem="it is suspended",
        stopped={5000, 5002},
    )

    states = [row.state for row in watcher.see(suspended).rows]
    resumed = watcher.see(look_of([rank_status(0), rank_status(1)]))

    assert states == [State.SUSPENDED, State.RUNNING, State.FAILED]
    assert [row.state for row in resumed.rows] == [State.RUNNING, State.RUNNING]


def test_a_rank_alone_that_is_stopped_is_suspended_and_not_still() -> None:
    sample = msgspec.structs.replace(look_of(four_ranks()), stopped={5001})

    rows = Watcher(NIGHTLY).see(sample).rows

    assert [row.state for row in rows] == [State.WAITING, State.SUSPENDED, *[State.WAITING] * 2]


def test_a_run_that_has_never_answered_is_shown_as_such() -> None:
    silent = RunSample(run=NIGHTLY, at=look_of([]).at, status=None, problem="it does not answer")

    assert page([Watcher(NIGHTLY).see(silent)]) == "nightly  pid 4711  it does not answer"
    assert page([]) == "no runs"


def test_columns_of_gpus_are_shown_as_far_as_a_rank_has_them() -> None:
    bare = page([Watcher(NIGHTLY).see(look_of(four_ranks()))])
    known = GpuUse(gpus=(0,), memory_bytes=70 << 30, utilisation=0.87, temperature_c=64)
    full = page([Watcher(NIGHTLY).see(look_of(four_ranks(), gpus=known))])

    assert "GPU" not in bare
    assert "GPU BUSY TEMP" in full
    assert "70 GiB  87%  64C" in full


def test_throttled_gpus_are_named_with_their_ranks_but_not_at_a_power_cap() -> None:
    hot = GpuUse(gpus=(1,), throttled_by=("thermal", "power cap"))
    full = GpuUse(gpus=(1,), throttled_by=("power cap",))

    told = page([Watcher(NIGHTLY).see(look_of(four_ranks(), gpus=hot))])
    untold = page([Watcher(NIGHTLY).see(look_of(four_ranks(), gpus=full))])

    assert "the GPUs of ranks 0-3 are throttled (thermal)" in told
    assert "throttled" not in untold


def test_machine_with_gpus_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_GPUS", "1")
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert samples._read_gpus() == (
        [],
        "GPUs cannot be read: nvidia-ml-py is not installed: pip install 'rankwise[gpu]'",
    )
