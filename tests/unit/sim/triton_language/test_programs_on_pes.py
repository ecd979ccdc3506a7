"""Which PE a program runs on: a free one takes the next."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import Deadlock
from rankwise.sim import GraphEngine, RuntimeContext

PES = 32


def turns(count: Any, a: Any, width: Any) -> None:
    i = tl.arange(0, width)
    x = tl.load(a + i[:, None] * width + i[None, :])
    s = tl.zeros((width, width), tl.float32)
    for _ in range(count):
        s = tl.dot(x, x, s)
    tl.store(a + i[:, None] * width + i[None, :], s.to(tl.float16))


def busy(a: Any, n: Any, width: tl.constexpr) -> None:
    turns(n, a, width)


def uneven(a: Any, n: Any, every: Any, width: tl.constexpr) -> None:
    turns(n if tl.program_id(0) % every == 0 else 1, a, width)


def time(*launches: tuple[Any, int, tuple[int, ...]]) -> tuple[int, GraphEngine]:
    """Picoseconds that launches on streams of their own take; kernel, programs and numbers."""
    engine = GraphEngine("default", enable_data=False)
    with RuntimeContext(engine=engine, ccl={}) as torch:
        tensors = [torch.empty((64, 64), dtype="f16") for _ in launches]
        start = torch.now
        for tensor, (kernel, programs, numbers) in zip(tensors, launches, strict=True):
            with torch.stream(torch.Stream()):
                torch.launch(kernel, programs, tensor, *numbers, width=64)
        torch.synchronize()
        return torch.now - start, engine


def places(engine: GraphEngine) -> list[str]:
    """Where the products were calculated."""
    return sorted({each.place for each in engine.op_log if each.kind == "dot"})


def test_kernels_of_one_program_on_two_streams_take_as_long_as_the_longer_one() -> None:
    alone, _ = time((busy, 1, (40,)))

    both, engine = time((busy, 1, (40,)), (busy, 1, (20,)))

    assert both == pytest.approx(alone, rel=0.03)
    assert places(engine) == ["sip0.cube0.pe0", "sip0.cube0.pe1"]


def test_programs_of_which_every_eighth_is_longer_take_what_list_scheduling_gives() -> None:
    long, _ = time((busy, 1, (50,)))
    short, _ = time((busy, 1, (1,)))

    whole, _ = time((uneven, 32, (50, 8)), (uneven, 32, (50, 8)))

    assert whole <= 1.03 * (long + 2 * short)


def test_programs_queue_in_order_when_no_pe_is_free() -> None:
    alone, _ = time((busy, PES, (20,)))

    twice, engine = time((busy, 2 * PES, (20,)))

    assert twice == pytest.approx(2 * alone, rel=0.1)
    assert len(places(engine)) == PES


def waits_for_the_last(flag: Any, out: Any) -> None:
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:
        tl.atomic_xchg(flag, 1)
    else:
        while tl.atomic_cas(flag, 1, 1) != 1:
            pass
    tl.store(out + program, program + 1)


def test_programs_that_spin_on_the_last_of_64_let_it_run() -> None:
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as torch:
        flag, out = torch.zeros(1, dtype="i32"), torch.zeros(64, dtype="i32")

        torch.launch(waits_for_the_last, 64, flag, out)

        np.testing.assert_array_equal(out.numpy(), np.arange(1, 65))


def passes_on(out: Any) -> None:
    program = tl.program_id(0)
    block = tl.zeros((4,), tl.float32) + 1
    if program < tl.num_programs(0) - 1:
        block += tl.recv(program + 1, 4, tl.float32)
    if program:
        tl.send(program - 1, block)
    else:
        tl.store(out + tl.arange(0, 4), block)


def test_programs_that_are_addressed_keep_their_pe_and_find_each_other() -> None:
    """Also beside a kernel that has the first PE."""
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as torch:
        out, other = torch.zeros(4), torch.zeros((64, 64), dtype="f16")
        with torch.stream(torch.Stream()):
            torch.launch(busy, 1, other, 20, width=64)

        torch.launch(passes_on, PES, out)

        assert out.tolist() == [float(PES)] * 4


def fails_first(flag: Any) -> None:
    tl.device_assert(tl.program_id(0) > 0, "the first one fails")
    tl.atomic_add(flag, 1)


def test_programs_that_queue_behind_one_that_fails_do_not_begin() -> None:
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as torch:
        flag = torch.zeros(1, dtype="i32")

        with pytest.raises(AssertionError, match="the first one fails"):
            torch.launch(fails_first, 4 * PES, flag)

        assert flag.item() < PES
        torch.launch(busy, PES, torch.zeros((64, 64), dtype="f16"), 1, width=64)


def waits_in_vain(flag: Any) -> None:
    while tl.atomic_cas(flag, 1, 1) != 1:
        pass


def test_deadlock_report_names_programs_that_wait_without_a_seat() -> None:
    context = RuntimeContext(engine=GraphEngine("default"), ccl={})

    with context as torch, pytest.raises(Deadlock) as caught:
        torch.launch(waits_in_vain, 40, torch.zeros(1, dtype="i32"))

    assert any(each.who.startswith("waits_in_vain[39] on sip0") for each in caught.value.waiting)
