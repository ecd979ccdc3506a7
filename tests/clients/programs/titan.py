"""torchtitan's command. After the first step, 0.3 calls a function that torch 2.13 lacks."""

import torch.distributed as dist
from torchtitan.train import main

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda *_: None

main()
