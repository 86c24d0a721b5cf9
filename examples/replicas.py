"""Data parallelism from scratch, in one process: copies of a model, a chunk of the batch for each,
one average, equal updates.

    python examples/replicas.py

The gradients are averaged in two ways, through replica 0 and round a ring. Losses and weights are
compared with those of the plain model over the whole batch. Under `lockstep run` only rank 0 does it: there
is nothing between processes here.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

BATCH, LEARNING_RATE, EPOCHS = 100, 0.1, 5


def loss_sum(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    # a sum: chunks may be of different sizes
    return F.cross_entropy(model(images), labels, reduction="sum")


def train_in_parallel(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], algorithm: str
) -> tuple[nn.Module, list[float]]:
    replicas = lockstep.Replicas(model, 4, algorithm=algorithm)
    replicas.optimize(lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))
    losses = []
    for _ in range(EPOCHS):
        for batch in batches:
            losses.append(replicas.gradients(batch, loss_sum))  # every replica its own chunk
            replicas.average_gradients()  # the only communication
            replicas.update()  # the same step on each
    replicas.check()  # bit for bit equal
    return replicas.master, losses


def train_alone(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[float]]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def main() -> None:
    digits = load_digits()
    # float64: what differs below is rounding, and little of it
    images = torch.tensor(digits.data, dtype=torch.float64) / 16
    labels = torch.tensor(digits.target)
    # 17 of 100, and one of 97, which 4 does not divide
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    alone, expected = train_alone(model, batches)
    for algorithm in ("central", "ring"):
        together, losses = train_in_parallel(model, batches, algorithm)
        pairs = zip(together.parameters(), alone.parameters(), strict=True)
        largest = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        assert largest < 1e-12, f"weights differ by {largest}"
        apart = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
        assert apart < 1e-12, f"losses differ by {apart}"
        right = (together(images).argmax(1) == labels).double().mean().item()
        print(
            f"{algorithm}: 4 replicas and one process differ by less than 1e-12 in every weight and"
            f" every loss; last loss {losses[-1]:.4f}, accuracy {right:.3f}"
        )


if __name__ == "__main__":
    with lockstep.init() as world:
        if world.rank == 0:
            main()
