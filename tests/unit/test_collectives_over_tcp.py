"""Ranks that share nothing but a network: how they are connected, and what errors they raise."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from rankwise.base.errors import CollectiveError, CollectiveTimeout, PeerDied
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.collectives.calls import describe
from rankwise.collectives.communicator import Communicator
from rankwise.collectives.connecting import Connector, RankEndpoint
from rankwise.collectives.nodes import NodesTransport
from rankwise.collectives.ordered_reductions import REDUCTIONS
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.collectives.tcp import TcpTransport
from rankwise.core.collectives.algorithms import recursive_doubling_allreduce
from rankwise.core.collectives.player import Keep, Player, ProgramEnded, Transmit, steps_of
from rankwise.core.collectives.program import Receive, Send, Span, Task
from rankwise.drivers.real.segments import Segment

PATIENCE = Duration(60 * SECOND)
MakeJob = Callable[..., list[Communicator]]


@pytest.fixture
def make_job() -> Iterator[MakeJob]:
    """Makes the ranks of nodes of the given sizes, in this process."""
    with ExitStack() as stack:

        def make(
            *local_sizes: int,
            absent: tuple[int, ...] = (),
            patience: Duration = PATIENCE,
        ) -> list[Communicator]:
            entrance = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ranks: list[Communicator] = []
            for node, local_size in enumerate(local_sizes):
                first = sum(local_sizes[:node])
                segment = stack.enter_context(Segment.create(local_size))
                for number in range(local_size):
                    rank = first + number
                    local = SharedMemoryTransport(
                        Segment.attach(segment.fd), number, 1, first_rank=first
                    )
                    here = RankEndpoint(
                        rank=rank,
                        size=sum(local_sizes),
                        node=node,
                        local_rank=number,
                        local_size=local_size,
                        address="127.0.0.1",
                        port=entrance.getsockname()[1],
                        key=b"key",
                        listener_fd=entrance.dup().detach() if rank == 0 else -1,
                    )
                    one = Communicator(NodesTransport(local, here), timeout=patience)
                    if rank not in absent:
                        ranks.append(stack.enter_context(one))
            return ranks

        yield make


def on_all(ranks: list[Communicator], work: Callable[[Communicator], Any]) -> list[Any]:
    """What each rank's work returned, or the error that it raised."""

    def attempt(rank: Communicator) -> Any:
        try:
            return work(rank)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attempt, ranks))


def every_operation(rank: Communicator, count: int) -> None:
    me, size = rank.rank, rank.size
    arrays = [np.arange(count) * (each + 1) for each in range(size)]
    rows = [np.arange(size * count).reshape(size, count) * (each + 1) for each in range(size)]
    for root in range(size):
        np.testing.assert_array_equal(rank.broadcast(arrays[me], root), arrays[root])
    np.testing.assert_array_equal(rank.all_reduce(arrays[me]), sum(arrays))
    np.testing.assert_allclose(rank.all_reduce(1.0 * arrays[me], "mean"), sum(arrays) / size)
    np.testing.assert_array_equal(rank.reduce_scatter(rows[me], "max"), np.max(rows, axis=0)[me])
    np.testing.assert_array_equal(rank.all_gather(arrays[me]), np.stack(arrays))
    np.testing.assert_array_equal(
        rank.all_to_all(rows[me]), np.stack([rows[each][me] for each in range(size)])
    )
    rank.barrier()


@pytest.mark.parametrize("local_sizes", [(1, 1), (2, 2), (3, 1), (1, 2, 1), (2, 2, 2)])
def test_every_operation_reaches_all_ranks_of_all_nodes(
    make_job: MakeJob, local_sizes: tuple[int, ...]
) -> None:
    def work(rank: Communicator) -> None:
        for count in (0, 1, 1001, 150_001):
            every_operation(rank, count)

    assert on_all(make_job(*local_sizes), work) == [None] * sum(local_sizes)


def test_a_reduction_folds_each_node_first_and_gives_all_ranks_the_same_bits(
    make_job: MakeJob,
) -> None:
    values = [np.random.default_rng(rank).normal(size=70_001).astype("f4") for rank in range(4)]

    results = on_all(make_job(2, 2), lambda rank: rank.all_reduce(values[rank.rank]))

    folded = (values[0] + values[1]) + (values[2] + values[3])
    assert [each.tobytes() for each in results] == [folded.tobytes()] * 4


def test_ranks_that_call_different_things_all_learn_of_it(make_job: MakeJob) -> None:
    def work(rank: Communicator) -> Any:
        return rank.all_reduce([1.0]) if rank.rank < 2 else rank.barrier()

    errors = on_all(make_job(2, 2), work)

    assert all(isinstance(error, CollectiveError) for error in errors)
    told = "rank 0 is in all_reduce #1 (sum) of (1,) float64; rank 2 is in barrier #1"
    assert any(error.message == told for error in errors)


def test_the_end_of_a_rank_is_told_to_those_who_wait_for_it_with_what_it_did_last(
    make_job: MakeJob,
) -> None:
    ranks = make_job(1, 1)
    on_all(ranks, lambda rank: rank.barrier())
    ranks[1].close()  # as the kernel does for a process that has ended

    with pytest.raises(
        PeerDied,
        match=r"^all_reduce #2 \(sum\) of \(1,\) int64 cannot be completed on rank 0: "
        r"rank 1 has ended.*, it was last in barrier #1$",
    ):
        ranks[0].all_reduce([1])


def test_who_gives_up_says_why_to_its_node_and_along_its_rail(make_job: MakeJob) -> None:
    ranks = make_job(2, 2)
    on_all(ranks, lambda rank: rank.barrier())
    ranks[3]._transport.withdraw("KeyboardInterrupt in barrier #2: ")

    errors = on_all(ranks[:3], lambda rank: rank.barrier())

    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "barrier #2 cannot be completed on rank 2: rank 3 gave up: Keyboard" in str(errors[2])
    assert "rank 2 gave up" in str(errors[0])


def test_rank_that_gives_up_because_a_peer_died_says_so_to_its_peers(make_job: MakeJob) -> None:
    ranks = make_job(1, 1)
    on_all(ranks, lambda rank: rank.barrier())
    ranks[1]._transport.withdraw("any text", lost_peer=True)

    with pytest.raises(PeerDied, match="rank 1 gave up: any text"):
        ranks[0].barrier()


def test_a_rank_that_stays_away_is_named_when_patience_ends(make_job: MakeJob) -> None:
    ranks = make_job(1, 1)
    on_all(ranks, lambda rank: rank.barrier())

    with pytest.raises(
        CollectiveTimeout,
        match=r"barrier #2 timed out on rank 0 after 50 ms: "
        r"rank 1 is missing, it was last in barrier #1",
    ):
        ranks[0].barrier(timeout=0.05)


def test_nobody_waits_for_a_rank_whose_agent_comes_to_say_that_it_has_ended(
    make_job: MakeJob,
) -> None:
    (rank,) = make_job(1, 1, absent=(1,))
    transport = rank._transport
    assert isinstance(transport, NodesTransport)
    agent = Connector(msgspec.structs.replace(transport._here, rank=1, node=1), "", PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(agent.tell_end)
        with pytest.raises(PeerDied, match="rank 1 has ended"):
            rank.barrier()


def test_who_never_comes_is_named_by_the_rank_to_which_all_connect(make_job: MakeJob) -> None:
    ranks = make_job(1, 1, absent=(1,), patience=Duration(50 * MILLISECOND))

    with pytest.raises(
        CollectiveTimeout,
        match=r"barrier #1 timed out on rank 0 after 50 ms: "
        r"rank 1 is missing, it has not come to any operation yet",
    ):
        ranks[0].barrier()


def test_who_comes_after_the_end_of_the_rank_that_listens_learns_of_its_end(
    make_job: MakeJob,
) -> None:
    (rank,) = make_job(1, 1, absent=(0,))
    transport = rank._transport
    assert isinstance(transport, NodesTransport)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    transport._here = msgspec.structs.replace(transport._here, port=port)

    said = rf"barrier #1 .* rank 0 has ended \(127.0.0.1 port {port} refuses connections\), it has"
    with pytest.raises(PeerDied, match=said):
        rank.barrier()


def test_a_rank_of_another_round_is_told_so_and_does_not_disturb_this_one(
    make_job: MakeJob,
) -> None:
    ranks = make_job(1, 1)
    here = msgspec.structs.replace(ranks[1]._transport._here, key=b"round before")  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool, Segment.create(1) as segment:
        first = pool.submit(ranks[0].barrier)
        local = SharedMemoryTransport(Segment.attach(segment.fd), 0, 1, first_rank=1)
        stale = Communicator(NodesTransport(local, here), timeout=PATIENCE)

        with pytest.raises(CollectiveError, match="is not rank 0 of this round: its key is not"):
            stale.barrier()
        ranks[1].barrier()

        first.result()
        stale.close()


def test_a_message_whose_place_is_overwritten_before_it_has_left_arrives_as_it_was_sent() -> None:
    ours, theirs = socket.socketpair()
    ranks = [TcpTransport(0, (0, 1), {1: ours}), TcpTransport(1, (0, 1), {0: theirs})]
    values = [np.arange(2_000_000.0), np.arange(2_000_000.0) * 2]  # no socket takes as much at once

    def work(rank: int) -> Any:
        ranks[rank].begin(describe("all_reduce"), PATIENCE)
        result = np.empty_like(values[rank])
        ranks[rank].run(recursive_doubling_allreduce, values[rank], result, REDUCTIONS["sum"])
        return result

    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(work, range(2)):
            np.testing.assert_array_equal(result, values[0] + values[1])
    for rank in ranks:
        rank.close()


def test_the_end_of_a_rank_is_seen_though_a_child_that_it_forked_lives_on() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    transport = TcpTransport(0, (0, 1), {1: ours})
    may_end, let_it_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_it_end)
        os.read(may_end, 1)
        os._exit(0)

    transport.close()

    assert theirs.recv(1) == b""
    os.close(let_it_end)
    os.waitpid(child, 0)
    os.close(may_end)
    theirs.close()


def test_a_long_array_is_reduced_in_chunks_in_the_order_of_the_nodes(make_job: MakeJob) -> None:
    values = [np.random.default_rng(rank).normal(size=1_200_001) for rank in range(3)]

    results = on_all(make_job(1, 1, 1), lambda rank: rank.all_reduce(values[rank.rank]))

    folded = (values[0] + values[1]) + values[2]
    assert [each.tobytes() for each in results] == [folded.tobytes()] * 3


def test_a_player_keeps_what_it_is_about_to_overwrite_and_finishes_when_all_has_left() -> None:
    here = Span(0, 4)
    player = Player(steps_of([Send(1, here), Receive(1, here, combines=True), Send(1, here)]))

    assert player.begin() == [Transmit(0, 1, here), Keep(0), Receive(1, here, combines=True)]
    assert player.sent(0) == []
    assert player.received() == [Transmit(1, 1, here)]
    assert player.sent(1) == [ProgramEnded()]


def test_a_player_keeps_nothing_that_has_left() -> None:
    player = Player(steps_of([*recursive_doubling_allreduce.program(Task(0, 4, 8))]))

    player.begin()
    player.sent(0)

    assert not any(isinstance(effect, Keep) for effect in player.received()[:1])
