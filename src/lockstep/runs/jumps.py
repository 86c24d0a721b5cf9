"""Find the steps whose loss is far above its running median."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.runs.reading import StepRecord

_WIDE = 31  # steps of the running median beside which a spike is seen
_NEAR = 11  # of that beside which the worst step is: few, because a loss falls
_LEAST = 10  # steps before the first spike
_FAR = 8.0  # median deviations
_SHARE = 0.1  # of the median: smaller jumps are no spikes, even of a loss that hardly moves


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose loss is far above the losses before it."""

    step: int
    loss: float
    median: float
    """The median loss of the steps before it: 31 for `spikes`, 11 for `worst`."""

    @property
    def jump(self) -> float:
        """How far the loss is above the median. A loss that is not finite is infinitely far."""
        return self.loss - self.median if math.isfinite(self.loss) else math.inf


def spikes(steps: Sequence[StepRecord]) -> list[Spike]:
    """Return the spikes of the loss, in order.

    A loss is a spike if it is above the median of the 31 steps before it by more than 8 times their
    median deviation, and by more than a tenth of it; or if it is not finite. Of steps that follow
    each other the first counts. The first 10 steps are none, if they are finite.

    Args:
        steps: of a run, in order.
    """
    result = []
    follows = False
    for spike, before in _jumps(steps, _WIDE):
        is_spike = _is_spike(spike, before)
        if is_spike and not follows:
            result.append(spike)
        follows = is_spike
    return result


def worst(steps: Sequence[StepRecord]) -> Spike | None:
    """Return the step with the largest jump of the loss above the median of the 11 steps before it;
    None if there are fewer than two steps. It need not be a spike.

    Args:
        steps: of a run, in order.
    """
    return max(
        (spike for spike, _ in _jumps(steps, _NEAR)), key=lambda spike: spike.jump, default=None
    )


def _is_spike(spike: Spike, before: Sequence[float]) -> bool:
    """Whether the loss is far above the losses `before` it."""
    if not math.isfinite(spike.loss):
        return True
    if len(before) < _LEAST or spike.jump <= _SHARE * abs(spike.median):
        return False
    deviation = statistics.median_low(abs(loss - spike.median) for loss in before)
    return spike.jump > _FAR * deviation


def _jumps(steps: Sequence[StepRecord], window: int) -> Iterator[tuple[Spike, Sequence[float]]]:
    """Yield each step's loss beside the median of the finite `window` losses before it, and these
    losses in ascending order.
    """
    latest: deque[float] = deque()
    ordered: list[float] = []
    for record in steps:
        if ordered:
            yield Spike(record.step, record.loss, ordered[(len(ordered) - 1) // 2]), ordered
        if math.isfinite(record.loss):
            latest.append(record.loss)
            insort(ordered, record.loss)
            if len(latest) > window:
                del ordered[bisect_left(ordered, latest.popleft())]
