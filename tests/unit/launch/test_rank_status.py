"""What is told of ranks that are being stopped."""

from gangs import running_gang

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.vocabulary import ProgressLooked, RanksBlamed
from rankwise.core.ledger import Delay
from rankwise.launch.looking.rank_status import WaitedSoFar, ranks_now
from rankwise.launch.run.node_ranks import NodeRanks

HERE = NodeRanks(size=2, master_addr="127.0.0.1", master_port=1)


def test_a_rank_that_hangs_says_for_how_long_while_it_lives() -> None:
    gang = running_gang(size=2, hang_timeout=Duration(60 * SECOND))
    now = Instant(60 * SECOND)
    gang.handle(ProgressLooked(0, Instant(0)), now)

    told = ranks_now(gang, HERE, None, (), now, waited_so_far=WaitedSoFar())

    assert [(each.state, each.why) for each in told] == [("hung", "no progress for 1 min")] * 2


def test_a_rank_that_is_blamed_says_for_what_while_it_lives() -> None:
    gang = running_gang(size=2)
    gang.handle(RanksBlamed((1,), 0, "rank 1 has not come"), Instant(5))

    told = ranks_now(gang, HERE, None, (), Instant(6), waited_so_far=WaitedSoFar())

    states = [(each.state, each.why) for each in told]
    assert states == [("running", ""), ("failed", "rank 1 has not come")]


def test_what_others_have_waited_never_becomes_less_within_an_attempt() -> None:
    so_far = WaitedSoFar()

    told = [so_far.at_least(0, 1, seconds) for seconds in (0.0, 2.5, 0.5, 3.0)]

    assert told == [0.0, 2.5, 2.5, 3.0]
    assert so_far.at_least(1, 1, 0.5) == 0.5


def test_rank_that_was_waited_for_is_told_so_when_the_wait_is_over() -> None:
    gang, so_far = running_gang(size=2), WaitedSoFar()
    late = Delay(rank=1, waited=Duration(3 * SECOND), last=0.5)

    during = ranks_now(gang, HERE, None, (late,), Instant(6), waited_so_far=so_far)
    afterwards = ranks_now(gang, HERE, None, (), Instant(7), waited_so_far=so_far)

    assert during[1].waited_for_s == afterwards[1].waited_for_s == 3
