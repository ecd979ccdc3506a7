"""Trains the decoder of transformer.py on one device; prints the seconds of each step, and memory.

A plain script: `one_gpu.py compiled --layers 16 ...` takes the flags of transformer.py after
`eager` or `compiled`.
"""

import json
import sys
import time

import torch
import transformer
from torch.nn import functional

WARM_UPS = 2
"""The first step makes the optimizer's state; a compiled one compiles in both."""


def main() -> None:
    is_compiled = sys.argv[1] == "compiled"
    o = transformer.options(words=[*sys.argv[2:], "--parallel", "no"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformer.build(o, str(device), None)
    network = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    shape = (o.sequence, o.hidden // o.heads // 2)
    angles = torch.ones(shape, dtype=torch.complex64, device=device)
    tokens = torch.zeros(o.batch, o.sequence, dtype=torch.int64, device=device)
    has_gpu = device.type == "cuda"
    seconds = []
    for step in range(WARM_UPS + o.steps):
        if step == WARM_UPS and has_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        logits = network(tokens, angles).flatten(0, 1).float()
        functional.cross_entropy(logits, tokens.flatten()).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
        if has_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peaks = (
        (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if has_gpu else (0, 0)
    )
    print(json.dumps([seconds[WARM_UPS:], *peaks]), flush=True)


if __name__ == "__main__":
    main()
