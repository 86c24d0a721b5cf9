"""Draw the loss of every step, for trainings with several numbers of workers. In exact mode the
curves are equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.settings import Settings
from lockstep.data.windows import counted
from lockstep.tools.drawing import SERIES, Drawing
from lockstep.tools.svg import Plot, figure
from lockstep.tools.timing.output_files import table
from lockstep.tools.verify.tracing import train

_ROWS = 12
"""The number of steps in the table."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses and the final weights of trainings, by number of workers."""

    task: str
    exact: bool
    losses: Mapping[int, Sequence[float]]
    """The loss of each step, before its update."""
    sha256: Mapping[int, str]
    """The checksum of the final weights."""

    @property
    def same(self) -> bool:
        """Whether all losses and weights are equal to the last bit."""
        return len(set(map(tuple, self.losses.values()))) == len(set(self.sha256.values())) == 1


def trained(
    task: str, counts: Sequence[int], steps: int, overrides: Mapping[str, str], *, exact: bool
) -> Losses:
    """Train once for each number of workers, on this host."""
    traces = {
        workers: train(
            Settings(
                task=task,
                overrides=dict(overrides),
                workers=workers,
                steps=steps,
                device="cpu",
                threads=1,
                exact=exact,
            )
        )
        for workers in counts
    }
    return Losses(
        task,
        exact,
        {workers: [step.loss for step in trace.steps] for workers, trace in traces.items()},
        {workers: trace.sha256 for workers, trace in traces.items()},
    )


def title(found: Losses) -> str:
    """Describe the result in one line."""
    steps = len(next(iter(found.losses.values())))
    counts = ", ".join(map(str, found.losses))
    same = "the same bits" if found.same else "other bits"
    how = "exact mode" if found.exact else "not exact"
    return f"{found.task}, {counted(steps, 'step')} with {counts} workers, {how}: {same}"


def text(found: Losses) -> str:
    """Return a table: one line for each of some steps, and the checksums of the final weights."""
    names = [counted(workers, "worker") for workers in found.losses]
    steps = len(next(iter(found.losses.values())))
    shown = sorted({round(place * (steps - 1) / max(1, _ROWS - 1)) for place in range(_ROWS)})
    rows: list[list[str]] = [
        [str(step + 1), *(f"{losses[step]:.17g}" for losses in found.losses.values())]
        for step in shown
    ]
    rows.append(["sha256", *(f"{digest[:16]}..." for digest in found.sha256.values())])
    return f"{title(found)}\n\n{table(['step', *names], rows)}"


def drawing(found: Losses) -> Drawing:
    """Draw one curve for each number of workers. The first is the widest, so that all can be seen
    where they coincide.
    """
    every = [loss for losses in found.losses.values() for loss in losses]
    names = {
        counted(workers, "worker"): SERIES[place % len(SERIES)]
        for place, workers in enumerate(found.losses)
    }
    plot = Plot(
        (1, len(next(iter(found.losses.values())))),
        "step",
        up=(0.0, max(every)),
        up_label="loss of the global batch, before the update",
        legend=names,
    )
    last = len(names) - 1
    for place, (colour, losses) in enumerate(
        zip(names.values(), found.losses.values(), strict=True)
    ):
        plot.curve(enumerate(losses, 1), colour, width=1.2 + 2.4 * (last - place))
    return figure(title(found), [plot], text(found).replace("\n", ". "))
