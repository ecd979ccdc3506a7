import pytest

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.records import (
    FailureNote,
    NodeRecord,
    Round,
    RoundPhase,
    decode_charter,
    decode_node,
    decode_round,
    encode,
)


def test_a_round_of_128_nodes_stays_below_two_kilobytes() -> None:
    members = tuple(f"abcd{number:03d}" for number in range(128))

    value = encode(
        Round(
            number=12, phase=RoundPhase.RUNNING, members=members, slots=(8,), restarts=3,
            master_address="node-0001.cluster.example", master_port=29500,
        )
    )  # fmt: skip

    assert len(value) < 2000


def test_records_are_read_as_they_were_written() -> None:
    failure = Failure(local_rank=1, attempt=0, cause=FailureCause.EXITED, at=Instant(5), rank=9)
    record = NodeRecord(
        host="h1", address="a", slots=2, failing=0, failures=(FailureNote(failure, Duration(7)),)
    )
    config = RendezvousConfig(nodes_min=1, nodes_max=2, settings={"backend": "etcd"})
    round_ = Round(number=3, phase=RoundPhase.GATHERING, members=("a", "b"), slots=(1, 2))

    assert decode_node(encode(record), "nodes/a", "a") == record
    assert decode_charter(encode(config.charter), "charter") == config.charter
    assert decode_round(encode(round_), "round") == round_


def test_workers_of_unequal_nodes_are_counted_by_rank() -> None:
    round_ = Round(number=0, phase=RoundPhase.RUNNING, members=("a", "b", "c"), slots=(4, 1, 2))

    assert [round_.workers_before(rank) for rank in range(4)] == [0, 4, 5, 7]
    assert round_.slots_of(2) == 2


def test_a_corrupt_record_names_its_key_and_its_writer() -> None:
    with pytest.raises(RemoteProtocolError, match=r"rankwise/run/nodes/n7, which node n7 writes"):
        decode_node(b"\xff\x00 no JSON", "rankwise/run/nodes/n7", "n7")


def test_another_version_is_told_as_such_whatever_its_fields_mean() -> None:
    value = b'{"version":99,"members":{"changed":"meaning"}}'

    with pytest.raises(RemoteProtocolError, match="protocol version 99, and this rankwise"):
        decode_round(value, "round")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes_min": 3, "nodes_max": 2}, "nodes are 3:2"),
        ({"nodes_min": 1, "nodes_max": 2, "is_static": True}, "static"),
        ({"nodes_min": 1, "nodes_max": 1, "lease_ttl": 3 * SECOND}, "two timeouts"),
        ({"nodes_min": 1, "nodes_max": 1, "fence": -1}, "fence is -1"),
        ({"nodes_min": 1, "nodes_max": 1, "spares": -1}, "spares is -1"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RendezvousConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("node_id", ["", "a/b", "x" * 17, "ä", "a b"])
def test_a_node_id_that_is_no_plain_short_word_is_refused(node_id: str) -> None:
    with pytest.raises(ValueError, match="node_id is"):
        NodeOffer(node_id=node_id, host="h", address="a", slots=1)
