"""Programs that say `import triton`, as simulated ranks: numbers, times, failures."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preloaded import Preloaded
from running import Finished, run, write_program

import rankwise

SCALE = """\
import sys
import numpy as np
import triton
import triton.language as tl

from rankwise import collectives


@triton.jit
def scale(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n)
    tl.store(out_ptr + places, factor * x, mask=places < n)


x = np.arange(5000, dtype=np.float32)
out = np.empty_like(x)
launch = lambda: scale[(triton.cdiv(x.size, 512),)](x, out, x.size, 3.0, BLOCK=512)
"""

LAYER = """\
import torch
import torch.distributed as dist
import triton
import triton.language as tl

@triton.autotune([triton.Config({"ROWS": rows}) for rows in (16, 64)], key=["m", "n", "k"])
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_column, b_row, b_column,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, INNER):
        inner = start + tl.arange(0, INNER)
        a = tl.load(a_ptr + rows * a_row + inner[None, :] * a_column,
                    mask=(rows < m) & (inner[None, :] < k), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_row + columns * b_column,
                    mask=(inner[:, None] < k) & (columns < n), other=0.0)
        total += tl.dot(a, b)
    tl.store(c_ptr + rows * n + columns, total, mask=(rows < m) & (columns < n))


def matmul(a, b):
    assert a.is_cuda and b.is_cuda
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device)
    grid = lambda meta: (triton.cdiv(m, meta["ROWS"]), triton.cdiv(n, meta["COLUMNS"]))
    matmul_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), COLUMNS=32, INNER=32)
    return c


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return matmul(gradient.contiguous(), weight), matmul(gradient.t(), x)


class Linear(torch.nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)
"""

TRAINING = (
    LAYER
    + """
dist.init_process_group("nccl")
rank = dist.get_rank()


def trained(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        kind(48, 64, bias=False), torch.nn.ReLU(), kind(64, 10, bias=False)
    ).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        images, labels = torch.randn(40, 48).cuda(), torch.randint(10, (40,)).cuda()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


print("equal", torch.allclose(trained(Linear), trained(torch.nn.Linear), atol=1e-6))
"""
)

PARALLEL = (
    LAYER
    + """
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()


def trained(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(kind(32, 64, bias=False), torch.nn.ReLU(), kind(64, 16, bias=False))
    model.cuda()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()])


print("sharded", torch.allclose(trained(Linear), trained(torch.nn.Linear), atol=1e-5))
torch.manual_seed(0)
x, first, second = torch.randn(16, 32), torch.randn(64, 32), torch.randn(8, 64)
mine = slice(rank * 64 // size, (rank + 1) * 64 // size)
out = Product.apply(torch.relu(Product.apply(x.cuda(), first[mine].cuda())), second[:, mine].cuda())
dist.all_reduce(out)
print("parallel", torch.allclose(out, torch.relu(x @ first.T) @ second.T, rtol=1e-4, atol=1e-4))
"""
)

BEYOND = (
    SCALE
    + """
rank = collectives.rank()
if rank == 1:
    x = x[:4990]
scale[(10,)](x, out, 5000, 3.0, BLOCK=512)
collectives.barrier()
"""
)


def ranks(
    program: Path, *options: str, count: int = 2, run: Callable[..., Finished] = run
) -> Finished:
    return run("run", f"--nproc-per-node={count}", "--no-prefix", *options, str(program))


@pytest.mark.parametrize("world", ["sim", "sim:pod64"])
def test_ranks_compute_with_kernels(tmp_path: Path, world: str) -> None:
    program = write_program(
        tmp_path,
        SCALE
        + "x += collectives.rank()\n"
        + "launch()\n"
        + "print(collectives.all_reduce(out)[:3].tolist())\n",
    )

    finished = ranks(program, f"--on={world}")

    assert finished.lines == ["[3.0, 9.0, 15.0]"] * 2
    assert "cannot be timed" not in finished.stderr


@pytest.mark.torch
@pytest.mark.parametrize("world", ["sim", "sim:pod64"])
def test_a_layer_of_kernels_trains_as_that_of_torch(tmp_path: Path, world: str) -> None:
    finished = ranks(write_program(tmp_path, TRAINING), f"--on={world}", "--device=cuda")

    assert finished.lines == ["equal True"] * 2


@pytest.mark.torch
def test_parameters_of_kernels_can_be_sharded_and_split(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    finished = ranks(
        write_program(tmp_path, PARALLEL), "--on=sim:pod64", "--device=cuda", run=preloaded.run
    )

    assert sorted(finished.lines) == ["parallel True"] * 2 + ["sharded True"] * 2


def test_a_launch_takes_the_time_that_it_takes_on_the_machine(tmp_path: Path) -> None:
    program = write_program(tmp_path, SCALE + "print(triton.testing.do_bench(launch))\n")

    on_machine = run("sim", "run", "--triton", "--topology=pod64", str(program))
    in_ranks = ranks(program, "--on=sim:pod64")

    assert in_ranks.lines == [on_machine.lines[0]] * 2
    assert float(in_ranks.lines[0]) > 0


@pytest.mark.torch
def test_a_collective_is_hidden_under_a_kernel(tmp_path: Path, preloaded: Preloaded) -> None:
    exposed = []
    for order in ("handle.wait()\nlaunches()\n", "launches()\nhandle.wait()\n"):
        program = write_program(
            tmp_path,
            SCALE
            + "import torch, torch.distributed as dist\n"
            + "dist.init_process_group('nccl')\n"
            + "def launches():\n    for _ in range(40):\n        launch()\n"
            + "handle = dist.all_reduce(torch.ones(10_000), async_op=True)\n"
            + order,
        )
        finished = ranks(program, "--on=sim:pod64", run=preloaded.run)
        assert finished.code == 0, finished.stderr
        (line,) = [line for line in finished.stderr.splitlines() if "exposed" in line]
        exposed.append(float(line.split()[2]))

    assert exposed[0] > 1
    assert exposed[1] == 0


@pytest.mark.parametrize("world", ["sim", "sim:pod64"])
def test_a_kernel_that_fails_is_named_with_its_line_and_program(tmp_path: Path, world: str) -> None:
    program = write_program(tmp_path, BEYOND)

    finished = ranks(program, f"--on={world}")

    line = 1 + BEYOND[: BEYOND.index("x = tl.load")].count("\n")
    assert finished.code == 1
    assert (
        "root cause: rank 1 failed: OutOfBounds: kernel"
        f' "scale" ({program}:{line}), program (9, 0, 0): load of element 4990' in finished.stderr
    )
    assert 'outside of buffer "x_ptr"' in finished.stderr
    assert "another exception" not in finished.stderr


def test_what_a_kernel_prints_is_printed_once(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        SCALE.replace("    x = tl.load", "    tl.device_print('at')\n    x = tl.load")
        + "scale[(1,)](x, out, 512, 3.0, BLOCK=512)\n",
    )

    finished = ranks(program, "--on=sim:pod64", count=1)

    assert finished.lines == ["pid (0, 0, 0) at"]


@pytest.mark.torch
def test_the_trial_of_a_kernel_that_follows_pointers_changes_nothing_where_they_lead(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    program = write_program(
        tmp_path,
        """\
import torch
import triton
import triton.language as tl

@triton.jit
def gather(table_ptr, out_ptr, BLOCK: tl.constexpr):
    source = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + places, tl.load(source + places))

@triton.jit
def count(table_ptr):
    tl.atomic_add(tl.load(table_ptr).to(tl.pointer_type(tl.int32)), 1)

parts = [torch.full((64,), float(each)) for each in range(3)]
table = torch.tensor([each.data_ptr() for each in parts])
out = torch.empty(3 * 64)
for _ in range(2):
    gather[(3,)](table, out, BLOCK=64)
counter = torch.zeros(1, dtype=torch.int32)
count[(4,)](torch.tensor([counter.data_ptr()]))
took = triton.testing.do_bench(lambda: gather[(3,)](table, out, BLOCK=64))
print(out[::64].tolist(), counter.item(), took > 0)
""",
    )

    finished = ranks(program, "--on=sim:pod64", run=preloaded.run)

    assert finished.lines == ["[0.0, 1.0, 2.0] 4 True"] * 2
    assert "cannot be timed" not in finished.stderr


TALKING = """\
import sys
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl


@triton.jit
def barrier(pads_ptr, rank, SIZE: tl.constexpr):
    pads = pads_ptr.to(tl.pointer_type(tl.uint64))
    first = tl.program_id(0) * SIZE
    for peer in range(SIZE):
        if peer != rank:
            word = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + first + rank
            while tl.atomic_cas(word, 0, 1, sem="release", scope="sys") != 0:
                pass
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + first
    for peer in range(SIZE):
        if peer != rank:
            while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def all_reduce(buffers_ptr, pads_ptr, out_ptr, n, rank, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    barrier(pads_ptr, rank, SIZE)
    buffers = buffers_ptr.to(tl.pointer_type(tl.uint64))
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(SIZE):
        part = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(part + places, mask=places < n, other=0.0)
    tl.store(out_ptr + places, total, mask=places < n)
    barrier(pads_ptr, rank, SIZE)


@triton.jit
def signal(word_ptr):
    tl.atomic_xchg(word_ptr, 1, sem="release", scope="sys")


@triton.jit
def take(word_ptr):
    while tl.atomic_cas(word_ptr, 1, 0, sem="acquire", scope="sys") != 1:
        pass


dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
memory = symm_mem.empty(1000, device="cuda")
handle = symm_mem.rendezvous(memory, dist.group.WORLD)


def reduced(value):
    memory.fill_(value)
    out = torch.empty(1000, device="cuda")
    pointers = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev
    all_reduce[(2,)](*pointers, out, 1000, rank, SIZE=size, BLOCK=512)
    return out


"""


@pytest.mark.torch
@pytest.mark.parametrize("world", ["sim", "sim:pod64"])
def test_kernels_of_ranks_wait_for_each_other(
    tmp_path: Path, world: str, preloaded: Preloaded
) -> None:
    program = write_program(
        tmp_path,
        TALKING + "print(*(set(reduced(rank + step).tolist()) for step in range(3)))\n",
    )

    finished = ranks(program, f"--on={world}", "--device=cuda", count=3, run=preloaded.run)

    assert finished.lines == ["{3.0} {6.0} {9.0}"] * 3
    told = "kernel all_reduce cannot be simulated alone on pod64; its time is"
    assert finished.stderr.count(told) == (world != "sim")


@pytest.mark.torch
def test_kernels_and_ranks_signal_each_other(tmp_path: Path, preloaded: Preloaded) -> None:
    program = write_program(
        tmp_path,
        TALKING
        + """
if rank == 0:
    signal[(1,)](handle.get_signal_pad(1, (1,), torch.int32, storage_offset=0))
    take[(1,)](handle.get_signal_pad(0, (1,), torch.int32, storage_offset=1))
else:
    handle.wait_signal(0)
    handle.put_signal(0)
print("done", rank)
""",
    )

    finished = ranks(program, "--on=sim:pod64", "--device=cuda", run=preloaded.run)

    assert sorted(finished.lines) == ["done 0", "done 1"], finished.stderr


@pytest.mark.torch
def test_a_kernel_that_waits_for_ever_is_named_with_what_it_waits_for(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    program = write_program(tmp_path, TALKING + "reduced(1)\nif rank != 1:\n    reduced(2)\n")

    finished = ranks(program, "--on=sim", "--device=cuda", count=3, run=preloaded.run)

    line = 1 + TALKING[: TALKING.index("while tl.atomic_cas(own")].count("\n")
    assert finished.code != 0
    assert "deadlock: no rank can continue" in finished.stderr
    assert (
        'waits for kernel "all_reduce": memory to change: program (0, 0, 0) at'
        f" {program}:{line}: signal pad of rank 0[1] " in finished.stderr
    )


@pytest.mark.torch
def test_a_rank_whose_kernel_others_keep_waiting_is_not_to_blame_for_their_collective(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    own = "handle.get_signal_pad(0, (1,), torch.int32, storage_offset=1)"
    text = f"if rank == 0:\n    take[(1,)]({own})\ndist.barrier()\n"
    program = write_program(tmp_path, TALKING + text)

    finished = ranks(program, "--on=sim", "--device=cuda", run=preloaded.run)

    assert finished.code != 0
    assert "deadlock: no rank can continue" in finished.stderr
    assert 'waits for kernel "take": memory to change: program (0, 0, 0) at' in finished.stderr
    assert "waits for barrier #" in finished.stderr


def tripled() -> list[float]:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    @triton.jit
    def triple(x_ptr: Any) -> None:
        places = x_ptr + tl.arange(0, 4)
        tl.store(places, 3 * tl.load(places))

    values = np.arange(4, dtype=np.float32)
    triple[(1,)](values)
    return [float(each) for each in values]


def test_functions_find_triton_in_each_run_of_a_process() -> None:
    for _ in range(2):
        results = rankwise.run(tripled, (), 2, on="sim:pod64")
        assert list(results) == [[0.0, 3.0, 6.0, 9.0]] * 2
