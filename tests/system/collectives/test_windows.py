"""Windows between processes: values, order, deaths, and nothing left behind."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from worlds import WindowWorld

from rankwise.base.errors import CollectiveError, CollectiveTimeout, PeerDied
from rankwise.workers.domains import DomainSpec, plan_domain
from rankwise.workers.member import Member

pytestmark = pytest.mark.system

MakeWorld = Callable[[DomainSpec], WindowWorld]
LARGE = 1 << 18  # elements: more than goes in one meeting, and in several pieces


def plan(size: int, **options: Any) -> DomainSpec:
    buffers: dict[str, Any] = {
        "x": (LARGE, "f4"),
        "row": ((4, 1024), "i8"),
        "odd": (LARGE + 3, "f8"),
    }
    return plan_domain("tp", range(size), buffers, signals=["go", "back"], timeout=60, **options)


def pass_round(member: Member, laps: int) -> Any:
    """A token goes round; each lap adds the rank's number to a row, and checks what came."""
    right = (member.rank + 1) % member.size
    row = np.zeros((1, 1024), "i8")
    for lap in range(laps):
        if member.rank or lap:
            member.wait("go", eq=lap + (member.rank > 0))
            row = member.get("row", member.rank, at=1, count=1)
            assert (row == row[0, 0]).all()
        member.put("row", row + member.rank, to=right, at=1, signal="go")
    if member.rank == 0:
        member.wait("go", ge=laps)
        return int(member["row"][1, 0])
    return None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_was_put_before_a_signal_is_seen_after_it(
    make_window_world: MakeWorld, size: int
) -> None:
    world = make_window_world(plan(size))

    results = world.run(pass_round, 200)

    assert results[0] == 200 * sum(range(size))


def add_many(member: Member, count: int) -> Any:
    for _ in range(count):
        for peer in range(member.size):
            member.signal("go", to=peer)
    return member.wait("go", eq=count * member.size)


def test_no_count_of_many_that_add_at_once_is_lost(make_window_world: MakeWorld) -> None:
    world = make_window_world(plan(4))

    assert world.run(add_many, 500) == [2000] * 4


def contribution(rank: int, count: int, dtype: str) -> Any:
    generator = np.random.default_rng([rank, count])
    return generator.normal(size=count).astype(dtype)


def reduce_window(member: Member, name: str, op: Any, offset: int, elsewhere: int) -> Any:
    dtype = member[name].dtype.str
    part = member[name][offset:]
    part[:] = contribution(member.rank, part.size, dtype)
    array = part
    if elsewhere == member.rank:  # this one's array does not lie in its window
        array = part.copy()
    member.all_reduce(array, op, out=array)
    member.barrier()
    return array.tobytes()


@pytest.mark.parametrize(
    ("size", "name", "op", "place"),
    [
        (2, "x", "sum", (0, -1)),
        (3, "x", "mean", (0, -1)),
        (4, "odd", "max", (5, -1)),
        (4, "odd", "prod", (0, -1)),
        (3, "odd", "sum", (0, 1)),
    ],
)
def test_windows_are_reduced_to_what_numpy_says_on_all_ranks_to_the_bit(
    make_window_world: MakeWorld, size: int, name: str, op: str, place: tuple[int, int]
) -> None:
    offset, elsewhere = place
    world = make_window_world(plan(size))
    count, dtype = (LARGE, "<f4") if name == "x" else (LARGE + 3 - offset, "<f8")
    pieces = [contribution(rank, count, dtype) for rank in range(size)]
    fold = {"sum": np.add, "mean": np.add, "max": np.maximum, "prod": np.multiply}[op]
    expected = pieces[0]
    for piece in pieces[1:]:
        expected = fold(expected, piece)
    if op == "mean":
        expected = expected / np.dtype(dtype).type(size)

    results = world.run(reduce_window, name, op, offset, elsewhere)

    assert set(results) == {expected.tobytes()}


def use_all_collectives(member: Member) -> Any:
    rank = member.rank
    return [
        member.all_reduce(np.array([rank, 1])).tolist(),
        member.all_gather([rank, 10 * rank]).tolist(),
        member.broadcast(np.array([rank]), root=1).tolist(),
        member.reduce_scatter(np.full((member.size, 2), rank + 1), op="max").tolist(),
    ]


def test_the_collectives_work_over_windows_too(make_window_world: MakeWorld) -> None:
    world = make_window_world(plan(3))

    assert world.run(use_all_collectives) == [
        [[3, 3], [[0, 0], [1, 10], [2, 20]], [1], [3, 3]] for _ in range(3)
    ]


def until_it_fails(member: Member, what: str) -> Any:
    try:
        member.barrier()
        while True:
            if what == "wait":
                member.wait("back")
            elif what == "barrier":
                member.barrier()
            else:
                member.all_reduce(member["x"], "max", out=member["x"])
    except CollectiveError as error:
        return time.monotonic(), error


def die(member: Member) -> Any:
    member.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("what", ["wait", "barrier", "all_reduce"])
def test_a_peer_that_is_killed_is_named_to_all_who_wait(
    make_window_world: MakeWorld, what: str
) -> None:
    world = make_window_world(plan(4))
    for rank in (0, 1, 3):
        world.tell(rank, until_it_fails, what)

    world.tell(2, die)

    assert world.wait_for_end_of(2) == -signal.SIGKILL
    ended_at = time.monotonic()
    for rank in (0, 1, 3):
        raised_at, error = world.hear(rank)
        assert isinstance(error, PeerDied)
        assert raised_at - ended_at < 30
        assert "rank 2 has ended (exit code -9)" in str(error)


def die_soon(member: Member, after_s: float) -> Any:
    signal.setitimer(signal.ITIMER_REAL, after_s)  # its default action is death
    return until_it_fails(member, "all_reduce")


@pytest.mark.parametrize("after_s", [0.001, 0.01, 0.03])
def test_a_peer_that_dies_amid_a_reduction_is_named(
    make_window_world: MakeWorld, after_s: float
) -> None:
    world = make_window_world(plan(3))
    for rank in (0, 2):
        world.tell(rank, until_it_fails, "all_reduce")
    world.tell(1, die_soon, after_s)

    assert world.wait_for_end_of(1) == -signal.SIGALRM
    for rank in (0, 2):
        _, error = world.hear(rank)
        assert isinstance(error, PeerDied)
        assert "rank 1 has ended" in str(error)


def come_late(member: Member) -> Any:
    if member.rank != 1:
        try:
            member.barrier(timeout=0.05)
        except CollectiveError as error:  # the first has timed out; the other may see it give up
            return str(error)
    return ""


def test_a_barrier_that_is_too_late_names_who_is_missing(make_window_world: MakeWorld) -> None:
    world = make_window_world(plan(3))

    told = world.run(come_late)

    assert told[1] == ""
    assert any("rank 1 is missing" in told[rank] for rank in (0, 2))
    assert all("rank" in told[rank] for rank in (0, 2))


def look_at_own_cpu(member: Member) -> Any:
    """CPU that a rank uses while it waits for a signal that comes after the peer's deadline."""
    before = time.process_time()
    if member.rank == 0:
        member.wait("go")
        return time.process_time() - before
    with pytest.raises(CollectiveTimeout):
        member.wait("back", timeout=0.5)
    member.signal("go", to=0)
    return time.process_time() - before


def test_who_waits_uses_no_cpu(make_window_world: MakeWorld) -> None:
    world = make_window_world(plan(2))

    assert max(world.run(look_at_own_cpu)) < 0.25


def use_in_forked_child(member: Member) -> Any:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            member.signal("go", to=0)
        except Exception as error:  # noqa: BLE001  # it is what is asked for
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 1000).decode(), member.value("go")


def test_a_forked_child_of_a_rank_is_refused(make_window_world: MakeWorld) -> None:
    world = make_window_world(plan(1))

    ((told, value),) = world.run(use_in_forked_child)

    assert "cannot use domain 'tp': this process was forked" in told
    assert value == 0
