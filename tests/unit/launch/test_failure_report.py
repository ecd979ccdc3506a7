"""The report as a whole: what is told and folded, and that no outcome and no terminal break it."""

import datetime as dt
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rankwise.base.failure import (
    EarlierAttempt,
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import Duration, Instant
from rankwise.launch.telling.failure_report.composing import compose_report
from rankwise.launch.telling.failure_report.model import ReportContext
from rankwise.launch.telling.failure_report.rendering import (
    TerminalStyle,
    boxed_text,
    look_of,
    plain_text,
    write_report,
)

CONTEXT = ReportContext(program="train.py", nprocs=4, timezone=dt.UTC)
anything = st.text(st.characters(exclude_categories=()), max_size=60)
paths = st.lists(anything, max_size=3).map(tuple)
error_records = st.builds(
    ErrorRecord,
    type=anything,
    message=anything,
    traceback=anything,
    raised_at=st.integers().map(Instant),
    wall_ns=st.integers(),
)
failures = st.builds(
    Failure,
    local_rank=st.integers(0, 9),
    rank=st.integers(-1, 99),
    attempt=st.integers(0, 3),
    cause=st.sampled_from(FailureCause),
    at=st.integers().map(Instant),
    exit=st.none() | st.integers(-70, 300).map(ExitStatus),
    pid=st.none() | st.integers(1, 99999),
    error=st.none() | error_records,
    detail=anything,
    host=anything,
    role=anything,
    wall_ns=st.integers(),
    out_of_memory=st.none() | st.booleans(),
    stacks=anything,
    stderr_tail=paths,
    log_paths=paths,
    error_file=anything,
)
outcomes = st.builds(
    Outcome,
    status=st.sampled_from(OutcomeStatus),
    attempts=st.integers(0, 5),
    failures=st.lists(failures, max_size=12).map(tuple),
    stop_signal=st.none() | st.integers(0, 70),
    survivors=st.lists(st.integers(1, 99), max_size=20).map(tuple),
    detail=anything,
)
contexts = st.builds(
    ReportContext,
    program=anything,
    nprocs=st.integers(1, 64),
    run_id=anything,
    duration=st.none() | st.integers(0, 10**15).map(Duration),
    attempts_max=st.integers(1, 4),
    log_directory=anything,
    timezone=st.none() | st.just(dt.UTC),
)


def raised(rank: int, message: str = "bad shape") -> Failure:
    return Failure(
        local_rank=rank,
        rank=rank,
        attempt=0,
        cause=FailureCause.RAISED,
        at=Instant(rank),
        error=ErrorRecord(
            type="ValueError",
            message=message,
            traceback=f"Traceback (most recent call last):\nValueError: {message}\n",
            raised_at=Instant(rank),
            wall_ns=1_000_000_000_000_000_000,
        ),
    )


def report_of(*failures: Failure, context: ReportContext = CONTEXT, attempts: int = 1) -> str:
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=attempts, failures=failures)
    return plain_text(compose_report(outcome, context))


@given(outcomes, contexts, st.integers(20, 200), st.booleans())
@settings(max_examples=200)
def test_every_outcome_can_be_shown_on_every_terminal(
    outcome: Outcome, context: ReportContext, width: int, unicode: bool
) -> None:
    report = compose_report(outcome, context)

    box = boxed_text(report, TerminalStyle(width=width, unicode=unicode))
    coloured = boxed_text(report, TerminalStyle(width=width, unicode=unicode, colour=True))
    plain = plain_text(report)

    assert re.sub(r"\x1b\[[0-9;]+m", "", coloured) == box
    for text in (box, plain):
        controls = [char for char in text if ord(char) < 32 or 127 <= ord(char) < 160]
        assert set(controls) <= {"\n"}
        text.encode("utf-8")


@given(outcomes, contexts, st.integers(20, 200))
def test_what_the_plain_lines_tell_the_box_tells_too(
    outcome: Outcome, context: ReportContext, width: int
) -> None:
    report = compose_report(outcome, context)

    words = boxed_text(report, TerminalStyle(width=width)).split()

    for line in plain_text(report).split("\n"):
        for word in line.split():
            # The plain lines say with colons what the box says with rules.
            assert word in words or word.rstrip(":") in words or word == "root"


@given(st.integers(20, 200), st.integers(1, 300))
def test_paths_and_quoted_lines_are_never_broken(width: int, length: int) -> None:
    path = "/" + "p" * length
    failure = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.EXITED,
        at=Instant(0),
        exit=ExitStatus(1),
        log_paths=(path,),
        stderr_tail=("words " * length,),
    )
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,))

    lines = boxed_text(compose_report(outcome, CONTEXT), TerminalStyle(width=width)).split("\n")

    assert any(line.endswith(path) for line in lines)
    assert ("words " * length).rstrip() in lines


@given(st.integers(20, 200))
def test_the_sentences_and_rules_of_the_box_fit_the_terminal(width: int) -> None:
    report = compose_report(
        Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(raised(0, "is " * 90),)),
        ReportContext(program="a b c d " * 20, nprocs=1),
    )

    lines = boxed_text(report, TerminalStyle(width=width)).split("\n")
    ours = lines[: lines.index(next(line for line in lines if line.startswith("├")))]

    assert max(map(len, [line for line in ours if "time" not in line])) <= min(width, 110)


def test_wide_characters_count_for_two_columns() -> None:
    report = compose_report(
        Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(raised(0, "漢字 " * 20),)),
        CONTEXT,
    )

    lines = boxed_text(report, TerminalStyle(width=40)).split("\n")

    assert all(len(line) + line.count("漢") * 2 <= 40 for line in lines if line.startswith("│ 漢"))


def test_outcomes_that_are_no_failures_are_told_in_a_line() -> None:
    succeeded = Outcome(status=OutcomeStatus.SUCCEEDED, attempts=1)
    stopped = Outcome(status=OutcomeStatus.STOPPED, attempts=1)

    assert plain_text(compose_report(succeeded, CONTEXT)) == "train.py succeeded"
    assert plain_text(compose_report(stopped, CONTEXT)) == "train.py was stopped"


def test_what_is_left_alive_and_why_restarts_were_not_used_is_told() -> None:
    outcome = Outcome(
        status=OutcomeStatus.FAILED,
        attempts=1,
        failures=(raised(0),),
        survivors=tuple(range(100, 120)),
        detail="not restarted: a process lives on",
    )

    text = plain_text(compose_report(outcome, CONTEXT))

    assert "  not restarted: a process lives on\n" in text
    assert "these processes survive SIGKILL: 100, 101," in text
    assert "115, ...\n" in text


def test_failures_alike_are_one_line_even_when_another_came_between() -> None:
    text = report_of(raised(5), raised(6), raised(7, "other"), raised(8), raised(9, "other"))

    assert text.count("same traceback on ranks 6, 8") == 1
    assert text.count("2 ns later") == 0
    assert "rank 7 failed: ValueError: other; the same on rank 9" in text


def test_failures_without_traceback_are_folded_by_how_they_ended() -> None:
    def exited(rank: int, code: int) -> Failure:
        return Failure(
            local_rank=rank,
            attempt=0,
            cause=FailureCause.EXITED,
            at=Instant(0),
            exit=ExitStatus(code),
        )

    text = report_of(exited(0, 3), exited(1, 3), exited(2, 4))

    assert "  the same happened to rank 1\n  rank 2 exited with code 4\n" in text


def test_an_exception_that_came_before_the_root_cause_says_so() -> None:
    text = report_of(replace(raised(0), at=Instant(5_000_000)), raised(1, "other"))

    assert "5 ms before the root cause, rank 1 failed: ValueError: other" in text


def test_nanoseconds_between_failures_are_no_matter_of_people() -> None:
    text = report_of(raised(0), replace(raised(1, "other"), at=Instant(999)))

    assert "\n  rank 1 failed: ValueError: other" in text


@pytest.mark.parametrize("size", [None, 8])
def test_the_rank_that_ended_early_is_named_where_all_ranks_are_known(size: int | None) -> None:
    lost = [raised(rank, "Connection closed by peer") for rank in (1, 0, 3)]
    outcome = Outcome(
        status=OutcomeStatus.FAILED, attempts=1, failures=tuple(lost), size=size, failed=size
    )

    report = compose_report(outcome, CONTEXT)

    assert report.root_cause is not None
    assert report.root_cause.hint.startswith("rank 2 ended with" if size is None else "it lost")


def test_a_broken_clock_in_a_record_leaves_the_time_out() -> None:
    assert "time:" in report_of(raised(0))
    assert "time:" not in report_of(replace(raised(0), wall_ns=10**30))


def test_a_lone_attempt_is_not_counted_and_several_are() -> None:
    many = ReportContext(program="train.py", nprocs=4, attempts_max=4, timezone=dt.UTC)

    assert "attempt" not in report_of(raised(0))
    text = report_of(replace(raised(0), attempt=1), context=many, attempts=2)
    assert "in attempt 2 of 4" in text
    assert "attempt: 2 of 4\n" in text


def test_an_attempt_is_told_as_it_is_called_in_paths_too() -> None:
    context = ReportContext(
        program="train.py", nprocs=4, timezone=dt.UTC, attempts_max=4, log_directory="/logs"
    )

    assert "attempt: 2 of 4 (attempt_1 in paths)" in report_of(
        replace(raised(0), attempt=1), context=context, attempts=2
    )


def test_among_several_nodes_rounds_are_told_by_their_numbers_and_restarts_are_counted() -> None:
    context = ReportContext(program="train.py", nprocs=2, attempts_max=2, timezone=dt.UTC)
    outcome = Outcome(
        status=OutcomeStatus.FAILED,
        attempts=2,
        failures=(replace(raised(0), attempt=2),),
        size=4,
        failed=1,
        earlier=(
            EarlierAttempt(0, 0, "node b on h2 is joining"),
            EarlierAttempt(1, 0, "rank 0 on h1 failed"),
        ),
    )

    text = plain_text(compose_report(outcome, context))

    assert "train.py failed: 1 of 4 ranks failed in round 2, restart 1 of 1" in text
    assert "  round 0, ended 1970-01-01 00:00:00: node b on h2 is joining\n" in text
    assert "  round 1, ended 1970-01-01 00:00:00: rank 0 on h1 failed\n" in text
    assert "round: 2, restart 1 of 1\n" in text
    assert "attempt" not in text


@pytest.mark.parametrize("role", ["default", "rank"])
def test_a_role_is_told_if_somebody_has_named_it(role: str) -> None:
    assert "role:" not in report_of(replace(raised(0), role=role))
    assert "role: trainer" in report_of(replace(raised(0), role="trainer"))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"


def test_a_pipe_gets_plain_lines_and_a_terminal_gets_the_box() -> None:
    report = compose_report(
        Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(raised(0),)), CONTEXT
    )
    pipe, terminal = io.StringIO(), Terminal()

    write_report(report, pipe, {"TERM": "xterm"})
    write_report(report, terminal, {"TERM": "xterm", "COLUMNS": "60"})

    assert pipe.getvalue() == plain_text(report) + "\n"
    assert terminal.getvalue() == boxed_text(report, TerminalStyle(width=60, colour=True))


def test_a_terminal_without_unicode_gets_a_box_that_it_can_show() -> None:
    report = compose_report(
        Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(raised(0, "ümläut"),)), CONTEXT
    )
    terminal = AsciiTerminal()

    write_report(report, terminal, {"TERM": "vt100", "NO_COLOR": "1"})

    assert terminal.getvalue().isascii()
    assert "\x1b" not in terminal.getvalue()
    assert "ValueError: \\xfcml\\xe4ut" in terminal.getvalue()


@pytest.mark.parametrize(
    ("environment", "colour", "width"),
    [
        ({"TERM": "xterm"}, True, 80),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, 80),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, 80),
        ({"TERM": "dumb"}, False, 80),
        ({}, False, 80),
        ({"TERM": "xterm", "COLUMNS": "132"}, True, 132),
        ({"TERM": "xterm", "COLUMNS": "wide"}, True, 80),
    ],
)
def test_the_wishes_of_the_environment_are_heeded(
    environment: dict[str, str], *, colour: bool, width: int
) -> None:
    look = look_of(Terminal(), environment)

    assert (look.colour, look.width, look.unicode) == (colour, width, True)


def test_a_worker_that_raised_and_had_to_be_ended_is_told_as_such() -> None:
    failure = Failure(
        local_rank=1,
        attempt=0,
        cause=FailureCause.RAISED,
        at=Instant(0),
        exit=ExitStatus(-15),
        detail="it had not ended 10 s after its exception",
        rank=1,
    )
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,))

    text = plain_text(compose_report(outcome, CONTEXT))

    assert re.search(r"ended: +signal 15: SIGTERM .*: it had not ended 10 s after its exc", text)


def test_attempts_before_the_last_one_are_told_and_those_alike_in_a_row_once() -> None:
    second = 1_000_000_000
    why = ["rank 1 failed", "rank 1 failed", "rank 0 hung", *(f"reason {n}" for n in range(7))]
    outcome = Outcome(
        status=OutcomeStatus.FAILED,
        attempts=11,
        failures=(raised(0),),
        earlier=tuple(EarlierAttempt(n, n * 60 * second, text) for n, text in enumerate(why)),
    )

    told = compose_report(outcome, CONTEXT).notes

    assert told[:3] == (
        "2 earlier attempts are in the journal, if there is one",
        "attempt 3, ended 1970-01-01 00:02:00: rank 0 hung",
        "attempt 4, ended 1970-01-01 00:03:00: reason 0",
    )
    few = compose_report(replace(outcome, earlier=outcome.earlier[:3]), CONTEXT).notes
    assert few == (
        "attempts 1-2, ended 1970-01-01 00:00:00 to 00:01:00: rank 1 failed",
        "attempt 3, ended 1970-01-01 00:02:00: rank 0 hung",
    )


def test_the_last_lines_of_stdout_come_before_those_of_stderr() -> None:
    lines = tuple(f"step {n}" for n in range(9))
    failure = replace(raised(0), stdout_tail=(*lines, ""), stderr_tail=("a warning",))
    report = compose_report(
        Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,)), CONTEXT
    )

    assert report.root_cause is not None
    first, second, _ = report.root_cause.blocks
    assert (first.title, first.lines) == ("last 5 lines of stdout", lines[-5:])
    assert (second.title, second.lines) == ("last line of stderr", ("a warning",))


def test_exception_of_a_thread_is_told_once_beside_what_the_rank_has_died_of() -> None:
    thread_error = "Exception in thread loader:\nTraceback (most recent call last):\nKeyError: 'x'"
    failure = replace(
        raised(1), thread_error=thread_error, stderr_tail=("step 1", *thread_error.splitlines())
    )

    report = report_of(failure)

    assert "  exception in thread loader of rank 1:\n    Traceback" in report
    assert report.count("KeyError: 'x'") == 1
    assert "  last line of stderr:\n    step 1\n" in report


def test_exceptions_of_threads_of_ranks_that_hang_are_told_alike_ones_together() -> None:
    text = "Exception in thread loader:\nTraceback (most recent call last):\nKeyError: 'x'"
    hung = [
        Failure(
            local_rank=rank,
            rank=rank,
            attempt=0,
            cause=FailureCause.HUNG,
            at=Instant(0),
            thread_error=text,
        )
        for rank in range(2)
    ]

    assert "exception in thread loader of ranks 0-1:" in report_of(*hung)


@pytest.mark.parametrize(("shown", "size"), [((1,), None), ((), None), ((1,), 4)])
def test_long_traceback_is_shown_whole_unless_its_rank_has_printed_it_here(
    shown: tuple[int, ...], size: int | None
) -> None:
    frames = '  File "/home/me/train.py", line 2, in f\n' * 30
    traceback = f"Traceback (most recent call last):\n{frames}ValueError: bad shape\n"
    failure = raised(1)
    assert failure.error is not None
    failure = replace(
        failure,
        local_rank=1,
        error=replace(failure.error, traceback=traceback),
        stderr_tail=tuple(traceback.splitlines()),
    )
    context = replace(CONTEXT, stderr_shown=frozenset(shown))
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failure,), size=size)

    report = plain_text(compose_report(outcome, context))

    assert ("printed above" in report) is (bool(shown) and size is None)
