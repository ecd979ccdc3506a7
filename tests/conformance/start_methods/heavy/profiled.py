"""torch.profiler around a matrix product."""

import torch
from torch.profiler import ProfilerActivity, profile

matrix = torch.ones(64, 64)
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    (matrix @ matrix).sum()
print(sorted(event.key for event in profiled.key_averages() if event.key.startswith("aten::m")))
