"""The sharded update: the optimizer's work and its state are divided by the number of ranks. The
weights are those of the replicated update, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lockstep.checks.witness import Witness
from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.updates.divide_clip_step import OwnStep
from lockstep.updates.norm_and_clip import InBuckets, block_sums
from lockstep.updates.optimizer_state import CutOptimizer, elementwise_pieces
from lockstep.updates.repeated import SliceUpdate, check_repeated
from lockstep.updates.shard_memory import can_share
from lockstep.updates.shards import Shards
from lockstep.updates.update import Applied, Updated


class InSlices(InBuckets):
    """This rank's slices of a reducer's sums."""

    def __init__(self, reducer: Reducer, cut: CutOptimizer[Shards]) -> None:
        super().__init__(reducer)
        self._cut = cut
        self.spread = [reducer.group]

    def flats(self) -> list[Tensor]:
        return self._cut.shards.slices(super().flats())

    def blocks(self) -> list[Tensor]:
        return [self._cut.shards.everybodys(list(map(block_sums, self.flats())))]

    def named(self) -> Iterable[tuple[str, Tensor]]:
        return self._cut.shards.gradients(self._reducer.names)


class Sharded(OwnStep):
    """Every rank updates its shard of the parameters, then all exchange the updated shards: ZeRO-1
    and 2 (Rajbhandari et al., SC 2020). The user's own optimizer holds the pieces.

    After a step only this rank's slices of the gradients are sums over all ranks, if the reduction
    can leave out the others. `weights` is described in config/parallelism.py.
    """

    name = "sharded"

    def __init__(self, updated: Updated, weights: str = "auto") -> None:
        reducer = updated.reducer

        def cut() -> Shards:
            layout = reducer.layout
            group = reducer.group
            together = weights != "separate" and group.size > 1 and can_share(group, layout)
            if weights == "shared" and group.size > 1 and not together:
                raise UsageError("weights-not-shareable")
            return Shards(reducer.parameters, layout, group, together=together)

        self.optimizer: CutOptimizer[Shards] = elementwise_pieces(reducer, updated.optimizer, cut)
        reducer.reduction.scatter()
        super().__init__(updated, InSlices(reducer, self.optimizer))
        self.witness: Witness | None = None
        """Has another rank repeat the next update of each slice."""

    def follow(self) -> None:
        self.optimizer.follow()

    def overwritten(self) -> Sequence[Tensor]:
        return self.optimizer.shards.differing()

    def _take_step(
        self,
        optimizer: Optimizer,
        flats: Callable[[], Sequence[Tensor]],
        divisor: float | Tensor,
        skipped: Tensor | None,
    ) -> None:
        witness = self.witness
        self.witness = None
        if witness is None:
            super()._take_step(optimizer, flats, divisor, skipped)
            return
        reducer = self._updated.reducer
        shards = self.optimizer.shards
        names = [reducer.names[piece.parameter] for piece in shards.pieces]
        slices = SliceUpdate(optimizer, shards.views, names)
        super()._take_step(optimizer, flats, divisor, skipped)

        def again(other: Optimizer, gradients: Sequence[Tensor]) -> None:
            super(Sharded, self)._take_step(other, lambda: gradients, divisor, skipped)

        check_repeated(slices, again, reducer.group, self._summed.device, witness)

    def apply(self, divisor: float) -> Applied:
        shards = self.optimizer.shards
        scaler = self._updated.scaler
        if scaler is not None and scaler.is_enabled() and shards.someone_has_none:
            raise UsageError(
                "loss-scaler-does-not-fit", option="update='sharded' of a model this small"
            )
        shards.take_gradients()
        applied = super().apply(divisor)
        shards.gather()
        return applied
