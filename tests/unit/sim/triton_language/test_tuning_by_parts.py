"""`autotune` on a machine tries parts of a grid, and chooses what the whole grid would choose."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim.hardware.commands import KernelLaunch, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.triton import kernel_runner, tuning
from rankwise.sim.triton.kernel_runner import DevicePointer, KernelRunner


@triton.jit
def scaled(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    for turn in range(C):
        i = (tl.program_id(0) * C + turn) * B + tl.arange(0, B)
        value = tl.load(x + i, mask=i < n)
        tl.store(o + i, tl.exp(value) * 2, mask=i < n)


@triton.jit
def row_sums(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    rows = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    for start in range(0, 64, B):
        columns = start + tl.arange(0, B)
        at = rows[:, None] * 64 + columns[None, :]
        total += tl.sum(tl.load(x + at, mask=at < n, other=0.0), 1)
    tl.store(o + rows, total, mask=rows * 64 < n)


@triton.jit
def transposed(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    rows = (tl.program_id(0) // (64 // C)) * B + tl.arange(0, B)
    columns = (tl.program_id(0) % (64 // C)) * C + tl.arange(0, C)
    height = n // 64
    at = rows[:, None] * 64 + columns[None, :]
    block = tl.load(x + at, mask=at < n)
    tl.store(o + columns[:, None] * height + rows[None, :], tl.trans(block), mask=tl.trans(at < n))


@triton.jit
def triangle(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    """Programs are not equal: each has more to do than the one before."""
    number = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for block in range(0, number + 1, C):
        total += tl.load(x + block * B + tl.arange(0, B))
    tl.store(o + number * B + tl.arange(0, B), total)


@triton.jit
def product_of(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    across = 64 // C
    rows = (tl.program_id(0) // across) * B + tl.arange(0, B)
    columns = (tl.program_id(0) % across) * C + tl.arange(0, C)
    total = tl.zeros((B, C), tl.float32)
    for start in range(0, 64, 32):
        inner = start + tl.arange(0, 32)
        a = tl.load(x + rows[:, None] * 64 + inner[None, :])
        total += tl.dot(a, tl.load(y + inner[:, None] * 64 + columns[None, :]))
    tl.store(o + rows[:, None] * 64 + columns[None, :], total)


@triton.jit
def counted(x: Any, y: Any, o: Any, n: Any, B: tl.constexpr, C: tl.constexpr) -> None:
    """Programs depend on each other: there is no part of this grid."""
    i = (tl.program_id(0) * C) * B + tl.arange(0, B)
    tl.atomic_add(o, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))


BLOCKS = ((16, 1), (16, 2), (64, 1), (64, 2), (64, 4), (256, 1))
ROWS = ((16, 2), (32, 2), (64, 1), (64, 4), (64, 8), (16, 8))
TILES = ((4, 16), (8, 16), (16, 16), (16, 32), (32, 16), (32, 32))
COUNTS: dict[Any, Callable[[int, int, int], int]] = {
    scaled: lambda n, b, c: triton.cdiv(n, b * c),
    row_sums: lambda n, _b, c: triton.cdiv(n // 64, c),
    transposed: lambda n, b, c: triton.cdiv(n // 64, b) * (64 // c),
    triangle: lambda n, b, _c: n // b // 4,
    product_of: lambda n, b, c: n // 64 // b * (64 // c),
    counted: lambda n, b, c: triton.cdiv(n, b * c),
}
CASES = [
    *product((scaled,), (1_000, 2_000, 2_501), (BLOCKS[1:], BLOCKS[:0:-1])),
    *product((row_sums,), (4_096, 8_192), (ROWS, ROWS[2:])),
    *product((transposed,), (2_048, 4_096), (TILES, TILES[::-1])),
    *product((triangle,), (4_096,), (((16, 1), (32, 1), (64, 2)), ((64, 1), (32, 4)))),
    *product((product_of,), (4_096, 8_192), (TILES[2:], TILES[:1:-1])),
    *product((counted,), (2_000,), (BLOCKS[2:],)),
]  # fmt: skip


class Tuned:
    """A launch of a tuned kernel on a machine of 32 processing elements, all with memory."""

    def __init__(self, kernel: Any, n: int, choices: Any) -> None:
        self.kernel = triton.autotune(
            [triton.Config({"B": b, "C": c}) for b, c in choices], key=["n"]
        )(kernel)
        engine = GraphEngine("default")
        pointers = []
        size = triton.cdiv(4 * n, 8_192) * 8_192
        places = tuple((size // 32, cube, pe) for cube in range(4) for pe in range(8))
        for name in "xyo":
            address = engine.space(0).reserve(size)
            mapped = MmuMap(sip=0, address=address, size=size, places=places, interleave=256)
            engine.wait(engine.submit(mapped))
            pointers.append(DevicePointer(address, "float32", n, name))
        launch = KernelLaunch(
            sip=0,
            runner=KernelRunner(
                {}, lambda meta: (COUNTS[kernel](n, meta["B"], meta["C"]),)
            ),
            kernel_fn=self.kernel, kernel_args=(*pointers, n), num_programs=1,
        )  # fmt: skip
        engine.wait(engine.submit(launch))

    @property
    def chosen(self) -> tuple[int, int]:
        config = self.kernel.best_config
        assert config is not None
        return config.kwargs["B"], config.kwargs["C"]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, bool]]:
    """What is tried: on how many PEs, and whether that was the whole grid."""
    seen: list[tuple[int | None, bool]] = []
    time_alone = kernel_runner._time_alone

    def noted(*given: Any) -> tuning.Trial:
        trial = time_alone(*given)
        seen.append((given[-1], trial.is_whole))
        return trial

    monkeypatch.setattr(kernel_runner, "_time_alone", noted)
    return seen


@pytest.mark.parametrize("case", range(len(CASES)))
def test_parts_of_the_grid_choose_what_the_whole_grid_chooses(
    case: int, monkeypatch: pytest.MonkeyPatch, trials: list[tuple[int | None, bool]]
) -> None:
    kernel, n, choices = CASES[case]

    by_parts = Tuned(kernel, n, choices).chosen

    tried_whole = sum(is_whole for _part, is_whole in trials)
    monkeypatch.setattr(tuning, "_PARTS", (None,))
    assert by_parts == Tuned(kernel, n, choices).chosen
    assert trials[-len(choices) :] == [(None, True)] * len(choices)
    assert tried_whole <= len(choices)


def test_few_of_many_configurations_are_tried_on_the_whole_grid(
    trials: list[tuple[int | None, bool]],
) -> None:
    assert len(CASES) >= 20

    Tuned(scaled, 4_000, BLOCKS)

    assert 0 < sum(is_whole for _part, is_whole in trials) < len(BLOCKS)


def test_programs_that_depend_on_each_other_are_tried_all_together(
    trials: list[tuple[int | None, bool]],
) -> None:
    Tuned(counted, 2_000, BLOCKS)

    assert trials == [(1, True)] * len(BLOCKS)


def test_a_choice_that_takes_long_says_how_far_it_is_after_five_seconds() -> None:
    seconds, out = iter([0, 4, 5, 6, 11, 19, 20.5]), io.StringIO()
    progress = tuning.Progress("mm", 30, clock=lambda: next(seconds), out=out)

    for config, is_whole in enumerate((False, False, False, False, True, True)):
        progress.tried(config % 4, is_whole=is_whole)

    assert out.getvalue().splitlines() == [
        "autotune of kernel mm: 2 of 30 configurations tried, for 5 s",
        "autotune of kernel mm: 4 of 30 configurations tried, for 11 s",
        "autotune of kernel mm: 4 of 30 configurations tried, 2 on the whole grid, for 20 s",
    ]
