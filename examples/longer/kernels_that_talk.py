"""Kernels that talk to the kernels of other ranks, each beside the same in separate steps.

rankwise sim run examples/longer/kernels_that_talk.py --topology switch8
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim import triton
from rankwise.sim.triton import distributed as dl
from rankwise.sim.triton import language as tl


@triton.jit
def one_shot_kernel(x: Any, out: Any, flags: Any, RANKS: tl.constexpr, B: tl.constexpr) -> None:
    """All-reduce: load the part from every rank, and add."""
    me, part = dl.rank(), tl.program_id(0)
    _meet(flags + part * RANKS, me, RANKS)
    places = part * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for step in range(RANKS):
        total += tl.load(dl.symm_at(x, (me + step) % RANKS) + places)
    tl.store(out + places, total)


@triton.jit
def two_shot_kernel(x: Any, out: Any, flags: Any, RANKS: tl.constexpr, B: tl.constexpr) -> None:
    """All-reduce: add one share of the part, and store the sum to every rank."""
    me, part = dl.rank(), tl.program_id(0)
    _meet(flags + part * 2 * RANKS, me, RANKS)
    share = B // RANKS
    places = part * B + me * share + tl.arange(0, B // RANKS)
    total = tl.zeros((B // RANKS,), tl.float32)
    for step in range(RANKS):
        total += tl.load(dl.symm_at(x, (me + step) % RANKS) + places)
    for step in range(RANKS):
        tl.store(dl.symm_at(out, (me + step) % RANKS) + places, total)
    _meet(flags + part * 2 * RANKS + RANKS, me, RANKS)


@triton.jit
def _meet(flags: Any, me: Any, RANKS: tl.constexpr) -> None:
    """Tell this program of every rank that it is ready, and wait for all of them."""
    for peer in range(RANKS):
        dl.notify(flags + me, peer, signal=1)
    dl.wait(flags, RANKS, scope="sys", semantic="acquire", waitValue=1)


@triton.jit
def matmul_kernel(a: Any, b: Any, c: Any, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                  TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr) -> None:  # fmt: skip
    """One column of tiles of a product."""
    column = tl.program_id(0)
    for row in range(M // TM):
        tl.store(_tile(c, row, column, N, TM, TN), _product(a, b, row, column, N, K, TM, TN, TK))


@triton.jit
def _tile(x: Any, row: Any, column: Any, WIDTH: tl.constexpr, H: tl.constexpr, W: tl.constexpr
          ) -> Any:  # fmt: skip
    rows, columns = row * H + tl.arange(0, H), column * W + tl.arange(0, W)
    return x + rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def _product(a: Any, b: Any, row: Any, column: Any, N: tl.constexpr, K: tl.constexpr,
             TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr) -> Any:  # fmt: skip
    total = tl.zeros((TM, TN), tl.float32)
    for depth in range(K // TK):
        left = tl.load(_tile(a, row, depth, K, TM, TK))
        right = tl.load(_tile(b, depth, column, N, TK, TN))
        total = tl.dot(left, right, total)
    return total


@triton.jit
def gather_matmul_kernel(
    a: Any, b: Any, c: Any, flags: Any, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """All-gather + matmul: put the own rows to the peers, and multiply rows as they come."""
    me, column = dl.rank(), tl.program_id(0)
    rows = M // RANKS
    share = rows * K // PROGRAMS
    mine = a + me * rows * K + column * share
    for step in range(1, RANKS):
        dl.putmem_signal_block(
            mine, mine, share * 2, flags + me, 1, dl.SIGNAL_ADD, (me + step) % RANKS
        )
    for step in range(RANKS):
        owner = (me + RANKS - step) % RANKS
        if step > 0:
            dl.signal_wait_until(flags + owner, dl.CMP_GE, PROGRAMS)
        for index in range(M // RANKS // TM):
            row = owner * (M // RANKS // TM) + index
            tl.store(
                _tile(c, row, column, N, TM, TN), _product(a, b, row, column, N, K, TM, TN, TK)
            )


@triton.jit
def matmul_scatter_kernel(
    a: Any, b: Any, parts: Any, out: Any, flags: Any,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Matmul + reduce-scatter: store each tile to the rank that adds it, the own ones last."""
    me, column = dl.rank(), tl.program_id(0)
    tiles = M // RANKS // TM
    for step in range(1, RANKS + 1):
        owner = (me + step) % RANKS
        there = dl.symm_at(parts, owner) + me * (M // RANKS) * N
        for index in range(tiles):
            found = _product(a, b, owner * tiles + index, column, N, K, TM, TN, TK)
            tl.store(_tile(there, index, column, N, TM, TN), found)
        dl.notify(flags + column * RANKS + me, owner, signal=1)
    dl.wait(flags + column * RANKS, RANKS, scope="sys", semantic="acquire", waitValue=1)
    for index in range(tiles):
        total = tl.zeros((TM, TN), tl.float32)
        for source in range(RANKS):
            total += tl.load(_tile(parts + source * (M // RANKS) * N, index, column, N, TM, TN))
        tl.store(_tile(out, index, column, N, TM, TN), total)


@triton.jit
def expert_kernel(x: Any, w: Any, y: Any, H: tl.constexpr, TOKENS: tl.constexpr) -> None:
    """What an expert does with a block of tokens."""
    block = tl.program_id(0)
    tl.store(_tile(y, block, 0, H, TOKENS, H), _expert(x, w, block, H, TOKENS))


@triton.jit
def _expert(x: Any, w: Any, block: Any, H: tl.constexpr, TOKENS: tl.constexpr) -> Any:
    found = tl.dot(tl.load(_tile(x, block, 0, H, TOKENS, H)), tl.load(_tile(w, 0, 0, H, H, H)))
    return tl.maximum(found, 0.0).to(tl.float16)


@triton.jit
def experts_kernel(
    x: Any, w: Any, y: Any, inbox: Any, flags: Any, H: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Dispatch, expert and combine: a block of tokens to a rank, and one from it and back."""
    me, other, block = dl.rank(), tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    mine, theirs = me * BLOCKS + block, other * BLOCKS + block
    size: tl.constexpr = TOKENS * H
    back = flags + RANKS * BLOCKS
    dl.putmem_signal_block(
        inbox + mine * size, x + theirs * size, size * 2, flags + mine, 1, dl.SIGNAL_SET, other
    )
    dl.signal_wait_until(flags + theirs, dl.CMP_EQ, 1)
    found = _expert(inbox, w, theirs, H, TOKENS)
    tl.store(_tile(dl.symm_at(y, other), mine, 0, H, TOKENS, H), found)
    dl.notify(back + mine, other, signal=1)
    dl.signal_wait_until(back + theirs, dl.CMP_EQ, 1)


@triton.jit
def _attend(q: Any, k: Any, v: Any, most: Any, total: Any, out: Any, S: tl.constexpr,
            D: tl.constexpr, T: tl.constexpr) -> Any:  # fmt: skip
    """Go on with the softmax over more keys and values."""
    for block in range(S // T):
        keys = tl.load(_tile(k, block, 0, D, T, D))
        scores = tl.dot(q, keys.trans()) * (D**-0.5)
        higher = tl.maximum(most, tl.max(scores, 1))
        weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
        total = total * shrunk + tl.sum(weights, 1)
        values = tl.load(_tile(v, block, 0, D, T, D))
        out = out * shrunk[:, None] + tl.dot(weights.to(tl.float16), values)
        most = higher
    return most, total, out


@triton.jit
def attention_kernel(q: Any, kv: Any, o: Any, S: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
                     RANKS: tl.constexpr) -> None:  # fmt: skip
    """A block of queries over the keys and values of all ranks, which have been gathered."""
    at = tl.program_id(0)
    queries = tl.load(_tile(q, at, 0, D, T, D))
    most, total = tl.full((T,), float("-inf"), tl.float32), tl.zeros((T,), tl.float32)
    out = tl.zeros((T, D), tl.float32)
    for source in range(RANKS):
        here = kv + source * 2 * S * D
        most, total, out = _attend(queries, here, here + S * D, most, total, out, S, D, T)
    tl.store(_tile(o, at, 0, D, T, D), (out / total[:, None]).to(tl.float16))


@triton.jit
def ring_attention_kernel(
    q: Any, kv: Any, o: Any, flags: Any, S: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """The same in a ring: pass keys and values on while attending to them."""
    me, at = dl.rank(), tl.program_id(0)
    share = 2 * S * D // PROGRAMS
    queries = tl.load(_tile(q, at, 0, D, T, D))
    most, total = tl.full((T,), float("-inf"), tl.float32), tl.zeros((T,), tl.float32)
    out = tl.zeros((T, D), tl.float32)
    for step in range(RANKS):
        source = (me + RANKS - step) % RANKS
        here = kv + source * 2 * S * D
        if step > 0:
            dl.signal_wait_until(flags + source, dl.CMP_GE, PROGRAMS)
        if step < RANKS - 1:
            mine = here + at * share
            dl.putmem_signal_block(
                mine, mine, share * 2, flags + source, 1, dl.SIGNAL_ADD, (me + 1) % RANKS
            )
        most, total, out = _attend(queries, here, here + S * D, most, total, out, S, D, T)
    tl.store(_tile(o, at, 0, D, T, D), (out / total[:, None]).to(tl.float16))


def drawn(name: str, rank: int, *shape: int) -> Any:
    """Random values, the same in every run."""
    random = np.random.default_rng([rank, *name.encode()])
    return random.standard_normal(shape).astype(np.float32)


class Rank:
    """What the cases need of a rank: symmetric tensors, and a stop-watch."""

    def __init__(self, torch: Any, rank: int, ranks: int) -> None:
        self.torch, self.rank, self.ranks = torch, rank, ranks
        self.symm_mem = torch.distributed._symmetric_memory  # noqa: SLF001  # torch's name

    def shared(self, *shape: int, dtype: str = "f16", name: str = "shared") -> Any:
        """Symmetric memory of zeros."""
        tensor = self.symm_mem.empty(*shape, dtype=dtype, name=name)
        self.symm_mem.rendezvous(tensor)
        return tensor

    def flags(self, count: int) -> Any:
        """Signals."""
        return self.shared(count, dtype="u64", name="flags")

    def own(self, name: str, *shape: int, dtype: str = "f16") -> Any:
        """A tensor of random values."""
        return self.torch.tensor(drawn(name, self.rank, *shape), dtype=dtype, name=name)

    def microseconds(self, work: Callable[[], object]) -> float:
        """How long it takes until all ranks are done, from a barrier on."""
        self.torch.distributed.barrier()
        start = self.torch.now
        work()
        return float(self.torch.now - start) / 1e6


Case = Callable[[Rank], tuple[float, float, Any, Any, Any]]
"""Microseconds fused and in steps, the results of both, and what is expected."""


def one_shot(at: Rank, n: int = 2_048, programs: int = 4) -> tuple[float, float, Any, Any, Any]:
    """All-reduce of a few numbers: one trip, and every rank adds all."""
    return _all_reduce(at, one_shot_kernel, n, programs, programs * at.ranks)


def two_shot(at: Rank, n: int = 32_768, programs: int = 8) -> tuple[float, float, Any, Any, Any]:
    """All-reduce of many numbers: every rank adds its share, and sends the sum."""
    return _all_reduce(at, two_shot_kernel, n, programs, programs * 2 * at.ranks)


def _all_reduce(
    at: Rank, kernel: Any, n: int, programs: int, flag_count: int
) -> tuple[float, float, Any, Any, Any]:
    x, flags = at.shared(n, dtype="f32", name="x"), at.flags(flag_count)
    out = at.shared(n, dtype="f32", name="out")
    values = drawn("x", at.rank, n)
    x.copy_(values)
    fused = at.microseconds(
        lambda: kernel[(programs,)](x, out, flags, RANKS=at.ranks, B=n // programs)
    )
    whole = at.torch.tensor(values)
    steps = at.microseconds(lambda: at.torch.distributed.all_reduce(whole))
    expected = sum(drawn("x", rank, n) for rank in range(at.ranks))
    return fused, steps, out, whole, expected


def gather_matmul(
    at: Rank, m: int = 512, n: int = 512, k: int = 256, tile: int = 64
) -> tuple[float, float, Any, Any, Any]:
    """The rows of A lie on all ranks; each rank has columns of B."""
    mine, b = at.own("a", m // at.ranks, k), at.own("b", k, n)
    a, gathered = at.shared(m, k, name="a"), at.torch.empty(m, k, dtype="f16")
    c, product = at.torch.empty(m, n), at.torch.empty(m, n)
    flags, sizes = at.flags(at.ranks), {"M": m, "N": n, "K": k, "TM": tile, "TN": tile, "TK": tile}
    own = np.zeros((m, k), np.float32)
    own[at.rank * m // at.ranks :][: m // at.ranks] = drawn("a", at.rank, m // at.ranks, k)
    a.copy_(own)
    programs = n // tile
    fused = at.microseconds(
        lambda: gather_matmul_kernel[(programs,)](
            a, b, c, flags, **sizes, RANKS=at.ranks, PROGRAMS=programs
        )
    )

    def in_steps() -> None:
        at.torch.distributed.all_gather_into_tensor(gathered, mine)
        matmul_kernel[(programs,)](gathered, b, product, **sizes)

    steps = at.microseconds(in_steps)
    rows = [_half(drawn("a", rank, m // at.ranks, k)) for rank in range(at.ranks)]
    return fused, steps, c, product, np.vstack(rows) @ _half(drawn("b", at.rank, k, n))


def matmul_scatter(
    at: Rank, m: int = 512, n: int = 256, k: int = 256, tile: int = 64
) -> tuple[float, float, Any, Any, Any]:
    """Each rank has columns of A and rows of B; each gets rows of the sum of the products."""
    a, b = at.own("a", m, k), at.own("b", k, n)
    parts, flags = at.shared(m, n, dtype="f32", name="parts"), at.flags(n // tile * at.ranks)
    out, scattered = at.torch.empty(m // at.ranks, n), at.torch.empty(m // at.ranks, n)
    product = at.torch.empty(m, n)
    sizes = {"M": m, "N": n, "K": k, "TM": tile, "TN": tile, "TK": tile}
    fused = at.microseconds(
        lambda: matmul_scatter_kernel[(n // tile,)](
            a, b, parts, out, flags, **sizes, RANKS=at.ranks
        )
    )

    def in_steps() -> None:
        matmul_kernel[(n // tile,)](a, b, product, **sizes)
        at.torch.distributed.reduce_scatter_tensor(scattered, product)

    steps = at.microseconds(in_steps)
    rows = slice(at.rank * m // at.ranks, (at.rank + 1) * m // at.ranks)
    expected = sum(
        _half(drawn("a", rank, m, k))[rows] @ _half(drawn("b", rank, k, n))
        for rank in range(at.ranks)
    )
    return fused, steps, out, scattered, expected


def experts(
    at: Rank, tokens: int = 32, hidden: int = 256, blocks: int = 4
) -> tuple[float, float, Any, Any, Any]:
    """Every rank has an expert; so many blocks of tokens go from each rank to each."""
    shape = (at.ranks * blocks * tokens, hidden)
    x, w = at.own("x", *shape), at.own("w", hidden, hidden)
    inbox, y = at.shared(*shape, name="inbox"), at.shared(*shape, name="y")
    flags = at.flags(blocks * 2 * at.ranks)
    fused = at.microseconds(
        lambda: experts_kernel[(at.ranks * blocks,)](
            x, w, y, inbox, flags, H=hidden, TOKENS=tokens, BLOCKS=blocks, RANKS=at.ranks
        )
    )
    dispatched, found, combined = (at.torch.empty(*shape, dtype="f16") for _ in range(3))

    def in_steps() -> None:
        at.torch.distributed.all_to_all_single(dispatched, x)
        expert_kernel[(at.ranks * blocks,)](dispatched, w, found, H=hidden, TOKENS=tokens)
        at.torch.distributed.all_to_all_single(combined, found)

    steps = at.microseconds(in_steps)
    of_ranks = np.split(_half(drawn("x", at.rank, *shape)), at.ranks)
    expected = [
        np.maximum(part @ _half(drawn("w", rank, hidden, hidden)), 0)
        for rank, part in enumerate(of_ranks)
    ]
    return fused, steps, y, combined, np.vstack(expected)


def ring_attention(
    at: Rank, s: int = 256, d: int = 64, tile: int = 64
) -> tuple[float, float, Any, Any, Any]:
    """Every rank has a part of the sequence, and attends to all of it."""
    q, mine = at.own("q", s, d), at.own("kv", 2 * s, d)
    kv, flags = at.shared(at.ranks * 2 * s, d, name="kv"), at.flags(at.ranks)
    own = np.zeros((at.ranks, 2 * s, d), np.float32)
    own[at.rank] = drawn("kv", at.rank, 2 * s, d)
    kv.copy_(own.reshape(-1, d))
    out, whole = at.torch.empty(s, d, dtype="f16"), at.torch.empty(s, d, dtype="f16")
    gathered = at.torch.empty(at.ranks * 2 * s, d, dtype="f16")
    sizes = {"S": s, "D": d, "T": tile, "RANKS": at.ranks}
    fused = at.microseconds(
        lambda: ring_attention_kernel[(s // tile,)](q, kv, out, flags, **sizes, PROGRAMS=s // tile)
    )

    def in_steps() -> None:
        at.torch.distributed.all_gather_into_tensor(gathered, mine)
        attention_kernel[(s // tile,)](q, gathered, whole, **sizes)

    steps = at.microseconds(in_steps)
    pairs = [np.split(_half(drawn("kv", rank, 2 * s, d)), 2) for rank in range(at.ranks)]
    keys, values = (np.vstack(each) for each in zip(*pairs, strict=True))
    scores = _half(drawn("q", at.rank, s, d)) @ keys.T * d**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return fused, steps, out, whole, weights / weights.sum(1, keepdims=True) @ values


def _half(values: Any) -> Any:
    """The values as the machine has them."""
    return values.astype(np.float16).astype(np.float32)


CASES: dict[str, Case] = {
    "one-shot all-reduce": one_shot,
    "two-shot all-reduce": two_shot,
    "all-gather + matmul": gather_matmul,
    "matmul + reduce-scatter": matmul_scatter,
    "all-to-all for experts": experts,
    "ring attention": ring_attention,
}


def compare(torch: Any, case: Case, ranks: int) -> tuple[float, float]:
    """Run a case on so many ranks; its microseconds fused and in steps. Its numbers are right."""
    found: dict[int, tuple[float, float]] = {}

    def worker(rank: int) -> None:
        fused, steps, one, other, expected = case(Rank(torch, rank, ranks))
        for result in (one, other) if torch.engine.enable_data else ():
            np.testing.assert_allclose(result.numpy(), expected, rtol=4e-3, atol=4e-2)
        found[rank] = fused, steps

    torch.multiprocessing.spawn(worker, nprocs=ranks)
    return found[0]


def run(torch: Any, *, ranks: int = 4) -> None:
    """What `rankwise sim run` calls."""
    for name, case in CASES.items():
        fused, steps = compare(torch, case, ranks)
        print(f"{name:24} {fused:8.1f} us fused {steps:8.1f} us in steps {steps / fused:6.2f} x")
