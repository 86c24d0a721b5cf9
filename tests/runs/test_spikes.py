"""Which steps are spikes, and which jump is the largest."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from lockstep.runs import StepRecord, spikes, worst


def steps(losses: Iterable[float]) -> list[StepRecord]:
    numbers = {"weight": 1.0, "lr": 0.1, "samples_per_s": 1.0}
    return [
        StepRecord(
            step=step,
            epoch=1,
            loss=loss,
            samples_by_rank=(1,),
            grad_norm=None,
            bytes_sent=None,
            **numbers,
        )
        for step, loss in enumerate(losses, 1)
    ]


def noisy(count: int, share: float = 0.2) -> list[float]:
    """A loss that falls, with noise."""
    draw = random.Random(3)
    return [2 / (1 + step / 50) * (1 + share * draw.gauss(0, 1)) for step in range(count)]


def test_a_noisy_loss_has_no_spike() -> None:
    assert spikes(steps(noisy(2000))) == []
    assert spikes(steps([0.5] * 30 + [0.52] + [0.5] * 30)) == []  # of a loss that hardly moves


def test_a_spike_is_marked_where_it_begins() -> None:
    losses = noisy(400)
    losses[299:303] = [30.0, 20.0, 10.0, 8.0]
    (spike,) = spikes(steps(losses))
    assert (spike.step, spike.loss) == (300, 30.0)
    assert spike.median < 0.6
    assert spike.jump == 30.0 - spike.median
    assert worst(steps(losses)) == spike


def test_the_largest_jump_is_against_the_median_and_not_the_largest_loss() -> None:
    losses = [100.0] * 20 + [1.0] * 60 + [90.0] + [1.0] * 10
    largest = worst(steps(losses))
    assert largest is not None
    assert (largest.step, largest.median, largest.jump) == (81, 1.0, 89.0)


def test_a_loss_that_is_not_finite_is_a_spike() -> None:
    losses = [*noisy(5), math.nan, math.nan, 1.0, math.inf]
    assert [spike.step for spike in spikes(steps(losses))] == [6, 9]
    largest = worst(steps(losses))
    assert largest is not None
    assert largest.step == 6


def test_short_runs() -> None:
    assert worst(steps([])) is None
    assert worst(steps([1.0])) is None
    assert spikes(steps([1.0, 1000.0])) == []
    assert [worst(steps([1.0, 2.0])), worst(steps([2.0, 1.0]))] != [None, None]
