"""What a meeting makes of replicas that have gone their own ways: a step from where they started, against their mean movement.

movement = start - replica, averaged with the weights of what each replica has learned from
average    start - movement                                parameter averaging, local SGD (Stich, ICLR 2019)
nesterov   SGD with Nesterov momentum, movement as gradient  DiLoCo (Douillard et al., 2023)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.method import Outer


class OuterStep:
    """Of some flat tensors `starts`, which it moves. All ranks give it the same movements, and have the same bits after it."""

    def __init__(self, outer: Outer, starts: list[Tensor]) -> None:
        self._outer = outer
        self.starts = starts
        self.momenta = [torch.zeros_like(start) for start in starts] if outer.kind == "nesterov" else []

    @torch.no_grad()
    def move(self, index: int, movement: Tensor) -> None:
        """Move the start of that number by the mean movement, which is used up."""
        start = self.starts[index]
        if not self.momenta:
            start.sub_(movement)
            return
        momentum = self.momenta[index].mul_(self._outer.momentum).add_(movement)
        start.sub_(movement.add_(momentum, alpha=self._outer.momentum), alpha=self._outer.lr)
