"""Learning rates for another global batch, and warm-up. Lockstep never applies them on its own.

The learning rate belongs to the global batch, not to the number of workers: with a fixed global
batch it stays the same at any number of ranks. For a changed batch two rules are common. Both hold
only up to the critical batch size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.config import knob
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR, LRScheduler

    from lockstep.data.windows import Window

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, base_batch: int, global_batch: int, rule: Rule = "linear") -> float:
    """Return the learning rate for `global_batch` samples a step, from a rate for `base_batch`.

    The rate belongs to the global batch. If only the number of workers changes, keep the rate.

    Example::

        lr = lockstep.scale_lr(0.1, base_batch=256, global_batch=1024)  # 0.4

    Args:
        lr: the learning rate that was chosen for `base_batch`.
        base_batch: samples of a step for which `lr` was chosen.
        global_batch: samples of a step now, over all ranks.
        rule: "linear": times the ratio of the batches, for SGD with a warm-up (Goyal et al. 2017,
            section 2.1). "sqrt": times the square root of the ratio, usual for Adam.

    Returns:
        The learning rate.

    Raises:
        UsageError: a batch below 1, a rate that is not above 0, or an unknown rule.
    """
    knob.whole("base_batch", base_batch)
    knob.whole("global_batch", global_batch)
    knob.number("lr", lr, above=0)
    knob.chosen("rule", rule, get_args(Rule))
    ratio = global_batch / base_batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))


def warmup(optimizer: Optimizer, steps: int, start: float = 0.1) -> LambdaLR:
    """Return a scheduler that raises the learning rate linearly over `steps` steps, from `start`
    times its value to its value.

    Gradual warm-up (Goyal et al. 2017, section 2.2). Pass it to `Stepper(scheduler=...)`, or chain
    it with `torch.optim.lr_scheduler.SequentialLR`. Raises UsageError for steps below 1 and a start
    outside (0, 1].
    """
    knob.whole("steps", steps)
    knob.number("start", start, above=0, most=1)
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: min(1.0, start + (1 - start) * step / steps))


def follow_epoch(scheduler: LRScheduler, window: Window | None) -> None:
    """Step a scheduler of epochs to the epoch of `window`. Raises UsageError if that is unknown."""
    if window is None:
        raise UsageError("epochs-unknown", kind="list of batches")
    while scheduler.last_epoch < window.cut.epoch:
        scheduler.step()
