"""What few programs use: sparse and transposed tensors, keys that are deleted, checkpoints.

And what a process has once, which each rank sets in its own way.
"""

import builtins
import hashlib
import io
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import sleep

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
odd = dist.new_group(range(1, size, 2))
# A barrier of gloo fails with what failed in its group a moment before, at times: it waits for all
# that the group's threads still hold. So no group has calls that fail and barriers.
failing = dist.new_group()


class Marked:
    """A class that a checkpoint may have."""


def told(name: str, *values: object) -> None:
    print(rank, name, *(digest(each) if isinstance(each, Tensor) else each for each in values))


def digest(tensor: Tensor) -> str:
    data = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]


def own(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


sparse = torch.sparse_coo_tensor(
    torch.tensor([[rank, rank + 1]]), own(2), (size + 1,), check_invariants=True
)
dist.all_reduce(sparse)
told("sparse", sparse.to_dense(), sparse.is_coalesced())

for tensor in (own(37, 41).t(), own(3, 5, 7, 2).permute(2, 0, 3, 1)):
    dist.all_reduce(tensor)
    told("transposed", tensor)


def outcome(call: Callable[..., object]) -> str:
    try:
        call(group=failing)
    except RuntimeError as error:
        return str(error).partition(":")[0]
    return "ok"


for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn, torch.complex64, torch.bool):
    few, many = torch.zeros(2).to(dtype), torch.zeros(2 * size).to(dtype)
    rows = [few.clone() for _ in range(size)]
    for call in (
        partial(dist.all_reduce, few),
        partial(dist.broadcast, few, 0),
        partial(dist.reduce, few, 0),
        partial(dist.all_gather, rows, few),
        partial(dist.gather, few, rows if rank == 0 else None),
        partial(dist.scatter, few, rows if rank == 0 else None),
        partial(dist.reduce_scatter, few, rows),
        partial(dist.all_to_all_single, many.clone(), many),
        partial(dist.all_to_all, [each.clone() for each in rows], rows),
    ):
        told("takes", dtype, call.func.__name__, outcome(call))
told("bits of floats", outcome(partial(dist.all_reduce, torch.ones(2), dist.ReduceOp.BAND)))

store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
if rank == 0:
    store.set("key", "value")
    told("store", store.delete_key("key"), store.delete_key("key"), store.check(["key"]))
    store.set("another", "value")
    told("store", store.num_keys() > 0)

dist.barrier()

model = fully_shard(nn.Linear(8, 5))
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().fill_(rank + 1)
dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0]).result()
dist.barrier()
told("saved", sorted(os.listdir(folder[0])))  # noqa: PTH208  # names alone

whole = {"weight": torch.arange(40.0).view(5, 8), "bias": torch.ones(5)} if rank == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, whole, options=options)
told("loaded", *(parameter.to_local() for parameter in model.parameters()))

torch.use_deterministic_algorithms(rank % 2 == 1, warn_only=True)
torch.set_printoptions(precision=2 + rank)
torch.set_num_threads(1 + rank % 2)
if rank == 1:
    torch.set_float32_matmul_precision("high")
if rank == 0:
    torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = rank % 2 == 1
torch.serialization.add_safe_globals([Marked])
dist.barrier()
told("settings", torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark)
file = io.BytesIO()
torch.save(Marked(), file)
file.seek(0)
told("its own class", isinstance(torch.load(file), Marked))
told("settings", torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
told("settings", torch.get_float32_matmul_precision(), str(torch.tensor([1 / 3])))

try:
    dist.broadcast(torch.ones(1), src=size)
except RuntimeError as error:
    told("root", f"invalid root rank: {size}" in str(error))

for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
    with sdpa_kernel(backend), torch.autograd.set_detect_anomaly(rank == 0):
        if rank % 2:
            dist.barrier(odd)
        dist.barrier()
        told("inside", torch.backends.cuda.math_sdp_enabled(), torch.is_anomaly_enabled())
    told("outside", torch.backends.cuda.math_sdp_enabled(), torch.is_anomaly_enabled())

seen = []
hook = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
dist.barrier()
nn.Linear(1, 1)(torch.ones(1))
dist.barrier()
hook.remove()
dist.barrier()
nn.Linear(1, 1)(torch.ones(1))
told("hooks", seen)

multiprocessing.set_start_method("spawn" if rank else "fork")
dist.barrier()
told("start method", multiprocessing.get_start_method())
child = multiprocessing.get_context("fork").Process(target=sleep, args=(1_000,))
child.start()
child.terminate()
child.join()
told("child", child.exitcode)

logging.basicConfig(stream=sys.stdout, format="%(message)s")
if rank:
    logging.disable(logging.CRITICAL)
dist.barrier()
logging.getLogger("of the program").warning("of rank 0 alone")
print_of_python = builtins.print


def print_on_one(*words: object) -> None:
    if rank == 0:
        print_of_python(*words)


builtins.print = print_on_one  # type: ignore[assignment]
dist.barrier()
print("by rank", rank)
dist.destroy_process_group()
