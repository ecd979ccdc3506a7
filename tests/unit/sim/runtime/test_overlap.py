"""Which commands overlap with a collective: fixed at the call, rank by rank.

Every pattern is timed, and compared with a closed form of two durations that are measured alone: of
a kernel that keeps one GEMM engine busy and moves nothing (`c`), and of an all-reduce (`m`). They
share no engine, so that only their order decides.
"""

from collections.abc import Callable
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext, triton

LAYERS = 3


@triton.jit
def busy_kernel(steps: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Keep the GEMM engine of one PE busy."""
    block = tl.zeros((64, 64), tl.float16)
    total = tl.zeros((64, 64), tl.float32)
    for _ in range(steps):
        total = tl.dot(block, block, total)


class Program:
    """What a pattern is written in."""

    def __init__(self, torch: RuntimeContext, steps: int) -> None:
        self.torch = torch
        self.dist = torch.distributed
        self.steps = steps
        self.x = [torch.ones(1 << 16, dtype="f16") for _ in range(LAYERS + 1)]
        self.halves = [self.dist.new_group([0, 1]), self.dist.new_group([2, 3])]
        self.half = self.halves[self.dist.get_rank() // 2]
        self.side, self.other_side = torch.Stream(), torch.Stream()

    def compute(self) -> None:
        self.torch.launch(busy_kernel, 1, steps=self.steps)

    def reduce(self, layer: int = 0, **options: Any) -> Any:
        return self.dist.all_reduce(self.x[layer], **options)

    def begin(self, layer: int = 0, **options: Any) -> Any:
        return self.reduce(layer, async_op=True, **options)


def compute_alone(program: Program) -> None:
    program.compute()


def reduce_alone(program: Program) -> None:
    program.reduce()


def reduce_in_half_alone(program: Program) -> None:
    program.reduce(group=program.half)


def begun_before(program: Program) -> None:
    work = program.begin()
    program.compute()
    work.wait()


def begun_after(program: Program) -> None:
    program.compute()
    program.begin().wait()


def waited_in_between(program: Program) -> None:
    work = program.begin()
    program.compute()
    work.wait()
    program.compute()


def waited_at_once(program: Program) -> None:
    program.begin().wait()
    program.compute()


def computed_in_another_stream(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
    program.reduce()
    program.side.synchronize()


def begun_behind_a_kernel_of_its_stream(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
        work = program.begin()
        program.compute()
    work.wait()
    program.side.synchronize()


def begun_behind_another_stream(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
    program.other_side.wait_stream(program.side)
    with program.torch.stream(program.other_side):
        program.begin().wait()


def begun_behind_what_another_stream_waits_for(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
    program.other_side.wait_stream(program.side)
    third = program.torch.Stream()
    third.wait_stream(program.other_side)
    with program.torch.stream(third):
        program.begin().wait()


def begun_behind_an_event(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
        event = program.side.record_event()
        program.compute()
    program.other_side.wait_event(event)
    with program.torch.stream(program.other_side):
        work = program.begin()
    work.wait()
    program.side.synchronize()


def begun_before_its_stream_waits(program: Program) -> None:
    with program.torch.stream(program.side):
        program.compute()
    with program.torch.stream(program.other_side):
        work = program.begin()
    program.other_side.wait_stream(program.side)
    work.wait()


def several_handles(program: Program) -> None:
    works = [program.begin(layer) for layer in range(LAYERS)]
    program.compute()
    for work in reversed(works):
        work.wait()


def disjoint_groups(program: Program) -> None:
    work = program.begin(group=program.half)
    program.compute()
    work.wait()


def a_group_then_the_world(program: Program) -> None:
    program.reduce(group=program.half)
    work = program.begin(1)
    program.compute()
    work.wait()


def message_alone(program: Program) -> None:
    mine, theirs, peer = *program.x[:2], program.dist.get_rank() ^ 1
    for work in (program.dist.isend(mine, peer), program.dist.irecv(theirs, peer)):
        work.wait()


def messages_begun_before(program: Program) -> None:
    mine, theirs, peer = *program.x[:2], program.dist.get_rank() ^ 1
    works = program.dist.isend(mine, peer), program.dist.irecv(theirs, peer)
    program.compute()
    for work in works:
        work.wait()


def called_later_by_one_rank(program: Program) -> None:
    if program.dist.get_rank() == 1:
        program.compute()
        program.begin().wait()
    else:
        work = program.begin()
        program.compute()
        work.wait()


def a_host_read_in_between(program: Program) -> None:
    work = program.begin()
    program.compute()
    float(program.x[1][0])  # of another tensor, like a loss that is printed
    program.compute()
    work.wait()


def a_host_read_alone(program: Program) -> None:
    float(program.x[1][0])


def data_parallel(program: Program) -> None:
    """As DDP: the gradients of a layer are reduced while those of the next are computed."""
    works = []
    for layer in range(LAYERS):
        program.compute()
        works.append(program.begin(layer))
    for work in works:
        work.wait()


def fully_sharded(program: Program) -> None:
    """As FSDP: the weights of the next layer are fetched while a layer is computed."""
    works = [program.begin(0)]
    for layer in range(LAYERS):
        works.append(program.begin(layer + 1))
        works[layer].wait()
        program.compute()
    works[LAYERS].wait()


def duration(pattern: Callable[[Program], None], steps: int) -> int:
    """Picoseconds that a pattern takes on four SIPs in a ring."""
    took = []

    def worker(_rank: int, torch: RuntimeContext) -> None:
        program = Program(torch, steps)
        torch.distributed.barrier()
        start = torch.now
        pattern(program)
        took.append(torch.now - start)

    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4)
    assert len(set(took)) == 1
    return took[0]


Alone = dict[str, int]

PATTERNS: list[tuple[Callable[[Program], None], Callable[[Alone], int]]] = [
    (begun_before, lambda t: max(t["c"], t["m"])),
    (begun_after, lambda t: t["c"] + t["m"]),
    (waited_in_between, lambda t: max(t["c"], t["m"]) + t["c"]),
    (waited_at_once, lambda t: t["m"] + t["c"]),
    (computed_in_another_stream, lambda t: max(t["c"], t["m"])),
    (begun_behind_a_kernel_of_its_stream, lambda t: t["c"] + max(t["c"], t["m"])),
    (begun_behind_another_stream, lambda t: t["c"] + t["m"]),
    (begun_behind_what_another_stream_waits_for, lambda t: t["c"] + t["m"]),
    (begun_behind_an_event, lambda t: t["c"] + max(t["c"], t["m"])),
    (begun_before_its_stream_waits, lambda t: t["m"]),
    (several_handles, lambda t: max(t["c"], LAYERS * t["m"])),
    (disjoint_groups, lambda t: max(t["c"], t["half"])),
    (a_group_then_the_world, lambda t: t["half"] + max(t["c"], t["m"])),
    (messages_begun_before, lambda t: max(t["c"], t["message"])),
    (called_later_by_one_rank, lambda t: t["c"] + t["m"]),
    (a_host_read_in_between, lambda t: max(2 * t["c"] + t["read"], t["m"])),
    (data_parallel, lambda t: t["c"] + (LAYERS - 1) * max(t["c"], t["m"]) + t["m"]),
    (fully_sharded, lambda t: t["m"] + LAYERS * max(t["c"], t["m"])),
]


@pytest.fixture(scope="module", params=[10, 200], ids=["short kernel", "long kernel"])
def alone(request: pytest.FixtureRequest) -> Alone:
    """What the parts take on their own: with a kernel that is shorter, or longer."""
    parts = {
        "c": compute_alone,
        "m": reduce_alone,
        "half": reduce_in_half_alone,
        "message": message_alone,
        "read": a_host_read_alone,
    }
    times = {name: duration(part, request.param) for name, part in parts.items()}
    return times | {"steps": request.param}


def test_one_kernel_is_shorter_than_the_collective_and_one_longer(alone: Alone) -> None:
    assert (
        (alone["c"] < 0.7 * alone["m"]) if alone["steps"] == 10 else (alone["c"] > 2 * alone["m"])
    )


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS, ids=lambda each: each.__name__)
def test_a_pattern_takes_as_long_as_its_closed_form_says(
    alone: Alone, pattern: Callable[[Program], None], expected: Callable[[Alone], int]
) -> None:
    assert duration(pattern, alone["steps"]) == pytest.approx(expected(alone), rel=0.002)


def test_a_stream_that_only_waits_remembers_no_more_than_what_is_under_way() -> None:
    with RuntimeContext(GraphEngine("default", enable_data=False), ccl={}) as torch:
        side = torch.Stream()
        for _ in range(20):
            torch.launch(busy_kernel, 1, steps=1)
            side.wait_stream(torch.default_stream())
        assert side.tail() == ()
        with torch.stream(torch.Stream()):
            torch.launch(busy_kernel, 1, steps=1)
            running = torch.current_stream()
        side.wait_stream(running)
        side.wait_stream(running)

        assert side.tail() == (running.last,)
