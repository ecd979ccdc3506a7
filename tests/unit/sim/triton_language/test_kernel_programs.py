"""How programs run together: divergence, waiting for one another, deadlock, races, order."""

import re
import sys
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import Deadlock


@triton.jit
def diverging_kernel(o: Any, log: Any, n: Any) -> None:
    pid = tl.program_id(0)
    tl.store(log + pid, tl.load(log + pid) + 1)
    steps = 0
    number = pid
    while number > 1:
        if number % 2 == 0:
            number //= 2
        else:
            number = number * 3 + 1
        steps += 1
    tl.store(o + pid, steps)
    if pid % 3 == 0:
        tl.store(o + pid, -1)
    tl.store(log + pid, tl.load(log + pid) + 1)


def collatz(number: int) -> int:
    steps = 0
    while number > 1:
        number = number // 2 if number % 2 == 0 else number * 3 + 1
        steps += 1
    return steps


def test_programs_that_decide_differently_each_do_their_own_and_only_once() -> None:
    out, log = np.zeros(100, np.int32), np.zeros(100, np.int32)

    diverging_kernel[(100,)](out, log, 100)

    expected = [-1 if number % 3 == 0 else collatz(number) for number in range(100)]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(log, 2)


@triton.jit
def relay_kernel(flags: Any, o: Any, n: Any) -> None:
    pid = tl.program_id(0)
    last = n - 1
    if pid < last:
        while tl.load(flags + pid + 1, volatile=True) == 0:
            pass
    tl.store(o + pid, tl.load(o + pid + 1) + 1)
    tl.atomic_xchg(flags + pid, 1)


def test_programs_that_wait_for_later_ones_finish() -> None:
    flags, out = np.zeros(40, np.int32), np.zeros(41, np.int32)

    relay_kernel[(40,)](flags, out, 40)

    np.testing.assert_array_equal(out, np.arange(40, -1, -1))


@triton.jit
def counted_barrier_kernel(counter: Any, slots: Any, o: Any, n: Any) -> None:
    pid = tl.program_id(0)
    tl.store(slots + pid, pid + 1)
    tl.atomic_add(counter, 1)
    while tl.atomic_add(counter, 0) < n:
        pass
    tl.store(o + pid, tl.load(slots + (pid + 1) % n))


def test_a_barrier_that_is_counted_in_memory_holds() -> None:
    counter, slots, out = np.zeros(1, np.int32), np.zeros(16, np.int32), np.zeros(16, np.int32)

    counted_barrier_kernel[(16,)](counter, slots, out, 16)

    np.testing.assert_array_equal(out, np.roll(np.arange(1, 17), -1))


@triton.jit
def last_one_sums_kernel(x: Any, partial: Any, ticket: Any, o: Any, B: tl.constexpr) -> None:
    pid = tl.program_id(0)
    tl.store(partial + pid, tl.sum(tl.load(x + pid * B + tl.arange(0, B)), 0))
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        tl.store(o, tl.sum(tl.load(partial + tl.arange(0, 16)), 0))


def test_the_program_with_the_last_ticket_sees_what_all_others_stored() -> None:
    x = np.arange(16 * 32, dtype=np.int32)
    partial, ticket, out = np.zeros(16, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)

    last_one_sums_kernel[(16,)](x, partial, ticket, out, B=32)

    assert out[0] == x.sum()
    assert ticket[0] == 16


@triton.jit
def ping_pong_kernel(turn: Any, o: Any) -> None:
    me = tl.program_id(0)
    for _ball in range(5):
        while tl.atomic_add(turn, 0) % 2 != me:
            pass
        tl.store(o + tl.atomic_add(turn, 0), me)
        tl.atomic_add(turn, 1)


def test_what_a_program_did_alone_before_it_had_to_wait_is_not_done_twice() -> None:
    turn, out = np.zeros(1, np.int32), np.full(10, 7, np.int32)

    ping_pong_kernel[(2,)](turn, out)

    assert out.tolist() == [0, 1] * 5
    assert turn[0] == 10


@triton.jit
def counted_flags_kernel(flags: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        seen: Any = 0
        while seen < 4:
            seen = 0
            for at in range(4):
                seen += tl.atomic_add(flags + at, 0)
        tl.store(o, 1)
    else:
        tl.atomic_xchg(flags + tl.program_id(0) - 1, 1)


@triton.jit
def block_of_flags_kernel(flags: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        while tl.sum(tl.load(flags + tl.arange(0, 4), volatile=True), 0) < 4:
            pass
        tl.store(o, 1)
    else:
        tl.atomic_xchg(flags + tl.program_id(0) - 1, 1)


@triton.jit
def wait_for(word: Any, value: Any) -> None:
    while tl.atomic_add(word, 0) < value:
        pass


@triton.jit
def waiting_helper_kernel(flags: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        wait_for(flags, 4)
        wait_for(flags, 4)
        tl.store(o, 1)
    else:
        tl.atomic_add(flags, 1)


@triton.jit
def look(word: Any) -> Any:
    return tl.load(word)


HERE: Any = sys.modules[__name__]


@triton.jit
def helper_of_module_kernel(flags: Any, o: Any) -> None:
    if tl.program_id(0) == 0:
        while HERE.look(flags) < 4:
            pass
        tl.store(o, 1)
    else:
        tl.atomic_add(flags, 1)


@pytest.mark.parametrize(
    "kernel",
    [counted_flags_kernel, block_of_flags_kernel, waiting_helper_kernel, helper_of_module_kernel],
)
def test_a_program_that_waits_lets_later_ones_run_however_it_looks(kernel: Any) -> None:
    out = np.zeros(1, np.int32)

    kernel[(5,)](np.zeros(4, np.int32), out)

    assert out[0] == 1


@triton.jit
def patient_kernel(flag: Any, o: Any, LIMIT: tl.constexpr) -> None:
    tries: Any = 0
    while (tl.load(flag, volatile=True) == 0) & (tries < LIMIT):
        tries += 1
    tl.store(o, tries)


def test_a_program_that_gives_up_after_many_looks_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flag, out = np.zeros(1, np.int32), np.zeros(1, np.int32)

    patient_kernel[(1,)](flag, out, LIMIT=2_100)

    assert out[0] == 2_100
    monkeypatch.setattr(patient_kernel, "_tries", 50)  # else it takes seconds
    with pytest.raises(Deadlock):
        patient_kernel[(1,)](flag, out, LIMIT=2_100)


@triton.jit
def forgotten_lock_kernel(lock: Any) -> None:
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass


def test_a_lock_that_is_never_released_is_reported_with_programs_and_lines() -> None:
    with pytest.raises(
        Deadlock, match=r"2 of 3 programs wait .*program \(1, 0, 0\) at .*\.py:\d+"
    ) as caught:
        forgotten_lock_kernel[(3,)](np.zeros(1, np.int32))

    assert [each.who for each in caught.value.waiting] == ["program (1, 0, 0)", "program (2, 0, 0)"]
    holder = (
        r"lock\[0\] at 0x\w+ holds 1, set by program \(0, 0, 0\) at .*test_kernel_programs.*:\d+"
    )
    assert all(re.search(holder, each.what) for each in caught.value.waiting)


@triton.jit
def locks_of_columns_kernel(lock: Any) -> None:
    column = tl.program_id(0)
    while tl.atomic_cas(lock + column, 0, 1) == 1:
        pass
    if tl.program_id(1) + tl.program_id(2) == 0:
        tl.atomic_xchg(lock + column, 0)


def test_the_holder_of_a_lock_is_named_by_its_place_in_the_grid() -> None:
    with pytest.raises(Deadlock) as caught:
        locks_of_columns_kernel[(2, 2, 2)](np.zeros(2, np.int32))

    told = {each.who: each.what for each in caught.value.waiting}
    assert sorted(told) == [
        "program (0, 0, 1)", "program (0, 1, 1)", "program (1, 0, 1)", "program (1, 1, 1)",
    ]  # fmt: skip
    assert re.search(
        r"lock\[0\] .* holds 1, set by program \(0, 1, 0\) ", told["program (0, 0, 1)"]
    )
    assert re.search(
        r"lock\[1\] .* holds 1, set by program \(1, 1, 0\) ", told["program (1, 0, 1)"]
    )


def test_a_program_reads_what_it_has_just_stored_also_through_another_argument() -> None:
    @triton.jit
    def kernel(x: Any, same: Any, B: tl.constexpr) -> None:
        i = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(x + i, tl.load(same + i) + 1)
        tl.store(same + i, tl.load(x + i) * 2)

    values = np.arange(64, dtype=np.float32)

    kernel[(4,)](values, values, B=16)

    np.testing.assert_array_equal(values, (np.arange(64) + 1) * 2)


@triton.jit(detect_races=True)
def racing_kernel(o: Any, B: tl.constexpr) -> None:
    tl.store(o + tl.arange(0, B) + tl.program_id(0) * (B // 2), 1)


def test_the_detector_names_line_element_and_both_programs() -> None:
    message = (
        r'store of element 8 of buffer "o" by program \(1, 0, 0\) races with program \(0, 0, 0\)'
    )

    with pytest.raises(triton.DataRace, match=message):
        racing_kernel[(3,)](np.zeros(64, np.int32), B=16)


@triton.jit(detect_races=True)
def locked_kernel(lock: Any, total: Any) -> None:
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + 1)
    tl.atomic_xchg(lock, 0)


def test_the_detector_accepts_what_a_lock_orders() -> None:
    total = np.zeros(1, np.int32)

    locked_kernel[(20,)](np.zeros(1, np.int32), total)

    assert total[0] == 20


@triton.jit
def float_sum_kernel(x: Any, o: Any, B: tl.constexpr) -> None:
    tl.atomic_add(o, tl.sum(tl.load(x + tl.program_id(0) * B + tl.arange(0, B)), 0))


def test_a_sum_of_floats_is_the_same_in_every_run() -> None:
    x = np.random.default_rng(1).standard_normal(64 * 256).astype(np.float32)
    sums = []

    for _run in range(3):
        out = np.zeros(1, np.float32)
        float_sum_kernel[(256,)](x, out, B=64)
        sums.append(out[0])

    assert sums[0] == sums[1] == sums[2]


def test_a_grid_of_three_axes_numbers_its_programs() -> None:
    @triton.jit
    def kernel(o: Any) -> None:
        x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
        tl.store(o + place, x + 10 * y + 100 * z)

    out = np.zeros((4, 3, 2), np.int32)

    kernel[(2, 3, 4)](out)

    z, y, x = np.indices((4, 3, 2))
    np.testing.assert_array_equal(out, x + 10 * y + 100 * z)


@triton.jit
def locked_sum_kernel(
    x: Any, locks: Any, sums: Any, tries: Any, LOCKS: tl.constexpr, B: tl.constexpr
) -> None:
    row = tl.program_id(0)
    lock, cols = locks + row % LOCKS, tl.arange(0, B)
    value = tl.load(x + row * B + cols)
    while tl.atomic_cas(lock, 0, 1) == 1:
        tl.atomic_add(tries, 1)
    mine = sums + row % LOCKS * B + cols
    tl.store(mine, tl.load(mine) + value)
    tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("locks", [1, 3, 16, 64])
def test_programs_take_a_lock_in_turn_and_never_find_it_taken(locks: int) -> None:
    x = np.random.default_rng(1).integers(0, 9, (50, 8)).astype(np.int32)
    words, sums, tries = np.zeros(locks, np.int32), np.zeros((locks, 8), np.int32), np.zeros(1, int)
    calls = []

    @triton.jit
    def counted(x: Any, locks: Any, sums: Any, tries: Any, LOCKS: tl.constexpr) -> None:
        calls.append(1)
        locked_sum_kernel(x, locks, sums, tries, LOCKS, 8)

    counted[(50,)](x, words, sums, tries, LOCKS=locks)

    expected = np.zeros_like(sums)
    np.add.at(expected, np.arange(50) % locks, x)
    np.testing.assert_array_equal(sums, expected)
    assert not words.any()
    assert tries[0] == 0
    # In groups of programs with a lock each; greenlets would have needed one call per program.
    assert locks < 16 or len(calls) < 25


def test_programs_that_find_a_lock_taken_wait_until_it_is_given_back() -> None:
    @triton.jit
    def kernel(lock: Any, o: Any) -> None:
        pid = tl.program_id(0)
        if pid == 7:
            tl.store(o, 5)
            tl.atomic_xchg(lock, 0)
        else:
            while tl.atomic_cas(lock, 0, 1) == 1:
                pass
            tl.store(o + pid + 1, tl.load(o))
            tl.atomic_xchg(lock, 0)

    lock, out = np.ones(1, np.int32), np.zeros(9, np.int32)

    kernel[(8,)](lock, out)

    np.testing.assert_array_equal(out, [5, 5, 5, 5, 5, 5, 5, 5, 0])
