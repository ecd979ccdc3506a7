"""What holds a run of several ranks back, in cases whose answer is known from their arithmetic."""

from collections.abc import Callable
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with
from rankwise.sim.benches.spending import Spending, held_back_by, spending_of

ONE_CUBE = {"sip.cubes.shape": "[1, 1]"}
SIZE = 1 << 16
Program = Callable[[int, Any], None]


def products(x: Any, count: Any) -> None:
    """Products of one tile with itself: the GEMM engine is busy almost all the time."""
    tile = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    block = tl.load(x + tile)
    total = tl.zeros((64, 64), tl.float32)
    for _ in range(count):
        total = tl.dot(block, block, total)
    tl.store(x + tile, total.to(tl.float16))


def doubling(x: Any, y: Any) -> None:
    """Each element is loaded, doubled and stored."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + at, tl.load(x + at) * 2)


def exponentials(x: Any, count: Any) -> None:
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = tl.load(x + at).to(tl.float32)
    for _ in range(count):
        values = tl.exp(values)
    tl.store(x + at, values.to(tl.float16))


def spent(
    program: Program, ranks: int = 1, *, ccl: dict[str, Any] | None = None, **fields: str
) -> Spending:
    """What a run spent its time with; `pe_dma_…` is `pe.dma.…`."""
    topology = topology_with("default", {**ONE_CUBE, **fields})
    engine = GraphEngine(topology, enable_data=False)
    with RuntimeContext(engine=engine, ccl=ccl or {}) as torch:
        torch.multiprocessing.spawn(program, args=(torch,), nprocs=ranks)
        torch.synchronize()
        found = spending_of(torch)
        assert held_back_by(engine) == held_back_by(torch) == found.held_back_by
    return found


def tile(torch: Any) -> Any:
    return torch.empty((64, 64), dtype="f16")


def reducing(elements: int) -> Program:
    def program(_rank: int, torch: Any) -> None:
        torch.distributed.all_reduce(torch.empty(elements, dtype="f16"))

    return program


def doubling_all(_rank: int, torch: Any) -> None:
    x, y = (torch.empty(SIZE, dtype="f16") for _ in range(2))
    torch.launch(doubling, SIZE // 1024, x, y)


def raising(_rank: int, torch: Any) -> None:
    torch.launch(exponentials, SIZE // 1024, torch.empty(SIZE, dtype="f16"), 20)


def small_kernels(_rank: int, torch: Any) -> None:
    x = tile(torch)
    for _ in range(10):
        torch.launch(products, 1, x, 1)


def waves_of(programs: int) -> Program:
    def program(_rank: int, torch: Any) -> None:
        torch.launch(products, programs, tile(torch), 200)

    return program


def uneven(rank: int, torch: Any) -> None:
    x, gradient = tile(torch), torch.empty(1024, dtype="f16")
    for _ in range(3):
        torch.launch(products, 1, x, 100 if rank else 300)
        torch.distributed.all_reduce(gradient)


def uneven_without_meeting(rank: int, torch: Any) -> None:
    torch.launch(products, 1, tile(torch), 100 if rank else 400)


def stages(rank: int, torch: Any) -> None:
    distributed, x, sent = torch.distributed, tile(torch), []
    activations = [torch.empty(1024, dtype="f16") for _ in range(2)]
    for each in activations:
        if rank:
            distributed.recv(each, rank - 1)
        torch.launch(products, 1, x, 200)
        if rank < 3:
            sent.append(distributed.isend(each, rank + 1))
    for work in sent:
        work.wait()


@pytest.mark.parametrize(("program", "ranks", "fields", "cause"), [
    pytest.param(reducing(1 << 16), 4, {"ccl": {"defaults": {"n_slots": 1, "slot_size": 256}}},
                 "credits", id="a slot for each queue"),
    pytest.param(reducing(1 << 17), 4, {"system.sips.link.bandwidth_GBps": "5"}, "links",
                 id="slow wires"),
    pytest.param(doubling_all, 2, {"cube.hbm.bandwidth_GBps": "10"}, "HBM", id="slow memory"),
    pytest.param(doubling_all, 2, {"pe.dma.setup_ns": "3000"}, "DMA", id="slow set-up of DMA"),
    pytest.param(doubling_all, 1, {"pe.dma.bandwidth_GBps": "4"}, "DMA", id="narrow DMA"),
    pytest.param(raising, 2, {}, "math", id="exponentials"),
    pytest.param(reducing(1 << 16), 4, {"pe.math.elements_per_cycle.f16": "1"}, "math",
                 id="slow sums of a collective"),
    pytest.param(small_kernels, 2, {"system.host.command_ns": "5000"}, "launch",
                 id="small kernels"),
    pytest.param(waves_of(9), 1, {}, "wave tail", id="nine equal programs on eight PEs"),
    pytest.param(uneven, 4, {}, "imbalance of ranks", id="a straggler before a collective"),
    pytest.param(uneven_without_meeting, 4, {}, "imbalance of ranks", id="a straggler alone"),
    pytest.param(stages, 4, {}, "pipeline bubble", id="four stages, two microbatches"),
    pytest.param(waves_of(8), 2, {}, "", id="as many equal programs as PEs"),
])  # fmt: skip
def test_run_is_held_back_by_what_was_made_scarce(
    program: Program, ranks: int, fields: dict[str, Any], cause: str
) -> None:
    found = spent(program, ranks, **fields)

    assert found.held_back_by[0] == cause
    assert found.work + sum(found.lost.values()) == pytest.approx(1, abs=0.01)


def test_share_of_a_pipeline_bubble_is_that_of_its_law() -> None:
    stage_count, microbatches = 4, 2

    found = spent(stages, stage_count)

    bubble = (stage_count - 1) / (microbatches + stage_count - 1)
    assert found.lost["pipeline bubble"] == pytest.approx(bubble, abs=0.03)


def test_share_of_an_imbalance_is_what_the_others_wait() -> None:
    found = spent(uneven, 4)

    # Three of four ranks wait for two thirds of the time.
    assert found.lost["imbalance of ranks"] == pytest.approx(3 / 4 * 2 / 3, abs=0.05)


def test_two_collectives_on_one_wire_are_held_back_by_it_though_credits_run_out() -> None:
    def program(_rank: int, torch: Any) -> None:
        distributed = torch.distributed
        groups = [distributed.new_group([0, 1]) for _ in range(2)]
        tensors = [torch.empty(1 << 17, dtype="f16") for _ in groups]
        works = [
            distributed.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        for work in works:
            work.wait()

    assert spent(program, 2).held_back_by[0] == "links"


def test_nothing_holds_a_run_back_that_has_not_begun() -> None:
    assert spent(lambda _rank, _torch: None) == Spending(0.0, {})
