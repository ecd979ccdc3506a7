"""torch.compile, without a compiler of machine code."""

import torch


@torch.compile(backend="aot_eager")
def double(x):
    return torch.sin(x) * 2 if x.sum() > 0 else x


x = torch.ones(3, requires_grad=True)
double(x).sum().backward()
print(
    [round(value, 5) for value in x.grad.tolist()],
    torch._dynamo.utils.counters["stats"]["unique_graphs"],
)
