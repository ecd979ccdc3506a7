"""Three steps of accelerate's loop."""

import accelerate
import torch
from accelerate import Accelerator
from tqdm import tqdm

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(48.0).reshape(12, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in tqdm(loader, disable=True):
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(accelerator.process_index, round(accelerator.reduce(loss.detach()).item(), 3))
print(accelerate.__version__, accelerator.num_processes)
