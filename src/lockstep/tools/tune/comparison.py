"""Two ways to take a step, timed in turns: is the second one faster, or is the machine only noisy?

Turns are compared pairwise, because what else the machine did fell on both of a pair. The noise of
the median of their ratios is that of a box plot's notch, 1.57 times the interquartile range over
the root of their number (McGill, Tukey and Larsen, 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles

_LEAST_GAIN = 0.01  # what is not worth a settings file; also where few turns lie together by chance
_NOTCH = 1.57


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTimes:
    """Seconds of a step: medians and 25th percentiles of both; `ratio` is the candidate's over
    the base's, `noise` what it may be off.
    """

    turns: int
    base: float
    base_p25: float
    candidate: float
    candidate_p25: float
    ratio: float
    noise: float

    @classmethod
    def of(cls, base: Sequence[float], candidate: Sequence[float]) -> PairedTimes:
        """From the seconds of every turn, at least two of each, equally many."""
        ratios = [theirs / ours for ours, theirs in zip(base, candidate, strict=True)]
        first, _, third = quantiles(ratios, n=4, method="inclusive")
        return cls(
            turns=len(ratios),
            base=median(base),
            base_p25=quantiles(base, n=4, method="inclusive")[0],
            candidate=median(candidate),
            candidate_p25=quantiles(candidate, n=4, method="inclusive")[0],
            ratio=median(ratios),
            noise=_NOTCH * (third - first) / sqrt(len(ratios)),
        )

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster by more than noise."""
        return self.ratio + max(self.noise, _LEAST_GAIN) < 1
