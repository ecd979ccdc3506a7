"""No rank waits for ever: deaths, absences, errors and disagreements are named to all others."""

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from worlds import World

from rankwise.base.errors import (
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
    LocalProtocolError,
    PeerDied,
)
from rankwise.collectives import Communicator
from rankwise.collectives.barrier import Barrier
from rankwise.collectives.default import communicator_from_environment
from rankwise.collectives.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.system

MakeWorld = Callable[..., World]


def call(communicator: Communicator, name: str, *arguments: Any) -> Any:
    return getattr(communicator, name)(*arguments)


def barrier_twice(communicator: Communicator) -> Any:
    communicator.barrier()
    try:
        communicator.barrier()
    except PeerDied as error:
        return error
    raise AssertionError("the second barrier was completed without rank 2")


def barrier_then_die(communicator: Communicator, how: str) -> Any:
    communicator.barrier()
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_peer_that_ends_before_it_comes_is_named(make_world: MakeWorld, how: str) -> None:
    world = make_world(4)
    for rank in (0, 1, 3):
        world.tell(rank, barrier_twice)

    world.tell(2, barrier_then_die, how)

    assert world.wait_for_end_of(2) == (0 if how == "exit" else -signal.SIGKILL)
    for rank in (0, 1, 3):
        error = world.hear(rank)
        assert f"barrier #2 cannot be completed on rank {rank}: rank 2 has ended" in str(error)
        assert "it was last in barrier #1" in str(error)


def reduce_until_it_fails(communicator: Communicator, die_after_s: float) -> Any:
    array = np.ones(1 << 20)
    if die_after_s:
        signal.setitimer(signal.ITIMER_REAL, die_after_s)  # its default action is death
    while True:
        try:
            communicator.all_reduce(array, "max", out=array)
        except CollectiveError as error:
            return error


@pytest.mark.parametrize("die_after_s", [0.001, 0.01, 0.03, 0.05])
def test_a_peer_that_dies_amid_a_long_operation_is_named(
    make_world: MakeWorld, die_after_s: float
) -> None:
    world = make_world(3)
    for rank in range(3):
        world.tell(rank, reduce_until_it_fails, die_after_s if rank == 1 else 0)

    assert world.wait_for_end_of(1) == -signal.SIGALRM
    for rank in (0, 2):
        error = world.hear(rank)
        assert isinstance(error, PeerDied)
        assert "rank 1 has ended" in str(error)


def die_at_the_barrier(communicator: Communicator, when: str) -> Any:
    transport = communicator._transport
    assert isinstance(transport, SharedMemoryTransport)
    arrivals = transport._barrier._arrivals
    add = arrivals.add

    def die() -> None:
        if when == "after":
            add()
        os.kill(os.getpid(), signal.SIGKILL)

    arrivals.add = arrivals.add_and_wake = die  # type: ignore[method-assign]  # death at one point
    communicator.barrier()


def test_a_peer_killed_right_before_it_is_counted_is_missed(make_world: MakeWorld) -> None:
    world = make_world(3)
    for rank in (0, 2):
        world.tell(rank, call, "barrier")
    world.tell(1, die_at_the_barrier, "before")

    assert world.wait_for_end_of(1) == -signal.SIGKILL
    for rank in (0, 2):
        error = world.hear(rank)
        assert isinstance(error, PeerDied)
        assert "rank 1 has ended, it was last in barrier #1" in str(error)


def test_a_peer_killed_right_after_it_is_counted_wakes_the_others(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.tell(0, call, "barrier")
    world.tell(0, call, "barrier")
    world.tell(1, die_at_the_barrier, "after")

    assert world.wait_for_end_of(1) == -signal.SIGKILL
    first, second = world.hear(0), world.hear(0)
    # Whether rank 0 came before or after the count was complete, it cannot get further than this.
    assert first is None or isinstance(first, PeerDied)
    assert isinstance(second, CollectiveError)


def barrier_and_exit(communicator: Communicator) -> Any:
    communicator.barrier()
    os._exit(0)


def test_a_peer_that_ends_after_the_last_operation_harms_nobody(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.tell(0, barrier_and_exit)
    world.tell(1, call, "barrier")
    world.tell(2, call, "barrier")

    assert world.hear(1) is None
    assert world.hear(2) is None
    assert world.wait_for_end_of(0) == 0


def test_a_peer_that_died_long_ago_is_named_at_once(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.tell(1, leave)
    assert world.wait_for_end_of(1) == 7

    world.tell(0, call, "all_reduce", [1.0])

    error = world.hear(0)
    assert isinstance(error, PeerDied)
    assert "rank 1 has ended, it has not come to any operation yet" in str(error)


def leave(communicator: Communicator) -> Any:
    os._exit(7)


def test_a_peer_that_does_not_come_is_named_after_the_timeout(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.run(call, "all_reduce", np.zeros((2, 3), np.int16), "max")
    world.tell(0, impatient_barrier)
    world.tell(2, impatient_barrier)

    first, second = world.hear(0), world.hear(2)

    timeout = first if isinstance(first, CollectiveTimeout) else second
    assert isinstance(timeout, CollectiveTimeout)
    assert isinstance(timeout, TimeoutError)
    assert "barrier #2 timed out on rank" in str(timeout)
    # On a busy machine the other one may be missing as well when the time is over.
    assert " after 200 ms: " in str(timeout)
    assert "rank 1 is missing, it was last in all_reduce #1 (max) of (2, 3) int16" in str(timeout)


def impatient_barrier(communicator: Communicator) -> Any:
    communicator.barrier(timeout=0.2)


def test_who_comes_after_a_timeout_hears_who_gave_up(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.tell(0, impatient_barrier)
    assert isinstance(world.hear(0), CollectiveTimeout)

    world.tell(1, call, "barrier")

    late = world.hear(1)
    assert type(late) is CollectiveError
    assert "rank 0 gave up: CollectiveTimeout in barrier #1" in str(late)


def test_after_an_error_the_communicator_refuses_and_says_why(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.tell(0, impatient_barrier)
    world.hear(0)

    world.tell(0, call, "all_reduce", [1.0])

    assert str(world.hear(0)) == (
        "rank 0 cannot do all_reduce #2 (sum) of (1,) float64: "
        "it is of no use after CollectiveTimeout in barrier #1 "
        "(the ranks no longer agree on where they are: end them all and start again; "
        "a tree of workers does so with close() and init())"
    )


class Interrupted(Exception):
    pass


def interrupted_barrier(communicator: Communicator) -> Any:
    def interrupt(signum: int, frame: FrameType | None) -> Any:
        while frame is not None:
            if frame.f_code is Barrier._sleep_until_complete.__code__:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise Interrupted("enough")
            frame = frame.f_back  # it does not wait yet, and is asked again

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        communicator.barrier()
    except Interrupted:
        return "interrupted"


def test_an_exception_from_a_signal_handler_ends_the_wait_and_is_told_to_the_peers(
    make_world: MakeWorld,
) -> None:
    world = make_world(2)
    world.tell(0, interrupted_barrier)
    assert world.hear(0) == "interrupted"

    world.tell(1, call, "barrier")

    assert "rank 0 gave up: Interrupted in barrier #1: enough" in str(world.hear(1))


def test_those_who_wait_for_another_hear_at_once_who_gave_up(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.tell(1, call, "barrier")

    world.tell(0, interrupted_barrier)

    assert "rank 0 gave up: Interrupted in barrier #1: enough" in str(world.hear(1))
    world.tell(2, call, "barrier")
    assert "gave up: " in str(world.hear(2))


WRONG_ARGUMENTS: list[tuple[Any, ...]] = [
    ("broadcast", [1.0], 1.0),
    ("broadcast", [1.0], "x"),
    ("broadcast", [1.0], 2),
    ("barrier", "soon"),
    ("barrier", math.inf),
    ("barrier", math.nan),
    ("barrier", -1),
]


def test_wrong_arguments_are_refused_before_anybody_hears_of_them(make_world: MakeWorld) -> None:
    world = make_world(2)
    for operation, *arguments in WRONG_ARGUMENTS:
        world.tell(0, call, operation, *arguments)
        assert type(world.hear(0)) is ConfigError, (operation, arguments)

    for rank in range(2):
        world.tell(rank, call, "all_reduce", [1])

    assert [world.hear(rank).tolist() for rank in range(2)] == [[2], [2]]


MATCHING = ("all_reduce", np.zeros(4))
MISMATCHES = [
    (("broadcast", np.zeros(4)), "broadcast #1 from rank 0 of (4,) float64"),
    (("barrier",), "barrier #1"),
    (("all_reduce", np.zeros((2, 2))), "all_reduce #1 (sum) of (2, 2) float64"),
    (("all_reduce", np.zeros(5)), "all_reduce #1 (sum) of (5,) float64"),
    (("all_reduce", np.zeros(100_000)), "all_reduce #1 (sum) of (100000,) float64"),
    (("all_reduce", np.zeros(4, np.int64)), "all_reduce #1 (sum) of (4,) int64"),
    (("all_reduce", np.zeros(4, ">f8")), "all_reduce #1 (sum) of (4,) >f8"),
    (("all_reduce", np.zeros(4), "max"), "all_reduce #1 (max) of (4,) float64"),
]


@pytest.mark.parametrize(("other", "text"), MISMATCHES)
def test_ranks_that_call_different_things_all_hear_who_calls_what(
    make_world: MakeWorld, other: tuple[Any, ...], text: str
) -> None:
    world = make_world(3)
    world.tell(0, call, *MATCHING)
    world.tell(1, call, *other)
    world.tell(2, call, *MATCHING)

    for rank in range(3):
        error = world.hear(rank)
        assert type(error) is CollectiveError
        assert error.message == (
            f"ranks 0, 2 are in all_reduce #1 (sum) of (4,) float64; rank 1 is in {text}"
        )


def test_different_roots_are_a_mismatch(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.tell(0, call, "broadcast", [1], 0)
    world.tell(1, call, "broadcast", [1], 1)

    errors = [world.hear(rank) for rank in range(2)]

    for error in errors:
        assert error.message == (
            "rank 0 is in broadcast #1 from rank 0 of (1,) int64; "
            "rank 1 is in broadcast #1 from rank 1 of (1,) int64"
        )


def use_in_forked_child(communicator: Communicator) -> Any:
    communicator.barrier()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            communicator.barrier()
        except CollectiveError as error:
            code = 0 if "forked" in str(error) else 2
        communicator.close()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    communicator.barrier()
    return code


def test_a_forked_child_is_refused_and_does_its_parent_no_harm(make_world: MakeWorld) -> None:
    assert make_world(2).run(use_in_forked_child) == [0, 0]


def test_a_rank_cannot_be_taken_twice(make_world: MakeWorld) -> None:
    world = make_world(2)
    world.run(call, "barrier")

    with pytest.raises(LocalProtocolError, match=r"rank 1 .* already in use by process \d+"):
        communicator_from_environment(
            {"RANK": "1", "WORLD_SIZE": "2", "RANKWISE_SEGMENT_FD": str(world.segment.fd)}
        )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", r"rank is 2, expected 0 to 1: the segment has 2 workers"),
        ("RANK", None, r"RANK is not set"),
        ("RANK", "one", r"RANK is 'one'"),
        ("WORLD_SIZE", "8", r"WORLD_SIZE is 8, but the segment joins the 2 workers"),
    ],
)
def test_an_environment_that_does_not_fit_the_segment_is_refused(
    make_world: MakeWorld, name: str, value: str | None, message: str
) -> None:
    world = make_world(2)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "RANKWISE_SEGMENT_FD": str(world.segment.fd)}
    environment = {**environment, name: value} if value else environment
    if value is None:
        del environment[name]

    with pytest.raises(ConfigError, match=message):
        communicator_from_environment(environment)


def test_every_operation_leaves_its_instant(make_world: MakeWorld) -> None:
    world = make_world(2)
    seen = [max(world.segment.marks(rank)[0] for rank in (0, 1))]
    for _ in range(3):
        world.run(call, "barrier")
        seen += [time.monotonic_ns(), max(world.segment.marks(rank)[0] for rank in (0, 1))]

    assert seen[0] == 0
    assert seen[2] < seen[1] < seen[4] < seen[3] < seen[6] < seen[5]


def add_often(communicator: Communicator, count: int) -> Any:
    from rankwise.drivers.real.futex import FutexWord  # noqa: PLC0415

    transport = communicator._transport
    assert isinstance(transport, SharedMemoryTransport)
    segment = transport._segment
    spare = segment.layout.abort_reasons
    word = FutexWord(segment.memory, spare, spare + 64)
    communicator.barrier()
    for _ in range(count):
        word.add()
    communicator.barrier()
    value = word.look()
    word.release()
    return value


def test_additions_of_several_processes_are_never_lost(make_world: MakeWorld) -> None:
    assert make_world(4).run(add_often, 20_000) == [80_000] * 4
