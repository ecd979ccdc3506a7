"""Which failures share one story on the page of a run."""

import re

from rankwise.base.failure import Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import SECOND, Instant
from rankwise.observe.story import NodeStory
from rankwise.observe.timeline import RunTimeline
from rankwise.report.run_page import run_page


def stories(*failures: Failure) -> list[str]:
    """The ranks of each story on the page, in order."""
    node = NodeStory(path="a journal", wall_offset=0)
    node.outcome = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=failures)
    page = run_page(RunTimeline([node], [], {}, [], 10 * SECOND, 0, (), 1.0, None, 2, 0))
    return re.findall(r'</h3><p class="note">([^<]*)</p>', page)


def failed(rank: int, cause: FailureCause, detail: str, *accused: int) -> Failure:
    return Failure(
        local_rank=rank, rank=rank, attempt=0, cause=cause, at=Instant(rank), detail=detail,
        accused=accused,
    )  # fmt: skip


def test_all_ranks_of_a_hang_are_one_story_whatever_is_told_of_each() -> None:
    hung = FailureCause.HUNG

    told = stories(
        failed(2, hung, "no progress for 5s", 2),
        failed(0, hung, "no progress for 5s"),
        failed(1, hung, "process 7 survives SIGKILL: it is stuck in the kernel"),
    )

    assert told == ["ranks 0-2"]


def test_ranks_accused_together_are_one_story_and_each_of_two_accusations_is_its_own() -> None:
    out_of_step, text = FailureCause.OUT_OF_STEP, "the ranks disagree"

    told = stories(
        failed(0, out_of_step, text, 0, 1),
        failed(1, out_of_step, text, 0, 1),
        failed(2, out_of_step, text, 2, 3),
        failed(4, out_of_step, text, 4),
        failed(5, FailureCause.EXITED, text),
    )

    assert told == ["ranks 0-1", "rank 2", "rank 4", "rank 5"]
