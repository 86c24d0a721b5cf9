"""Numbers and ranks as the verdict writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentages(shares: Sequence[float]) -> list[int]:
    """Whole per cents that add up as the shares do: what rounding down leaves goes to the
    largest remainders.
    """
    whole = [math.floor(100 * share) for share in shares]
    left = round(100 * sum(shares)) - sum(whole)
    by_remainder = sorted(range(len(shares)), key=lambda place: whole[place] - 100 * shares[place])
    for place in by_remainder[:left]:
        whole[place] += 1
    return whole


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1 and 2`, `ranks 0, 1, 2 and 9 more`."""
    shown = [str(number) for number in numbers[:4]]
    if len(numbers) > 4:
        shown = [*shown[:3], f"{len(numbers) - 3} more"]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' * (len(numbers) > 1)} {listed}"


def milliseconds(seconds: float) -> str:
    """Without a unit: `212`, `11`, `0.35`."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.00995 else f"{1e3 * seconds:.2g}"
