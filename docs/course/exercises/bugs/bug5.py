"""Bug 5: each rank trains on its slice of 25 samples, in batches of 4."""

import json
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

inputs = torch.randn(25, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
share = math.ceil(25 / world_size)
indices = torch.arange(25)
indices = indices[rank * share : (rank + 1) * share]
samples = []
for _epoch in range(3):
    samples.append([])
    for part in indices.split(4):
        samples[-1] += part.tolist()
        loss = F.mse_loss(model(inputs[part]), targets[part])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
print(json.dumps({"weights": model.weight.flatten().tolist(), "samples": samples}))
dist.destroy_process_group()
