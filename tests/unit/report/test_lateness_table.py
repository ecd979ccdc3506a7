"""What the page of a run says of ranks that came late."""

from rankwise.base.units import SECOND, Duration
from rankwise.core.ledger import Delay
from rankwise.observe.records import Sample
from rankwise.observe.story import NodeStory
from rankwise.observe.timeline import RankTrack, RunTimeline
from rankwise.report.run_page import run_page


def track(rank: int, *cpu_waits: Duration) -> RankTrack:
    samples = [
        (at * SECOND, Sample(rank, Duration(0), 0, cpu_wait))
        for at, cpu_wait in enumerate(cpu_waits)
    ]
    return RankTrack(rank, samples=samples)


def seconds(count: float) -> Duration:
    return Duration(round(count * SECOND))


def page(late: RankTrack) -> str:
    delays = tuple(Delay(rank=rank, last=0.9 * rank, waited=seconds(2 * rank)) for rank in (0, 1))
    tracks = {0: track(0), 1: late}
    nodes = [NodeStory(path="a journal", wall_offset=0)]
    return run_page(RunTimeline(nodes, [], tracks, [], 10 * SECOND, 0, delays, 1.0, None, 2, 0))


def test_a_rank_that_had_no_cpu_is_told_with_the_machine() -> None:
    assert (
        "<b>Rank 1</b> has cost the others a notable part of the run; it had to wait for a CPU "
        "itself for 15 % of the run: the machine is busy."
    ) in page(track(1, seconds(0.5), seconds(1), seconds(2)))


def test_a_rank_that_had_its_cpu_is_told_alone() -> None:
    told = page(track(1, seconds(8), seconds(8.9)))

    assert "<b>Rank 1</b> has cost the others a notable part of the run." in told


def test_the_processes_of_later_attempts_wait_anew() -> None:
    assert track(1, seconds(3), seconds(5), seconds(1), seconds(2)).cpu_wait == seconds(3)
