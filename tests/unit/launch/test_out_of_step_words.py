"""How a rank for which others waited in vain is told."""

import pytest
from msgspec.structs import replace

from rankwise.base.failure import (
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    Mismatch,
    MismatchKind,
    Outcome,
    OutcomeStatus,
    failure_in_words,
)
from rankwise.base.units import Instant
from rankwise.compat.torch.elastic.multiprocessing.results import process_failures
from rankwise.launch.spawning import exception_for
from rankwise.launch.telling.failure_report.composing import compose_report, lines_of_standing
from rankwise.launch.telling.failure_report.hints import hint_for
from rankwise.launch.telling.failure_report.model import ReportContext
from rankwise.launch.telling.failure_report.rendering import plain_text
from rankwise.launch.telling.failure_report.stacks import innermost_frames, place_in_program

STACKS = """Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/loader.py", line 31 in read
  File "/home/me/train.py", line 80 in <module>
"""
IN_A_COLLECTIVE = """Current thread 0x00007f (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/env/lib/python3.11/site-packages/rankwise/drivers/real/worker/torch_calls.py", line 9 in call
  File "/home/me/train.py", line 88 in <module>
"""  # noqa: E501
ABSENCE = "rank 1 has not come to barrier #2 (train.py:88), in which rank 0 waits"
DISAGREEMENT = (
    "call #2: rank 1 called barrier (train.py:88), ranks 0, 2 called broadcast (train.py:90)"
)
TIE = (
    "call #2: ranks 0 and 1 disagree: rank 0 called barrier (a.py:8), rank 1 called gather (a.py:9)"
)


def report_of(detail: str, stacks: str, code: int = -15) -> str:
    root = Failure(
        local_rank=1,
        attempt=0,
        cause=FailureCause.OUT_OF_STEP,
        at=Instant(5),
        exit=ExitStatus(code),
        detail=detail,
        stacks=stacks,
        ended_by_us=code < 0,
        rank=1,
    )
    waiting = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.EXITED,
        at=Instant(5),
        exit=ExitStatus(1),
        rank=0,
    )
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(root, waiting))
    return plain_text(compose_report(outcome, ReportContext(program="train.py", nprocs=2)))


def test_the_culprit_is_told_with_where_it_is() -> None:
    report = report_of(ABSENCE, STACKS)

    assert report.splitlines()[:3] == [
        "train.py failed",
        "  rank 0 exited with code 1 (a consequence)",
        f"root cause: {ABSENCE}: it is at loader.py:31, in read",
    ]
    assert "where it is, innermost call first:" in report
    assert "SIGTERM" not in report, "how we ended it tells nothing"


def test_a_place_that_is_told_is_not_told_again() -> None:
    assert f"root cause: {DISAGREEMENT}\n" in report_of(DISAGREEMENT, IN_A_COLLECTIVE)


@pytest.mark.parametrize(
    ("operations", "hint"),
    [
        (("send", "send"), "batch_isend_irecv"),
        (("recv", "recv"), "all of them receive: let one of these ranks send first"),
        (("send", "recv"), "receives match sends of their tag"),
        (("all_reduce", "all_reduce"), "look for a branch"),
    ],
)
def test_of_a_circle_of_messages_the_hint_is_about_messages(
    operations: tuple[str, ...], hint: str
) -> None:
    circle = Mismatch(MismatchKind.CIRCLE, operations)

    assert hint in hint_for(replace(failures_of_two_that_disagree()[0], mismatch=circle))


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (MismatchKind.MISFIT, "as many elements as its send"),
        (MismatchKind.DISAGREEMENT, "that one of these ranks takes differently"),
    ],
)
def test_hint_on_ranks_that_are_out_of_step_together_follows_from_the_kind(
    kind: MismatchKind, hint: str
) -> None:
    told = replace(failures_of_two_that_disagree()[0], mismatch=Mismatch(kind), detail="any text")

    assert hint in hint_for(told)


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (MismatchKind.ABSENCE, "if this rank is only slow, give a longer limit"),
        (MismatchKind.DEPARTURE, "that this rank takes differently"),
    ],
)
def test_hint_on_one_rank_that_is_out_of_step_follows_from_the_kind(
    kind: MismatchKind, hint: str
) -> None:
    alone = replace(failures_of_two_that_disagree()[0], accused=(1,), mismatch=Mismatch(kind))

    assert hint in hint_for(alone)


def failures_of_two_that_disagree() -> tuple[Failure, Failure]:
    first, second = (
        Failure(
            local_rank=rank,
            attempt=0,
            cause=FailureCause.OUT_OF_STEP,
            at=Instant(5),
            exit=ExitStatus(-15),
            detail=TIE,
            accused=(0, 1),
            stacks=stacks,
            ended_by_us=True,
            rank=rank,
            host="node-7",
        )
        for rank, stacks in enumerate((STACKS, IN_A_COLLECTIVE))
    )
    return first, second


def test_of_two_ranks_that_disagree_none_is_told_as_the_culprit() -> None:
    failures = failures_of_two_that_disagree()
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=failures)

    report = plain_text(compose_report(outcome, ReportContext(program="train.py", nprocs=2)))

    assert report.splitlines()[:4] == [
        "train.py failed",
        f"root cause: {TIE}",
        "  ranks: 0-1",
        "  host:  node-7",
    ]
    assert "rank 0, innermost call first:" in report
    assert "rank 1, innermost call first:" in report
    assert "one of these ranks takes differently" in report
    assert failure_in_words(failures[0], "node-7") == TIE


def test_a_rank_that_has_raised_and_left_its_program_is_shown_where_it_raised() -> None:
    left = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/env/src/rankwise/drivers/real/worker/bootstrap.py", line 185 in _write\n'
    )
    raised = ErrorRecord(
        type="CollectiveError",
        message="ranks disagree",
        traceback="Traceback (most recent call last):\n"
        '  File "/home/me/a.py", line 12, in <module>\n    step()\n'
        '  File "/home/me/a.py", line 9, in step\n    gather()\nCollectiveError: ranks disagree\n',
        raised_at=Instant(4),
        wall_ns=4,
    )
    first, second = failures_of_two_that_disagree()

    lines = lines_of_standing([first, replace(second, stacks=left, error=raised)])

    place = next(at for at, line in enumerate(lines) if "rank 1, innermost" in line)
    assert [line.strip() for line in lines[place + 1 : place + 3]] == [
        'File "/home/me/a.py", line 9 in step',
        'File "/home/me/a.py", line 12 in <module>',
    ]


def test_of_ranks_that_disagree_on_two_nodes_the_host_is_that_of_who_is_known_here() -> None:
    failures = failures_of_two_that_disagree()[:1]
    outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=failures, size=2)

    report = plain_text(compose_report(outcome, ReportContext(program="train.py", nprocs=1)))

    assert report.splitlines()[2:4] == ["  ranks: 0-1", "  host:  node-7 (rank 0)"]


def test_a_rank_that_had_ended_is_nowhere() -> None:
    report = report_of("rank 1 was done after barrier #1", "", code=0)

    assert "root cause: rank 1 was done after barrier #1\n" in report
    assert "where it is" not in report
    assert "ended: exit code 0" in report


@pytest.mark.parametrize(
    ("stacks", "place"),
    [(STACKS, "loader.py:31, in read"), (IN_A_COLLECTIVE, "train.py:88"), ("", "")],
)
def test_a_place_is_one_of_the_program(stacks: str, place: str) -> None:
    assert place_in_program(stacks) == place


def test_how_a_collective_works_inside_is_folded() -> None:
    assert innermost_frames(IN_A_COLLECTIVE) == (
        "  ... (1 frame of torch)",
        "  ... (1 frame of rankwise)",
        '  File "/home/me/train.py", line 88 in <module>',
    )


def test_torchs_names_tell_it_as_a_failure_though_it_ended_well() -> None:
    root = Failure(
        local_rank=1,
        attempt=0,
        cause=FailureCause.OUT_OF_STEP,
        at=Instant(5),
        exit=ExitStatus(0),
        detail=ABSENCE,
    )

    told = process_failures([root], {})
    error = exception_for((root,))

    assert (told[1].exitcode, told[1].message) == (1, ABSENCE)
    assert str(error) == f"process 1 terminated with exit code 0: {ABSENCE}"
