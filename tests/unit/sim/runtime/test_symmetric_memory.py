"""Symmetric memory: ranks share buffers, and their kernels talk through them."""

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException, triton
from rankwise.sim.hardware.watchpoints import Watchpoints
from rankwise.sim.runtime.multiprocessing import RanksStuck
from rankwise.sim.triton import distributed as dl
from rankwise.sim.triton import iris

EXAMPLE = runpy.run_path(str(Path(__file__).parents[4] / "examples/longer/kernels_that_talk.py"))
SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def line(mark: str) -> str:
    """The line of this file that ends with a comment."""
    (number,) = [at for at, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    return f"{__file__}:{number}"


def on_ranks(
    worker: Callable[[int, Any], object], ranks: int = 2, *, data: bool = True, **options: Any
) -> RuntimeContext:
    with RuntimeContext(GraphEngine("default", enable_data=data), ccl={}, **options) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        return torch


def shared(torch: Any, *shape: int, dtype: str = "f32", name: str = "x") -> Any:
    tensor = torch.distributed._symmetric_memory.empty(*shape, dtype=dtype, name=name)
    return tensor, torch.distributed._symmetric_memory.rendezvous(tensor)


@triton.jit
def produce(x: Any, flag: Any, B: tl.constexpr, SIGNALS: tl.constexpr) -> None:
    peer = 1 - dl.rank()
    tl.store(dl.symm_at(x, peer) + tl.arange(0, B), tl.arange(0, B) + 1.0)  # stores
    if SIGNALS:
        dl.notify(flag, peer, signal=SIGNALS)  # signals


@triton.jit
def consume(x: Any, flag: Any, out: Any, B: tl.constexpr, WAITS: tl.constexpr) -> None:
    if WAITS:
        dl.signal_wait_until(flag, dl.CMP_EQ, 7)  # waits
    tl.store(out + tl.arange(0, B), tl.load(x + tl.arange(0, B)) * 2)  # loads


def pair(
    out: list[Any], *, signals: int = 7, waits: bool = True, late: bool = False
) -> Callable[[int, Any], None]:
    """Rank 0 stores to rank 1, which waits for that, and loads."""

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 64)
        flag, _ = shared(torch, 1, dtype="u32", name="flag")
        result = torch.zeros(64)
        if rank == 0:
            if late:
                torch.zeros(8).numpy()
            produce[(1,)](x, flag, B=64, SIGNALS=signals)
        else:
            consume[(1,)](x, flag, result, B=64, WAITS=waits)
            out.append(result.numpy())

    return worker


@pytest.mark.parametrize("late", [False, True])
def test_a_store_to_a_peer_is_seen_after_its_signal_whoever_launches_first(late: bool) -> None:
    out: list[Any] = []

    on_ranks(pair(out, late=late), detect_races=True)

    np.testing.assert_array_equal(out[0], 2 * (np.arange(64) + 1))


def test_a_missing_wait_is_a_race_that_is_told_with_both_lines() -> None:
    with pytest.raises(SpawnException) as caught:
        on_ranks(pair([], waits=False), detect_races=True)

    (race,) = caught.value.errors.values()
    assert isinstance(race, triton.DataRace)
    one, other = line("stores"), line("loads")
    loads = (
        f'kernel "consume" ({other}): load of element 0 of buffer "x" by program (0, 0, 0) of rank'
        f" 1 races with program (0, 0, 0) of rank 0, which stored it at {one}"
    )
    stores = (
        f'kernel "produce" ({one}): store of element 0 of buffer "x of rank 1" by program (0, 0, 0)'
        f" of rank 0 races with program (0, 0, 0) of rank 1, which loaded it at {other}"
    )
    assert loads in str(race) or stores in str(race)
    assert "let one signal the other" in str(race.hint)


@triton.jit
def store_alike(x: Any) -> None:
    dl.rank()
    tl.store(x, tl.program_id(0))


def test_a_race_of_two_programs_of_one_rank_is_not_mended_by_signals_between_ranks() -> None:
    def worker(_rank: int, torch: Any) -> None:
        store_alike[(2,)](shared(torch, 1)[0])
        torch.synchronize()

    with pytest.raises(SpawnException) as caught:
        on_ranks(worker, detect_races=True)

    (race, *_) = caught.value.errors.values()
    assert isinstance(race, triton.DataRace)
    assert race.hint == "order them with an atomic, or give each program elements of its own"


def test_a_missing_signal_is_a_deadlock_that_names_signal_value_and_line() -> None:
    with pytest.raises(RanksStuck) as caught:
        on_ranks(pair([], signals=0))

    text = str(caught.value)
    assert "consume[0] on sip1.cube0.pe0 waits for signal flag[0] of rank 1 at 0x" in text
    assert " to be == 7: it holds 0, and no program has set it since" in text
    assert f" at {line('waits')} in consume" in text


def test_a_signal_of_another_value_is_told_with_who_has_set_it_where() -> None:
    with pytest.raises(RanksStuck) as caught:
        on_ranks(pair([], signals=6))

    setter = f"it holds 6, set by produce[0] on sip0.cube0.pe0 at {line('signals')} since"
    assert setter in str(caught.value)


@triton.jit
def atomic_flag(x: Any, flag: Any, out: Any, SCOPE: tl.constexpr, SEM: tl.constexpr) -> None:
    if dl.rank() == 0:
        tl.store(dl.symm_at(x, 1), 3.0)
        tl.atomic_xchg(dl.symm_at(flag, 1), 1, sem=SEM, scope=SCOPE)
    else:
        while tl.atomic_cas(flag, 1, 1, sem="acquire", scope=SCOPE) == 0:
            pass
        tl.store(out, tl.load(x))


@pytest.mark.parametrize(
    ("scope", "sem", "is_race"),
    [("sys", "release", False), ("gpu", "release", True), ("sys", "relaxed", True)],
)
def test_atomics_order_ranks_if_they_release_for_the_whole_system(
    scope: str, sem: str, is_race: bool
) -> None:
    out: list[float] = []

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 1)
        flag, _ = shared(torch, 1, dtype="u32", name="flag")
        result = torch.zeros(1)
        atomic_flag[(1,)](x, flag, result, SCOPE=scope, SEM=sem)
        if rank == 1:
            out.append(result.item())

    if is_race:
        with pytest.raises(SpawnException, match="races with"):
            on_ranks(worker, detect_races=True)
    else:
        on_ranks(worker, detect_races=True)
        assert out == [3.0]


def test_signals_of_the_host_order_streams_of_ranks() -> None:
    got: dict[Any, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        symm_mem = torch.distributed._symmetric_memory
        x, handle = shared(torch, 4)
        if rank == 0:
            symm_mem.put_signal(torch.tensor([1.0, 2.0, 3.0, 4.0]), handle, 1)
        else:
            symm_mem.wait_signal(handle, 0)
            got["x"] = x.tolist()
        handle.barrier(channel=2)
        got[rank] = handle.get_buffer(1, (2,), "f32", 2).tolist()

    on_ranks(worker, detect_races=True)

    assert got == {"x": [1, 2, 3, 4], 0: [3, 4], 1: [3, 4]}


@triton.jit
def through_tables(table: Any, out: Any, peer: int) -> None:
    theirs = tl.load(table + peer).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.arange(0, 4), tl.load(theirs + tl.arange(0, 4)))
    tl.atomic_add(theirs, 10.0, sem="relaxed", scope="sys")


def test_addresses_of_peers_can_be_loaded_from_a_table() -> None:
    got = {}

    def worker(rank: int, torch: Any) -> None:
        x, handle = shared(torch, 4)
        x.copy_(np.arange(4) + 100 * rank)
        table, out = torch.tensor(np.array(handle.buffer_ptrs)), torch.empty(4)
        torch.distributed.barrier()
        through_tables[(1,)](table, out, 1 - rank)
        torch.distributed.barrier()
        got[rank] = out.tolist(), x.tolist()

    on_ranks(worker)

    assert got == {
        0: ([100, 101, 102, 103], [10, 1, 2, 3]),
        1: ([0, 1, 2, 3], [110, 101, 102, 103]),
    }


def test_a_remote_load_takes_the_time_of_the_links() -> None:
    times: dict[int, int] = {}

    @triton.jit
    def load(x: Any, out: Any, peer: int, B: tl.constexpr) -> None:
        there = dl.symm_at(x, peer)
        tl.store(out + tl.arange(0, B), tl.load(there + tl.arange(0, B)))

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 16_384)
        out = torch.empty(16_384)
        for peer in (0, 1, 2):
            start = torch.now
            if rank == 0:
                load[(1,)](x, out, peer, B=16_384)
            times[peer] = times.get(peer, 0) + torch.now - start

    on_ranks(worker, ranks=4)

    # 64 KiB over a link of 50 GB/s and 500 ns; rank 2 is one link further away. Elsewhere they come
    # from many channels at once, at the 128 GB/s of the DMA engine.
    extra = 65_536 / 50e9 * 1e12 - 65_536 / 128e9 * 1e12 + 500_000
    assert times[1] - times[0] == pytest.approx(extra, rel=0.1)
    assert times[2] - times[1] == pytest.approx(500_000, rel=0.05)


def test_what_cannot_be_shared_is_refused() -> None:
    def plain(rank: int, torch: Any) -> None:
        torch.distributed._symmetric_memory.rendezvous(torch.zeros(4))

    def different(rank: int, torch: Any) -> None:
        shared(torch, 4 + rank)

    def beyond(rank: int, torch: Any) -> None:
        _, handle = shared(torch, 4)
        handle.get_buffer(1, (4,), "f32", 1)

    def channel(rank: int, torch: Any) -> None:
        shared(torch, 4)[1].barrier(channel=5_000)

    for worker, message in (
        (plain, "not symmetric memory"),
        (different, r"rank 1 of the group has \(5,\) f32, and rank 0 has \(4,\) f32"),
        (beyond, "end at byte 20, and it has 16"),
        (channel, "channel 5000: the signal pad of 9216 bytes has channels 0 to 1151 for 2 ranks"),
    ):
        with pytest.raises(SpawnException, match=message) as caught:
            on_ranks(worker)
        assert all(isinstance(each, LocalProtocolError) for each in caught.value.errors.values())


@triton.jit
def lonely(x: Any) -> None:
    dl.notify(x, 0)


def test_an_ordinary_launch_has_no_peers() -> None:
    with pytest.raises(triton.Unsupported, match="notify needs ranks on a simulated machine"):
        lonely[(1,)](np.zeros(1, np.int32))


SMALL: dict[str, dict[str, int]] = {
    "one-shot all-reduce": {"n": 512, "programs": 2},
    "two-shot all-reduce": {"n": 2_048, "programs": 4},
    "all-gather + matmul": {"m": 128, "n": 64, "k": 64, "tile": 32},
    "matmul + reduce-scatter": {"m": 128, "n": 64, "k": 32, "tile": 32},
    "all-to-all for experts": {"tokens": 16, "hidden": 32, "blocks": 2},
    "ring attention": {"s": 64, "d": 32, "tile": 32},
}


@pytest.mark.parametrize("name", EXAMPLE["CASES"])
def test_fused_kernels_give_the_numbers_of_numpy_and_race_with_nobody(name: str) -> None:
    def case(at: Any) -> Any:
        return EXAMPLE["CASES"][name](at, **SMALL[name])

    with RuntimeContext(GraphEngine("default"), ccl={}, detect_races=True) as torch:
        EXAMPLE["compare"](torch, case, 4)


def test_puts_are_under_way_while_the_same_pe_multiplies() -> None:
    def case(at: Any) -> Any:
        return EXAMPLE["gather_matmul"](at, m=256, n=64, k=128, tile=64)

    with RuntimeContext(GraphEngine("default", enable_data=False), ccl={}) as torch:
        fused, steps = EXAMPLE["compare"](torch, case, 4)
        log = [each for each in torch.engine.op_log if each.place == "sip0.cube0.pe0"]

    puts = [each for each in log if each.name == "gather_matmul_kernel.put"]
    first, *_, last = (each for each in log if each.name == "gather_matmul_kernel.dot")
    assert len(puts) == 3
    assert all(put.start < last.end and first.start < put.end for put in puts)
    assert fused < steps


@triton.jit
def in_the_words_of_iris(x: Any, flag: Any, out: Any) -> None:
    me = dl.rank()
    i, peer = tl.arange(0, 4), 1 - me
    iris.put(x + 4 + i, x + i, me, peer, None)
    iris.store(x + 8, 40.0 + me, me, peer, None)
    iris.atomic_add(flag, 1, me, peer, None, sem="release", scope="sys")
    while tl.atomic_cas(flag, 1, 1, sem="acquire", scope="sys") == 0:
        pass
    tl.store(out + i, tl.load(x + i))
    iris.get(x + 8, out + 4, me, peer, None)
    tl.store(out + 5, iris.load(x + 4, me, peer, None, mask=None))


def test_the_words_of_iris_reach_the_rank_that_they_name() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 9)
        flag, _ = shared(torch, 1, dtype="i32", name="flag")
        x.copy_(np.array([0, 0, 0, 0, 1, 2, 3, 4, 0]) * (rank + 1))
        out = torch.empty(6)
        in_the_words_of_iris[(1,)](x, flag, out)
        got[rank] = out.tolist()

    on_ranks(worker, detect_races=True)

    assert got == {0: [2, 4, 6, 8, 40, 2], 1: [1, 2, 3, 4, 41, 1]}


@triton.jit
def bulk(x: Any, flag: Any, N: tl.constexpr) -> None:
    if dl.my_pe() == 0:
        dl.put(x + 2, x, N, 1)
        dl.signal_op(flag, 5, dl.SIGNAL_ADD, 1)
        dl.signal_wait_until(flag, dl.CMP_GE, 1)
        dl.get(x, x + 3, 1, 1)
        dl.get_nbi(x + 1, x + 4, 1, 1)
        dl.quiet()
    else:
        dl.signal_wait_until(flag, dl.CMP_GT, 4)
        tl.store(x + 3, tl.load(x + 2) + 70.0)
        dl.notify(flag, 0, signal=1, sig_op="add")


def test_bulk_copies_and_counting_signals() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 5)
        flag, _ = shared(torch, 1, dtype="u64", name="flag")
        x.copy_(np.array([7, 8, 9, 10, 11]) * (1 - rank))
        bulk[(1,)](x, flag, N=3)
        got[rank] = x.tolist()

    on_ranks(worker, detect_races=True)

    assert got == {0: [77, 9, 9, 10, 11], 1: [0, 0, 7, 77, 9]}


@triton.jit
def nonblocking(x: Any, flag: Any, N: tl.constexpr) -> None:
    """Rank 0 puts what rank 1 waits for and brings back, in Triton-distributed's words."""
    if dl.my_pe() == 0:
        dl.putmem_nbi_block(x + N, x, 4, 1)
        dl.putmem_signal_nbi_block(x + N + 1, x + 1, 4 * (N - 1), flag, 1, dl.NVSHMEM_SIGNAL_SET, 1)
    else:
        dl.signal_wait_until(flag, dl.NVSHMEM_CMP_EQ, 1)
        dl.getmem_nbi_block(x, x, 4 * N, 0)
        dl.quiet()
        tl.store(x, tl.load(x) + tl.load(x + N))


def test_copies_that_do_not_wait_have_come_at_their_signal_or_when_it_is_quiet() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 4)
        flag, _ = shared(torch, 1, dtype="u64", name="flag")
        x.copy_(np.array([7, 8, 0, 0]) * (1 - rank))
        nonblocking[(1,)](x, flag, N=2)
        got[rank] = x.tolist()

    on_ranks(worker, detect_races=True)

    assert got == {0: [7, 8, 0, 0], 1: [14, 8, 7, 8]}


@triton.jit
def wrong(x: Any, flag: Any, HOW: tl.constexpr) -> None:
    if HOW == "rank":
        dl.notify(flag, 2)
    if HOW == "private":
        dl.symm_at(x, 1)
    if HOW == "operation":
        dl.notify(flag, 1, sig_op="mul")
    if HOW == "semantic":
        dl.wait(flag, 1, semantic="relaxed")
    if HOW == "size":
        dl.put(flag, flag, 5, 1)
    if HOW == "beyond":
        dl.wait(flag + 4, 1)
    if HOW == "compare":
        dl.signal_wait_until(flag, 9, 1)
    if HOW == "barrier":
        dl.barrier_all_block()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("rank", '"flag" at rank 2: flag has no part at rank 2: its group has 2 ranks'),
        ("private", '"x" at rank 1: address 0x.* is not in symmetric memory'),
        ("operation", "notify has sig_op='mul': it is 'set' or 'add'"),
        ("semantic", "wait has semantic='relaxed': it is 'acquire' or 'acq_rel'"),
        ("size", 'put of 20 bytes: buffer "flag" has 16 from element 0 on'),
        ("beyond", 'wait: element 4 is outside of buffer "flag", which has 4 elements of uint32'),
        ("compare", "signal_wait_until has cmp=9"),
        (
            "barrier",
            r"wrong.*distributed\.barrier_all_block is not emulated: make a barrier of sig",
        ),
    ],
)
def test_misuse_in_a_kernel_is_told_with_what_was_expected(how: str, message: str) -> None:
    def worker(rank: int, torch: Any) -> None:
        flag, _ = shared(torch, 4, dtype="u32", name="flag")
        wrong[(1,)](torch.zeros(4, name="x"), flag, HOW=how)

    with pytest.raises(SpawnException, match=message):
        on_ranks(worker)


@triton.autotune([triton.Config({"B": 1}), triton.Config({"B": 2})], key=[])
@triton.jit
def tuned(flag: Any, B: tl.constexpr) -> None:
    dl.notify(flag, B - 1)


def test_an_autotuner_says_that_it_tries_kernels_without_peers() -> None:
    def worker(rank: int, torch: Any) -> None:
        tuned[(1,)](shared(torch, 4, dtype="u32")[0])

    with pytest.raises(SpawnException, match="an autotuner tries it without peers"):
        on_ranks(worker)


def test_a_rank_that_has_returned_is_told_beside_the_signal_that_it_never_sent() -> None:
    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 64)
        flag, _ = shared(torch, 1, dtype="u32", name="flag")
        if rank == 1:
            consume[(1,)](x, flag, torch.zeros(64), B=64, WAITS=True)

    with pytest.raises(RanksStuck) as caught:
        on_ranks(worker)

    assert "rank 0 has returned" in str(caught.value)
    assert "signal flag[0] of rank 1" in str(caught.value)


@triton.jit
def two_views(whole: Any, part: Any, out: Any) -> None:
    tl.store(out, tl.load(dl.symm_at(whole, 1) + 2))
    tl.store(out + 1, tl.load(dl.symm_at(part, 1)))


def test_views_of_one_allocation_are_told_apart_at_a_peer() -> None:
    got = {}

    def worker(rank: int, torch: Any) -> None:
        x, handle = shared(torch, 4)
        x.copy_(np.arange(4) + 10 * rank)
        out = torch.empty(2)
        torch.distributed.barrier()
        two_views[(1,)](x, handle.get_buffer(rank, (2,), "f32", 2), out)
        got[rank] = out.tolist()

    on_ranks(worker)

    assert got == {0: [12, 12], 1: [12, 12]}


@pytest.mark.parametrize(("ranks", "n", "kind"), [(4, 1_000, "f32"), (3, 513, "f16")])
def test_all_reduces_of_torchs_operations_can_follow_each_other(
    ranks: int, n: int, kind: str
) -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, n, dtype=kind)
        x.copy_(np.arange(n) % 7 + rank)
        ops = torch.ops.symm_mem
        once = ops.one_shot_all_reduce(x, "sum", "world")
        ops.two_shot_all_reduce_(x, "sum", "world")
        got[rank] = once.numpy(), x.numpy(), ops.one_shot_all_reduce(x).numpy()

    on_ranks(worker, ranks=ranks, detect_races=True)

    total = ranks * (np.arange(n) % 7) + sum(range(ranks))
    for once, in_place, twice in got.values():
        np.testing.assert_array_equal(once, total)
        np.testing.assert_array_equal(in_place, total)
        np.testing.assert_array_equal(twice, ranks * total)


@pytest.mark.parametrize(("kind", "large"), [("i32", 16_777_217), ("f64", 1e9), ("i64", 1 << 60)])
def test_sums_are_as_exact_as_their_type(kind: str, large: float) -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 4, dtype=kind)
        x.copy_(np.full(4, 1 if rank else large, x.kind.storage))
        once = torch.ops.symm_mem.one_shot_all_reduce(x)
        torch.ops.symm_mem.two_shot_all_reduce_(x)
        got[rank] = once.tolist(), x.tolist()

    on_ranks(worker)

    assert got == {rank: ([large + 1] * 4, [large + 1] * 4) for rank in range(2)}


@triton.jit
def store_to_one(x: Any) -> None:
    tl.store(dl.symm_at(x, 1), 5.0)


@triton.jit
def load_here(x: Any, out: Any) -> None:
    tl.store(out, tl.load(x))


def test_a_rank_that_launches_when_another_has_ended_is_another_program() -> None:
    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 1)
        out = torch.zeros(1)
        if rank == 0:
            store_to_one[(1,)](x)
        else:
            torch.zeros(1 << 16).numpy()  # meanwhile, rank 0's kernel ends
            load_here[(1,)](x, out)

    with pytest.raises(SpawnException, match="races with"):
        on_ranks(worker, detect_races=True)


@triton.jit
def take_the_flag(x: Any, flag: Any, out: Any, HOW: tl.constexpr) -> None:
    i = tl.arange(0, 2)
    if dl.rank() == 0:
        there = dl.symm_at(flag, 1)
        tl.store(dl.symm_at(x, 1), 5.0)
        if HOW == "scope":
            tl.atomic_xchg(there, 1)
        if HOW == "mask":
            tl.atomic_xchg(there + i, 1, mask=i < 1, scope="sys")
        if HOW == "swap":
            tl.atomic_cas(there + 1, 7, 1, scope="sys")  # it holds 0
        tl.atomic_xchg(there, 1, sem="relaxed", scope="sys")
    elif HOW == "scope":
        while tl.atomic_add(flag, 0) == 0:
            pass
        tl.atomic_xchg(flag, 0)
        tl.store(out, tl.load(x))
    else:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") == 0:
            pass
        tl.atomic_add(flag + 1, 0, scope="sys")
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("how", ["scope", "mask", "swap"])
def test_an_atomic_orders_only_for_its_scope_and_where_it_writes(how: str) -> None:
    def worker(rank: int, torch: Any) -> None:
        x, _ = shared(torch, 1)
        flag, _ = shared(torch, 2, dtype="i32", name="flag")
        take_the_flag[(1,)](x, flag, torch.zeros(1), HOW=how)

    with pytest.raises(SpawnException, match="races with"):
        on_ranks(worker, detect_races=True)


@triton.jit
def flag_in_a_table(tables: Any, x: Any, flag: Any, out: Any) -> None:
    if dl.rank() == 0:
        theirs = tl.load(tables + 1).to(tl.pointer_type(tl.float32))
        word = tl.load(tables + 3).to(tl.pointer_type(tl.int32))
        tl.store(theirs, 5.0)
        tl.atomic_xchg(word, 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(out, tl.load(x))


def test_a_flag_whose_address_is_a_number_orders_as_well() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        x, one = shared(torch, 1)
        flag, other = shared(torch, 1, dtype="i32", name="flag")
        tables = torch.tensor(np.array(one.buffer_ptrs + other.buffer_ptrs))
        out = torch.zeros(1)
        flag_in_a_table[(1,)](tables, x, flag, out)
        got[rank] = out.item()

    on_ranks(worker, detect_races=True)

    assert got[1] == 5


def test_an_allocation_is_shared_in_one_group() -> None:
    same: list[bool] = []

    def again(rank: int, torch: Any) -> None:
        x, handle = shared(torch, 4)
        symm_mem = torch.distributed._symmetric_memory
        same.append(all(symm_mem.rendezvous(x, group) is handle for group in (None, "0", "world")))
        symm_mem.rendezvous(x, torch.distributed.new_group([0, 1]))

    def other(rank: int, torch: Any) -> None:
        group = torch.distributed.new_group([1, 2])
        x, _ = shared(torch, 4)
        if rank:
            torch.distributed._symmetric_memory.rendezvous(x, group)

    def reduced(rank: int, torch: Any) -> None:
        torch.distributed.new_group([1, 2])
        torch.ops.symm_mem.one_shot_all_reduce(shared(torch, 4)[0], "sum", "group 0")

    def unknown(rank: int, torch: Any) -> None:
        torch.distributed._symmetric_memory.rendezvous(shared(torch, 4)[0], "tp")

    on_ranks(again, ranks=2)
    assert same == [True, True]
    for worker, message in (
        (other, r"rendezvous of x in group 0 \(ranks 1-2\): it is shared in world \(ranks 0-2\)"),
        (reduced, r"one_shot_all_reduce of x in group 0 .*: it is shared in world"),
        (unknown, "group 'tp': there is no such group"),
    ):
        with pytest.raises(SpawnException, match=message):
            on_ranks(worker, ranks=3)


@triton.jit
def two_sizes(part: Any, whole: Any, out: Any, B: tl.constexpr) -> None:
    i = tl.arange(0, B)
    few = tl.sum(tl.load(dl.symm_at(part, 1) + tl.arange(0, 4)))
    tl.store(out + i, tl.load(dl.symm_at(whole, 1) + i) + few)


def test_views_of_one_address_have_their_own_sizes_at_a_peer() -> None:
    got = {}

    def worker(rank: int, torch: Any) -> None:
        x, handle = shared(torch, 64)
        x.fill_(rank + 1)
        out = torch.empty(64)
        torch.distributed.barrier()
        two_sizes[(1,)](handle.get_buffer(rank, (4,), "f32"), x, out, B=64)
        got[rank] = out.tolist()

    on_ranks(worker)

    assert got == {0: [10] * 64, 1: [10] * 64}


def test_an_all_reduce_has_as_many_programs_as_the_signal_pad_has_words_for() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        torch.distributed._symmetric_memory.set_signal_pad_size(64)
        x, _ = shared(torch, 16_384)
        x.fill_(1)
        torch.ops.symm_mem.two_shot_all_reduce_(x)
        got[rank] = torch.ops.symm_mem.one_shot_all_reduce(x).tolist()

    def too_small(rank: int, torch: Any) -> None:
        torch.distributed._symmetric_memory.set_signal_pad_size(28)
        torch.ops.symm_mem.one_shot_all_reduce(shared(torch, 4)[0])

    on_ranks(worker, ranks=4)
    assert all(each == [16] * 16_384 for each in got.values())
    with pytest.raises(SpawnException, match="of 4 ranks needs 32 bytes of the signal pad of x"):
        on_ranks(too_small, ranks=4)


@triton.jit
def negative(flag: Any) -> None:
    dl.notify(flag, 0, signal=-1)


def test_a_signal_that_its_word_cannot_hold_is_refused() -> None:
    def worker(rank: int, torch: Any) -> None:
        negative[(1,)](shared(torch, 1, dtype="u32")[0])

    with pytest.raises(SpawnException, match="signal=-1: a word of uint32 holds 0 to 4294967295"):
        on_ranks(worker)


@triton.jit
def take_flag(flag: Any, out: Any) -> None:
    dl.wait(flag, 1, scope="sys", semantic="acquire", waitValue=1)
    tl.store(out, tl.load(flag) + 0.0)


@triton.jit
def spin_for_flag(flag: Any, out: Any) -> None:
    while tl.load(flag, volatile=True) == 0:
        pass
    tl.store(out, 1.0)


@pytest.mark.parametrize("how", ["host", "collective"])
@pytest.mark.parametrize("kernel", [take_flag, spin_for_flag])
def test_what_is_written_without_a_kernel_wakes_one_that_waits(kernel: Any, how: str) -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any) -> None:
        flag, handle = shared(torch, 1, dtype="u32", name="flag")
        out, waiting, writing = torch.zeros(1), torch.Stream(), torch.Stream()
        if rank == 1:
            with torch.stream(waiting):
                kernel[(1,)](flag, out)
        with torch.stream(writing):
            torch.zeros(4_096)  # takes time: the kernel waits by now
            if how == "collective":
                torch.distributed.broadcast(flag if rank else torch.ones(1, dtype="u32"), src=0)
            elif rank == 0:
                handle.get_buffer(1, (1,), "u32").fill_(1)
        waiting.synchronize()
        got[rank] = out.tolist()

    on_ranks(worker)

    assert got == {0: [0], 1: [1]}


def test_a_flag_that_the_host_sets_is_seen_where_only_time_is_simulated() -> None:
    def worker(rank: int, torch: Any) -> None:
        flag, handle = shared(torch, 1, dtype="u32", name="flag")
        handle.get_buffer(1 - rank, (1,), "u32").fill_(1)
        take_flag[(1,)](flag, torch.zeros(1))
        torch.synchronize()

    on_ranks(worker, data=False)


@triton.jit
def fetch(x: Any, out: Any, QUIET: tl.constexpr) -> None:
    peer = 1 - dl.rank()
    dl.get_nbi(out, x, 4, peer)  # copies
    if QUIET:
        dl.quiet()
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(out + at) * 2)  # uses


def test_the_use_of_a_copy_before_quiet_is_a_race() -> None:
    got: dict[int, Any] = {}

    def worker(rank: int, torch: Any, *, quiet: bool) -> None:
        x, _ = shared(torch, 4)
        x.fill_(rank + 1)
        out = torch.zeros(4, name="out")
        torch.distributed.barrier()
        fetch[(1,)](x, out, QUIET=quiet)
        got[rank] = out.tolist()

    on_ranks(partial(worker, quiet=True), detect_races=True)
    assert got == {0: [4] * 4, 1: [2] * 4}

    with pytest.raises(SpawnException) as caught:
        on_ranks(partial(worker, quiet=False), detect_races=True)

    (first, *_) = caught.value.errors.values()
    race = str(first)
    assert "wait for the copy first: quiet()" in race
    assert f'({line("uses")}): load of element 0 of buffer "out" by program (0, 0, 0)' in race
    assert "races with a copy begun by program (0, 0, 0) of rank" in race
    assert f"which stored it at {line('copies')}" in race


def test_symmetric_memory_that_is_freed_takes_its_signal_pad_with_it() -> None:
    told: dict[int, str] = {}

    def worker(rank: int, torch: Any) -> None:
        symm_mem = torch.distributed._symmetric_memory
        space = torch.engine.space(rank)
        before = len(space.mappings())
        for _ in range(3):
            x, handle = shared(torch, 64)
            handle.barrier()
            torch.synchronize()
            torch.distributed.barrier()
            x.free()
            torch.synchronize()
            assert not symm_mem.is_symm_mem_tensor(x)
            assert len(space.mappings()) == before
        try:
            symm_mem.rendezvous(x)
        except LocalProtocolError as error:
            told[rank] = str(error)

    context = on_ranks(worker)

    assert told == dict.fromkeys((0, 1), "x was used after it was freed")
    module = context.distributed._symmetric_memory
    assert (module._own, module._handles, module._arrived) == ({}, {}, {})


def test_a_change_wakes_who_watches_its_bytes_and_who_watches_all() -> None:
    simulator = GraphEngine("default").simulator
    points = Watchpoints()
    names = ("first", "second", "across", "all")
    first, second, across, everything = (simulator.future(name) for name in names)
    points.watch(first, 64, 4)
    points.watch(second, 4_096, 8)
    points.watch(across, 70, 4)
    points.watch_everything(everything)

    points.changed(72, 8)

    assert (first.is_done, second.is_done) == (False, False)
    assert (across.is_done, everything.is_done) == (True, True)

    points.changed(0, 1 << 20)

    assert (first.is_done, second.is_done) == (True, True)
