"""What is told of ranks that are being stopped."""

from gangs import running_gang

from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.vocabulary import ProgressLooked, RanksBlamed
from rankwise.launch.node_ranks import NodeRanks
from rankwise.launch.rank_status import ranks_now

HERE = NodeRanks(size=2, master_addr="127.0.0.1", master_port=1)


def test_a_rank_that_hangs_says_for_how_long_while_it_lives() -> None:
    gang = running_gang(size=2, hang_timeout=Duration(60 * SECOND))
    now = Instant(60 * SECOND)
    gang.handle(ProgressLooked(0, Instant(0)), now)

    told = ranks_now(gang, HERE, None, (), now)

    assert [(each.state, each.why) for each in told] == [("hung", "no progress for 1 min")] * 2


def test_a_rank_that_is_blamed_says_for_what_while_it_lives() -> None:
    gang = running_gang(size=2)
    gang.handle(RanksBlamed((1,), 0, "rank 1 has not come"), Instant(5))

    told = ranks_now(gang, HERE, None, (), Instant(6))

    states = [(each.state, each.why) for each in told]
    assert states == [("running", ""), ("failed", "rank 1 has not come")]
