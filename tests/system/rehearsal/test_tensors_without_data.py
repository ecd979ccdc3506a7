"""Fake and meta tensors on simulated ranks: no data moves, and the time is that of real ones."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

COLLECTIVES = """
import sys
import time

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
following, preceding = (rank + 1) % size, (rank - 1) % size


def collectives(ones):
    yield dist.all_reduce, (ones(64),)
    yield dist.broadcast, (ones(64), 1)
    yield dist.reduce, (ones(64), 1)
    yield dist.all_gather, ([ones(32) for _ in range(size)], ones(32))
    yield dist.all_gather_into_tensor, (ones(64), ones(64 // size))
    yield dist.gather, (ones(32), [ones(32) for _ in range(size)] if rank == 1 else None, 1)
    yield dist.scatter, (ones(32), [ones(32) for _ in range(size)] if rank == 1 else None, 1)
    yield dist.reduce_scatter, (ones(32), [ones(32) for _ in range(size)])
    yield dist.reduce_scatter_tensor, (ones(64 // size), ones(64))
    yield dist.all_to_all_single, (ones(64), ones(64))
    yield wait, (ones(64),)
    yield exchange, (ones(64), ones(64))


def wait(tensor):
    dist.all_reduce(tensor, async_op=True).wait()


def exchange(sent, received):
    ends = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, preceding)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def times(ones):
    for call, args in collectives(ones):
        dist.barrier()  # making tensors takes time, too
        begun = time.perf_counter()
        call(*args)
        yield call.__name__, round(1e9 * (time.perf_counter() - begun))


real = list(times(torch.ones))
meta = list(times(lambda count: torch.ones(count, device="meta")))
with FakeTensorMode():
    fake = list(times(torch.ones))
assert all(time for _, time in real), real
assert real == meta == fake, (real, meta, fake)
"""

COMPUTED = """
import time

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

dist.init_process_group("gloo")


def compute():
    layer = torch.nn.Linear(64, 64)
    query = layer(torch.ones(2, 4, 32, 64))
    begun = time.perf_counter()
    attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    layer(attended + 1).square().mean().backward()
    assert layer.weight.grad.shape == (64, 64)
    return round(1e9 * (time.perf_counter() - begun))


real = compute()
with FakeTensorMode():
    fake = compute(), compute()  # of which the second one finds the shapes in a cache
assert fake == (real, real), (fake, real)
begun = time.perf_counter()
with torch.device("meta"):
    torch.nn.Linear(64, 64)
assert time.perf_counter() == begun, "an initialisation that is put off takes no time"
"""

MEMORY = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")


def peak(device):
    torch.cuda.reset_peak_memory_stats()
    layer = torch.nn.Linear(64, 512, device=device)
    layer(torch.ones(32, 64, device=device)).square().mean().backward()
    return torch.cuda.max_memory_allocated()


assert peak("meta") == peak("cuda") > 4 * 64 * 512 * 2
before = torch.cuda.memory_allocated()
put_off = torch.nn.Linear(64, 64, device="meta")
torch.nn.init.trunc_normal_(put_off.weight)
assert torch.cuda.memory_allocated() == before, "nothing has been computed from it"
whole = put_off.to_empty(device="cuda")
assert torch.cuda.memory_allocated() == before + 4 * 64 * 64 + 512  # a block is 512 bytes at least
"""

FURTHER = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symm_mem
from torch._subclasses.fake_tensor import FakeTensorMode

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD


def coalesced(ones):
    with dist._coalescing_manager(group):
        first, second = ones(2), ones(4)
        dist.all_gather_into_tensor(second, first)
    return second


def results(ones):
    functions, name = torch.ops._c10d_functional, group.group_name
    yield functional.all_reduce(ones(4, 2), "sum", group)
    yield functional.broadcast(ones(4, 2), 0, group)
    yield functional.all_to_all_single(ones(4, 2), None, None, group)
    yield functional.permute_tensor(ones(4), [1, 0], group)
    yield functional.all_reduce_coalesced([ones(4, 2)], "sum", group)[0]
    yield functions.all_gather_into_tensor(ones(4, 2), 2, name)
    yield functions.reduce_scatter_tensor(ones(4, 2), "sum", 2, name)
    yield coalesced(ones)
    yield torch.ops.symm_mem.fused_all_gather_matmul(ones(4, 2), [ones(2, 4)], 0, name)[1][0]


def shapes(ones):
    return [tuple(each.shape) for each in results(ones)]


def refused(call, *args):
    try:
        call(*args)
    except (NotImplementedError, RuntimeError) as error:
        return str(error).partition(":")[0]


real = shapes(torch.ones)
assert real == shapes(lambda *shape: torch.ones(shape, device="meta"))
with FakeTensorMode():
    assert real == shapes(torch.ones)
    objects = refused(dist.all_gather_object, [None, None], rank)
    shared = refused(symm_mem.rendezvous, torch.ones(4), group)
print(real[5:7], objects, shared, sep="; ")
print(refused(lambda: symm_mem.empty(4, device="meta")))
"""

MIXED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4, device="meta" if dist.get_rank() else "cpu"))
"""


@pytest.mark.parametrize("program", [COLLECTIVES, COMPUTED], ids=["collectives", "computed"])
def test_fake_tensors_take_the_time_of_real_ones(
    program: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    words = ("run", "--on=sim:switch8", "--virtual-clock", "--nproc-per-node=2")

    finished = preloaded.run(*words, write_program(tmp_path, program), cwd=tmp_path)

    assert finished.code == 0, finished.stderr


def test_meta_tensors_take_the_memory_of_real_ones_when_they_are_computed_with(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, MEMORY)

    finished = preloaded.run("run", "--on=sim:switch8", "--device=cuda", program, cwd=tmp_path)

    assert finished.code == 0, finished.stderr


def test_collectives_of_fake_tensors_need_no_machine(preloaded: Preloaded, tmp_path: Path) -> None:
    program = write_program(tmp_path, COLLECTIVES.partition("assert")[0])

    finished = preloaded.run(
        "run", "--on=sim", "--virtual-clock", "--nproc-per-node=2", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr


def test_ranks_that_bring_tensors_with_and_without_data_are_told_so(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, MIXED)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", program, cwd=tmp_path)

    assert finished.code == 1
    assert "rank 1 called all_reduce #1 (sum) of (4,) float32 without data" in finished.stderr


def test_further_collectives_of_fake_tensors_give_the_shapes_of_real_ones_or_are_refused(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, FURTHER)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr
    shared = "symm_mem.rendezvous of a fake or meta tensor of shape (4,)"
    objects = "a collective of objects under FakeTensorMode"
    assert sorted(finished.lines) == [
        *[f"[(8, 2), (2, 2)]; {objects}; {shared}"] * 2,
        *["symm_mem.empty of a fake or meta tensor of shape (4,)"] * 2,
    ]
