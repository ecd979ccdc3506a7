"""Three steps of megatron-core's GPT of the local spec, with its DDP and distributed optimizer.

Four ranks share each layer's weights, without sequence parallelism: the norms of torch refuse it.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

BATCH, SEQUENCE, WORDS, TENSOR = 2, 2048, 32_000, 4

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4, hidden_size=2048, num_attention_heads=16, tensor_model_parallel_size=TENSOR,
    bf16=True, params_dtype=torch.bfloat16,
)  # fmt: skip
model = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=WORDS,
    max_sequence_length=SEQUENCE,
).cuda()  # fmt: skip
parallel = DistributedDataParallel(
    config=config, module=Float16Module(config, model),
    ddp_config=DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    ),
)  # fmt: skip
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True),
    [parallel],
)
tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="cuda")
positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
seen = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda")
for _ in range(3):
    parallel.zero_grad_buffer()
    optimizer.zero_grad()
    parallel(tokens, positions, seen.triu(1), labels=tokens).mean().backward()
    finalize_model_grads([parallel])
    optimizer.step()
dist.destroy_process_group()
