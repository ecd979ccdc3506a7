"""Control flow that Triton's compiler refuses is refused, and what it accepts runs.

The verdicts are those of `ASTSource.make_ir` of Triton 3.9.
"""

from typing import Any

# mypy: disable-error-code="assignment, attr-defined, has-type"
# The kernels are wrong on purpose.
import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

WHOLE: Any = tl.constexpr(value=True)


def loop_changes_type(p: Any, n: Any) -> None:
    a = 0
    for _i in range(n):
        a = a + 1.5
    tl.store(p, a)


def loop_widens(p: Any, n: Any) -> None:
    a = n
    for i in range(n):
        a = a + i.to(tl.int64)
    tl.store(p, a.to(tl.float32))


def loop_changes_shape(p: Any, n: Any) -> None:
    a = tl.zeros((1,), tl.float32)
    for _i in range(n):
        a = a + tl.zeros((4,), tl.float32)
    tl.store(p + tl.arange(0, 4), a)


def while_changes_type(p: Any, n: Any) -> None:
    a = 0
    while n > 0:
        a = a + 1.5
        n = n - 1
    tl.store(p, a)


def inner_loop_changes_type(p: Any, n: Any) -> None:
    a = 0
    for _i in range(n):
        for _j in range(n):
            a += 1.5
    tl.store(p, a)


def sides_differ(p: Any, n: Any) -> None:
    if n > 0:  # noqa: SIM108
        a = 1
    else:
        a = 1.5
    tl.store(p, a)


def sides_of_loads_differ(p: Any, n: Any) -> None:
    if n > 0:  # noqa: SIM108
        a = tl.load(p)
    else:
        a = tl.load(p).to(tl.float16)
    tl.store(p, a)


def side_that_runs_changes_type(p: Any, n: Any) -> None:
    a = 1
    if n > 0:
        a = 1.5
    tl.store(p, a)


def side_that_does_not_run_changes_type(p: Any, n: Any) -> None:
    a = 1
    if n < 0:
        a = 1.5
    tl.store(p, a)


def one_side_defines(p: Any, n: Any) -> None:
    if n > 0:
        b = tl.load(p)
    tl.store(p, b)


def loop_defines(p: Any, n: Any) -> None:
    for i in range(n):
        b = tl.load(p + i)
    tl.store(p, b)


def loop_returns(p: Any, n: Any) -> None:
    for i in range(n):
        if i > 100:
            return
    tl.store(p, 1.0)


def loop_breaks(p: Any, n: Any) -> None:
    for i in range(n):
        if i > 100:
            break
    tl.store(p, 1.0)


def loop_continues(p: Any, n: Any) -> None:
    for i in range(n):
        if i > 100:
            continue
        tl.store(p, 1.0)


def ternary_differs(p: Any, n: Any) -> None:
    a = 1 if n > 0 else 1.5
    tl.store(p, a)


def side_of_an_operation_differs(p: Any, n: Any) -> None:
    a = 1
    if n < 0:
        a = tl.exp(tl.load(p)).to(tl.float32)
    tl.store(p, a)


REFUSED = [
    (side_of_an_operation_differs, "`a` is int32, and the then side of this `if` makes it fp32"),
    (loop_changes_type, "`a` is int32, and a turn of this loop makes it fp32"),
    (loop_widens, "`a` is int32, and a turn of this loop makes it int64"),
    (loop_changes_shape, r"`a` is fp32\[1\], and a turn of this loop makes it fp32\[4\]"),
    (while_changes_type, "`a` is int32, and a turn of this loop makes it fp32"),
    (inner_loop_changes_type, "`a` is int32, and a turn of this loop makes it fp32"),
    (sides_differ, "`a` is int32, and after the other side of this `if` it is fp32"),
    (sides_of_loads_differ, "`a` is fp32, and after the other side of this `if` it is fp16"),
    (side_that_runs_changes_type, "`a` is int32, and the then side of this `if` makes it fp32"),
    (side_that_does_not_run_changes_type, "`a` is int32, and the then side"),
    (one_side_defines, "'b'.*a name ends with the loop, or the side of an `if`"),
    (loop_defines, "'b'.*a name ends with the loop, or the side of an `if`"),
    (loop_returns, "Triton has no `return` in a loop"),
    (loop_breaks, "Triton has no `break`"),
    (loop_continues, "Triton has no `continue`"),
    (ternary_differs, "one side of .* is int32, the other fp32"),
]


@pytest.mark.parametrize(
    ("kernel", "words"), REFUSED, ids=lambda each: getattr(each, "__name__", "")
)
def test_flow_that_the_compiler_refuses_is_refused_with_the_line(kernel: Any, words: str) -> None:
    with pytest.raises((triton.KernelTypeError, UnboundLocalError), match=words) as refusal:
        triton.jit(kernel)[(1,)](np.zeros(64, np.float32), 5)

    assert f"test_flow.py:{kernel.__code__.co_firstlineno}"[:-3] in str(refusal.value)


def untaken_arange(p: Any, n: Any) -> None:
    a = tl.zeros((4,), tl.float32)
    if n < 0:
        a = tl.arange(0, 4)
    tl.store(p + tl.arange(0, 4), a)


def untaken_sum(p: Any, n: Any) -> None:
    a = 1
    if n < 0:
        a = tl.sum(tl.load(p + tl.arange(0, 4)))
    tl.store(p, a)


def untaken_sum_along_an_axis(p: Any, n: Any) -> None:
    a = 1.0
    if n < 0:
        a = tl.sum(tl.load(p + tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :]), axis=0)
    tl.store(p, a)


def untaken_max(p: Any, n: Any) -> None:
    a = tl.load(p).to(tl.float16)
    if n < 0:
        a = tl.max(tl.load(p + tl.arange(0, 4)).to(tl.float16), 0)
    tl.store(p, a)


def untaken_min(p: Any, n: Any) -> None:
    a = tl.load(p).to(tl.float16)
    if n < 0:
        a = tl.load(p + tl.arange(0, 4)).to(tl.float16).min()
    tl.store(p, a)


def untaken_where(p: Any, n: Any) -> None:
    a = 1
    if n < 0:
        a = tl.where(n > 3, 1.5, 2)
    tl.store(p, a)


def untaken_broadcast(p: Any, n: Any) -> None:
    a = 1.0
    if n < 0:
        a = tl.broadcast_to(a, (4,))
    tl.store(p, a)


@pytest.mark.parametrize(
    ("kernel", "type_"),
    [
        (untaken_arange, r"int32\[4\]"),
        (untaken_sum, "fp32"),
        (untaken_sum_along_an_axis, r"fp32\[2\]"),
        (untaken_max, "fp32"),
        (untaken_min, "fp32"),
        (untaken_where, "fp32"),
        (untaken_broadcast, r"fp32\[4\]"),
    ],
)
def test_an_operation_of_a_side_that_does_not_run_has_its_type(kernel: Any, type_: str) -> None:
    with pytest.raises(triton.KernelTypeError, match=f"the then side .* makes it {type_}"):
        triton.jit(kernel)[(1,)](np.zeros(64, np.float32), 5)


def untaken_operations(p: Any, n: Any) -> None:
    at = tl.arange(0, 4)
    a, b, c, d = tl.load(p + at), 0.0, n, at < 2
    if n < 0:
        a = tl.where(at < n, tl.broadcast_to(b, (4,)), a)
        b = tl.sum(a, axis=0) + tl.max(a)
        c = tl.min(at)
        d = at[:, None].broadcast_to(4, 4).sum(1) > 1
    tl.store(p + at, a + b + c, mask=d)


@pytest.mark.parametrize("kernel", [kernel for kernel, _words in REFUSED])
def test_a_kernel_that_was_refused_is_refused_at_the_next_launch(kernel: Any) -> None:
    launched = triton.jit(kernel)

    for _launch in range(2):
        with pytest.raises((triton.KernelTypeError, UnboundLocalError)):
            launched[(1,)](np.zeros(64, np.float32), 5)


def unrolled_loop_changes_type(p: Any, n: Any) -> None:
    a = 0
    for _i in tl.static_range(3):
        a = a + 1.5
    tl.store(p, a)


def unrolled_loop_defines(p: Any, n: Any) -> None:
    for i in tl.static_range(2):
        if i == 1:
            tl.store(p, b)  # noqa: F821 (of the turn before)
        b = tl.load(p + i)
    tl.store(p, b)


def constant_decides_the_type(p: Any, n: Any) -> None:
    if WHOLE:  # noqa: SIM108
        a = 1
    else:
        a = 1.5
    b = 1 if WHOLE else 1.5
    tl.store(p, a + b)


def constant_decides_whether_there_is_a_name(p: Any, n: Any) -> None:
    if WHOLE:
        b = tl.load(p)
    if WHOLE:
        tl.store(p, b)


def name_is_local_to_one_side(p: Any, n: Any) -> None:
    if n > 0:
        b = tl.load(p)
        tl.store(p, b + 1)
    tl.store(p + 1, 1.0)


def name_is_local_to_a_body(p: Any, n: Any) -> None:
    for i in range(n):
        b = 1
        b = b + 1.5
        tl.store(p + i, b)
    b = 2
    tl.store(p, b)


def sides_agree(p: Any, n: Any) -> None:
    a = 1.0
    if n > 0:
        a = a * 2
        c = tl.load(p)
    elif n > 7:
        c = a
    else:
        c = tl.full((), 1, tl.float32)
    tl.store(p, a + c)


def both_sides_return(p: Any, n: Any) -> None:
    if n > 9:
        tl.store(p, 1.0)
        return
    tl.store(p, 2.0)


def loop_is_left_by_its_condition(p: Any, n: Any) -> None:
    i = 0
    go_on = n > 0
    while go_on:
        i += 1
        go_on = i < n
    tl.store(p, i)


@triton.jit
def exp(x: Any) -> Any:
    return tl.exp(x.to(tl.float32))


@triton.jit
def load(p: Any) -> Any:
    return tl.load(p).to(tl.float64)


@triton.jit
def cast(x: Any, type_: tl.constexpr) -> Any:
    return x.to(tl.float16)


def helpers_have_names_of_the_language(p: Any, n: Any) -> None:
    a = tl.full((), 1.0, tl.float32)
    b = tl.full((), 1.0, tl.float64)
    c = tl.full((), 1.0, tl.float16)
    if n < 0:
        a = exp(tl.load(p).to(tl.float16))
        b = load(p)
        c = cast(tl.load(p), tl.float32)
    tl.store(p, a + b + c)


ACCEPTED = [
    helpers_have_names_of_the_language, untaken_operations,
    unrolled_loop_changes_type, unrolled_loop_defines, constant_decides_the_type,
    constant_decides_whether_there_is_a_name, name_is_local_to_one_side, name_is_local_to_a_body,
    sides_agree, both_sides_return, loop_is_left_by_its_condition,
]  # fmt: skip


@pytest.mark.parametrize("kernel", ACCEPTED)
def test_flow_that_the_compiler_accepts_runs(kernel: Any) -> None:
    triton.jit(kernel)[(4,)](np.zeros(64, np.float32), 5)


def test_a_name_read_by_the_next_turn_of_a_loop_keeps_its_value() -> None:
    @triton.jit
    def kernel(p: Any, n: Any) -> None:
        before = tl.load(p)
        total = before * 0
        for i in range(n):
            total += before
            before = tl.load(p + i)
        tl.store(p, total)

    p = np.arange(1, 5, dtype=np.float32)

    kernel[(1,)](p, 4)

    assert p[0] == 1 + 1 + 2 + 3
