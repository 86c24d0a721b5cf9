"""Updates whose optimizer steps on every rank at the end of every window: divide the summed
gradients, check that they are finite, clip once, step.

    replicated  every rank applies the whole update to its whole copy, as usual in data parallelism.
                The gradients are equal on all ranks, so norm, finite check and step need no
                further message
    sharded     the optimizer's work and its state are divided by the number of ranks; the weights
                are those of the replicated update, bit for bit
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checks.witness import Witness
from lockstep.errors import UsageError
from lockstep.gradients.facts import Facts
from lockstep.gradients.reducer import Reducer
from lockstep.updates.norm import InBuckets, block_sums, clip_factor
from lockstep.updates.optimizer_state import (
    CutOptimizer,
    OptimizerState,
    WholeOptimizer,
    elementwise_pieces,
    whole_pieces,
)
from lockstep.updates.repeated import SliceUpdate, check_repeated
from lockstep.updates.shard_memory import can_share
from lockstep.updates.shards import Shards
from lockstep.updates.update import NOTHING, Applied, EndedWindow, Update, Updated


class OwnStep(Update):
    """Steps the optimizer of `updated` on `summed` gradients."""

    def __init__(self, updated: Updated, summed: InBuckets) -> None:
        self._updated = updated
        self._summed = summed

    def end(self, steps: int, facts: Facts, divisor: float) -> EndedWindow:
        if facts.weight == 0:
            outcome = Applied(reason=NOTHING)
        elif not math.isfinite(facts.loss) and self._updated.scaler is None:
            outcome = Applied(
                reason=f"the loss is {facts.loss}: this update would make every weight nan"
            )
        else:
            outcome = self.apply(divisor)
        return EndedWindow(
            steps=steps + 1,
            number=steps + 1,
            loss=facts.loss,
            weight=facts.weight,
            stop=facts.stop > 0,
            outcome=outcome,
        )

    def apply(self, divisor: float) -> Applied:
        """Divide the sums, check that they are finite, clip once, step the optimizer. On a GPU the
        host waits only for values that it needs.
        """
        clip = self._updated.clip
        scaler = self._updated.scaler
        if scaler is not None and scaler.is_enabled():
            return self._apply_scaled(divisor, clip, scaler)
        optimizer = self._updated.optimizer
        flats = self._summed.flats
        if clip is None:
            self._take_step(optimizer, flats, divisor, None)
            return Applied()
        norm = self._updated.norm(self._summed, divisor)
        skipped = ~norm.isfinite()
        self._take_step(optimizer, flats, divisor / clip_factor(norm, clip), skipped)
        return Applied(norm, skipped=skipped)

    def _take_step(
        self,
        optimizer: Optimizer,
        flats: Callable[[], Sequence[Tensor]],
        divisor: float | Tensor,
        skipped: Tensor | None,
    ) -> None:
        """Step an optimizer on the gradients in `flats()`."""
        if skipped is None and isinstance(divisor, float) and divisor == 1:
            optimizer.step()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            self._step_dividing(optimizer, divisor, skipped)
        elif skipped is None or not bool(skipped):
            # the host waits for the gradient, as it cannot tell this optimizer on the device
            _multiply(flats(), 1 / divisor)
            optimizer.step()

    def _step_dividing(
        self, optimizer: Any, divisor: float | Tensor, skipped: Tensor | None
    ) -> None:
        """Step a fused optimizer. It divides gradients by a loss scale as it reads them (and leaves
        them divided), which saves a pass over them.

        The step does nothing if `skipped` is true.
        """
        # torch.full, unlike torch.tensor, copies nothing from the host.
        device = self._summed.device
        if not isinstance(divisor, Tensor):
            divisor = torch.full((), divisor, device=device, dtype=torch.float32)
        if skipped is None:
            skipped = torch.zeros((), device=device, dtype=torch.float32)
        optimizer.grad_scale = divisor.to(torch.float32)
        optimizer.found_inf = skipped.to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _apply_scaled(
        self, divisor: float, clip: float | None, scaler: torch.amp.GradScaler
    ) -> Applied:
        """Apply with a loss scaler. The gradients are divided before the scaler looks at them; it
        finds those that are not finite, and lowers its scale.
        """
        one = torch.ones((), device=self._summed.device)
        before = scaler.scale(one)
        norm = None
        if clip is None:
            _multiply(self._summed.flats(), 1 / divisor)
        else:
            norm = self._updated.norm(self._summed, divisor) / before.double()
            # The scaler checks elements. A norm that overflows while no element does must become
            # visible in them, so the factor is nan. Between gradients a flat tensor has zeros, which
            # must stay: nan there would be in the norm of every later step.
            factor = torch.where(norm.isfinite(), clip_factor(norm, clip), torch.nan) / divisor
            _multiply([gradient for _, gradient in self._summed.named()], factor)
        scaler.unscale_(self._updated.optimizer)
        scaler.step(self._updated.optimizer)
        scaler.update()
        return Applied(norm, scale=(before, scaler.scale(one)))


def _multiply(flats: Sequence[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) or factor != 1:
        for flat in flats:
            flat.mul_(factor)


class Replicated(OwnStep):
    """Every rank holds the whole optimizer."""

    name = "replicated"
    follows = False

    def __init__(self, updated: Updated) -> None:
        super().__init__(updated, InBuckets(updated.reducer))
        self.optimizer: OptimizerState = WholeOptimizer(updated.reducer, updated.optimizer)

    def replicated(self) -> Sequence[tuple[str, Tensor]]:
        reducer = self._updated.reducer
        names = dict(zip(map(id, reducer.parameters), reducer.names, strict=True))
        pieces = whole_pieces(
            self._updated.optimizer, reducer.parameters, lambda parameter: names[id(parameter)]
        )
        return [(piece.name, piece.data) for piece in pieces]


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
        self._witness: Witness | None = None

    def follow(self) -> None:
        self.optimizer.follow()

    def overwritten(self) -> Sequence[Tensor]:
        return self.optimizer.shards.differing()

    def repeat(self, witness: Witness) -> None:
        self._witness = witness

    def _take_step(
        self,
        optimizer: Optimizer,
        flats: Callable[[], Sequence[Tensor]],
        divisor: float | Tensor,
        skipped: Tensor | None,
    ) -> None:
        witness = self._witness
        self._witness = None
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
