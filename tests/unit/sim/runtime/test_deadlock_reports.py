"""A deadlock says who waits for whom, in which group, and at which lines of the user's program."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import Deadlock
from rankwise.sim import GraphEngine, RuntimeContext, triton
from rankwise.sim.runtime.multiprocessing import RanksStuck

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


@pytest.fixture
def torch() -> Iterator[RuntimeContext]:
    with RuntimeContext(GraphEngine("default"), ccl={}) as context:
        yield context


def line(mark: str) -> str:
    """How a report names the line of this file that ends with a comment."""
    numbers = [number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    (number,) = numbers
    return f"{__file__}:{number}"


def stuck(torch: RuntimeContext, worker: Callable[..., object], ranks: int = 3) -> RanksStuck:
    with pytest.raises(RanksStuck) as caught:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
    return caught.value


def waits(deadlock: Deadlock) -> dict[str, tuple[str, str]]:
    """What each of those who wait waits for, and where."""
    return {each.who: (each.what, each.where) for each in deadlock.waiting}


def test_a_deadlock_across_crossed_groups_names_groups_ranks_and_lines(
    torch: RuntimeContext,
) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist, x = torch.distributed, torch.ones(4)
        pair, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        if rank == 0:
            dist.all_reduce(x, group=pair)  # pair first
            dist.all_reduce(x, group=three)
        else:
            dist.all_reduce(x, group=three)  # three first
            dist.all_reduce(x, group=pair)

    deadlock = stuck(torch, worker)

    first, second = line("pair first"), line("three first")
    text = f"{deadlock}\n"
    pair, three = (f"all_reduce #1 of (4,) f32 in group {group}" for group in (0, 1))
    assert text.startswith(f"ranks wait for each other: rank 0 in {pair} (ranks 0-1) (test_")
    assert f"rank 0 is in {pair} (ranks 0-1), at {first} in worker; " in text
    assert f"rank 1 is in {three} (ranks 0-2), at {second} in worker; " in text
    assert (
        f"  {pair} (ranks 0-1): called by rank 0 at {first} in worker; waits for rank 1\n" in text
    )
    assert (
        f"  {three} (ranks 0-2): called by ranks 1-2 at {second} in worker; waits for rank 0\n"
        in text
    )
    assert waits(deadlock)["rank 0"] == (
        f"rank 1 to call {pair} (ranks 0-1)",
        f"{first} in worker",
    )


def test_a_deadlock_in_the_barrier_of_a_group_names_the_group(torch: RuntimeContext) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist = torch.distributed
        group = dist.new_group([3, 0, 1])
        if rank == 0:
            dist.barrier(group=group)  # of the group
        else:
            dist.barrier()  # of everybody

    text = f"{stuck(torch, worker, ranks=4)}\n"

    of_group = f"barrier #1 in group 0 (ranks 0-1, 3): called by rank 0 at {line('of the group')}"
    assert f"{of_group} in worker; waits for ranks 1, 3\n" in text
    of_all = f"barrier #1: called by ranks 1-3 at {line('of everybody')} in worker"
    assert f"{of_all}; waits for rank 0\n" in text


def test_calls_that_disagree_are_told_with_the_lines_that_made_them(torch: RuntimeContext) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist, x = torch.distributed, torch.ones(4)
        if rank == 0:
            dist.all_reduce(x, async_op=True)  # reduces
        else:
            dist.broadcast(x, 0, async_op=True)  # broadcasts
        dist.barrier()

    text = f"{stuck(torch, worker, ranks=2)}\n"

    assert text.startswith(
        "call #1: ranks 0 and 1 disagree: rank 0 called all_reduce of (4,) f32 ("
    )
    assert ", rank 1 called broadcast of (4,) f32 (test_deadlock_reports" in text
    assert "  rank 0 is in barrier #2, at " in text
    reduces = f"all_reduce #1 of (4,) f32: called by rank 0 at {line('reduces')} in worker"
    broadcasts = f"broadcast #1 of (4,) f32: called by rank 1 at {line('broadcasts')} in worker"
    assert f"  {reduces}; {broadcasts}\n" in text


def test_a_collective_that_never_took_place_is_told_with_its_line(torch: RuntimeContext) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist = torch.distributed
        group = dist.new_group([0, 2])
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=group, async_op=True)  # begun in vain

    text = f"{stuck(torch, worker)}\n"

    assert text.startswith("all_reduce #1 of (4,) f32 in group 0 (ranks 0, 2) of rank 0 never took")
    assert f"called by rank 0 at {line('begun in vain')} in worker; waits for rank 2" in text


def test_receivers_that_wait_for_each_other_are_told_with_their_lines(
    torch: RuntimeContext,
) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist, x = torch.distributed, torch.ones(4)
        group = dist.new_group([0, 1])
        dist.recv(x, src=1 - rank, group=group)  # both receive

    deadlock = stuck(torch, worker, ranks=2)

    group = "in group 0 (ranks 0-1)"
    at = f"{line('both receive')} in worker"
    told = (
        f"  recv #1 of (4,) f32 from rank 1 {group}: called by rank 0 at {at}; waits for rank 1\n"
    )
    assert told in f"{deadlock}\n"
    awaited = f"rank 1 to call send #1 of (4,) f32 to rank 0 {group}"
    assert waits(deadlock)["rank 0"] == (awaited, at)


@triton.jit
def receiving_kernel(n: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Every program waits for a message of the other one."""
    tl.recv(1 - tl.program_id(0), n, tl.float32)  # nobody sends


def test_a_rank_says_which_command_it_waits_for_and_the_command_its_line(
    torch: RuntimeContext,
) -> None:
    def worker(_rank: int, torch: Any) -> None:
        side = torch.Stream()
        with torch.stream(side):
            torch.launch(receiving_kernel, 2, n=4)  # launched
        side.record_event().synchronize()  # waited for

    deadlock = stuck(torch, worker, ranks=1)

    at = f"{line('waited for')} in worker"
    command = "receiving_kernel #0 on sip0"
    assert f"rank 0 is waiting for a command ({command}), at {at}" in str(deadlock)
    found = waits(deadlock)
    assert found["rank 0"] == (f"a command ({command})", at)
    assert found[command][1] == f"{line('launched')} in worker"
    program = found["receiving_kernel[0] on sip0.cube0.pe0"]
    assert program[0].startswith("slot of queue sip0.cube0.pe1 to sip0.cube0.pe0")
    assert program[1] == f"{line('nobody sends')} in receiving_kernel"


def test_streams_that_wait_for_each_other_say_for_which_command(torch: RuntimeContext) -> None:
    def worker(_rank: int, torch: Any) -> None:
        one, other = torch.Stream(), torch.Stream()
        with torch.stream(one):
            torch.launch(receiving_kernel, 2, n=4)
        other.wait_stream(one)
        with torch.stream(other):
            torch.launch(receiving_kernel, 2, n=4)  # behind it
        other.synchronize()

    found = waits(stuck(torch, worker, ranks=1))

    assert found["receiving_kernel #1 on sip0"] == (
        "receiving_kernel #0 on sip0",
        f"{line('behind it')} in worker",
    )


def test_a_collective_that_is_held_up_names_its_ranks_and_what_holds_it_up(
    torch: RuntimeContext,
) -> None:
    def worker(rank: int, torch: Any) -> None:
        dist, x = torch.distributed, torch.ones(4)
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        with torch.stream(torch.Stream()):
            if rank == 1:
                torch.launch(receiving_kernel, 2, n=4)
            dist.all_reduce(x, group=group)  # held up

    deadlock = stuck(torch, worker)

    found = waits(deadlock)
    collective, at = "all_reduce #1 of (4,) f32 in group 0 (ranks 1-2)", line("held up")
    (behind,) = [each for who, each in found.items() if who.startswith(f"{collective} of rank 1 #")]
    assert re.fullmatch(r"receiving_kernel #\d+ on sip1", behind[0])
    assert behind[1] == f"{at} in worker"
    assert found[f"{collective}, rank 2 lane 0: kernel on sip2.cube0.pe0"] == (
        "slot of queue sip1.cube0.pe0 to sip2.cube0.pe0 (0 in it)",
        "",
    )
    assert not [each for each in deadlock.waiting if each.what == "future"]
    # What says a line comes before what is at work for it.
    assert [bool(each.where) for each in deadlock.waiting] == sorted(
        (bool(each.where) for each in deadlock.waiting), reverse=True
    )


@triton.jit
def crossed_locks_kernel(a, b):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Two programs take two locks, each in an order of its own."""
    mine = a if tl.program_id(0) == 0 else b
    other = b if tl.program_id(0) == 0 else a
    while tl.atomic_cas(mine, 0, 1) == 1:  # takes one
        pass
    tl.debug_barrier()
    while tl.atomic_cas(other, 0, 1) == 1:  # wants the other
        pass


def test_a_deadlock_of_locks_names_each_lock_its_address_and_its_holder(
    torch: RuntimeContext,
) -> None:
    a, b = (torch.zeros(1, dtype="i32", name=name) for name in "ab")

    with pytest.raises(Deadlock) as caught:
        torch.launch(crossed_locks_kernel, 2, a, b)

    found = waits(caught.value)
    programs = [f"crossed_locks_kernel[{number}] on sip0.cube0.pe{number}" for number in (0, 1)]
    for who, holder, lock in ((0, 1, b), (1, 0, a)):
        what, where = found[programs[who]]
        assert what == (
            f"memory to change: {lock.name}[0] at {lock.address:#x} holds 1,"
            f" set by {programs[holder]} at {line('takes one')}"
        )
        assert where == f"{line('wants the other')} in crossed_locks_kernel"


@triton.jit
def taking_kernel(lock):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Takes a lock and keeps it."""
    while tl.atomic_cas(lock + 1, 0, 7) != 0:  # takes and keeps
        pass


def test_a_lock_that_an_earlier_launch_keeps_is_told_with_it(torch: RuntimeContext) -> None:
    locks = torch.zeros(2, dtype="i32", name="locks")
    torch.launch(taking_kernel, 1, locks)

    with pytest.raises(Deadlock) as caught:
        torch.launch(taking_kernel, 1, locks)

    (what,) = [
        each.what for each in caught.value.waiting if each.who.startswith("taking_kernel[0]")
    ]
    assert what == (
        f"memory to change: locks[1] at {locks.address + 4:#x} holds 7,"
        f" set by taking_kernel[0] on sip0.cube0.pe0 at {line('takes and keeps')}"
    )


@triton.jit
def flag_kernel(flag, n: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Counts itself, and waits for one more than there are."""
    tl.atomic_add(flag, 1)  # counts
    while tl.atomic_add(flag, 0) <= n:
        pass


def test_a_counter_that_never_gets_there_says_how_far_it_came(torch: RuntimeContext) -> None:
    with pytest.raises(Deadlock) as caught:
        torch.launch(flag_kernel, 3, torch.zeros(1, dtype="i32", name="count"), n=3)

    told = {each.what for each in caught.value.waiting if each.who.startswith("flag_kernel[")}
    assert len(told) == 1
    assert re.search(
        rf"count\[0\] at 0x\w+ holds 3, set by flag_kernel\[2\] .* at {line('counts')}$", told.pop()
    )


def test_a_word_that_was_set_by_other_means_since_is_told_without_a_holder(
    torch: RuntimeContext,
) -> None:
    locks = torch.zeros(2, dtype="i32", name="locks")
    torch.launch(taking_kernel, 1, locks)
    locks.copy_([0, 5])

    with pytest.raises(Deadlock) as caught:
        torch.launch(taking_kernel, 1, locks)

    (what,) = [
        each.what for each in caught.value.waiting if each.who.startswith("taking_kernel[0]")
    ]
    assert what.endswith(" holds 5")
