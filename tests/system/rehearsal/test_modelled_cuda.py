"""`--device cuda`: scripts of torch that were written for CUDA and NCCL, on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from running import run, write_program

pytestmark = pytest.mark.torch

TRAINING = """\
import os
import torch
import torch.distributed as dist
from torch import nn

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
copying = torch.cuda.Stream()
begin.record()
for _ in range(3):
    with torch.cuda.stream(copying):
        images = torch.randn(6, 8, pin_memory=True).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(copying)
    labels = torch.zeros(6, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(images)
        assert output.dtype is torch.bfloat16
        loss = (output.float() - labels).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) > 0
total = torch.full((2,), float(dist.get_rank()), device=device)
dist.all_reduce(total)
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, torch.cuda.current_device())
dist.barrier(device_ids=[local_rank])
print(total.tolist(), objects, torch.cuda.device_count(), dist.get_backend(), device)
"""

OF_NCCL = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
stacked, flat = torch.zeros(2, 3, device="cuda"), torch.zeros(2, device="cuda")
dist.all_gather_into_tensor(stacked, torch.full((3,), 1.0 + rank, device="cuda"))
dist.reduce_scatter_tensor(flat, torch.ones(2, 2, 1, device="cuda"))
parts = [torch.zeros(1 + of, device="cuda") for of in range(2)]
dist.all_gather(parts, torch.ones(1 + rank, device="cuda"))
print(stacked.tolist(), flat.tolist(), [part.tolist() for part in parts])
"""

WAYS = """\
import io
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("nccl")
here = torch.zeros(2)
there = here.cuda()
there += 1
back = there.cpu()
back += 1
print(here.tolist(), there.tolist(), back.tolist())
with torch.device("cuda"):
    layer = nn.Linear(2, 2)
layer = layer.cuda().to(1).to("cuda:0")
torch.set_default_device("cuda")
print(torch.zeros(2, device=0).tolist(), torch.ones(2).tolist())
torch.set_default_device("cpu")
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator)
assert len(torch.cuda.default_generators) == 2
torch.cuda.default_generators[1].manual_seed(3)  # as megatron-core does
assert torch.cuda.default_generators[1].initial_seed() == 3
file = io.BytesIO()
torch.save({"weights": torch.randn(2, generator=generator, device="cuda")}, file)
file.seek(0)
print(len(torch.load(file, map_location="cuda:1")["weights"]))
mesh = init_device_mesh("cuda", (2,))
model = fully_shard(nn.Linear(8, 4).cuda(), mesh=mesh)
model(torch.ones(2, 8, device="cuda")).sum().backward()
assert torch.accelerator.is_available()
assert torch.accelerator.current_accelerator().type == "cuda"
assert torch.accelerator.device_count() == len(torch.cuda.random.get_rng_state_all()) == 2
there.record_stream(torch.accelerator.current_stream())
assert torch.cuda.current_stream() == torch.cuda.default_stream()
torch.cuda.set_per_process_memory_fraction(0.5)
old = FullyShardedDataParallel(nn.Linear(8, 4).cuda(), device_id=torch.cuda.current_device())
old(torch.ones(2, 8, device="cuda")).sum().backward()
assert old.clip_grad_norm_(1.0) > 0
assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
try:
    torch.cuda.set_device(2)
except RuntimeError as error:
    print(error)
"""

OPTIMISERS = """\
import torch

kinds = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax", "RAdam", "ASGD")
for kind in (*kinds, "Adadelta", "Rprop", "Adafactor"):
    parameter = torch.nn.Parameter(torch.ones(4, 4, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    getattr(torch.optim, kind)([parameter], lr=0.01).step()
    assert parameter.detach().max() < 1, kind
print(True)
"""

ATTENTION = """\
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,))
torch.manual_seed(0)
whole = [torch.randn(2, 4, 8, 16, device="cuda", requires_grad=True) for _ in range(3)]
attend = torch.nn.functional.scaled_dot_product_attention
expected = attend(*whole, is_causal=True)
expected.square().sum().backward()
parts = [distribute_tensor(each.detach(), mesh, [Shard(1)]).requires_grad_() for each in whole]
attended = attend(*parts, is_causal=True)
attended.square().sum().backward()
gradient = parts[0].grad
print(
    attended.placements, gradient.placements,
    torch.allclose(attended.full_tensor(), expected, atol=1e-6),
    torch.allclose(gradient.full_tensor(), whole[0].grad, atol=1e-5),
)
"""

COMPILED = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
compiled = torch.compile(model, backend="aot_eager")


@torch.compile(backend="eager", fullgraph=True)
def compute(x):
    assert x.is_cuda
    made = torch.zeros(4, device="cuda") + torch.arange(4, device=torch.device("cuda", 0))
    copies = x.to("cuda:1"), x.to(0, torch.float64), x.cuda(), x.cpu(), x.to(device="cuda")
    for copy in copies:
        copy += 1
    return made + torch.ones(4, device=0), copies


x = torch.ones(3, 8, device="cuda")
output = compiled(x)
output.square().sum().backward()
print(torch.equal(output, model(x)), model[0].weight.grad.abs().sum().item() > 0)
torch.set_default_device("cuda")
made, copies = compute(torch.zeros(2))
print(made.tolist(), copies[1].dtype, [copy.sum().item() for copy in copies])
"""

FULL_STATE = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

dist.init_process_group("nccl")
torch.manual_seed(0)
layer = torch.nn.Linear(8, 4).cuda()
expected = layer.weight.sum().item()
model = FullyShardedDataParallel(layer, device_id=torch.cuda.current_device())
config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    found = model.state_dict()
print([abs(each.sum().item() - expected) < 1e-5 for name, each in found.items() if "w" in name])
model(torch.ones(2, 8, device="cuda")).sum().backward()
"""

NO_GPU = """\
import rankwise


def work():
    print(torch.cuda.is_available(), torch.cuda.device_count(), end=" ")
    print(torch.accelerator.current_accelerator(), torch.accelerator.is_available())
    for attempt in (
        lambda: torch.ones(1, device="cuda"),
        lambda: torch.ones(1).cuda(),
        lambda: torch.ones(1).pin_memory(),
        lambda: torch.ones(1).to(torch.device("cuda:0")),
        torch.cuda.current_device,
    ):
        try:
            attempt()
        except (AssertionError, RuntimeError):
            print("refused")
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.square().sum().backward()
    torch.optim.AdamW([parameter], lr=0.0, weight_decay=0.0).step()
    print(parameter.tolist())


if IN_USE:  # no machine of these tests has a GPU: let torch say that the program uses one
    torch.cuda._initialized = True
rankwise.run(work, nprocs=1, on="sim")
"""


def test_a_training_for_cuda_runs_on_modelled_devices(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nnodes=2", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, TRAINING), cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == sorted(
        f"[6.0, 6.0] [0, 1, 0, 1] 2 nccl cuda:{rank % 2}" for rank in range(4)
    )
    assert finished.stderr == ""


def test_each_optimiser_takes_a_step_on_modelled_devices(tmp_path: Path) -> None:
    program = write_program(tmp_path, OPTIMISERS)

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=1", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["True"]


@pytest.mark.parametrize("in_use", [True, False])
def test_a_simulated_rank_without_modelled_devices_finds_no_gpu(
    tmp_path: Path, *, in_use: bool
) -> None:
    program = write_program(tmp_path, f"import torch\nIN_USE = {in_use}\n{NO_GPU}")

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[rank0]:") for line in done.stdout.splitlines()]
    assert lines == ["False 0 None False"] + ["refused"] * 5 + ["[1.0]"]


def test_gpus_are_hidden_from_what_a_simulation_loads_and_not_from_what_ranks_read(
    tmp_path: Path,
) -> None:
    program = write_program(
        tmp_path,
        "import ctypes, os\n"
        "getenv = ctypes.CDLL(None).getenv\n"
        "getenv.restype = ctypes.c_char_p\n"
        "print(getenv(b'CUDA_VISIBLE_DEVICES'), os.environ.get('CUDA_VISIBLE_DEVICES'))\n",
    )

    finished = run(
        "run", "--on=sim", "--nproc-per-node=1", "--no-prefix", program,
        environment={"CUDA_VISIBLE_DEVICES": "2"},
    )  # fmt: skip

    assert finished.lines == ["b'' 2"], finished.stderr


def test_attention_of_tensors_that_are_split_by_heads_is_computed_on_each_part(
    tmp_path: Path,
) -> None:
    program = write_program(tmp_path, ATTENTION)

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["(Shard(dim=1),) (Shard(dim=1),) True True"] * 2


def test_functions_for_cuda_are_compiled_for_the_cpu(tmp_path: Path) -> None:
    program = write_program(tmp_path, COMPILED)

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    told = "[1.0, 2.0, 3.0, 4.0] torch.float64 [2.0, 2.0, 2.0, 2.0, 2.0]"
    assert sorted(finished.lines) == sorted(["True True", told] * 2)


def test_full_state_of_sharded_parameters_is_copied_to_the_cpu(tmp_path: Path) -> None:
    program = write_program(tmp_path, FULL_STATE)

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == ["[True]", "[]"]


def test_shapes_that_nccl_takes_need_no_more_than_the_right_size(tmp_path: Path) -> None:
    program = str(write_program(tmp_path, OF_NCCL))

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    told = "[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]] [2.0, 2.0] [[1.0], [1.0, 1.0]]"
    assert finished.lines == [told, told]


@pytest.mark.parametrize("where", ["sim", "sim:pod64"])
def test_torch_does_not_warn_that_triton_is_not_there(where: str, tmp_path: Path) -> None:
    text = "import torch\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
    text += "dist.all_reduce(torch.ones(8, 8, device='cuda') @ torch.ones(8, 8, device='cuda'))\n"
    text += "import torch.utils.flop_counter\n"
    program = str(write_program(tmp_path, text))

    finished = run("run", "--on", where, "--device", "cuda", "--nproc-per-node=2", program)

    assert finished.code == 0, finished.stderr
    assert "triton" not in finished.stdout + finished.stderr


PINNED = """\
import torch

with torch.autograd.graph.save_on_cpu(pin_memory=True):
    x = torch.ones(2, device="cuda", requires_grad=True)
    y = (x * x).sum()
y.backward()
print(x.grad.tolist())
"""


def test_activations_are_offloaded_to_pinned_memory_that_is_the_cpus(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=1", "--no-prefix",
        write_program(tmp_path, PINNED), cwd=tmp_path,
    )  # fmt: skip

    assert finished.lines == ["[2.0, 2.0]"], finished.stderr


TOOLS = """\
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(4, device="cuda")
torch.cuda.cudart().cudaProfilerStart()
torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), 16, 0))
pool = torch.cuda.use_mem_pool(torch.cuda.MemPool())
with torch.cuda.profiler.profile(), torch.cuda.nvtx.range("step"), pool:
    y = x * 2
torch.cuda.reset_peak_host_memory_stats()
torch.cuda.set_sync_debug_mode("warn")
assert torch.cuda.can_device_access_peer(0, 1)
assert torch.cuda.get_allocator_backend() == "native"
old = torch.cuda.FloatTensor([1.0, 2.0])
dist.all_reduce(old)
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
assert x.type() == "torch.cuda.FloatTensor" and x.type("torch.cuda.HalfTensor").dtype is torch.half
print(old.tolist(), y.tolist(), torch.cuda.cudart().cudaMemGetInfo(0)[1] > 0)
"""


def test_profiler_pools_and_old_types_of_cuda_are_there(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, TOOLS), cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["[2.0, 4.0] [2.0, 2.0, 2.0, 2.0] True"] * 2


def test_all_ways_to_a_device_lead_to_the_cpu(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, WAYS), cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == sorted(
        [
            "[0.0, 0.0] [1.0, 1.0] [2.0, 2.0]",
            "[0.0, 0.0] [1.0, 1.0]",
            "2",
            "CUDA error: invalid device ordinal: 2 of 2",
        ]
        * 2
    )


GRAPHS = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
state, x = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = x * 2
    state += doubled
    total = doubled.clone()
    dist.all_reduce(total)
assert state.tolist() == [0, 0], "a capture computes nothing"
for step in range(3):
    x.fill_(step + rank)
    graph.replay()
print(rank, state.tolist(), total.tolist())

torch.manual_seed(0)
graphed, plain = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()) for _ in range(2))
plain.load_state_dict(graphed.state_dict())
graphed = torch.cuda.make_graphed_callables(graphed, (torch.randn(5, 4, device="cuda"),))
for _ in range(3):
    batch = torch.randn(5, 4, device="cuda")
    for model in (graphed, plain):
        model.zero_grad()
        model(batch).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
assert all(map(torch.equal, graphed.parameters(), plain.parameters()))
"""

GRAPH_OF_ONE_RANK = """\
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("nccl")
rank = dist.get_rank()
peer = 1 - rank
x = torch.ones(2, device="cuda")
got = torch.zeros(2, device="cuda")
graph = torch.cuda.CUDAGraph()
def body():
    ends = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    y = got * 2
    dist.all_reduce(y)
    return y
if rank == 0:
    with torch.cuda.graph(graph):
        twice = body()
for step in range(3):
    x.fill_(10 * step + rank)
    if rank == 0:
        graph.replay()
    else:
        twice = body()
group = dist.distributed_c10d._get_default_group()
calls = group._get_sequence_number_for_group()
g2 = torch.cuda.CUDAGraph()
with torch.cuda.graph(g2):
    total = funcol.all_reduce(x, "sum", dist.group.WORLD) + 1
for step in range(2):
    x.fill_(step + rank)
    g2.replay()
print(rank, got.tolist(), twice.tolist(), total.tolist(), calls)
"""

SYNCHRONISED = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
counts = [3, 5]
whole, factor = torch.randn(8, 3, 5), torch.randn(8, 3, 5)
own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
expected = torch.nn.BatchNorm1d(3)
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3)).cuda()
batch, part = whole.clone().requires_grad_(), whole[own].clone().cuda().requires_grad_()
(expected(batch) * factor).sum().backward()
(model(part) * factor[own]).sum().backward()
dist.all_reduce(model.weight.grad)
dist.all_reduce(model.bias.grad)
for ours, theirs in (
    (part.grad, batch.grad[own]), (model.weight.grad, expected.weight.grad),
    (model.bias.grad, expected.bias.grad), (model.running_mean, expected.running_mean),
    (model.running_var, expected.running_var),
    (model.eval()(part), expected.eval()(batch)[own]),
):
    torch.testing.assert_close(ours, theirs)
ours = model.double().train()(whole[own].double().cuda())
theirs = expected.double().train()(whole.double())[own]
torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
"""


def test_a_captured_graph_computes_when_it_is_replayed(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, GRAPHS),
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == ["0 [6.0, 6.0] [10.0, 10.0]", "1 [12.0, 12.0] [10.0, 10.0]"]


def test_graph_of_one_rank_meets_the_calls_of_a_rank_without_graph(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix",
        write_program(tmp_path, GRAPH_OF_ONE_RANK),
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == [
        "0 [21.0, 21.0] [82.0, 82.0] [4.0, 4.0] 3", "1 [20.0, 20.0] [82.0, 82.0] [4.0, 4.0] 3",
    ]  # fmt: skip


def test_batches_are_normalised_over_all_ranks(tmp_path: Path) -> None:
    finished = run(
        "run", "--on=sim", "--device=cuda", "--nproc-per-node=2",
        write_program(tmp_path, SYNCHRONISED),
    )  # fmt: skip

    assert finished.code == 0, finished.stderr


OF_GLOO_BESIDE_NCCL = """\
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
transposed = torch.ones(3, 2).t()
dist.all_reduce(transposed, group=dist.new_group(backend="gloo"))
refused = []
for group in (None, dist.new_group(backend="cpu:gloo,cuda:nccl")):
    try:
        dist.all_reduce(transposed.to("cuda"), group=group)
    except ValueError as error:
        refused.append("nccl wants" in str(error))
print(transposed.tolist(), refused)
"""


def test_group_of_gloo_has_rules_of_gloo_beside_nccl(tmp_path: Path) -> None:
    program = str(write_program(tmp_path, OF_GLOO_BESIDE_NCCL))

    finished = run("run", "--on=sim", "--device=cuda", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]] [True, True]"] * 2
