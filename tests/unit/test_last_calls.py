"""The last call of each rank, and who is awaited: read while ranks write their call records."""

import time
from collections.abc import Iterator

import pytest
from gangs import running_gang

from rankwise.base.units import SECOND, Instant
from rankwise.drivers.real.last_calls import awaited, last_call
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.worker import call_ring
from rankwise.drivers.real.worker.call_ring import (
    DONE,
    CallRing,
    RingGroup,
    signature_text,
    stamp_of,
)
from rankwise.launch.looking.rank_status import WaitedSoFar, ranks_now
from rankwise.launch.run.node_ranks import NodeRanks

SUM = signature_text("all_reduce", "sum", tensors=[((4,), "float32")])


def stamp(group: RingGroup | None) -> bytes:
    return stamp_of(group, 7, SUM, ("/home/me/train.py", 88))


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    with Segment.create(3) as made:
        monkeypatch.setenv("RANKWISE_SEGMENT_FD", str(made.fd))
        monkeypatch.setenv("RANK", "8")
        monkeypatch.delenv("RANKWISE_LEDGER", raising=False)
        yield made
        call_ring.forget_ring()


@pytest.fixture
def rings(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> list[CallRing]:
    rings = []
    for local_rank in range(segment.worker_count):
        monkeypatch.setenv("RANKWISE_LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("RANK", str(8 + local_rank))
        call_ring.forget_ring()
        ring = call_ring.ring_of_process()
        assert ring is not None
        rings.append(ring)
    return rings


def soon() -> Instant:
    return Instant(time.monotonic_ns() + 2 * SECOND)


def test_who_has_made_no_call_has_no_last_one(segment: Segment) -> None:
    assert last_call(segment, 0) is None
    assert awaited(segment, {}, soon()) == {}


def test_the_last_call_is_told_with_its_number_and_whether_it_goes_on(
    segment: Segment, rings: list[CallRing]
) -> None:
    group = rings[1].add_group("torch 0 0", "dp", 3, range(8, 11))
    rings[1].end(rings[1].begin(group, stamp(group)), DONE)
    entry = rings[1].begin(group, stamp(group))

    standing = last_call(segment, 1)
    rings[1].end(entry, DONE)
    done = last_call(segment, 1)

    assert standing is not None
    assert done is not None
    assert (standing.sequence, standing.number, standing.key) == (2, 2, "torch 0 0")
    assert standing.text == "all_reduce #2 (sum) of (4,) float32"
    assert (standing.group, standing.place) == ("dp", "train.py:88")
    assert (standing.is_standing, done.is_standing) == (True, False)


def test_who_has_not_come_is_awaited_by_those_who_have(
    segment: Segment, rings: list[CallRing]
) -> None:
    groups = [ring.add_group("torch 0 0", "", 3, range(8, 11)) for ring in rings]
    for rank in (0, 2):
        rings[rank].begin(groups[rank], stamp(groups[rank]))
    calls = {rank: call for rank in range(3) if (call := last_call(segment, rank)) is not None}

    assert awaited(segment, calls, soon()) == {1: (2, calls[0].begun_at)}
    assert awaited(segment, calls, calls[0].begun_at) == {}  # nobody has waited for long


def test_who_waits_elsewhere_or_is_no_member_is_awaited_by_nobody(
    segment: Segment, rings: list[CallRing]
) -> None:
    pair = [rings[rank].add_group("torch 1 0", "tp", 2, (8, 9)) for rank in (0, 1)]
    rings[0].begin(pair[0], stamp(pair[0]))
    every = rings[1].add_group("torch 0 0", "", 3, range(8, 11))
    rings[1].begin(every, stamp(every))
    calls = {rank: call for rank in range(3) if (call := last_call(segment, rank)) is not None}

    # Rank 1 waits itself; rank 2, which is no member of the pair, has not come to the other one.
    assert list(awaited(segment, calls, soon())) == [2]


def test_time_that_others_wait_for_a_rank_grows_while_they_wait(
    segment: Segment, rings: list[CallRing]
) -> None:
    groups = [ring.add_group("torch 0 0", "", 3, range(8, 11)) for ring in rings]
    for rank in (0, 2):
        rings[rank].begin(groups[rank], stamp(groups[rank]))
    begun_at = time.monotonic_ns()
    gang = running_gang(size=3)
    here = NodeRanks(size=3, master_addr="127.0.0.1", master_port=1)

    told = [
        ranks_now(
            gang, here, segment, (), Instant(begun_at + wait * SECOND), waited_so_far=WaitedSoFar()
        )
        for wait in (10, 20)
    ]

    assert [[round(rank.waited_for_s) for rank in ranks] for ranks in told] == [
        [0, 10, 0],
        [0, 20, 0],
    ]


def test_rank_is_not_waited_for_alone_while_another_one_has_not_come_either(
    segment: Segment, rings: list[CallRing]
) -> None:
    group = rings[0].add_group("torch 0 0", "", 3, range(8, 11))
    rings[0].begin(group, stamp(group))
    here = NodeRanks(size=3, master_addr="127.0.0.1", master_port=1)

    told = ranks_now(running_gang(size=3), here, segment, (), soon(), waited_so_far=WaitedSoFar())

    assert [rank.waited_for_s for rank in told] == [0, 0, 0]
