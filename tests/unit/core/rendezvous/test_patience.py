"""For how long a node waits, and what it then says."""

from table_of_nodes import Table

from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    GangEnded,
    MadeSpare,
    RefusalKind,
    Refused,
    Settled,
)


def test_a_node_that_was_done_when_the_store_went_away_says_so() -> None:
    table = Table()
    config = RendezvousConfig(nodes_min=2, nodes_max=2, join_timeout=Duration(9 * SECOND))
    for node in ("a", "b"):
        table.add(node, config)
        table.ready(node)
    table.pass_time(SECOND)
    table.tell("a", GangEnded(round=0, is_done=True))
    table.is_reached = lambda _order: False

    table.pass_time(60 * SECOND)

    refused = table.told["a"][-1]
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.STORE
    assert refused.why == (
        "its workers were done, but the outcome of the job did not arrive within 9 s: "
        "nobody answers"
    )


def test_a_spare_takes_a_seat_though_it_was_in_reserve_for_longer_than_nodes_wait() -> None:
    table = Table()
    patience = Duration(30 * SECOND)
    config = RendezvousConfig(nodes_min=2, nodes_max=2, spares=1, join_timeout=patience)
    for node in ("a", "b", "c"):
        table.add(node, config)
        table.ready(node)
    table.pass_time(20 * SECOND)
    assert isinstance(table.told["c"][-1], MadeSpare)
    table.pass_time(10 * patience)

    table.kill("b")
    table.pass_time(10 * SECOND)
    table.tell("a", GangEnded(round=0, is_done=False))
    table.ready("a", 1)
    table.pass_time(20 * SECOND)

    settled = table.told["c"][-1]
    assert isinstance(settled, Settled)
    assert sorted(settled.world.members) == ["a", "c"]


def test_who_waits_is_told_the_same_more_and_more_rarely_and_news_within_ten_seconds() -> None:
    table = Table()
    config = RendezvousConfig(nodes_min=3, nodes_max=3)
    table.add("a", config)
    table.ready("a")

    table.pass_time(85 * SECOND)
    table.add("b", config)
    table.ready("b")
    table.pass_time(50 * SECOND)

    told = [each for each in table.told["a"] if isinstance(each, AnnounceWaiting)]
    alone = "for more nodes: 1 of at least 3 nodes are ready (a on host-a)"
    both = "for more nodes: 2 of at least 3 nodes are ready (a on host-a, b on host-b)"
    assert [(each.waited // SECOND, each.text) for each in told] == [
        *((at, alone) for at in (10, 20, 40, 80)),
        *((at, both) for at in (90, 100, 120)),
    ]


def test_who_waits_for_more_nodes_tells_which_one_was_lost() -> None:
    table = Table()
    config = RendezvousConfig(nodes_min=3, nodes_max=3)
    for node in ("a", "b", "c"):
        table.add(node, config)
        table.ready(node)
    table.pass_time(SECOND)
    table.kill("c")
    table.pass_time(10 * SECOND)
    for node in ("a", "b"):
        table.tell(node, GangEnded(round=0, is_done=False))
        table.ready(node, 1)

    table.pass_time(20 * SECOND)

    lost = "; the last round ended because node c on host-c is lost"
    told = {
        node: [each.text for each in table.told[node] if isinstance(each, AnnounceWaiting)][-1]
        for node in ("a", "b")
    }
    assert told == {
        "a": f"for more nodes: 2 of at least 3 nodes are ready (a on host-a, b on host-b){lost}",
        "b": f"for node a on host-a, which gathers the others{lost}",
    }
