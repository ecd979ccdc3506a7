"""A transformer's MLP, tensor-parallel over all devices, against the unsharded computation.

The first layer is split by columns, the second by rows, as in Megatron-LM. One all-reduce at the
end gives the result to every rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.base.seeds import derived_seed
from rankwise.sim import parallel
from rankwise.sim.benches.bounds import Bound, roofline_of
from rankwise.sim.benches.checking import check_close
from rankwise.sim.benches.kernels import relu_kernel
from rankwise.sim.benches.measuring import ranks_result, span_of
from rankwise.sim.benches.parameters import Size
from rankwise.sim.benches.planning import algorithm_of, bound_of, check_fits, world_size_of
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.triton.dtypes import Array

TOLERANCE = 5e-3
"""Both layers round their results to f16, off by 5e-4 at most, and sums differ in order."""
_BLOCK = 1024
_MEASURED = ("KernelLaunch", "all_reduce")


def run(
    torch: Any, *, tokens: Size = 64, hidden: Size = 128, inner: Size = 256, seed: int = 0
) -> list[BenchResult]:
    """`relu(X A^T) B^T` for X of tokens x hidden, A of inner x hidden, B of hidden x inner."""
    size, begun = world_size_of(torch), len(torch.engine.op_log)
    if inner % size:
        raise ConfigError(
            f"tp_mlp: an inner of {inner} cannot be cut into {size} equal parts, one per rank",
            hint=f"--set inner={-(-inner // size) * size}, or another world_size",
        )
    check_fits(torch, 2 * hidden * (2 * inner // size + tokens), "tp_mlp")
    # Made once, since all ranks share this process, and what they cut out is their own.
    values = _values(torch, tokens, hidden, inner, seed)
    if torch.engine.enable_data:
        values.append(_unsharded(*values))
    args = (size, torch, tokens, hidden, inner, seed, values)
    torch.multiprocessing.spawn(worker, args=args, nprocs=size)
    logged = (torch.engine.op_log[at] for at in range(begun, len(torch.engine.op_log)))
    flops = 4 * tokens * hidden * inner
    moved = 2 * (2 * hidden * inner + size * 2 * tokens * hidden + 2 * tokens * inner)
    computing = roofline_of(torch.engine.topology, "f16", sips=size).bound(flops, moved)
    exchanging = bound_of(torch, "all_reduce", tokens * hidden, size, "f32")
    # The sum of the partial products cannot begin before they are there.
    bound = Bound(f"{computing.name} + {exchanging.name}", computing[1] + exchanging[1])
    time = span_of(each for each in logged if each.kind in _MEASURED)
    case = f"{tokens} x {hidden} x {inner} f16, {size} ranks"
    return [
        ranks_result(
            torch, "tp_mlp", case, time, bound, flops=flops, size=moved, begun=begun,
            algorithm=algorithm_of(torch, "all_reduce", tokens * hidden, size, "f32").name,
        )
    ]  # fmt: skip


def worker(  # noqa: PLR0917  # spawn hands arguments over by position
    rank: int,
    world_size: int,
    torch: Any,
    tokens: Size = 64,
    hidden: Size = 128,
    inner: Size = 256,
    seed: int = 0,
    values: Sequence[Array] | None = None,
) -> None:
    """What each rank does: it keeps its part of the whole weights, which `values` may give."""
    x, first, second, *expected = values or _values(torch, tokens, hidden, inner, seed)
    torch.distributed.init_process_group(rank=rank, world_size=world_size)
    parallel.initialize_model_parallel(
        tensor_model_parallel_size=torch.distributed.get_world_size()
    )
    up = parallel.ColumnParallelLinear(hidden, inner, bias=False, gather_output=False, weight=first)
    down = parallel.RowParallelLinear(
        inner, hidden, bias=False, input_is_parallel=True, weight=second
    )
    activations = up(torch.from_numpy(x, name="x"))
    count = activations.numel()
    torch.launch(relu_kernel, -(-count // _BLOCK), activations, count, BLOCK=_BLOCK)
    result = down(activations)
    if torch.engine.enable_data:
        whole = expected[0] if expected else _unsharded(x, first, second)
        check_close(f"rank {rank}", result.numpy(), whole, tolerance=TOLERANCE)
    parallel.destroy_model_parallel()


def _unsharded(x: Array, first: Array, second: Array) -> Array:
    """The block's result, by numpy alone."""
    wide = [each.astype(np.float32) for each in (x, first, second)]
    between = np.maximum(wide[0] @ wide[1].T, 0).astype(np.float16).astype(np.float32)
    return np.asarray(between @ wide[2].T)


def _values(torch: Any, tokens: int, hidden: int, inner: int, seed: int) -> list[Array]:
    """X, A and B: so large that f16 holds what comes of them without much loss.

    Where only time is simulated, arrays of these shapes that take no memory.
    """
    shapes = ((tokens, hidden), (inner, hidden), (hidden, inner))
    if not torch.engine.enable_data:
        return [np.broadcast_to(np.float16(0), shape) for shape in shapes]
    random = np.random.default_rng(derived_seed(seed, "tp_mlp"))
    scales = (1.0, *(columns**-0.5 for _, columns in shapes[1:]))
    return [
        (random.standard_normal(shape, dtype=np.float32) * scale).astype(np.float16)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
