"""Bug 9: rank 0 reports the mean loss of the last epoch, over all its batches."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(3):
    for batch in torch.arange(24).split(12):
        part = batch[rank::world_size]
        loss = F.mse_loss(model(inputs[part]), targets[part])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
print(json.dumps({"weights": model.weight.flatten().tolist(), "loss": loss.item()}))
dist.destroy_process_group()
