"""Bug 3: every epoch visits the samples in a new order."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(inputs, world_size, rank)
loader = DataLoader(TensorDataset(torch.arange(24)), 12 // world_size, sampler=sampler)
samples = []
for _epoch in range(3):
    samples.append([])
    for (part,) in loader:
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
