"""Memory windows between simulated ranks: the programs of real ranks, and what they wait for."""

import gc
import os
import time
from mmap import mmap
from typing import Any

import numpy as np
import pytest

import rankwise
from rankwise import collectives
from rankwise.base.failure import FailureCause
from rankwise.simranks.run import windows
from rankwise.simranks.world.world import present_world
from rankwise.workers import CommHandle, DomainSpec, Member, plan_domain


def ring(size: int) -> DomainSpec:
    buffers: dict[str, Any] = {"x": ((4,), "f4"), "rows": ((2, 3), "i8"), "big": ((1 << 17,), "f8")}
    return plan_domain("ring", ranks=range(size), buffers=buffers, signals=["go"])


def meet(path: str = "windows of ranks") -> CommHandle:
    return CommHandle.meet(rankwise.rank(), rankwise.world_size(), path)


def pass_on(path: str) -> tuple[Any, ...]:
    """Everything that a member of a domain can do."""
    with meet(path) as comm:
        m = comm.alloc_domain(ring(comm.size))
        m["x"][:] = m.rank
        right = (m.rank + 1) % m.size
        m.put("rows", np.full((1, 3), m.rank), to=right, at=1, signal="go")
        counted = m.wait("go", ge=1)
        m.barrier()
        left = m.peer((m.rank - 1) % m.size)["x"]
        seen = m.all_gather(left[0])
        m["big"][:] = np.arange(1 << 17) / 7 + m.rank
        m.all_reduce(m["big"], out=m["big"])
        m.signal("go", to=0, value=5)
        total = m.wait("go", ge=1 + 5 * m.size) if m.rank == 0 else 0
        rows = m.get("rows", right).tolist()
        m.barrier()
        return min(counted, 1), seen.tolist(), m["rows"].tolist(), rows, total, m["big"].tobytes()


def test_simulated_ranks_have_the_windows_of_real_ones(tmp_path: Any) -> None:
    path = str(tmp_path / "point")

    simulated = rankwise.run(pass_on, (path,), 3, on="sim")

    assert simulated == rankwise.run(pass_on, (path,), 3)
    assert simulated[0][:3] == (1, [2.0, 0.0, 1.0], [[0, 0, 0], [2, 2, 2]])
    assert simulated[0][4] == 16


def wait_in_vain() -> None:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        if member.rank != 1:
            member.signal("go", to=1)
        member.wait("go")
        member.barrier()


def test_a_signal_that_never_comes_is_a_deadlock_with_its_name_and_line() -> None:
    with pytest.raises(rankwise.WorkersFailed) as failed:
        rankwise.run(wait_in_vain, nprocs=2, on="sim")

    root = failed.value.failures[0]
    assert (root.rank, root.cause) == (0, FailureCause.HUNG)
    assert root.waits_for == "signal 'go' >= 1 of 'ring': it is 0; nothing was added by rank 1"
    assert "in wait_in_vain" in root.stacks


def wait_for_a_second_signal() -> None:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        if member.rank == 0:
            member.signal("go", to=1)
        if member.rank == 1:
            member.wait("go", ge=2)
        collectives.all_reduce(np.ones(2))


def call_a_barrier_of_windows_alone() -> None:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        if member.rank == 1:
            member.barrier()
        collectives.all_reduce(np.ones(2))


@pytest.mark.parametrize(
    ("function", "waits_for"),
    [
        (
            wait_for_a_second_signal,
            "signal 'go' >= 2 of 'ring': it is 1; nothing was added by rank 2",
        ),
        (call_a_barrier_of_windows_alone, "barrier #1, not called by ranks 0, 2"),
    ],
)
def test_a_rank_that_others_keep_waiting_at_its_windows_is_not_to_blame_for_their_collective(
    function: Any, waits_for: str
) -> None:
    with pytest.raises(rankwise.WorkersFailed) as failed:
        rankwise.run(function, nprocs=3, on="sim")

    waits = {each.rank: each.waits_for for each in failed.value.failures}
    assert {each.cause for each in failed.value.failures} == {FailureCause.HUNG}
    assert waits[1] == waits_for
    assert waits[0].startswith("all_reduce #1 (sum) of (2,) float64 in group")


def leave_a_barrier_out() -> None:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        if member.rank == 1:
            member.wait("go")
        member.barrier()


def test_a_barrier_that_nobody_else_comes_to_is_one_too() -> None:
    with pytest.raises(rankwise.WorkersFailed) as failed:
        rankwise.run(leave_a_barrier_out, nprocs=3, on="sim")

    assert failed.value.failures[0].waits_for == "barrier #1, not called by rank 1"


def meet_nobody() -> None:
    if rankwise.rank() == 0:
        meet()


def test_a_meeting_to_which_a_rank_does_not_come_is_one_too() -> None:
    with pytest.raises(rankwise.WorkersFailed) as failed:
        rankwise.run(meet_nobody, nprocs=2, on="sim")

    assert failed.value.failures[0].waits_for == (
        "CommHandle.meet at 'windows of ranks', to which rank 1 did not come"
    )


def time_out() -> str:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        text = ""
        if member.rank == 0:
            with pytest.raises(rankwise.CollectiveTimeout) as late:
                member.wait("go", timeout=60)
            text = late.value.message
        member.barrier()
        return text


def test_a_wait_with_a_timeout_ends_in_virtual_time() -> None:
    told, _ = rankwise.run(time_out, nprocs=2, on="sim")

    assert told == (
        "wait for signal 'go' >= 1 timed out on rank 0 of 'ring' after 1 min: it is 0; nothing was"
        " added by rank 1"
    )


def time_out_at() -> tuple[int, int]:
    """When a wait and a barrier have ended, on the clock of the simulation."""
    world = present_world()
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        if member.rank == 1:
            time.sleep(1000)
            return (0, 0)
        with pytest.raises(rankwise.CollectiveTimeout):
            member.wait("go", timeout=60)
        waited = world.scheduler.now
        with pytest.raises(rankwise.CollectiveTimeout):
            member.barrier(timeout=30)
        return (waited, world.scheduler.now - waited)


def test_deadlines_are_on_virtual_time_to_the_nanosecond() -> None:
    first, second = (rankwise.run(time_out_at, nprocs=2, on="sim")[0] for _ in range(2))

    assert first == second
    assert first[1] == 30 * 10**9


def meet_again() -> list[str]:
    told = []
    if rankwise.rank() == 1:
        time.sleep(45)
    else:
        with pytest.raises(rankwise.CollectiveTimeout) as late:
            CommHandle.meet(0, 2, "windows of ranks", timeout=30)
        told.append(late.value.message)
    CommHandle.meet(rankwise.rank(), 2, "windows of ranks").destroy()
    return told


def test_ranks_meet_again_after_a_meeting_that_came_to_nothing() -> None:
    late, nothing = rankwise.run(meet_again, nprocs=2, on="sim")

    assert nothing == []
    (told,) = late
    assert told.endswith("to which rank 1 did not come within 30 s of virtual time")


def alloc_and_leave() -> int:
    """How much memory is still mapped for windows when all were left."""
    for _ in range(5):
        with meet() as comm:
            member = comm.alloc_domain(ring(comm.size))
            member.barrier()
        del comm, member
    gc.collect()
    # Not `isinstance`: it asks objects of all libraries for their class, and some warn.
    return sum(type(each) is mmap and len(each) > 1 << 20 for each in gc.get_objects()) + sum(
        type(each) is windows._Communicators and len(each._joined) for each in gc.get_objects()
    )


def test_windows_that_were_left_are_forgotten() -> None:
    assert rankwise.run(alloc_and_leave, nprocs=1, on="sim") == [0]


def lose_a_peer() -> str:
    with meet() as comm:
        member = comm.alloc_domain(ring(comm.size))
        member.barrier()
        if member.rank == 1:
            os._exit(0)
        with pytest.raises(rankwise.PeerDied) as lost:
            member.wait("go")
        return lost.value.message


def test_a_rank_that_ends_without_leaving_is_missed() -> None:
    told, _ = rankwise.run(lose_a_peer, nprocs=2, on="sim")

    assert told == "wait for signal 'go' >= 1 cannot end on rank 0 of 'ring': rank 1 has ended"


def be_killed_in_a_turn() -> int:
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    with CommHandle.meet(local, count, "windows of ranks") as comm:
        member = comm.alloc_domain(ring(count))
        for turn in range(4):
            if rankwise.restart_count() == 0 and rankwise.rank() == 1 and turn == 2:
                os.kill(os.getpid(), 9)
            member.signal("go", to=1 - local)
            member.wait("go", ge=turn + 1)
        return member.value("go")


def test_windows_are_new_when_ranks_are_started_again() -> None:
    assert rankwise.run(be_killed_in_a_turn, nprocs=2, on="sim", max_restarts=1) == [4, 4]


def disagree(path: str) -> list[str]:
    told = []
    for what in ("sizes", "signals"):
        with meet(f"{path} {what}") as comm:
            more = comm.rank if what == "signals" else 0
            size = 4096 if what == "signals" else 4096 * (1 + comm.rank)
            names = ["go", "stop"][: 1 + more]
            domain = plan_domain("d", range(comm.size), signals=names, window_bytes=size)
            with pytest.raises(rankwise.ConfigError) as refused:
                comm.alloc_domain(domain)
            told.append(refused.value.message)
    return told


@pytest.mark.parametrize("on", ["sim", None])
def test_ranks_that_want_different_windows_are_told(on: Any, tmp_path: Any) -> None:
    sizes = "ranks want windows of different sizes: rank 0 4096, rank 1 8192"
    signals = "ranks want different numbers of signals: rank 0 1, rank 1 2"

    assert rankwise.run(disagree, (str(tmp_path / "at"),), 2, on=on) == [[sizes, signals]] * 2


def claim_rank_0() -> str:
    try:
        CommHandle.meet(0, 2, "windows of ranks").destroy()
    except rankwise.ConfigError as error:
        return error.message
    return ""


def test_a_rank_is_claimed_once() -> None:
    told = "two ranks at 'windows of ranks' say that they are rank 0"

    assert rankwise.run(claim_rank_0, nprocs=2, on="sim") == [told] * 2


def test_a_domain_has_the_ranks_of_its_communicator() -> None:
    with CommHandle.meet(0, 1, "windows of one") as comm:
        with pytest.raises(rankwise.ConfigError, match="has ranks 0, 1, and the communicator"):
            comm.alloc_domain(ring(2))
        assert isinstance(comm.alloc_domain(ring(1)), Member)
