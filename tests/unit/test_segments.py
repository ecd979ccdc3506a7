import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.drivers.real.futex import FutexWord
from rankwise.drivers.real.segments import (
    LEDGER_MOVED_AT,
    LEDGER_SECTIONS,
    LEDGER_STEPS,
    LEDGER_WORDS,
    Segment,
    SegmentLayout,
)


def test_a_segment_has_no_name_and_costs_nothing_until_it_is_used() -> None:
    with Segment.create(64) as segment:
        status = os.fstat(segment.fd)

        assert status.st_size > 64 << 20
        assert status.st_blocks * 512 <= 4096
        assert status.st_nlink == 0
        assert Path(f"/proc/self/fd/{segment.fd}").readlink().name.startswith("memfd:rankwise")


def test_both_ends_see_the_same_memory() -> None:
    with Segment.create(2) as ours, Segment.attach(ours.fd) as theirs:
        assert theirs.layout == ours.layout

        theirs.memory[theirs.layout.slots] = 42

        assert ours.memory[ours.layout.slots] == 42


def test_parts_of_the_layout_do_not_overlap() -> None:
    for worker_count in (1, 2, 7, 64, 1000):
        layout = SegmentLayout(worker_count, 1 << 16)
        starts = [
            layout.arrivals, layout.quiet, layout.deaths, layout.withdrawals, layout.ledgers,
            layout.abort_reasons, layout.headers, layout.slots, layout.total_bytes,
        ]  # fmt: skip

        assert starts == sorted(set(starts))
        assert layout.ledgers >= layout.withdrawals + 4 * worker_count
        assert layout.header(2, worker_count - 1) < layout.slots
        assert layout.buffer(2, worker_count - 1) + layout.buffer_bytes == layout.total_bytes
        assert layout.slots % 4096 == 0


def test_a_worker_cannot_shrink_the_segment_under_the_others() -> None:
    with Segment.create(2) as segment, pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)


def test_every_buffer_has_room_for_every_worker() -> None:
    with Segment.create(1000, buffer_bytes=1) as segment:
        assert segment.layout.buffer_bytes >= 64 * 1000


@pytest.mark.parametrize("worker_count", [0, -1, 4097])
def test_a_worker_count_out_of_range_is_refused(worker_count: int) -> None:
    with pytest.raises(ConfigError, match=f"worker_count is {worker_count}, expected between 1"):
        Segment.create(worker_count)


def test_a_buffer_without_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_bytes is 0, expected at least 1"):
        Segment.create(1, buffer_bytes=0)


def test_a_closed_descriptor_is_refused() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)

    with pytest.raises(ConfigError, match=f"descriptor {fd} cannot be read as a rankwise segment"):
        Segment.attach(fd)


def test_anything_else_than_a_segment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 8192)
    with file.open("rb") as other:
        fd = other.fileno()

        with pytest.raises(ConfigError, match=f"descriptor {fd} is something else"):
            Segment.attach(fd)

    reader, writer = os.pipe()
    try:
        with pytest.raises(ConfigError, match=f"descriptor {reader} is something else"):
            Segment.attach(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_another_layout_version_is_refused() -> None:
    with Segment.create(2) as segment:
        os.pwrite(segment.fd, struct.pack("=I", 99), 8)

        with pytest.raises(ConfigError, match=r"layout version 99, expected 5 .*same release"):
            Segment.attach(segment.fd)


def test_a_segment_of_the_wrong_size_is_refused() -> None:
    with Segment.create(2) as segment:
        os.pwrite(segment.fd, struct.pack("=I", 3), 12)

        with pytest.raises(ConfigError, match=r"the segment for 3 workers has .* bytes, expected"):
            Segment.attach(segment.fd)


def test_each_worker_has_marks_that_change_when_it_goes_on() -> None:
    words = (LEDGER_MOVED_AT, LEDGER_STEPS, LEDGER_SECTIONS)
    with Segment.create(3) as ours, Segment.attach(ours.fd) as theirs:
        assert ours.marks(1) == (0, 0, 0)

        for value, word in enumerate(words, start=5):
            theirs.ledgers[LEDGER_WORDS + word] = value

        assert [ours.marks(rank) for rank in range(3)] == [(0, 0, 0), (5, 6, 7), (0, 0, 0)]


def test_marking_a_stranger_dead_is_refused() -> None:
    with (
        Segment.create(2) as segment,
        pytest.raises(ConfigError, match="local rank 2 is not one of the segment's 2 workers"),
    ):
        segment.mark_dead(2)


def test_a_segment_is_closed_once_and_then_refuses() -> None:
    segment = Segment.create(1)
    segment.mark_dead(0)
    segment.close()
    segment.close()

    with pytest.raises(LocalProtocolError, match="the segment is closed"):
        _ = segment.memory


def test_creating_a_segment_imports_nothing_heavy() -> None:
    program = (
        "import sys; from rankwise.drivers.real.segments import Segment; "
        "Segment.create(4).marks(3); "
        "print([name for name in ('ctypes', 'numpy', 'dataclasses') if name in sys.modules])"
    )

    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout

    assert output.strip() == "[]"


def now() -> Instant:
    return Instant(time.monotonic_ns())


def test_a_sleeper_is_woken_by_the_addition_that_says_so() -> None:
    with Segment.create(1) as segment:
        word = segment.arrivals
        deadline = after(now(), Duration(60 * SECOND))
        going_to_sleep, seen = threading.Event(), []

        def sleep_until_two() -> None:
            going_to_sleep.set()
            while (value := word.look()) < 2:
                word.sleep(value, deadline)
            seen.append(value)

        sleeper = threading.Thread(target=sleep_until_two)
        sleeper.start()
        going_to_sleep.wait()
        word.add()
        word.add_and_wake()
        sleeper.join()

        assert seen == [2]
        assert now() < deadline


def test_nobody_sleeps_on_a_value_that_has_changed_or_after_the_deadline() -> None:
    with Segment.create(1) as segment:
        word = segment.arrivals
        begin = now()
        word.add()

        word.sleep(0, after(begin, Duration(60 * SECOND)))
        word.sleep(1, after(begin, Duration(20 * MILLISECOND)))

        assert 20 * MILLISECOND <= now() - begin < 60 * SECOND


def test_a_ring_changes_the_value_but_not_the_count() -> None:
    with Segment.create(1) as segment:
        word = segment.arrivals
        word.add()
        before = word.look()

        word.ring()

        assert word.look() != before
        assert word.look() % (1 << FutexWord.RING_BIT) == before == 1


def test_the_word_wraps_around() -> None:
    with Segment.create(1) as segment:
        os.pwrite(segment.fd, struct.pack("=I", 0xFFFFFFFF), segment.layout.arrivals)

        segment.arrivals.add()

        assert segment.arrivals.look() == 0
