"""Every rank updates its shard of the parameters, and all exchange what they have updated: ZeRO-1
and 2 (Rajbhandari et al., SC 2020).

The optimizer's work and its state are divided by the number of ranks; the weights are those of the
replicated update, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.updates.applied import Applied
from lockstep.updates.norm import block_sums
from lockstep.updates.optimizer_state import CutOptimizer
from lockstep.updates.replicated import InBuckets
from lockstep.updates.shards import Shards
from lockstep.updates.stepping import Stepping
from lockstep.updates.update import OwnStep, Updated


class Sharded(OwnStep):
    """Holds pieces of the parameters in the user's own optimizer.

    After a step only this rank's slices of the gradients are sums over all ranks, where the
    reduction can leave the others out.
    """

    name = "sharded"

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated)
        reducer = updated.reducer
        self.optimizer: CutOptimizer = CutOptimizer(
            reducer,
            updated.optimizer,
            lambda: Shards(reducer.parameters, reducer.layout, reducer.group),
        )
        reducer.reduction.scatter()
        self._stepping = Stepping(updated, InSlices(reducer, self.optimizer))

    def follow(self) -> None:
        self.optimizer.follow()

    def overwritten(self) -> Sequence[Tensor]:
        return self.optimizer.shards.flats

    def apply(self, divisor: float) -> Applied:
        shards, scaler = self.optimizer.shards, self._updated.scaler
        if scaler is not None and scaler.is_enabled() and shards.someone_has_none:
            raise UsageError(
                "loss-scaler-does-not-fit", option="update='sharded' of a model this small"
            )
        shards.take_gradients()
        applied = self._stepping.apply(divisor)
        shards.gather()
        return applied


class InSlices(InBuckets):
    """This rank's slices of a reducer's sums."""

    def __init__(self, reducer: Reducer, cut: CutOptimizer) -> None:
        super().__init__(reducer)
        self._cut, self.spread = cut, [reducer.group]

    def flats(self) -> list[Tensor]:
        return self._cut.shards.slices(super().flats())

    def blocks(self) -> list[Tensor]:
        return [self._cut.shards.everybodys([block_sums(each) for each in self.flats()])]

    def named(self) -> Iterable[tuple[str, Tensor]]:
        return self._cut.shards.gradients(self._reducer.names)
