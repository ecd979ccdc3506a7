"""A model that is trained in two dimensions, saved, and loaded by shards of another shape."""

import hashlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
data_rank, tensor_rank = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()


def told(name: str, *tensors: Tensor) -> None:
    print(rank, name, *map(digest, tensors))


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)
        self.output = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.narrow(self.wide(self.norm(tokens)).relu()))


torch.manual_seed(0)
model = Network()
plan = {
    "norm": SequenceParallel(),
    "wide": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(output_layouts=Replicate()),
    "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
parallelize_module(model, mesh["tensor"], plan)
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = torch.randn(4, 6, 16, generator=generator)
    labels = torch.randint(0, 20, (4, 6), generator=generator)
    with loss_parallel():
        output = model(tokens.chunk(2, dim=1)[tensor_rank].contiguous())
        loss = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    told("step", loss, norm)
told("trained", *model.state_dict().values())

folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])

torch.manual_seed(1)
other = Network()
fully_shard(other, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
weights, moments = get_state_dict(other, optimizer)
state = {"model": weights, "optimizer": moments}
dcp.load(state, checkpoint_id=folder[0])
set_state_dict(
    other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
told("resharded", *other.state_dict().values())
told("moments", *(kept["exp_avg"] for kept in optimizer.state.values()))
whole = {"model": {name: torch.zeros_like(each) for name, each in Network().state_dict().items()}}
dcp.load(whole, checkpoint_id=folder[0])
told("whole", *whole["model"].values())
dist.destroy_process_group()
