"""Draws speedup.svg: how much faster N workers are by the formulas of the course's lesson 7, for three
links.

    python docs/pictures/speedup.py --out speedup.svg
"""

from __future__ import annotations

import argparse

from lockstep.tools.drawing import SERIES, SOFT, Drawing, Plot, figure

COMPUTE = 1.0  # seconds of a step on one worker
SIZE = 1e8  # bytes of gradients
MOST = 32  # workers
LINKS = {  # seconds of a message, bytes a second
    "NVLink, 450 GB/s": (3e-6, 450e9),
    "25 GbE, 3.1 GB/s": (25e-6, 3.1e9),
    "10 GbE, 1.2 GB/s": (50e-6, 1.2e9),
}


def ring_seconds(workers: int, latency: float, bandwidth: float) -> float:
    """The duration of a ring all-reduce of the gradients."""
    return 2 * (workers - 1) * latency + 2 * (workers - 1) / workers * SIZE / bandwidth


def speedup(workers: int, latency: float, bandwidth: float) -> float:
    """The workers share one batch, and nothing hides the all-reduce."""
    return COMPUTE / (COMPUTE / workers + ring_seconds(workers, latency, bandwidth))


def drawing() -> Drawing:
    colours = {"no communication": SOFT, **dict(zip(LINKS, SERIES, strict=False))}
    plot = Plot((1, MOST), "workers", up=(0, MOST), up_label="speedup", legend=colours)
    plot.curve([(1, 1), (MOST, MOST)], SOFT, dashes="4 4")
    ends = []
    for name, link in LINKS.items():
        points = [(workers, speedup(workers, *link)) for workers in range(1, MOST + 1)]
        plot.curve(points, colours[name])
        ends.append(f"{name}: {points[-1][1]:.1f}")
    title = "Speedup by the formula: a step of 1 s with 100 MB of gradients"
    return figure(title, [plot], f"With {MOST} workers: {', '.join(ends)}.")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    drawing().save(options.parse_args().out)


if __name__ == "__main__":
    main()
