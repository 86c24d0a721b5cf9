"""When the next checkpoint is due, where nobody has said it: often enough, and for no more than
2 % of the time.
"""

from __future__ import annotations

import math

FIRST = 20  # the step after which the first is written, and the cost of one is known
_SHARE = 0.02  # of the time may go into saving
_BETWEEN_FAILURES = 3 * 3600.0  # seconds, assumed


def steps_until_next(cost: float, step: float) -> int:
    """Steps between two checkpoints, one of which costs `cost` seconds, where a step takes `step`
    seconds.

    sqrt(2 * cost * time between failures) loses least to both saving and repeating (Young, CACM
    1974; Daly, FGCS 2006).
    """
    seconds = max(cost / _SHARE, math.sqrt(2 * cost * _BETWEEN_FAILURES))
    return max(1, math.ceil(seconds / max(step, 1e-6)))
