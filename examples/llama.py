"""Llama 3 8B, sharded by FSDP2: predict its step on GPUs that you do not have.

    rankwise run --on sim:h100-sxm --nnodes 2 --nproc-per-node 8 --timing-only llama.py

The same script trains on GPUs, there with tokens of your own.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HEADS, KEY_HEADS, HIDDEN, WORDS = 4096, 32, 8, 14336, 128256
HEAD = WIDTH // HEADS


class Block(nn.Module):
    """Attention and a gated network, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_before_attention, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, WIDTH + 2 * KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values of shape (batch, sequence, width), and the result, too."""
        parts = self.queries_keys_values(self.norm_before_attention(values)).split(
            [WIDTH, KEY_HEADS * HEAD, KEY_HEADS * HEAD], dim=-1
        )
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        values = values + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.norm(values)).chunk(2, dim=-1)
        return values + self.down(F.silu(gate) * up)


def main() -> None:
    """Train for three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence")
    arguments = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            *(Block() for _ in range(arguments.layers)),
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, WORDS, bias=False),
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
    model.to_empty(device="cuda")
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(3):
        tokens = torch.randint(WORDS, (arguments.batch, arguments.sequence), device="cuda")
        logits = model(tokens).flatten(0, 1).float()
        F.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
