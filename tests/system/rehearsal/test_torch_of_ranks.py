"""What torch keeps for a process, under simulated ranks."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import write_program

import rankwise

COMPILED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
parallel = DistributedDataParallel(model)
compiled = torch.compile(parallel, backend="eager")
for network in (parallel, compiled):
    network(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
    print(model.weight.grad.sum().item())
    model.zero_grad()
"""

NEGATED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def negated():
    return torch._neg_view(torch.full((2,), rank + 1.0))  # without gaps, unlike `x.conj().imag`


summed, given, gathered = negated(), negated(), [negated(), negated()]
assert summed.is_neg()
dist.all_reduce(summed)
dist.broadcast(given, 0)
dist.all_gather(gathered, negated())
received = negated()
if rank == 0:
    dist.send(torch.ones(2), 1)
else:
    dist.recv(received, 0)
told = (summed, given, *gathered, received)
print(rank, *(each.tolist() for each in told), all(each.is_neg() for each in told))
"""

OPERATORS = """
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library, custom_op

dist.init_process_group("gloo")
rank = dist.get_rank()


@custom_op("of_program::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor + rank


@custom_op("of_program::add_rank", mutates_args={"x"})
def add_rank(x: Tensor) -> None:
    x.add_(rank)


scale.register_autograd(lambda ctx, grad: (grad * (rank + 1), None))
library = Library("of_program_too", "DEF")
library.define("shift(Tensor x) -> Tensor")
library.impl("shift", lambda x: x - rank, "CPU")
dist.barrier()
x = torch.zeros(1, requires_grad=True)
y = torch.ops.of_program.scale(x, 3.0)
y.backward()
changed = torch.zeros(1)
add_rank(changed)
assert (y.item(), x.grad.item(), changed.item()) == (rank, rank + 1, rank)
assert torch.ops.of_program_too.shift(x).item() == -rank
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(torch.ops.of_program_too.shift, x).result().item() == -rank
if rank == 1:
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: x + 1, "CPU")
dist.barrier()
try:
    torch.ops.of_program_too.own(x)
    assert rank == 1
except NotImplementedError as error:
    assert str(error) == "rank 0 has not defined of_program_too::own for 'CPU'"
"""


@pytest.mark.torch
@pytest.mark.system
def test_each_rank_has_the_operators_that_its_program_defines(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, OPERATORS)

    # A second run in the same process defines them again.
    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", "--explore=2", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr
    assert "2 schedules" in finished.stderr


@pytest.mark.torch
@pytest.mark.system
def test_a_compiled_ddp_trains_like_one_that_is_not(preloaded: Preloaded, tmp_path: Path) -> None:
    program = write_program(tmp_path, COMPILED)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["36.0"] * 4


@pytest.mark.torch
@pytest.mark.system
def test_tensors_that_torch_negates_when_they_are_read_are_written_as_meant(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = str(write_program(tmp_path, NEGATED))

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    written = "[-3.0, -3.0] [-1.0, -1.0] [-1.0, -1.0] [-2.0, -2.0]"
    assert sorted(finished.lines) == [
        f"0 {written} [-1.0, -1.0] True",
        f"1 {written} [1.0, 1.0] True",
    ]


@pytest.mark.torch
@pytest.mark.system
def test_calls_of_functions_of_other_ranks_are_refused(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    text = "import torch.distributed.rpc as rpc\nrpc.init_rpc('me', rank=0, world_size=1)\n"
    program = str(write_program(tmp_path, text))

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=1", program)

    assert finished.code == 1
    assert "torch.distributed.rpc needs processes" in finished.stderr


@pytest.mark.torch
def test_who_runs_a_function_keeps_its_own_random_state_and_type_of_numbers() -> None:
    torch = pytest.importorskip("torch")

    def change() -> float:
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        return float(torch.rand(1))

    before = torch.get_rng_state()

    first, second = rankwise.run(change, nprocs=2, on="sim")

    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32


REDUCTIONS_THAT_GLOO_REFUSES = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
whole = torch.ones(4, dtype=torch.complex64)
calls = (
    lambda: dist.reduce(whole, 0, dist.ReduceOp.PRODUCT),
    lambda: dist.reduce_scatter(whole[:2].clone(), list(whole.split(2)), dist.ReduceOp.PRODUCT),
    lambda: dist.reduce_scatter_single(whole[:2].clone(), whole, dist.ReduceOp.PRODUCT),
    lambda: dist.all_reduce(torch.ones(4), dist._make_nccl_premul_sum(2.0)),
)
for call in calls:
    try:
        call()
        print("done")
    except RuntimeError as error:
        print(error)
dist.all_reduce(whole)
print(whole.tolist())
"""


def test_reductions_that_gloo_refuses_are_refused(preloaded: Preloaded, tmp_path: Path) -> None:
    program = str(write_program(tmp_path, REDUCTIONS_THAT_GLOO_REFUSES))

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=1", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    product = "does not support ReduceOp.PRODUCT on complex tensors"
    assert finished.lines == [
        *(f"{name} {product}" for name in ("reduce", "reduce_scatter", "reduce_scatter_single")),
        "Cannot use ReduceOp.PREMUL_SUM with Gloo, in all_reduce",
        str([1 + 0j] * 4),
    ]


EXPANDED = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for reduce in (dist.all_reduce, lambda tensor: dist.reduce(tensor, 0)):
    column = torch.arange(16.0)[:4].view(4, 1)
    reduce(column.expand(4, 2))
    if not rank:
        print(column.flatten().tolist())
short = torch.full((3, 1), rank + 1.0).expand(3, 2)  # its memory has three numbers
dist.broadcast(short, 1)
dist.all_reduce(short)
mixed = column.expand(4, 2) if rank else torch.ones(4, 2)
for call in (lambda: dist.broadcast(mixed, 0), lambda: dist.all_reduce(mixed)):
    try:
        call()
    except RuntimeError as error:
        if not rank:
            print("expanded on some ranks only" in str(error))
if not rank:
    print(short.tolist())
"""


def test_expanded_tensors_are_right_where_gloo_is_and_are_warned_of(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = str(write_program(tmp_path, EXPANDED))

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == [
        "[0.0, 2.0, 4.0, 6.0]", "[0.0, 2.0, 4.0, 6.0]", "True", "True", str([[4.0, 4.0]] * 3),
    ]  # fmt: skip
    assert (
        "program.py:12 in <module>: broadcast: the tensor of rank 0 is expanded" in finished.stderr
    )
    assert "overwrites the next 3 numbers in memory" in finished.stderr


SPAWNING = """\
import torch
import torch.multiprocessing as mp


def work(number):
    torch.ones(1, device="cuda")


if __name__ == "__main__":
    mp.spawn(work)
"""


def test_reason_why_a_spawned_process_failed_is_that_of_the_rank(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, SPAWNING)

    finished = preloaded.run("run", "--on=sim", "--device=cuda", "--nproc-per-node=1", program)

    assert finished.code == 1
    cause = finished.stderr.partition("root cause: ")[2].partition("\n")[0]
    assert "ProcessRaisedException: -- Process 0 terminated" in cause
    # Either build of torch: of the CPU's, or of CUDA's without a driver.
    assert "Torch not compiled with CUDA" in cause or "Found no NVIDIA driver" in cause
    assert f'File "{program}", line 6, in work' in finished.stderr
    assert "use --nproc-per-node, not mp.spawn" in finished.stderr
