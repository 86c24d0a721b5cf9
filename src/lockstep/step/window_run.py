"""What a caller may do to one optimizer step: a window that was opened, until `Stepper.step` ends it.

    run = stepper.open(window)
    for index, batch in enumerate(window):
        run.begin(index, batch, last=index == len(window) - 1)
        loss = loss_sum(model, batch)
        factor = run.count(loss, weight)     # before or after the backward
        with run.backward():                 # the gradients of this block count
            (loss * factor).backward()
        run.end()
    run.complete()                           # the sum; Stepper.step() does it otherwise
    stepper.step()

`Stepper.micro_batches` and `Stepper.backward` are these calls in this order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.checks.divergence import OverwrittenCheck
from lockstep.checks.witness import Computed
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.gradients.bucket import cut_by_buckets
from lockstep.gradients.facts import Facts, FactsMessage
from lockstep.runtime import preemption, randomness, status
from lockstep.step.assembly import Assembly
from lockstep.step.loss_scale import LossScale
from lockstep.world.world import World

Batch = TypeVar("Batch")
_STAGES = 2**48  # offset of a slot's random-stream number from one pipeline stage to the next
_END = object()


def summed(loss: Tensor, weight: float | Tensor, reduction: str) -> Tensor:
    """Check the loss, and return it as a sum of losses."""
    if not isinstance(loss, Tensor):
        raise UsageError("loss-not-a-tensor", kind=type(loss).__name__)
    if loss.numel() != 1:
        raise UsageError("loss-not-one-number", what="the loss", shape=list(loss.shape))
    if isinstance(weight, (int, float)) and not 0 <= weight < math.inf:
        raise UsageError(
            "wrong-value", name="weight", value=weight, expected="a finite number of at least 0"
        )
    if loss.ndim:
        loss = loss.reshape(())
    if reduction == "sum":
        return loss
    if reduction != "mean":
        raise UsageError(
            "unknown-choice", name="reduction", value=reduction, choices=("sum", "mean")
        )
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss, 0).reshape(()) * weight
    if weight == 0:
        # a mean over no samples is nan, and so is its gradient
        return torch.zeros((), device=loss.device)
    return loss * weight


class WindowRun:
    """One window of a Stepper, while it is open.

    Args:
        window: the Loader's window; None for a plain list of batches, whose slots have no numbers.
        steps: steps before this one.
        parts: the reducer, the update and the buffers of the Stepper.
        world: the world of this rank.
        seed: of the random streams of the forwards.
        exact: whether the sums follow exact mode's tree over the slots.
        reports: whether this rank reports the micro-batches of its replica.
        scale: finds the factor of the losses.
        factor: the factor, None if the ranks must still agree on it.
        overwritten: compares what this step overwrites; None for no comparison.
    """

    def __init__(
        self,
        window: Window | None,
        steps: int,
        parts: Assembly,
        world: World,
        *,
        seed: int,
        exact: bool,
        reports: bool,
        scale: LossScale,
        factor: float | None,
        overwritten: OverwrittenCheck | None,
    ) -> None:
        self.window = window
        self._steps = steps
        self._parts = parts
        self._world = world
        self._reducer = parts.reducer
        self._buffers = parts.buffers
        self._seed = seed
        self._exact = exact
        self._reports = reports
        self._scale = scale
        self._factor = factor
        self._overwritten = overwritten
        self.step = steps if window is None else window.cut.step
        """The step number that selects the random streams."""
        # gives micro-batches of a plain list slot numbers that no other rank uses
        self._first_slot = world.rank * 2**32
        # exact mode keeps the values of slots separate, and adds them along a tree
        self._slots = window.cut.slots if exact and window is not None else 0
        self._buffers.begin(self._slots)
        self.facts = FactsMessage(parts.facts_group, world.device, self._slots)
        # Whether they leave before the buckets: the sum needs their weight, or the host of a GPU reads
        # them while the buckets travel. Otherwise they would only delay the buckets.
        self._facts_lead = parts.reducer.reduction.divisor is not None or world.device.type != "cpu"
        self.stops = False
        """Whether this rank asks to stop. The facts tell all ranks."""
        self.divides = True
        """Whether the sum is to be divided by the weights."""
        self.in_users_loop = False
        """Whether the micro-batches are computed in a loop of the user's own: its caller enters their
        random streams, and its body goes on after their ends.
        """
        self.micro_batch: int | None = None
        """This rank's number of the micro-batch that is being computed; None between two."""
        self.counted = False
        """Whether it was counted."""
        self.backwards = 0
        """Micro-batches that were counted."""
        self.record: Computed | None = None
        """Digests of what this rank computes, if the step is witnessed."""
        self._last = False
        self._weight: float | Tensor = 0.0
        self._row = 0  # of its values in tensors with a row per slot
        self._random_state: randomness.RandomState | None = None
        self._summed: tuple[Facts, float] | None = None

    # -- micro-batches ----------------------------------------------------------------------------

    def walk(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each batch with its micro-batch begun. It reads one batch ahead."""
        reducer = self._reducer
        with cut_by_buckets(reducer.bucket_bytes, wanted=reducer.group.size > 1):
            rest = iter(batches)
            batch: Any = next(rest, _END)
            index = 0
            try:
                while batch is not _END:
                    following: Any = next(rest, _END)
                    self.begin(index, batch, last=following is _END)
                    try:
                        yield batch
                    except BaseException:
                        self.end(interrupted=True)
                        raise
                    self.end()
                    batch = following
                    index += 1
            finally:
                if self._random_state is not None:
                    self._leave_stream()

    def begin(self, index: int, batch: object = None, *, last: bool) -> None:
        """Begin a micro-batch: its random stream, its buffers, its gradients.

        Args:
            index: its number among this rank's micro-batches of the window.
            batch: its samples, for a witness.
            last: whether it is this rank's last: full buckets are launched in its backward.
        """
        window = self.window
        slot = self._first_slot + index if window is None else window.slots[index]
        self.micro_batch = index
        self.counted = False
        self._last = last
        self._weight = 0.0
        self._row = slot if self._exact else 0
        if window is not None and self._reports:
            self.facts.add_samples(window.counts[index])
        if self.record is not None:
            self.record.open(slot, batch)
        if self._buffers.watched:
            self._buffers.begin_micro_batch()
        self._parts.trace.micro_batch = index
        self._reducer.begin_micro_batch()
        if not self.in_users_loop:
            if self._random_state is None:
                self._random_state = randomness.get_state()
            randomness.step(self._seed, self.step, slot)
        status.enter("forward")

    def count(self, loss: Tensor, weight: float | Tensor) -> float:
        """Count the micro-batch's sum of losses and its weight. With the last one, the buckets are
        sent as they fill: best before its backward, which hides the messages.

        Returns:
            The factor for the loss, equal on all ranks: 1 without loss scaling.
        """
        self.counted = True
        self._weight = weight
        self.backwards += 1
        if self._reports:
            self.facts.add(weight, loss, self._row)
        if self._factor is None:
            self._factor = self._scale.agree(self._parts.facts_group, weight)
        if self._last:
            if self._facts_lead:
                self._send()
            self._reducer.allow_launch()
        return self._factor

    def backward(self) -> AbstractContextManager[None]:
        """Return a block in which the model's gradients count. Others are left in `.grad`, and
        `Stepper.step` raises.
        """
        return self._reducer.backward()

    def end(self, *, interrupted: bool = False) -> None:
        """End the micro-batch. The buffers return to the values that the step began with.
        `interrupted`: the caller's loop stops here; the step sums what it has computed.
        """
        self._reducer.end_micro_batch(interrupted=interrupted)
        if self.record is not None:
            self.record.shut(self._weight, self._buffers.named())
        self.micro_batch = None
        self._buffers.end_micro_batch(self._weight, self._row)
        if interrupted:
            return
        # behind the buckets, but not later: other ranks can end their step before this one does
        if self._last and self.counted and self._reducer.all_launched and not self.facts.sent:
            self._send()
        if not self.in_users_loop:
            status.enter("data")
        # loading the next batch of a plain list may draw random numbers
        if self._random_state is not None and (self._last or self.window is None):
            self._leave_stream()

    def _leave_stream(self) -> None:
        """Restore the random states from before the first micro-batch."""
        assert self._random_state is not None
        randomness.set_state(self._random_state)
        self._random_state = None

    def discard(self) -> None:
        """End a micro-batch without counting it, as if the step did not have it. Raises UsageError
        if it was counted: its gradients are in the sum.
        """
        if self.micro_batch is None or self.counted:
            raise UsageError("micro-batch-counted")
        if self.window is not None and self._reports:
            self.facts.add_samples(-self.window.counts[self.micro_batch])
        self.end()

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """A block in which a pipeline computes all micro-batches in its own order. It calls
        `enter_stream` before a forward, and `add` on the rank that has the loss.
        """
        with self._reducer.backward(), randomness.preserved(devices=True):
            yield
        status.enter("data")

    def enter_stream(self, index: int, stage: int) -> None:
        """Begin the forward of micro-batch `index` in a pipeline's stage."""
        status.enter("forward")
        slot = self._first_slot + index if self.window is None else self.window.slots[index]
        randomness.step(self._seed, self.step, slot + stage * _STAGES)

    def add(self, index: int, loss: Tensor, weight: float | Tensor) -> None:
        """Count micro-batch `index`, its sum of losses and its weight."""
        self.backwards += 1
        if self._reports:
            if self.window is not None:
                self.facts.add_samples(self.window.counts[index])
            self.facts.add(weight, loss)

    def again(self, share: Window) -> WindowRun:
        """Return a run of this step over another share of it, with the same factor: a witness
        compares its sums, and no update is made of them.
        """
        run = WindowRun(
            share,
            self._steps,
            self._parts,
            self._world,
            seed=self._seed,
            exact=self._exact,
            reports=True,
            scale=self._scale,
            factor=self._factor,
            overwritten=self._overwritten,
        )
        self._reducer.reset(share.cut)
        return run

    def restart(self) -> None:
        """Begin this window anew, after `again`: no micro-batch was computed."""
        assert self.window is not None
        self._reducer.reset(self.window.cut)
        self._buffers.begin(self._slots)

    # -- the sum ----------------------------------------------------------------------------------

    def _send_last(self) -> None:
        """Send what travels behind the buckets, the facts first."""
        self._send()
        self._buffers.send()

    def _send(self) -> None:
        """Send the facts of the step."""
        check = self._overwritten
        if check is not None and self._reducer.group.size > 1 and self._steps >= check.next_step:
            overwritten = [*self._parts.update.overwritten(), *self._buffers.starts]
            check.add_digest(self.facts, overwritten)
        self.facts.send(
            stop=self.stops or preemption.asked, newly_moving=self._buffers.newly_moving
        )

    @property
    def completed(self) -> bool:
        """Whether the sum is complete."""
        return self._summed is not None

    def complete(self) -> tuple[Facts, float]:
        """Complete the sum over all ranks, after the last micro-batch. Every rank calls it; a
        second call returns the same.

        Returns:
            The facts of the step, and the number by which the sum must still be divided.

        Raises:
            UsageError: gradients were cleared, or an exception ended a backward of this window.
        """
        if self._summed is not None:
            return self._summed
        reducer = self._reducer
        reduction = self._reducer.reduction
        if reducer.unfinished:
            raise UsageError("backward-interrupted")
        if self._random_state is not None:  # the caller has left out the last micro-batches
            self._leave_stream()
        status.enter("reduce")
        if self._factor is None:
            self._factor = self._scale.agree(self._parts.facts_group, 0.0)
        if self._facts_lead and not self.facts.sent:
            self._send()
        if self._parts.shard.mesh is not None:
            self._parts.shard.collect(reducer)
        reducer.check_not_cleared()  # before waiting for other ranks
        if reduction.divisor is None:
            reducer.finish(self._buffers.send if self.facts.sent else self._send_last)
            facts = self.facts.wait()
            divisor = self._divisor(facts)
        else:
            facts = self.facts.wait()
            reduction.divisor = self._divisor(facts) or 1.0
            try:
                reducer.finish(self._buffers.send)
            finally:
                reduction.divisor = 1.0
            divisor = 1.0
        self._summed = facts, divisor
        if self.record is not None:
            self.record.summed(facts, self._buffers.moved())
        return self._summed

    def _divisor(self, facts: Facts) -> float:
        assert self._factor is not None
        return (facts.weight if self.divides else 1.0) * self._factor

    def average(self) -> Facts:
        """Complete the sum and divide it: every `.grad` is then the mean over all ranks."""
        facts, divisor = self.complete()
        if divisor not in (0, 1):
            for flat in self._reducer.sums:
                flat.mul_(1 / divisor)
        self._summed = facts, 1.0
        return facts

    def finish_buffers(self) -> None:
        """Move the buffers by what the micro-batches have moved them. `Stepper.step` does it for
        the window that it ends.
        """
        facts, _ = self.complete()
        self._buffers.finish(facts.weight, facts.newly_moving > 0)

    def mark_buffers(self) -> None:
        """Note how the micro-batch has left the moving buffers, for `restart_buffers`."""
        self._buffers.mark()

    def restart_buffers(self) -> None:
        """Undo what forwards since `mark_buffers` have done to moving buffers."""
        self._buffers.restart()

    def check_can_end(self) -> None:
        """Raise UsageError if `step()` is not allowed now."""
        if self.micro_batch is not None:
            raise UsageError("step-inside-window")
        if self.window is not None and self.window.cut.turned:
            raise UsageError("loop-left-while-witnessed")
        if not self.backwards and self._reducer.unexpected:
            raise UsageError("backward-not-by-stepper")
