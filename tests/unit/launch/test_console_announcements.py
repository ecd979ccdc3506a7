"""What an agent among others says of its own part."""

import pytest

from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import Lineup
from rankwise.core.rendezvous.vocabulary import MadeSpare
from rankwise.launch.cluster.console_announcements import ConsoleAnnouncements
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.job import Job, Script


@pytest.mark.parametrize(
    ("nodes_max", "when"), [(2, "as soon as a place is free"), (3, "with the next round")]
)
def test_a_spare_is_told_when_it_is_taken_in(nodes_max: int, when: str) -> None:
    said: list[str] = []
    announcements = ConsoleAnnouncements(
        Job(program=Script("a.py"), gang=GangSpec(size=1), run_id="x"),
        RendezvousPlan(
            rendezvous=RendezvousConfig(nodes_min=1, nodes_max=nodes_max), address="127.0.0.1"
        ),
        lambda message, *_, **__: said.append(message),
    )

    announcements.tell(MadeSpare(1, "round 1 runs on 2 other nodes", Lineup(hosts=("a", "b"))))

    assert said == [
        f"this node is a spare for now: round 1 runs on 2 other nodes; it is taken in {when}"
    ]
