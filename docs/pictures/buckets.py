"""Draws buckets.svg, a recorded training step of a small model: when each bucket of gradients was
ready, sent and summed on every rank, beside the backward.

    python docs/pictures/buckets.py --out buckets.svg
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data.loader import Loader
from lockstep.data.windows import counted
from lockstep.launcher.launch import launch
from lockstep.step.stepper import Stepper
from lockstep.tools.drawing import Drawing, Plot, figure
from lockstep.tools.timing.output_files import table
from lockstep.world.world import init

WORKERS, LAYERS = 2, 6
_WARM, _STEPS = 5, 25
_WIDTH, _SAMPLES = 512, 384  # features of a layer, samples of a rank's step
_COLOURS = {
    "forward": "var(--blue)",
    "backward": "var(--green)",
    "wait for sums": "var(--grey)",
    "update": "var(--purple)",
}
_READY, _SENT = "var(--gold)", "var(--orange)"


@dataclass(frozen=True, slots=True)
class BucketMoments:
    """The times, in seconds, when a bucket's last gradient was computed (`ready`), when the bucket
    was sent, and when its sum arrived (`done`).
    """

    ready: float
    sent: float
    done: float


@dataclass(slots=True)
class RankMoments:
    """The times of one rank's step, on a clock that all ranks of a host share."""

    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    buckets: Sequence[BucketMoments] = ()
    sizes: Sequence[int] = ()
    """The bytes of each bucket."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.spans[name] = begin, time.monotonic()


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The step that is drawn, as all ranks recorded it."""

    ranks: Sequence[RankMoments]

    @property
    def begin(self) -> float:
        return min(rank.spans["forward"][0] for rank in self.ranks)

    def hidden(self, rank: int) -> float:
        """The fraction of a rank's communication time that overlaps its backward."""
        over = self.ranks[rank].spans["backward"][1]
        on_way, beside, reached = 0.0, 0.0, 0.0
        for each in self.ranks[rank].buckets:
            begin = max(each.sent, reached)
            reached = max(reached, each.done)
            on_way += max(0.0, each.done - begin)
            beside += max(0.0, min(each.done, over) - begin)
        return beside / on_way if on_way else 0.0


def recorded(workers: int, layers: int) -> RecordedStep:
    """Train a small model for some steps on this host, and return the step of median length."""
    found = launch(_on_rank, workers, (layers,))
    lengths = [step.spans["update"][1] - step.spans["forward"][0] for step in found[0]]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    return RecordedStep([steps[middle] for steps in found])


def _on_rank(layers: int) -> list[RankMoments]:
    """Record every step after the warm-up."""
    with init() as world:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(
            *(part for _ in range(layers) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU()))
        )
        landed: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: landed.__setitem__(name, time.monotonic())
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        stepper = Stepper(model, optimizer, reduce="native", bucket_mb=1.0)
        data = TensorDataset(torch.randn(world.size * _SAMPLES * _STEPS, _WIDTH))
        loader = Loader(data, global_batch=world.size * _SAMPLES, micro_batch=_SAMPLES)
        found = []
        for window in next(iter(loader.epochs(1))):
            step = RankMoments()
            for (inputs,) in stepper.micro_batches(window):
                with step.span("forward"):
                    loss = model(inputs).square().sum()
                with step.span("backward"):
                    stepper.backward(loss, weight=len(inputs))
            stepper.step()
            _note_rest(step, stepper, landed, time.monotonic())
            found.append(step)
        return found[_WARM:]


def _note_rest(
    step: RankMoments, stepper: Stepper, landed: Mapping[str, float], end: float
) -> None:
    """Add the buckets, the wait for the last sum, and the update to a recorded step."""
    plans = stepper.reducer.layout.buckets
    step.sizes = [plan.numel * plan.dtype.itemsize for plan in plans]
    moments = []
    for plan, times in zip(plans, stepper.reducer.timeline.times(), strict=True):
        assert times.arrived is not None, "a step ends when all sums are there"
        ready = max(landed[span.name] for span in plan.spans)
        moments.append(BucketMoments(min(ready, times.left), times.left, times.arrived))
    step.buckets = moments
    over = step.spans["backward"][1]
    summed = max(over, max(each.done for each in moments))
    step.spans |= {"wait for sums": (over, summed), "update": (summed, end)}


def title(found: RecordedStep) -> str:
    """Describe the step in one line."""
    shares = " and ".join(f"{found.hidden(rank):.0%}" for rank in range(len(found.ranks)))
    return (
        f"one step of {counted(len(found.ranks), 'rank')}:"
        f" {counted(len(found.ranks[0].buckets), 'bucket')}, {shares} of the communication"
        " hidden behind the backward"
    )


def text(found: RecordedStep) -> str:
    """Return a table in milliseconds: one line per phase and per bucket of each rank."""
    rows = []
    for rank, step in enumerate(found.ranks):
        for name, (begin, end) in step.spans.items():
            rows.append([f"rank {rank} {name}", "", _ms(found, begin), "", _ms(found, end)])
        for number, (each, size) in enumerate(zip(step.buckets, step.sizes, strict=True)):
            moments = (_ms(found, at) for at in (each.ready, each.sent, each.done))
            rows.append([f"rank {rank} bucket {number}", f"{size / 1e6:.2f} MB", *moments])
    head = "ms since the step began | size | ready, or began | sent | done, or ended"
    return f"{title(found)}\n\n{table(head, rows)}"


def _ms(found: RecordedStep, at: float) -> str:
    return f"{1e3 * (at - found.begin):.2f}"


def drawing(found: RecordedStep) -> Drawing:
    """Draw one panel per rank: the phases of its step, and below them its buckets."""
    ends = [
        each for rank in found.ranks for each in (rank.spans["update"][1], rank.buckets[-1].done)
    ]
    last = 1e3 * (max(ends) - found.begin)
    names = {**_COLOURS, "ready, not yet sent": _READY, "sent, until its sum is there": _SENT}
    plots = []
    for rank, step in enumerate(found.ranks):
        rows = ["step", *(f"bucket {number}" for number in range(len(step.buckets)))]
        legend = names if rank == 0 else None
        label = "ms since the step began"
        plot = Plot((0, last), label, rows=rows, legend=legend, title=f"rank {rank}")
        for name, (begin, end) in step.spans.items():
            plot.bar(*_both(found, begin, end), 0.12, 0.76, _COLOURS[name])
        for row, each in enumerate(step.buckets, 1):
            plot.bar(*_both(found, each.ready, each.sent), row + 0.3, 0.4, _READY)
            plot.bar(*_both(found, each.sent, each.done), row + 0.18, 0.64, _SENT)
        plots.append(plot)
    return figure(title(found), plots, text(found).replace("\n", ". "))


def _both(found: RecordedStep, begin: float, end: float) -> tuple[float, float]:
    return 1e3 * (begin - found.begin), 1e3 * (end - found.begin)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    file = options.parse_args().out
    drawing(recorded(WORKERS, LAYERS)).save(file)


if __name__ == "__main__":
    main()
