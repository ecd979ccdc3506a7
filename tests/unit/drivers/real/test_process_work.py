"""What /proc tells of this process, its threads and its children."""

import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rankwise.base.units import MILLISECOND
from rankwise.drivers.real.process_work import (
    ProcessWork,
    cpu_wait_of,
    work_beside_this_thread,
    works_of,
)

ENOUGH_NS = 60 * MILLISECOND
BURN = f"""
import sys, time
while time.thread_time_ns() < {ENOUGH_NS}: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def compute() -> None:
    end_at = time.thread_time_ns() + ENOUGH_NS
    while time.thread_time_ns() < end_at:
        pass


def look() -> ProcessWork:
    return works_of([os.getpid()])[os.getpid()]


def helpers_since(before: ProcessWork) -> int:
    now = look().helper_times
    return sum(time - before.helper_times.get(key, 0) for key, time in now.items())


def test_the_main_threads_time_is_told_apart() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = look()

    compute()

    # The kernel counts what runs at ticks, and when it stops running.
    assert look().main_time - before.main_time > ENOUGH_NS // 2
    assert os.getpid() not in look().helper_times


def test_a_process_that_shares_its_cpu_has_waited_for_it() -> None:
    cpus = os.sched_getaffinity(0)
    before = cpu_wait_of(os.getpid())
    if before is None:
        pytest.skip("this kernel does not count for how long a process waits for a CPU")

    os.sched_setaffinity(0, {min(cpus)})
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", BURN], stdin=subprocess.PIPE) as other:
            compute()
            other.communicate()
    finally:
        os.sched_setaffinity(0, cpus)

    waited = cpu_wait_of(os.getpid())
    assert waited is not None
    assert waited - before > ENOUGH_NS // 10
    assert cpu_wait_of(other.pid) is None


def test_other_threads_are_helpers() -> None:
    before, has_computed, may_end = look(), threading.Event(), threading.Event()

    def work() -> None:
        compute()
        has_computed.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    has_computed.wait()
    computed = helpers_since(before)
    may_end.set()
    thread.join()

    assert computed > ENOUGH_NS // 2


def test_a_thread_can_be_the_main_one_and_who_asks_counts_for_nothing() -> None:
    may_begin, has_computed, may_end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        may_begin.wait()
        compute()
        has_computed.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    main = thread.native_id or 0
    before = work_beside_this_thread(main)
    may_begin.set()
    has_computed.wait()
    compute()
    Path(__file__).read_bytes()
    now = work_beside_this_thread(main)
    may_end.set()
    thread.join()

    assert before is not None
    assert now is not None
    assert now.main_time - before.main_time > ENOUGH_NS // 2
    assert not {main, threading.get_native_id()} & now.helper_times.keys()
    assert now.byte_count - before.byte_count < Path(__file__).stat().st_size
    until = (
        time.monotonic() + 10
    )  # Python joins a thread a moment before the kernel is done with it
    while Path(f"/proc/self/task/{main}").exists() and time.monotonic() < until:
        time.sleep(0.001)
    assert work_beside_this_thread(main) is None, "it has ended"


def test_children_are_helpers_while_they_live_and_afterwards() -> None:
    before = look()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", BURN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        while_alive = helpers_since(before)
        assert child.stdin is not None
        child.stdin.close()
        child.wait()

    assert while_alive > ENOUGH_NS // 2
    assert helpers_since(before) > ENOUGH_NS // 2


def test_a_process_that_a_shell_has_left_in_the_background_is_a_helper(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "end")
    left = shlex.join([sys.executable, "-S", "-c", BURN]) + f" < {tmp_path / 'end'} &"
    program = f"import os, sys; os.system({left!r}); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        with (tmp_path / "end").open("wb"):
            leader.stdout.readline()
            helpers = works_of([leader.pid])[leader.pid].helper_times
        leader.communicate()

    assert max(helpers.values()) > ENOUGH_NS // 2


def test_bytes_are_counted(tmp_path: Path) -> None:
    before = look().byte_count

    (tmp_path / "checkpoint").write_bytes(bytes(1 << 20))

    assert look().byte_count - before >= 1 << 20


@pytest.mark.parametrize("name", [b"pt_nccl_watchdg", b"NCCL Progress 0"])
def test_threads_that_watch_a_librarys_calls_are_no_helpers(name: bytes) -> None:
    number, may_end = [0], threading.Event()
    is_named = threading.Event()

    def watch() -> None:
        number[0] = threading.get_native_id()
        Path(f"/proc/self/task/{number[0]}/comm").write_bytes(name)
        is_named.set()
        may_end.wait()

    thread = threading.Thread(target=watch)
    thread.start()
    is_named.wait()
    helpers = look().helper_times
    may_end.set()
    thread.join()

    assert number[0] not in helpers


def test_who_has_ended_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()

    assert works_of([child.pid]) == {}
