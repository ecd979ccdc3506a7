"""A forward and backward pass of megatron-core's tensor-parallel layers, in groups of two ranks."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
layer = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True}
torch.manual_seed(3)
up = ColumnParallelLinear(8, 16, gather_output=False, **layer)
down = RowParallelLinear(16, 8, input_is_parallel=True, skip_bias_add=False, **layer)
between, _ = up(torch.randn(4, 2, 8, requires_grad=True))
result, _ = down(torch.relu(between))
result.square().mean().backward()
print(
    "rank", dist.get_rank(), parallel_state.get_tensor_model_parallel_rank(),
    f"{result.double().sum().item():.9f} {up.weight.grad.double().sum().item():.9f}", flush=True,
)  # fmt: skip
dist.destroy_process_group()
