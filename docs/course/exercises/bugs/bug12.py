"""Bug 12: if the training diverges, it starts again with a smaller learning rate."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)


def train(lr):
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(20):
        part = torch.arange(24)[rank::world_size]
        loss = F.mse_loss(model(inputs[part]), targets[part])
        optimizer.zero_grad()
        loss.backward()
        for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
            tensor /= world_size
        if not loss < 1000:
            raise FloatingPointError(f"the loss is {loss.item()}")
        optimizer.step()
    dist.destroy_process_group()
    return model.weight.flatten().tolist()


for lr in (100.0, 0.1):
    try:
        print(json.dumps({"weights": train(lr)}))
        break
    except FloatingPointError as error:
        print(f"learning rate {lr}: {error}")
