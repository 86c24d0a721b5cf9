"""Exercise 7: speedup and efficiency, what a step takes, and your own scaling.

Grade it with `pytest docs/course -k lesson7`. When it passes, run this file: it measures this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def scaling(rates: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Return (speedup, efficiency) for each number of workers.

    The smallest number of workers is the base. It need not be 1. The base has speedup 1 and
    efficiency 1. With linear scaling every number of workers has efficiency 1.

    Args:
        rates: samples per second by number of workers.
    """
    raise NotImplementedError


def ring_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce.

    Args:
        ranks: how many ranks there are, at least 1.
        size: bytes of the tensor on each rank.
        latency: seconds for a message, whatever its size.
        bandwidth: bytes per second, one way.
    """
    raise NotImplementedError


def step_seconds(forward: float, backward: float, buckets: Sequence[float]) -> float:
    """Return the seconds from the start of the forward pass until all gradients are summed.

    The backward pass completes its buckets one after the other, at equal distances, the last one at
    its end. The link carries one bucket at a time, in this order, each as soon as it is complete
    and the link is free.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        buckets: seconds on the link of each bucket, in the order in which they are complete.
    """
    raise NotImplementedError


def build() -> Callable[[], int]:
    """On a rank of an open group: return a function that trains one step of 4096 samples together,
    and returns how many of them this rank had.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = 4096 // dist.get_world_size()
    inputs, labels = torch.randn(samples, 64), torch.randint(10, (samples,))

    def step() -> int:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        return samples

    return step


def measure(
    build: Callable[[], Callable[[], int]],
    numbers: Sequence[int],
    warm_up: int = 3,
    steps: int = 10,
) -> dict[int, float]:
    """Return samples per second by number of workers, measured on this machine.

    For each number start the ranks with `lockstep.launch`, which takes a function from the top of a
    file. On each rank open a group with the gloo backend, call `build()` once, and call the step that
    it returns `warm_up` times. Then start all ranks together and measure `steps` steps with
    `time.perf_counter()`. The rate is the samples of all ranks in the time of the slowest one. Free
    the step, which holds a DDP model, before you leave the group (lesson 5).

    Args:
        build: returns a function that makes one step, and returns how many samples this rank had.
        numbers: numbers of workers, not always with 1.
        warm_up: how many steps come before the measured ones.
        steps: how many steps are measured.
    """
    raise NotImplementedError


def draw(rates: Mapping[int, float], file: str) -> None:
    """Draw the speedups of `scaling(rates)` into an SVG file.

    Each number of workers is one `<circle>`. Its distance to the right is in proportion to the
    workers, and its height to the speedup. One `<line>` shows linear scaling: it begins at the base,
    which has speedup 1, and has speedup `workers / base` elsewhere. A `<text>` beside each circle
    has the efficiency in percent, such as "95%".

    Args:
        rates: samples per second by number of workers.
        file: the SVG file to write.
    """
    raise NotImplementedError


if __name__ == "__main__":
    found = measure(build, [1, 2, 4])
    draw(found, "my_scaling.svg")
    for workers, (speedup, efficiency) in scaling(found).items():
        print(f"{workers} workers: speedup {speedup:.2f}, efficiency {efficiency:.0%}")
