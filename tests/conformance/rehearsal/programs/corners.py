"""What few programs use: sparse and transposed tensors, keys that are deleted, checkpoints."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial

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

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


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


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
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
dist.barrier()
told("settings", torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
told("settings", torch.get_float32_matmul_precision(), str(torch.tensor([1 / 3])))
dist.destroy_process_group()
