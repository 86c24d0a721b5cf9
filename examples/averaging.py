"""When does averaging models work? Often enough it is training; once, of models that began apart,
it is not.

    lockstep run --workers 4 examples/averaging.py --out averaging.svg

Every rank trains on its share of each batch, alone; the table shows what one replica has learned,
and what their average knows.
"""

import argparse

import torch
from torch import Tensor, nn

import lockstep
from lockstep.tasks import digits
from lockstep.tools.drawing import SERIES, Plot, figure

NEVER = 10**9
WAYS = {
    "summed gradients": (None, True),
    "every step": (1, True),
    "every 8 steps": (8, True),
    "every 64 steps": (64, True),
    "once, one start": (NEVER, True),
    "once, other starts": (NEVER, False),
}


def accuracy(model: nn.Module, data: torch.utils.data.TensorDataset) -> float:
    images, labels = data.tensors
    model.eval()
    with torch.no_grad():
        found = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return found


def average(model: nn.Module, world: lockstep.World) -> nn.Module:
    """A model whose weights and statistics are the mean of all ranks'. Nobody's own is touched."""
    mean = digits.Net(dropout=0.0)
    theirs: dict[str, Tensor] = {
        name: value.detach().clone() for name, value in model.state_dict().items()
    }
    for value in theirs.values():
        if value.is_floating_point():
            world.group.all_reduce(value, "mean").wait()
    mean.load_state_dict(theirs)
    return mean


def train(
    world: lockstep.World, every: int | None, one_start: bool, epochs: int
) -> list[tuple[float, float]]:
    """After each epoch: the mean of the replicas' accuracies, and the accuracy of their average."""
    data, held_out = digits.datasets()
    torch.manual_seed(0)
    model = digits.Net(dropout=0.0)
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sync_every=every
    )
    if not one_start:  # after the Stepper has made all alike
        torch.manual_seed(1 + world.rank)
        model.load_state_dict(digits.Net(dropout=0.0).state_dict())
    loader = lockstep.Loader(data, global_batch=64, micro_batch=8, seed=0)
    found = []
    for epoch in loader.epochs(epochs):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(
                    nn.functional.cross_entropy(model(x), y, reduction="sum"), weight=len(y)
                )
            stepper.step()
        found.append(
            (world.mean(accuracy(model, held_out), 1.0), accuracy(average(model, world), held_out))
        )
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--out")
    chosen = options.parse_args()
    with lockstep.init() as world:
        found = {
            name: train(world, every, one_start, chosen.epochs)
            for name, (every, one_start) in WAYS.items()
        }
        if world.rank > 0:
            return
        print(
            f"{'the replicas meet':20}{'a replica':>12}{'their average':>16}    accuracy after"
            f" {chosen.epochs} epochs, {world.size} ranks"
        )
        for name, accuracies in found.items():
            alone, together = accuracies[-1]
            print(f"{name:20}{alone:12.3f}{together:16.3f}")
        if chosen.out:
            plot(found, chosen.out)


def plot(found: dict[str, list[tuple[float, float]]], file: str) -> None:
    colours = dict(zip(found, SERIES, strict=False))
    epochs = len(next(iter(found.values())))
    chart = Plot(
        (1, epochs), "epoch", up=(0, 1), up_label="accuracy of the average", legend=colours
    )
    for number, (name, accuracies) in enumerate(found.items()):
        together = [average for _, average in accuracies]
        # curves may lie on each other: later ones have longer gaps, in which earlier ones are seen
        dashes = f"6 {2 * number}" if number else None
        chart.curve(enumerate(together, 1), colours[name], dots=True, dashes=dashes)
    title = "Accuracy of the averaged replicas, by how often they synchronize"
    ends = [f"{name}: {accuracies[-1][1]:.3f}" for name, accuracies in found.items()]
    figure(title, [chart], f"After {epochs} epochs: {', '.join(ends)}.").save(file)


if __name__ == "__main__":
    main()
