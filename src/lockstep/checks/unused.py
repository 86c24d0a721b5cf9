"""Parameters without a gradient, by name, before the optimizer steps.

Every rank counts its own missing gradients, and the count travels in the last bucket. So if none is
missing, no further message is sent. Otherwise the ranks compare. A parameter that some of them used
was averaged with zeros: this is right, and a warning says so once. A parameter that none of them
used is usually a mistake.
"""

from __future__ import annotations

import warnings

import torch

from lockstep.collectives.fingerprints import listed
from lockstep.config.task import Unused
from lockstep.errors import LockstepWarning, UnusedParameters
from lockstep.gradients.reducer import Reducer

_NAMED = 5  # names before "and N more"


class UnusedCheck:
    """Checks which gradients a finished window was missing. `policy`: raise for parameters that no
    rank used, count them as zeros, or leave their `.grad` None.
    """

    def __init__(self, reducer: Reducer, policy: Unused) -> None:
        self._reducer = reducer
        self._policy = policy
        self._warned: set[str] = set()

    def __call__(self) -> None:
        """Check. All ranks call it after `finish`. Raises UnusedParameters on all of them."""
        reducer = self._reducer
        if not reducer.someone_misses:
            return
        device = reducer.parameters[0].device
        ready = torch.tensor(reducer.ready_here, dtype=torch.uint8, device=device)
        table = reducer.group.all_gather(ready, place="for the list of unused parameters")
        used = table.view(reducer.group.size, -1).bool().cpu()
        idle = ~used.any(1, keepdim=True)  # a rank without micro-batches misses nothing
        missing = ~(used | idle)
        unused = []
        partly_used = {}
        anywhere = used.any(0).tolist()
        for name, is_used, by_rank in zip(reducer.names, anywhere, missing.t(), strict=True):
            if not is_used:
                unused.append(name)
            elif by_rank.any():
                partly_used[name] = by_rank
        self._warn(partly_used)
        if unused and self._policy == "error":
            raise UnusedParameters("unused-parameters", names=unused, shown=shortly(unused))
        if self._policy == "skip":
            skipped = set(unused)
            for name, parameter, filled in zip(
                reducer.names, reducer.parameters, reducer.filled_here, strict=True
            ):
                if filled and name in skipped:  # a `.grad` left from an earlier backward stays
                    parameter.grad = None

    def _warn(self, partly_used: dict[str, torch.Tensor]) -> None:
        """Warn once of each parameter that some ranks used. The values say of each rank whether it
        misses the gradient.
        """
        new = [name for name in partly_used if name not in self._warned]
        self._warned.update(new)
        if new and self._reducer.group.rank == 0:
            ranks = partly_used[new[0]].nonzero().flatten().tolist()
            warnings.warn(
                f"{shortly(new)} got no gradient on {listed(ranks)}: the mean counts zeros there."
                " This warning appears once.",
                LockstepWarning,
                stacklevel=2,
            )


def shortly(names: list[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    if len(names) <= _NAMED:
        return shown
    return f"{shown} and {len(names) - _NAMED} more"
