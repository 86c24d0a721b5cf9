"""DDP averages the ranks' gradients, also where one rank has ten times the labels of another.

https://github.com/pytorch/pytorch/issues/31579

Pixels of an ignored class are left out of each rank's mean. The mean of the ranks' means then
gives a labelled pixel of one rank another weight than one of the other.

The line: `stepper.backward(loss, weight=labelled, reduction="mean")` for `loss.backward()`. The
gradient is that of the mean over all labelled pixels.

    lockstep run --workers 2 examples/upstream/pytorch_31579.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep

IGNORED = -100  # what cross_entropy leaves out
PIXELS = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0))  # of each rank
LABELS = PIXELS[..., :3].argmax(-1)
LABELS[1, 10:] = IGNORED


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 3)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def error_of(model: nn.Module) -> str:
    """How far this gradient is from that of one process over all pixels."""
    whole = net()
    F.cross_entropy(whole(PIXELS.flatten(0, 1)), LABELS.flatten()).backward()
    error = (gradient(model) - gradient(whole)).norm() / gradient(whole).norm()
    return f"the gradient is {error:.0%} off that of all pixels in one process"


def before(world: lockstep.World) -> str:
    model = DistributedDataParallel(net())
    F.cross_entropy(model(PIXELS[world.rank]), LABELS[world.rank]).backward()
    return error_of(model)


def after(world: lockstep.World) -> str:
    model = net()
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for pixels, labels in stepper.micro_batches([(PIXELS[world.rank], LABELS[world.rank])]):
        loss = F.cross_entropy(model(pixels), labels)
        stepper.backward(loss, weight=int((labels != IGNORED).sum()), reduction="mean")
    stepper.step()
    return error_of(model)


if __name__ == "__main__":
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
