import os
import subprocess
import sys
from collections import Counter

import pytest

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.mailbox.frames import FrameKind
from rankwise.core.mailbox.vocabulary import (
    CarryOut,
    Deliver,
    FrameArrived,
    GiveUpCall,
    WorkerEffect,
    WorkerStimulus,
)
from rankwise.core.mailbox.worker_end import WorkerEnd
from rankwise.drivers.sim.mailboxes import MailboxPlan, MailboxStory, random_plan, run_mailbox

SEED_COUNT = int(os.environ.get("RANKWISE_SEEDS", "2000"))
FIRST_SEED = int(os.environ.get("RANKWISE_FIRST_SEED", "0"))

DIGEST_PROGRAM = """
import hashlib, sys
from rankwise.drivers.sim.mailboxes import random_plan, run_mailbox
digest = hashlib.sha256()
for seed in range(int(sys.argv[1])):
    for line in run_mailbox(random_plan(seed), seed).journal:
        digest.update(line.encode())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("first", range(0, SEED_COUNT, 1000))
def test_every_call_ends_once_and_is_carried_out_at_most_once(first: int) -> None:
    for seed in range(FIRST_SEED + first, FIRST_SEED + min(first + 1000, SEED_COUNT)):
        run_mailbox(random_plan(seed), seed)


def test_journals_do_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_PROGRAM, "200"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }

    assert len(digests) == 1


def delivered(story: MailboxStory) -> int:
    return sum(isinstance(end, Deliver) for ends in story.ends.values() for end in ends)


def test_random_plans_reach_every_way_in_which_a_call_can_end() -> None:
    ways: Counter[str] = Counter()
    for seed in range(400):
        story = run_mailbox(random_plan(seed), seed)
        for (end,) in story.ends.values():
            match end:
                case Deliver(succeeded=succeeded):
                    ways["delivered" if succeeded else "failed"] += 1
                case GiveUpCall(timed_out=timed_out, was_sent=was_sent):
                    ways[f"timed out {timed_out}, sent {was_sent}"] += 1

    assert set(ways) == {
        "delivered", "failed", "timed out False, sent False", "timed out False, sent True",
        "timed out True, sent False", "timed out True, sent True",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_without_faults_all_calls_are_delivered_and_the_worker_leaves_in_peace(seed: int) -> None:
    story = run_mailbox(MailboxPlan(calls=20, depth=2), seed)

    assert delivered(story) == 20
    assert story.announced_end == ""
    assert story.worker_left == ""


@pytest.mark.parametrize("seed", range(30))
def test_repeated_frames_change_nothing_but_the_traffic(seed: int) -> None:
    story = run_mailbox(MailboxPlan(calls=20, depth=2, repeats=60), seed)

    assert delivered(story) == 20
    assert sorted(story.carried_out) == list(range(20))
    assert story.announced_end == ""


class Forgetful(WorkerEnd):
    """Does not know a request again."""

    def handle(self, stimulus: WorkerStimulus, now: Instant) -> list[WorkerEffect]:
        effects = super().handle(stimulus, now)
        match stimulus:
            case FrameArrived(frame=frame) if frame.kind is FrameKind.REQUEST and not effects:
                return [CarryOut(frame.lane, frame.sequence, frame.body)]
        return effects


def test_a_worker_that_does_work_twice_would_be_found() -> None:
    with pytest.raises((AssertionError, LocalProtocolError), match=r"twice|is being carried out"):
        run_mailbox(MailboxPlan(calls=20, depth=2, repeats=60), 1, Forgetful)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_stream_is_noticed_and_every_call_told(seed: int) -> None:
    story = run_mailbox(MailboxPlan(calls=60, cuts=20), seed)

    assert story.announced_end != ""
    assert delivered(story) < 60


def test_calls_of_a_worker_that_is_killed_end_before_their_patience_does() -> None:
    story = run_mailbox(MailboxPlan(calls=5, worker_dies_at=Duration(30 * MILLISECOND)), 3)

    assert story.announced_end == "signal 9 (SIGKILL)"
    last = int(story.journal[-1].split()[0])
    assert last < 3 * SECOND


def test_a_worker_whose_parent_is_killed_leaves() -> None:
    story = run_mailbox(MailboxPlan(calls=30, parent_dies_at=Duration(900 * MILLISECOND)), 4)

    assert story.worker_left == "the parent is gone: signal 9 (SIGKILL)"


def test_the_same_seed_tells_the_same_story() -> None:
    plan = MailboxPlan(calls=40, repeats=20, cuts=2, failures=20, patience=Duration(SECOND // 10))

    assert run_mailbox(plan, 11).journal == run_mailbox(plan, 11).journal
    assert run_mailbox(plan, 11).journal != run_mailbox(plan, 12).journal
