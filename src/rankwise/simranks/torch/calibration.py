"""Measures what a calibration needs: a program of some ranks, on a CPU with gloo or GPUs with NCCL.

`rankwise calibrate` runs it and reads the file that rank 0 writes. GPUs do not compete: rank 0
measures operations while the others wait. Ranks of a CPU share its caches, memory and clock, as
they do in training, so all measure the same operation at the same time. Products and elementwise
operations get tensors that no cache holds, as weights and their gradients are in training.
Collectives, and the hooks of DTensors and FSDP, come after computations in training: processors
have gone to sleep meanwhile, and caches hold other things. So a CPU measures them that way. Each
figure is the median of a few batches, within a share of the budget. The least would be what a
processor does in its best moment: its clock and its neighbours let that of a virtual CPU vary by a
factor of two.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise.simranks.prediction.machines.calibration import (
    Attention,
    Elementwise,
    MeasuredCollective,
    MeasuredProduct,
    Measurements,
    progress_of,
)

_SHAPES = (
    (32, 512, 512), (128, 512, 1536), (256, 768, 768), (192, 1024, 640), (512, 512, 512),
    (384, 384, 1536), (640, 1280, 896), (96, 2048, 2048), (1536, 768, 512),
    (16, 1024, 2048), (2048, 16, 1024), (48, 2048, 1024), (1536, 64, 1536),
)  # fmt: skip
"""Rows, inner dimension and columns of products on a CPU. Few rows, and few columns of what a
gradient is the product of, tell what reading and writing matrices takes."""
_SHAPES_OF_GPUS = (
    *(
        (rows, inner, columns)
        for rows in (1024, 4096, 8192)
        for inner, columns in ((2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192))
    ),
    (128, 4096, 4096), (512, 8192, 1024), (64, 8192, 8192),
)  # fmt: skip
_SIZES = tuple(4 << power for power in range(10, 24, 2))
_SIZES_OF_GPUS = tuple(4 << power for power in range(14, 30, 2))
_COLLECTIVES = tuple(1 << power for power in range(10, 25, 2))
_COLLECTIVES_OF_GPUS = tuple(1 << power for power in range(10, 31, 2))
_BATCHES = 5
_CHAIN, _LAYERS = 50, 4
"""So many operations, and layers, tell what one takes of the host."""
_ROWS, _WIDTH = 64, 1280
"""Of these layers: their weights leave no cache as it was."""
_BEFORE = ((128, 512, 1536),) * 2
"""The products that ranks compute before each collective."""
_COLLECTIVES_MAX = 40
_COLD_BYTES = 96 << 20
"""So much memory lies between two uses of a tensor that no cache should hold."""
_OVERLAPPED_BYTES = 8 << 20
_MAPPED_BYTES = 48 << 20
# torch 2.13 renames them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_PATIENCE = timedelta(minutes=5)


def main(words: Sequence[str]) -> None:
    """Measure, and let rank 0 write a file: its path, and seconds."""
    path, seconds = words[0], float(words[1])
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=_PATIENCE)
    is_first = dist.get_rank() == 0
    meter = _Meter(
        has_gpu=has_gpu, seconds=seconds, progress=progress_of(Path(path)) if is_first else None
    )
    measured = _operations(meter) if is_first or not has_gpu else None
    dist.barrier()
    meter.is_together = True
    collectives = _collectives(meter) if dist.get_world_size() > 1 else []
    shared = _share_of_processor(meter) if collectives and not has_gpu else None
    if measured is not None and is_first:
        whole = msgspec.structs.replace(
            measured, collectives=collectives, shared=shared, late=lateness(meter.late)
        )
        Path(path).write_bytes(msgspec.json.encode(whole))
    dist.barrier()
    dist.destroy_process_group()


class _Meter:
    """Measures within a budget.

    Attributes:
        device: where tensors lie.
        slice: seconds for one figure.
        is_together: whether all ranks measure the same.
        late: of each collective in training, how long ranks had computed, and how much longer than
            it took they were in it.
    """

    def __init__(self, *, has_gpu: bool, seconds: float, progress: Path | None) -> None:
        self.has_gpu = has_gpu
        self.device = "cuda" if has_gpu else "cpu"
        self.shapes = _SHAPES_OF_GPUS if has_gpu else _SHAPES
        self.dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
        self.sizes = _SIZES_OF_GPUS if has_gpu else _SIZES
        self.collective_sizes = _COLLECTIVES_OF_GPUS if has_gpu else _COLLECTIVES
        count = 2 * len(self.shapes) + 3 * len(self.sizes) + 3 * len(self.collective_sizes) + 21
        self.slice = seconds / count
        self._count, self._done, self._progress = count, 0, progress
        self.is_together = not has_gpu
        self._pools: dict[torch.dtype, Tensor] = {}
        self.late: list[tuple[float, float]] = []

    def seconds_of(self, run: Callable[[], object]) -> float:
        """How long one call takes."""
        run()
        once = self._batch(run, 1)
        if self.is_together:  # so many calls as the slowest rank has time for
            slowest = torch.tensor(once, device=self.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            once = slowest.item()
        times = max(1, min(1_000, round(self.slice / _BATCHES / max(once, 1e-7))))
        figure = statistics.median(self._batch(run, times) for _ in range(_BATCHES))
        self._note_figure()
        return figure

    def seconds_in_training(self, run: Callable[[], object]) -> float:
        """How long a collective takes from when its last rank has come.

        On a CPU each rank has computed before. How late the last one is goes to `late`.
        """
        if self.has_gpu:
            return self.seconds_of(run)
        works = [_product(self, torch.float32, *shape) for shape in _BEFORE]

        def once() -> tuple[float, float]:
            begun = time.perf_counter()
            for work in works:
                work()
            computed = time.perf_counter()
            run()
            return computed - begun, time.perf_counter() - computed

        once()
        whole = torch.tensor(sum(once()))
        dist.all_reduce(whole, dist.ReduceOp.MAX)  # so many calls as the slowest rank has time for
        times = max(_BATCHES, min(_COLLECTIVES_MAX, round(self.slice / whole.item())))
        spent = torch.tensor([once() for _ in range(times)])
        least, mean = spent.clone(), spent
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        self.late += zip(mean[:, 0].tolist(), (mean - least)[:, 1].tolist(), strict=True)
        self._note_figure()
        return float(least[:, 1].median())

    def launch_seconds(self, run: Callable[[], object]) -> float:
        """How long the host needs for a call that it does not wait for."""
        run()
        self.wait()
        spent = []
        for _ in range(50):
            begun = time.perf_counter()
            run()
            spent.append(time.perf_counter() - begun)
        self.wait()
        return statistics.median(spent)

    def cold_pool(self, dtype: torch.dtype) -> Tensor:
        """Numbers of which no cache holds all."""
        pool = self._pools.get(dtype)
        if pool is None:
            pool = self._pools[dtype] = torch.randn(_COLD_BYTES // 4).to(dtype)
        return pool

    def wait(self) -> None:
        """Let the device finish."""
        if self.has_gpu:
            torch.cuda.synchronize()

    def _note_figure(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress.write_text(f"{min(self._done, self._count)} {self._count}", "ascii")

    def meet(self) -> None:
        """Let all ranks begin at the same time, if they measure the same."""
        if self.is_together:
            dist.barrier()

    def _batch(self, run: Callable[[], object], times: int) -> float:
        self.meet()
        self.wait()
        begun = time.perf_counter()
        for _ in range(times):
            run()
        self.wait()
        return (time.perf_counter() - begun) / times


def _operations(meter: _Meter) -> Measurements:
    device = meter.device
    small, few = torch.ones(16, device=device), [torch.ones(16, device=device) for _ in range(32)]
    matrix = torch.ones(16, 16, device=device)
    empty = meter.seconds_of(lambda: small.add_(1))
    heads = torch.ones(1, 1, 16, 16, device=device)
    launches = {
        "view": meter.launch_seconds(lambda: matrix.view(-1)),
        "plain": meter.launch_seconds(lambda: small.add_(1)),
        "attention": meter.launch_seconds(
            lambda: functional.scaled_dot_product_attention(heads, heads, heads)
        ),
        "foreach": meter.launch_seconds(lambda: torch._foreach_add_(few, 1)),
    }
    # Hooks of FSDP and DTensors are Python: so many plain launches as profilers show.
    launches |= dict.fromkeys(("fsdp", "dtensor", "collective"), 8 * launches["plain"])
    if not meter.has_gpu:
        # The host carries the smallest operation out itself: what it takes is counted once.
        empty /= 2
        launches["plain"] = max(_launch_in_training() - empty, 1e-7)
        launches["dtensor"], launches["dtensor_update"] = _dtensor_seconds()
        launches["fsdp"] = max(_fsdp_seconds(), 1e-7)
    return Measurements(
        device=torch.cuda.get_device_name() if meter.has_gpu else _processor(),
        software=f"torch {torch.__version__}, {dist.get_backend()}",
        sms=torch.cuda.get_device_properties().multi_processor_count if meter.has_gpu else 1,
        memory_bytes=torch.cuda.mem_get_info()[1] if meter.has_gpu else _memory(),
        is_queueing=meter.has_gpu,
        ranks=dist.get_world_size(),
        empty=empty,
        launches=launches,
        products=[
            MeasuredProduct(
                dtype=name, rows=rows, inner=inner, columns=columns,
                seconds=meter.seconds_of(_product(meter, dtype, rows, inner, columns)),
            )
            for name, dtype in meter.dtypes.items()
            for rows, inner, columns in meter.shapes
        ],
        attention=_attention(meter),
        elementwise=_elementwise(meter),
        collectives=[],
        new_pages=None if meter.has_gpu else _new_pages(meter),
        functions=None if meter.has_gpu else _functions(meter),
    )  # fmt: skip


def _launch_in_training() -> float:
    """What an operation takes of its host, with autograd: most have a node, and run backward."""
    weight = torch.ones(16, requires_grad=True)

    def train() -> None:
        value = weight
        for _ in range(_CHAIN):
            value = value * 1.5
        value.backward(torch.ones(16))

    return _host_seconds(train) / (2 * _CHAIN)


def _dtensor_seconds() -> tuple[float, float]:
    """What an operation on a DTensor takes of its host: of layers, and of an optimizer.

    Both are the cost beyond that of plain tensors of the same shapes, divided by the operations.
    That of layers has what their hooks do.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    given = torch.ones(_ROWS, _WIDTH)
    part = _WIDTH // size
    split = nn.Sequential(*(nn.Linear(part * size, part * size) for _ in range(2 * _LAYERS)))
    plain = nn.Sequential()
    for _ in range(_LAYERS):
        plain.extend([nn.Linear(part * size, part), nn.Linear(part, part * size)])
        # The same collectives as the split layers call, so that the difference is DTensor's own.
        plain[-2].register_forward_pre_hook(lambda _, given: (_ReducedBackward.apply(*given),))
        plain[-1].register_forward_hook(lambda _, __, out: _Reduced.apply(out))
    ways = [ColwiseParallel(), RowwiseParallel()] * _LAYERS
    parallelize_module(split, mesh, {str(number): way for number, way in enumerate(ways)})
    given = given[:, : part * size]
    optimizers = {
        each: torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9, foreach=False)
        for each in (split, plain)
    }

    def train(network: nn.Module) -> list[float]:
        moments = [time.thread_time()]
        network(given).sum().backward()
        moments.append(time.thread_time())
        optimizers[network].step()
        moments.append(time.thread_time())
        optimizers[network].zero_grad()
        return [late - early for early, late in pairwise(moments)]

    for each in (split, plain):
        train(each)  # the first pass also makes the gradients and the optimizer's state
    with _CountingMode() as counting:
        split(given).sum().backward()
    of_layers = counting.count
    with counting:
        optimizers[split].step()
    of_updates = counting.count - of_layers
    spent = [(train(split), train(plain)) for _ in range(_BATCHES + 2)]
    in_layers, in_updates = (
        statistics.median(ours[which] - theirs[which] for ours, theirs in spent) for which in (0, 1)
    )
    return max(in_layers / of_layers, 1e-7), max(in_updates / of_updates, 1e-7)


class _Reduced(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Adds the results of all ranks."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        """Add them."""
        ctx.mark_dirty(out)
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004  # torch's signature
        """Each rank has the same one."""
        return grad


class _ReducedBackward(torch.autograd.Function):  # type: ignore[misc]  # the same
    """Adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:  # noqa: ARG004  # the same
        """Each rank has the same one."""
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004  # the same
        """Add them."""
        dist.all_reduce(grad)
        return grad


class _CountingMode(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Counts operations on DTensors, as predictions do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave an operation to its tensors."""
        if any(issubclass(each, DTensor) for each in types):
            self.count += 1
            return NotImplemented
        return func(*args, **kwargs or {})


def _fsdp_seconds() -> float:
    """What the hooks of FSDP take of the host, by operation of its own.

    Of these it has two per all-gather and one per reduce-scatter.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def seconds_of(*, is_sharded: bool) -> float:
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(_LAYERS)))
        if is_sharded:
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(layers, mesh=mesh)
        given = torch.ones(16, 16)
        return _host_seconds(lambda: layers(given).sum().backward())

    return (seconds_of(is_sharded=True) - seconds_of(is_sharded=False)) / (5 * _LAYERS)


def _new_pages(meter: _Meter) -> float | None:
    """Bytes per second of memory that a process has not had yet; None if it costs nothing."""
    kept = torch.ones(_MAPPED_BYTES // 4)

    def filled(again: Tensor | None) -> float:
        meter.meet()
        begun = time.thread_time()
        # The C library maps so large a tensor anew each time, in CPU time of the caller.
        (torch.empty(_MAPPED_BYTES // 4) if again is None else again).fill_(1.0)
        return time.thread_time() - begun

    more = statistics.median(filled(None) - filled(kept) for _ in range(2 * _BATCHES))
    return _MAPPED_BYTES / more if more > 0 else None


def _functions(meter: _Meter) -> float:
    """Values per second of a function that is more than an addition."""
    given = torch.randn(1 << 16)
    return float(given.numel() / meter.seconds_of(lambda: functional.gelu(given)))


def _host_seconds(run: Callable[[], object]) -> float:
    """What a call takes of the thread that makes it: its CPU time, without what it waits for."""
    run()
    spent = []
    for _ in range(_BATCHES):
        begun = time.thread_time()
        run()
        spent.append(time.thread_time() - begun)
    return statistics.median(spent)


def _product(
    meter: _Meter, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Callable[[], Tensor]:
    if meter.has_gpu:
        left = torch.randn(rows, inner, device=meter.device).to(dtype)
        right = torch.randn(inner, columns, device=meter.device).to(dtype)
        return lambda: left @ right
    pool, size = meter.cold_pool(dtype), rows * inner + inner * columns
    begins = range(0, pool.numel() - size, size)
    parts = (pool[begin : begin + size].split([rows * inner, inner * columns]) for begin in begins)
    pairs = cycle([(left.view(rows, inner), right.view(inner, columns)) for left, right in parts])

    def multiply() -> Tensor:
        left, right = next(pairs)
        return left @ right

    return multiply


def _attention(meter: _Meter) -> list[Attention]:
    """Forward, and both directions less forward."""
    name, length = ("bf16", 4_096) if meter.has_gpu else ("f32", 256)
    batch, heads, width = (4, 16, 128) if meter.has_gpu else (2, 4, 64)
    shape = (batch, heads, length, width)
    query, key, value = (
        torch.randn(shape, device=meter.device, dtype=meter.dtypes[name], requires_grad=True)
        for _ in range(3)
    )
    attend = functional.scaled_dot_product_attention

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(query, key, value, is_causal=True)

    def both() -> None:
        attend(query, key, value, is_causal=True).sum().backward()

    ahead, whole = meter.seconds_of(forward), meter.seconds_of(both)
    return [
        Attention(
            dtype=name, batch=batch, heads=heads, length=length, width=width,
            is_backward=is_backward, seconds=max(seconds, 1e-9),
        )
        for is_backward, seconds in ((False, ahead), (True, whole - ahead))
    ]  # fmt: skip


def _elementwise(meter: _Meter) -> list[Elementwise]:
    found = []
    for size in meter.sizes:
        count = 1 if meter.has_gpu else max(1, _COLD_BYTES // (3 * size))
        sets = cycle([torch.ones(3, size // 4, device=meter.device) for _ in range(count)])

        def copy(sets: Iterator[Tensor] = sets) -> None:
            left, _, out = next(sets)
            out.copy_(left)

        def add(sets: Iterator[Tensor] = sets) -> None:
            left, right, out = next(sets)
            torch.add(left, right, out=out)

        def mul(sets: Iterator[Tensor] = sets) -> Tensor:
            return next(sets)[0] * 2.0  # a new tensor, as most operations of a program make

        for name, run, moved in (("copy", copy, 2 * size), ("add", add, 3 * size),
                                 ("mul", mul, 2 * size)):  # fmt: skip
            found.append(Elementwise(name=name, size=moved, seconds=meter.seconds_of(run)))
    return found


def _share_of_processor(meter: _Meter) -> float:
    """How much of a collective's time computing loses that goes on meanwhile.

    Threads of gloo copy and add on the same CPUs: none of it is hidden where no CPU is idle.
    """
    whole = torch.ones(_OVERLAPPED_BYTES // 4)
    left, right = torch.randn(128, 768), torch.randn(768, 768)
    once = meter.seconds_of(lambda: left @ right)
    alone = meter.seconds_of(lambda: dist.all_reduce(whole))
    times = torch.tensor(max(1, round(alone / once)))
    dist.broadcast(times, 0)

    def compute() -> None:
        for _ in range(int(times)):
            left @ right

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        compute()
        work.wait()

    computing, together = meter.seconds_of(compute), meter.seconds_of(both)
    lost = together - max(computing, alone)
    return min(1.0, max(0.0, lost / min(computing, alone)))


def lateness(late: Sequence[tuple[float, float]]) -> float | None:
    """How late the last rank comes after a second of computing.

    Delays of parts are independent, so their squares add up. The longest tenth is left out: a
    machine that did something else.
    """
    if not late:
        return None
    found = sorted(waited / computed**0.5 for computed, waited in late)
    return statistics.fmean(found[: max(1, len(found) * 9 // 10)])


def _collectives(meter: _Meter) -> list[MeasuredCollective]:
    count = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    found = []
    for size in meter.collective_sizes:
        part = torch.ones(max(1, size // 4 // count), device=meter.device)
        whole = torch.ones(part.numel() * count, device=meter.device)
        for kind, given, run in (
            ("all_reduce", whole, lambda: dist.all_reduce(whole)),  # noqa: B023  # called at once
            ("all_gather", part, lambda: _all_gather(whole, part)),  # noqa: B023  # the same
            ("reduce_scatter", whole, lambda: _reduce_scatter(part, whole)),  # noqa: B023  # the same
        ):
            seconds = meter.seconds_in_training(run)
            found.append(
                MeasuredCollective(
                    kind=kind, size=given.nbytes, nodes=count // per_node, per_node=per_node,
                    seconds=seconds,
                )
            )  # fmt: skip
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    main(sys.argv[1:])
