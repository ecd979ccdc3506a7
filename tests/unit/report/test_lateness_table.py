"""What the page of a run says of ranks that came late."""

from collections.abc import Iterator

import msgspec

from rankwise.base.units import SECOND, Duration
from rankwise.core.agent.vocabulary import AGENT, BeginAttempt
from rankwise.core.ledger import Delay, Stage
from rankwise.core.matching import CallSignature
from rankwise.core.rendezvous.records import LateRank
from rankwise.core.rendezvous.vocabulary import InquiryAnswered, World
from rankwise.observe.records import Sample
from rankwise.observe.story import NodeStory, read_story
from rankwise.observe.timeline import PlacedCall, PlacedLife, RankTrack, RunTimeline
from rankwise.report.run_page import run_page


def track(rank: int, *cpu_waits: Duration) -> RankTrack:
    samples = [
        (at * SECOND, Sample(rank, Duration(0), 0, cpu_wait))
        for at, cpu_wait in enumerate(cpu_waits)
    ]
    return RankTrack(rank, samples=samples)


def seconds(count: float) -> Duration:
    return Duration(round(count * SECOND))


def page(late: RankTrack, node: NodeStory | None = None) -> str:
    delays = tuple(Delay(rank=rank, last=0.9 * rank, waited=seconds(2 * rank)) for rank in (0, 1))
    tracks = {0: track(0), 1: late}
    nodes = [node or NodeStory(path="a journal", wall_offset=0)]
    return run_page(RunTimeline(nodes, [], tracks, [], 10 * SECOND, 0, delays, 1.0, None, 2, 0))


def journal_of_a_node(*members: str) -> Iterator[bytes]:
    """What is told on the first of these nodes when all of its ranks have ended."""
    world = World(
        round=0, node_rank=0, members=members, first_rank=0, slots=2, size=2 * len(members),
        master_address="a", master_port=1,
    )  # fmt: skip
    late = LateRank(rank=3, last=0.9, waited=seconds(4), text="rank 3 came last in 90 % of them")
    for effect in (BeginAttempt(world), InquiryAnswered(0, late=late), InquiryAnswered(0)):
        yield msgspec.json.encode({"at": 1, "machine": AGENT, "effect": effect}) + b"\n"


def test_a_page_of_one_node_of_many_tells_who_was_late_of_all_ranks() -> None:
    one_of_two, alone = (
        page(track(1), read_story(journal_of_a_node(*members), "a journal"))
        for members in (("a", "b"), ("a",))
    )

    told = "On all nodes: rank 3 came last in 90 % of them. The table compares"
    assert told in one_of_two
    assert "of all nodes" not in alone


def test_a_rank_that_had_no_cpu_is_told_with_the_machine() -> None:
    assert (
        "<b>Rank 1</b> cost the other ranks a notable part of the run; it had to wait for a CPU "
        "itself for 15 % of the time since the first call: the machine is busy."
    ) in page(track(1, seconds(0.5), seconds(1), seconds(2)))


def test_a_rank_that_had_its_cpu_is_told_alone() -> None:
    told = page(track(1, seconds(8), seconds(8.9)))

    assert "<b>Rank 1</b> cost the other ranks a notable part of the run." in told


def test_shares_are_of_the_time_since_the_first_call_until_the_last_rank_has_ended() -> None:
    late = track(1, seconds(0), seconds(0.8), seconds(1.1), seconds(1.4))
    late.lives = [PlacedLife(0, 0, 0, 9 * SECOND, "exit 0", is_over=True)]
    call = PlacedCall(
        key=(0, "world", 1), begin=SECOND // 2, end=SECOND, waited_until=SECOND, awaited=-1,
        signature=CallSignature("barrier"), place="", is_over=True, stage=Stage.DONE, label="",
    )  # fmt: skip
    late.calls = [call]

    told = page(late)

    assert "<td>1</td><td>23.5 %</td>" in told  # 2 s of 8.5 s
    assert late.cpu_wait(SECOND // 2) == seconds(
        1 / 2.5 * 8.5
    )  # as in samples, of which 0.4 s count
    assert "it had to wait for a CPU itself for 40 % of the time since" in told


def test_the_processes_of_later_attempts_wait_anew() -> None:
    assert track(1, seconds(3), seconds(5), seconds(1), seconds(2)).cpu_wait(0) == seconds(3)
