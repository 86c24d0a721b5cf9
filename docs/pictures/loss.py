"""Draws loss.svg: the loss of every step of digits in exact mode, with 1, 2 and 4 workers.

    python docs/pictures/loss.py --out loss.svg

The first curve is the widest, so that all can be seen where they coincide.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from lockstep.config.settings import Settings
from lockstep.tools.drawing import SERIES, Drawing, Plot, figure
from lockstep.tools.verify.tracing import train

WORKERS = (1, 2, 4)
STEPS = 100


def losses_with(workers: int, steps: int) -> list[float]:
    """Train on this host's CPUs, and return the loss of each step before its update."""
    settings = Settings(
        task="digits", workers=workers, steps=steps, device="cpu", threads=1, exact=True
    )
    return [step.loss for step in train(settings).steps]


def drawing(losses: Mapping[int, Sequence[float]]) -> Drawing:
    """Draw one curve for each number of workers."""
    curves = [*losses.values()]
    names = {
        f"{workers} worker{'s' * (workers > 1)}": colour
        for workers, colour in zip(losses, SERIES, strict=False)
    }
    steps = len(curves[0])
    largest = max(max(curve) for curve in curves)
    label = "loss of the global batch, before the update"
    plot = Plot((1, steps), "step", up=(0.0, largest), up_label=label, legend=names)
    for behind, colour, curve in zip(
        reversed(range(len(curves))), names.values(), curves, strict=True
    ):
        plot.curve(enumerate(curve, 1), colour, width=1.2 + 2.4 * behind)
    same = "the same bits" if all(curve == curves[0] for curve in curves) else "other bits"
    counts = ", ".join(map(str, losses))
    title = f"digits, {steps} steps with {counts} workers, exact mode: {same}"
    ends = "; ".join(
        f"{name}: from {curve[0]:.17g} to {curve[-1]:.17g}"
        for name, curve in zip(names, curves, strict=True)
    )
    return figure(title, [plot], f"{title}. {ends}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    file = options.parse_args().out
    drawing({workers: losses_with(workers, STEPS) for workers in WORKERS}).save(file)


if __name__ == "__main__":
    main()
