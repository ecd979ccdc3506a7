"""For how long a node waits, and what it then says."""

from table_of_nodes import Table

from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.vocabulary import GangEnded, RefusalKind, Refused


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
    assert refused.kind is RefusalKind.TIMEOUT
    assert refused.why == (
        "its workers were done, but how the job ended was not heard within 9 s: nobody answers"
    )
