"""Ranks that have only a path in common: they meet, get windows, and watch each other."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.base.errors import CollectiveTimeout, ConfigError, LocalProtocolError
from rankwise.drivers.real.windows import WindowRegion
from rankwise.workers.comm import CommHandle

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("comm_rank.py")
PATIENCE_S = 60
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    ranks: list[subprocess.Popen[str]] = []

    def start_rank(
        rank: int,
        count: int,
        script: str = "meet",
        *,
        size: int = 4096,
        timeout: float = PATIENCE_S,
    ) -> "subprocess.Popen[str]":
        words = [rank, count, tmp_path / "root", size, timeout, script]
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, words)], stdout=subprocess.PIPE, text=True
            )
        )
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.kill()
        rank.communicate()
    assert list(tmp_path.iterdir()) == []


def line(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ranks_meet_at_a_path_and_see_each_others_windows(start: Start, count: int) -> None:
    ranks = [start(rank, count) for rank in range(count)]

    told = [line(rank) for rank in ranks]

    assert told == [f"met {10 + (rank - 1) % count} 4096" for rank in range(count)]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0] * count


def test_a_rank_that_is_killed_is_named_to_the_others(start: Start) -> None:
    ranks = [start(rank, 3, "stay" if rank == 1 else "wait") for rank in range(3)]
    assert [line(rank)[:3] for rank in ranks] == ["met"] * 3

    ranks[1].kill()

    for rank in (0, 2):
        told = line(ranks[rank])
        assert told.startswith(f"PeerDied barrier #2 cannot be completed on rank {rank}")
        assert f"rank 1 has ended (process {ranks[1].pid})" in told


def test_a_rank_that_dies_before_there_are_windows_is_named(start: Start) -> None:
    ranks = [start(rank, 3, "late" if rank == 2 else "meet") for rank in range(3)]
    assert line(ranks[2]) == "met"

    ranks[2].kill()

    for rank in (0, 1):
        assert line(ranks[rank]).startswith("PeerDied")


def test_who_did_not_come_is_named(start: Start) -> None:
    told = line(start(1, 4, timeout=0.2))

    assert told == (
        "CollectiveTimeout ranks 0, 2-3 did not join the communicator of 4 ranks within 200 ms"
    )


def test_two_that_claim_to_be_the_same_rank_are_told_so(start: Start) -> None:
    ranks = [start(1, 3), start(1, 3)]

    for rank in ranks:
        assert line(rank).startswith("TreeValueError rank 1 is claimed by process ")


def test_two_that_disagree_on_the_count_are_told_so(start: Start) -> None:
    ranks = [start(0, 2), start(1, 3)]

    for rank in ranks:
        assert "they meet at the same path" in line(rank)


def test_windows_of_different_sizes_are_refused_to_all(start: Start) -> None:
    ranks = [start(0, 2, size=100), start(1, 2, size=200)]

    for rank in ranks:
        assert line(rank) == (
            "TreeValueError ranks want windows of different sizes: rank 0 100, rank 1 200"
        )


def test_windows_that_cannot_be_made_are_refused_to_all(start: Start) -> None:
    ranks = [start(rank, 2, size=-1) for rank in range(2)]

    for rank in ranks:
        assert line(rank).startswith("TreeValueError window_bytes is -1, expected between 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, "x"), "nranks is 0, expected between 1 and 4096"),
        ((2, 2, "x"), "rank is 2, expected 0 to 1"),
        ((0, 1, "x", 0), "timeout is 0, expected a number of seconds"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommHandle.meet(*arguments)


def test_the_life_of_a_communicator_has_an_order(tmp_path: Path) -> None:
    with CommHandle.meet(0, 1, tmp_path / "root") as comm:
        with pytest.raises(LocalProtocolError, match=r"rank 0 has no windows yet .call alloc"):
            comm.barrier()
        base = comm.alloc_windows(5000)
        assert base < comm.local_window_base
        with pytest.raises(LocalProtocolError, match="rank 0 has windows already"):
            comm.alloc_windows(5000)
        comm.barrier()
    comm.destroy()

    with pytest.raises(LocalProtocolError, match="the communicator of rank 0 is destroyed"):
        comm.barrier()


def test_windows_that_a_tree_has_made_are_handed_out() -> None:
    with WindowRegion.create("tree", 2, 4096) as region:
        with CommHandle.within(region, 1) as comm:
            with pytest.raises(
                ConfigError, match=r"windows of 5000 bytes are wanted, .* have 4096"
            ):
                comm.alloc_windows(5000)
            assert comm.alloc_windows(4096) == region.address
            assert comm.local_window_base == region.window_address(1)
            with pytest.raises(CollectiveTimeout, match="rank 0 is missing"):
                comm.barrier(timeout=0.01)
        assert region.memory[region.window_offset(0)] == 0
