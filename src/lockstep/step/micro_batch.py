"""A micro-batch of a user's own loop: what its losses and the values that it logs weigh."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class MicroBatch:
    """The micro-batch that the loop computes now.

    Args:
        index: its number among this rank's of the window; None for a copy that pads the window.
        weight: its number of samples.
        last: whether it is this rank's last of the window.
        reduction: what a loss is: the "mean" over the micro-batch, its "sum", or a sum that must
            not be divided ("as is").
        logged: for each name the sum of weight times value, and of weights, in this window.
    """

    def __init__(
        self,
        index: int | None,
        weight: float,
        last: bool,
        reduction: str,
        logged: dict[str, tuple[float, float]],
    ) -> None:
        self.index = index
        self.weight = weight
        self.last = last
        self.reduction = reduction
        self.counted = False
        """Whether a loss was counted with this weight."""
        self.evaluated = False
        """Whether its body has begun an evaluation: what it adds up then is that evaluation's."""
        self._logged = logged

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Count values of this micro-batch; those of a copy count nothing."""
        weight = 0.0 if self.index is None else self.weight
        for name, value in values.items():
            total, weights = self._logged.get(name, (0.0, 0.0))
            if isinstance(value, Tensor):
                value = value.detach()
            number = float(value) if weight else 0.0
            self._logged[name] = total + weight * number, weights + weight

    def root(self) -> float:
        """Return the gradient of a loss: what it is multiplied by in the step's sum."""
        return self.weight if self.reduction == "mean" else 1.0
