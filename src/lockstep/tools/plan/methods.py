"""Training methods as text, and the work of a module that is no task: what a ratio of communication
to computation needs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.config.knob import knobs
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.work import BACKWARD, RankWork
from lockstep.tools.timing.profile import laid_out

_NAMES = knobs(Parallelism).keys() - {"exact", "mesh"}


def method_of(text: str) -> Parallelism:
    """Read a method such as `--compress bf16` or `--sync-every 50 --outer nesterov`. A first word
    without dashes is a value of --reduce. Raises UsageError for any other text.
    """
    words = shlex.split(text)
    if words and not words[0].startswith("-"):
        words = ["--reduce", *words]
    given: dict[str, Any] = {
        option.removeprefix("--").replace("-", "_"): value
        for option, value in zip(words[::2], words[1::2], strict=False)
    }
    if len(words) % 2 or not words or not set(given) <= _NAMES:
        raise UsageError("unknown-method", text=text)
    if given.get("sync_every", "").isdigit():
        given["sync_every"] = int(given["sync_every"])
    return Parallelism(**given)


def work_of_module(
    model: nn.Module, *, seconds: float = 0.0, micro_batches: int = 1, landed: Sequence[float] = ()
) -> RankWork:
    """Return the work of a rank that computes its micro-batches of a step in `seconds`. Raises
    UsageError if the model has no trained parameter.

    `landed`: for each trained parameter, the share of the backward after which its gradient is
    complete; default: from the last parameter to the first.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise UsageError("no-trainable-parameter")
    each = seconds / micro_batches
    return RankWork(
        forward=(1 - BACKWARD) * each,
        backward=BACKWARD * each,
        micro_batches=micro_batches,
        buckets=laid_out(trained, landed),
        width=sum(each.nbytes for each in trained) / max(1, sum(each.numel() for each in trained)),
    )
