import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.drivers.real.windows import PeerWatch, WindowLayout, WindowRegion, region_bytes
from rankwise.drivers.real.windows.region import Presence


@pytest.fixture
def region() -> Iterator[WindowRegion]:
    with WindowRegion.create("tp", 3, 5000) as made:
        yield made


def test_a_region_has_no_name_and_costs_little_until_it_is_used(region: WindowRegion) -> None:
    assert region.fd is not None
    status = os.fstat(region.fd)

    assert status.st_nlink == 0
    assert status.st_blocks * 512 <= 8192
    assert Path(f"/proc/self/fd/{region.fd}").readlink().name.startswith("memfd:rankwise")
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 4096)


@pytest.mark.parametrize("rank_count", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("base", [0, 1 << 20])
def test_parts_of_the_layout_do_not_overlap(rank_count: int, base: int) -> None:
    layout = WindowLayout(rank_count, 100, 3, 1 << 16, base)
    starts = [
        layout.base, layout.presences, layout.doorbells, layout.obituaries, layout.signals,
        layout.segment.base, layout.windows, layout.base + layout.total_bytes,
    ]  # fmt: skip

    assert starts == sorted(set(starts))
    assert layout.presence(rank_count - 1) + 4 <= layout.doorbells
    assert layout.doorbell(rank_count - 1) + 64 <= layout.obituaries
    assert layout.death_reason(rank_count - 1).stop == layout.signals
    assert layout.signals % 8 == 0
    assert layout.signals + 8 * 3 * rank_count * (1 + rank_count) <= layout.segment.base
    assert layout.windows % 4096 == 0
    assert layout.window(rank_count - 1) + 100 <= layout.base + layout.total_bytes
    assert layout.total_bytes == region_bytes(rank_count, 100, 3, 1 << 16)


def test_a_region_is_found_again_by_its_descriptor(region: WindowRegion) -> None:
    assert region.fd is not None
    with WindowRegion.attach(os.dup(region.fd)) as other:
        assert (other.name, other.rank_count, other.window_bytes) == ("tp", 3, 5000)

        other.memory[other.window_offset(2)] = 42

        assert region.memory[region.window_offset(2)] == 42


def test_a_region_travels_through_a_socket(region: WindowRegion) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        region.send(ours)

        with WindowRegion.receive(theirs) as other:
            assert other.name == "tp"

        ours.sendall(b"nonsense")
        with pytest.raises(ConfigError, match="got 8 bytes and 0 descriptors"):
            WindowRegion.receive(theirs)
        ours.close()
        with pytest.raises(ConfigError, match="got 0 bytes"):
            WindowRegion.receive(theirs)


def test_a_region_in_larger_memory_cannot_be_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, region_bytes(1, 10)) as memory:
        placed = WindowRegion.place(memory, 0, "tp", 1, 10)

        with pytest.raises(LocalProtocolError, match="no descriptor of theirs"):
            placed.send(ours)


def test_addresses_are_those_of_this_process(region: WindowRegion) -> None:
    import ctypes  # noqa: PLC0415  # only here

    region.memory[region.window_offset(1)] = 7

    assert ctypes.c_ubyte.from_address(region.window_address(1)).value == 7
    assert region.window_address(1) - region.address == region.window_offset(1)


@pytest.mark.parametrize(
    ("count", "size", "message"),
    [
        (0, 1, "rank_count is 0, expected between 1 and 4096"),
        (4097, 1, "rank_count is 4097, expected"),
        (1, -1, "window_bytes is -1, expected between 0"),
    ],
)
def test_sizes_out_of_range_are_refused(count: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WindowRegion.create("tp", count, size)


def test_a_rank_out_of_range_is_refused(region: WindowRegion) -> None:
    for call in (region.mark_dead, region.window_offset, region.presence):
        with pytest.raises(ConfigError, match="rank is 3, expected 0 to 2: 'tp' has 3 ranks"):
            call(3)


def test_what_is_no_region_is_refused(region: WindowRegion, tmp_path: Path) -> None:
    assert region.fd is not None
    (tmp_path / "file").write_bytes(b"x" * 8192)
    with (tmp_path / "file").open() as file, pytest.raises(ConfigError, match="is not a region"):
        WindowRegion.attach(file.fileno())
    with pytest.raises(ConfigError, match="cannot be read as a region of windows"):
        WindowRegion.attach(1 << 20)
    with mmap.mmap(-1, 8192) as memory:
        for offset in (0, 1, -4096, 8192):
            with pytest.raises(ConfigError, match="region of windows"):
                WindowRegion.find(memory, offset)
        with pytest.raises(ConfigError, match="offset is 100, expected a whole number of pages"):
            WindowRegion.place(memory, 100, "tp", 1, 1)


@pytest.mark.parametrize(
    ("offset", "word", "message"),
    [
        (8, struct.pack("=I", 9), "has layout version 9, expected 1 .*same release"),
        (12, struct.pack("=I", 4), "claims .* it is damaged"),
    ],
)
def test_a_region_of_another_make_is_refused(
    region: WindowRegion, offset: int, word: bytes, message: str
) -> None:
    assert region.fd is not None
    region.memory[offset : offset + len(word)] = word

    with pytest.raises(ConfigError, match=message):
        WindowRegion.attach(region.fd)


def run_limited(limit: str, value: int) -> str:
    """What making a region of 1 GiB says in a process with this limit."""
    program = (
        "import resource\n"
        "from rankwise.drivers.real.windows import WindowRegion\n"
        "from rankwise.base.errors import WindowError\n"
        f"resource.setrlimit(resource.{limit}, ({value}, {value}))\n"
        "try:\n    WindowRegion.create('tp', 2, 1 << 29)\n"
        "except WindowError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("RLIMIT_NOFILE", 3, "Too many open files (raise the limit of open files (ulimit -n))"),
        ("RLIMIT_FSIZE", 1 << 20, "File too large (use smaller windows, or raise the limits"),
        ("RLIMIT_AS", 1 << 29, "Cannot allocate memory (use smaller windows, or raise the limits"),
    ],
)
def test_a_limit_of_the_system_is_told_with_what_to_do(
    limit: str, value: int, message: str
) -> None:
    told = run_limited(limit, value)

    assert told.startswith("cannot make a region of 1.006 GiB for the 2 windows of 'tp': ")
    assert message in told


def test_the_first_word_about_a_death_stays(region: WindowRegion) -> None:
    assert not region.is_dead(1)

    region.mark_dead(1, "chip 1 was killed by SIGKILL")
    region.mark_dead(1, "later rumours")
    region.mark_dead(2)

    assert region.is_dead(1)
    assert region.fate_of(1) == "has ended (chip 1 was killed by SIGKILL)"
    assert region.fate_of(2) == "has ended"


def test_a_presence_is_seen_by_all(region: WindowRegion) -> None:
    region.set_presence(1, Presence.JOINED)

    assert [region.presence(rank) for rank in range(3)] == [
        Presence.ABSENT, Presence.JOINED, Presence.ABSENT,
    ]  # fmt: skip


def test_a_region_is_closed_once_and_then_refuses(region: WindowRegion) -> None:
    region.mark_dead(0)

    region.close()
    region.close()

    with pytest.raises(LocalProtocolError, match="the windows of 'tp' are closed"):
        _ = region.memory


def test_closing_keeps_what_somebody_looks_at(region: WindowRegion) -> None:
    view = memoryview(region.memory)

    region.close()

    assert view[:8].tobytes() == b"rw-windw"


def sleeping_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def test_a_watch_marks_those_that_end_and_nobody_else(region: WindowRegion) -> None:
    children = [sleeping_child(), sleeping_child()]
    with PeerWatch(region, {0: children[0].pid, 2: children[1].pid}) as watch:
        try:
            assert watch.look() == []
            assert watch.living == [0, 2]
            children[1].kill()
            assert select.select([watch], [], [], 30)[0] == [watch]

            assert watch.look() == [2]

            assert watch.living == [0]
            assert [region.is_dead(rank) for rank in range(3)] == [False, False, True]
            assert region.fate_of(2) == f"has ended (process {children[1].pid})"
            children[0].kill()
            assert watch.wait() == [0]
            assert watch.wait() == []
        finally:
            for child in children:
                child.kill()
                child.wait()


def test_a_watch_in_a_thread_ends_with_its_owner(region: WindowRegion) -> None:
    child = sleeping_child()
    try:
        watch = PeerWatch(region, {1: child.pid})
        watch.start_thread()
        doorbell = region.doorbells[0]
        seen = doorbell.look()
        child.kill()
        deadline = time.monotonic_ns() + 30 * 10**9
        while not region.is_dead(1):
            doorbell.sleep(seen, deadline)  # type: ignore[arg-type]  # an Instant
            assert time.monotonic_ns() < deadline
        watch.close()
        watch.close()

        other = PeerWatch(region, {0: os.getpid()})
        other.start_thread()
        other.close()
        assert not region.is_dead(0)
    finally:
        child.kill()
        child.wait()


def test_who_was_gone_before_the_watch_began_is_marked_at_once(region: WindowRegion) -> None:
    child = sleeping_child()
    child.kill()
    child.wait()

    with PeerWatch(region, {1: child.pid}) as watch:
        assert region.is_dead(1)
        assert watch.living == []
