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
        self._said: set[str] = set()

    def __call__(self) -> None:
        """Check. All ranks call it after `finish`. Raises UnusedParameters on all of them."""
        reducer = self._reducer
        if not reducer.someone_misses:
            return
        landed = torch.tensor(
            reducer.ready_here, dtype=torch.uint8, device=reducer.parameters[0].device
        )
        used = (
            reducer.group.all_gather(landed, place="for the list of unused parameters")
            .view(reducer.group.size, -1)
            .bool()
            .cpu()
        )
        anywhere = used.any(0).tolist()
        nowhere = [
            name for name, is_used in zip(reducer.names, anywhere, strict=True) if not is_used
        ]
        idle = ~used.any(1, keepdim=True)  # a rank without micro-batches misses nothing
        self._say_partly(
            [
                (name, missing)
                for name, missing, is_used in zip(
                    reducer.names, (~(used | idle)).t(), anywhere, strict=True
                )
                if is_used and missing.any()
            ]
        )
        if nowhere and self._policy == "error":
            raise UnusedParameters("unused-parameters", names=nowhere, shown=shortly(nowhere))
        if self._policy == "skip":
            skipped = set(nowhere)
            for name, parameter, filled in zip(
                reducer.names, reducer.parameters, reducer.filled_here, strict=True
            ):
                if filled and name in skipped:  # a `.grad` left from an earlier backward stays
                    parameter.grad = None

    def _say_partly(self, partly: list[tuple[str, torch.Tensor]]) -> None:
        new = [(name, missing) for name, missing in partly if name not in self._said]
        self._said.update(name for name, _ in new)
        if new and self._reducer.group.rank == 0:
            without = new[0][1].nonzero().flatten().tolist()
            names = shortly([name for name, _ in new])
            warnings.warn(
                f"{names} got no gradient on {listed(without)}: the mean counts zeros there. This"
                " warning appears once.",
                LockstepWarning,
                stacklevel=2,
            )


def shortly(names: list[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
