"""A model, its optimizer and its scheduler in a loop of the user's own, as `lockstep.prepare` gives
them back.

    for x, y in loader:                  # this rank's micro-batches; all ranks have equally many
        loss = F.cross_entropy(model(x), y)
        loss.backward()                  # torch's own: the root's gradient is the weight
        optimizer.step()                 # acts at the last micro-batch of a window
        optimizer.zero_grad()

Until the last backward of a window every `.grad` is None; after it, it is the mean over all ranks.
running_loops.py replaces `torch.autograd.backward` meanwhile: the root's gradient costs nothing, and
it is seen which models a backward has reached.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.gradients.hidden import HiddenSum
from lockstep.runtime import status
from lockstep.step.gates import Schedulers
from lockstep.step.micro_batch import MicroBatch
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.step.window_run import WindowRun

_OPTIONS = {"witness": "witness=", "server": "update='server'"}


class Trained:
    """One model in a loop of the user's own, with a Stepper.

    `optimizer.step`, `zero_grad` and the scheduler's `step` act at the last micro-batch of a window
    and do nothing before.

    Args:
        model: to be trained.
        optimizer: trains it.
        backwards: the backwards of a micro-batch that reach the model.
        options: those of the Stepper.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, backwards: int = 1, **options: Any
    ) -> None:
        if hasattr(optimizer.step, "prepared"):
            raise UsageError("prepared-twice")
        self.optimizer = optimizer
        self.backwards = backwards
        self._closures: list[tuple[MicroBatch, object, Callable[[], Any]]] = []
        """Of this window, with which the loop has called the optimizer's step."""
        self._bound = True
        self._batch: object = None
        self.result: StepResult | None = None
        """Of the last window."""
        self.on_step: Callable[[StepResult], None] | None = None
        """Called after each step."""
        self._run: WindowRun | None = None
        self.micro_batch: MicroBatch | None = None
        """The one that the loop computes now; None outside of the loop's body."""
        self._done = 0  # backwards of this micro-batch that have reached the model
        self._loss: float | Tensor = 0.0
        self._early: list[Sequence[Tensor | None]] = []
        """The gradients of this micro-batch's backwards so far."""
        self.asked = False
        """Whether the loop has called the optimizer's step in this micro-batch."""
        self._applies = False
        self._withholds = False
        self._evaluated = False
        self._left = False
        self._defers = False
        self._deferred = False
        self.scaler: Any = None
        """A GradScaler, which `gate_scaler` has made act at the last micro-batch."""
        self._versions: list[int] = []  # of the sums when they were complete
        self.writes = False
        """Whether the loop, on some rank, changes the sums before the step, as a clip does."""
        self.schedulers = Schedulers(lambda: self.micro_batch)
        """Those of the optimizer."""
        self._gate_optimizer()
        try:
            self.stepper = Stepper(model, optimizer, **options)
            for option in ("witness", "server"):
                if getattr(self.stepper.method, option):
                    raise UsageError("not-in-prepared-loop", option=_OPTIONS[option])
        except BaseException:
            del optimizer.step, optimizer.zero_grad
            raise
        self._sum = HiddenSum(self.stepper.reducer)

    # -- the window -------------------------------------------------------------------------------

    def open(self, window: Window, *, divides: bool, defers: bool, bound: bool) -> None:
        """Begin a window. Every rank calls it.

        Args:
            window: the Loader's.
            divides: divide the sum by the weights.
            bound: whether a closure must keep its batch: one micro-batch may follow another before
                it is called again.
            defers: step when the loop's body is over. So another model's losses of the last
                micro-batch meet the same weights as those of the others, on any number of ranks.
        """
        if self._left:
            raise UsageError("window-left")
        if self._run is not None:
            raise UsageError("two-prepared-loops")
        self._defers = defers
        self._deferred = False
        self._bound = bound
        self._closures.clear()
        self._run = self.stepper.open(window)
        self._run.in_users_loop = True
        self._run.divides = divides
        self._sum.hide()

    def begin(self, micro_batch: MicroBatch, batch: object) -> None:
        """Begin a micro-batch."""
        self.micro_batch = micro_batch
        self._batch = batch
        self._done = 0
        self._loss = 0.0
        self._early.clear()
        self.asked = False
        if self._run is not None and micro_batch.index is not None:
            self._run.begin(micro_batch.index, batch, last=micro_batch.last)

    @property
    def root(self) -> float:
        """The gradient of a loss now."""
        assert self.micro_batch is not None
        return self.micro_batch.root()

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward that reaches the model now belongs to this micro-batch."""
        return self._run is not None and self._done < self.backwards

    def check_no_more(self) -> None:
        """Raise UsageError if a backward has reached the model after its last one and before its
        optimizer's step.
        """
        late = self._run is not None and not self.awaits_backward and not self.asked
        if late and self.stepper.reducer.unexpected:
            raise UsageError("too-many-backwards", count=self.backwards)

    def _check_enough(self) -> None:
        """Raise UsageError if some of the backwards of this micro-batch are missing."""
        if 0 < self._done < self.backwards:
            raise UsageError("too-few-backwards", expected=self.backwards, count=self._done)

    def backward(self, loss: Tensor, engine: Callable[[], None]) -> None:
        """Compute gradients of the loss by `engine`; those of the model count."""
        run = self._run
        micro_batch = self.micro_batch
        assert run is not None
        assert micro_batch is not None
        reducer = self.stepper.reducer
        reducer.reached = False
        status.enter("backward")
        value = loss.detach() * micro_batch.root()
        if self.scaler is not None:
            value = value / self.scaler.scale(torch.ones((), device=value.device))
        if micro_batch.index is not None and self._done + 1 == self.backwards:
            self._final(run, micro_batch, value, engine)
        else:
            with self._sum.apart() as gradients:
                engine()
            if reducer.reached and micro_batch.index is None:
                micro_batch.counted = True
            elif reducer.reached:
                self._loss += value
                self._early.append(gradients)
        if reducer.reached:
            self._end_backward(run, micro_batch)
        status.enter("loop")

    def _final(
        self, run: WindowRun, micro_batch: MicroBatch, value: Tensor, engine: Callable[[], None]
    ) -> None:
        """The micro-batch's last backward: its gradients, and those before, go into the sum."""
        reducer = self.stepper.reducer
        if self._early:
            value = value + self._loss
        self._sum.show()
        for gradients in self._early:
            self._sum.add_to_next(gradients)
        if micro_batch.last:
            reducer.closing = True
            reducer.on_first = partial(self._count, run, micro_batch, value)
        with reducer.backward():
            engine()
            for gradients in self._early:
                self._sum.count_rest(gradients)
        reducer.on_first = None
        if not reducer.reached:
            reducer.closing = False
            self._sum.hide()
        elif not micro_batch.last:
            self._count(run, micro_batch, value)

    def _count(self, run: WindowRun, micro_batch: MicroBatch, value: Tensor) -> None:
        micro_batch.counted = True
        run.count(value, micro_batch.weight)

    def _end_backward(self, run: WindowRun, micro_batch: MicroBatch) -> None:
        """After a backward that has reached the model."""
        self._done += 1
        if self._done < self.backwards:
            return
        if micro_batch.index is not None:
            run.end()
            run.mark_buffers()
        if micro_batch.last:
            self._complete_sum(run)
        elif micro_batch.index is not None:
            self._sum.hide()

    def _complete_sum(self, run: WindowRun) -> None:
        """Have every `.grad` be the mean over all ranks. A micro-batch without a backward is left
        out.
        """
        if run.micro_batch is not None:
            run.discard()
        self._sum.show()
        run.average()
        self._versions = self._sum.versions()

    def end(self) -> None:
        """End the micro-batch, after the loop's body."""
        run = self._run
        micro_batch = self.micro_batch
        self.micro_batch = None
        if micro_batch is None:
            return
        if run is None:  # the step is done
            if micro_batch.last:
                self.stepper.undo_forwards()
            return
        reducer = self.stepper.reducer
        if self._deferred:
            self._take_deferred_step()
            return
        self._check_enough()
        if self._done and (micro_batch.last or not self.asked):
            raise UsageError("window-without-step")
        if micro_batch.last:
            self._finish(run)
            return
        if run.micro_batch is not None:
            run.discard()
        if reducer.unexpected:
            self._sum.drop()
        run.restart_buffers()

    def _take_deferred_step(self) -> None:
        self._sum.drop()  # what other models' losses have sent here since
        self._sum.show()
        self._step()

    def _finish(self, run: WindowRun) -> None:
        """Complete a window whose last micro-batch the loop has left out."""
        if self.writes or self.scaler is not None:
            raise UsageError("left-out-before-clip")
        self._complete_sum(run)
        self._step()
        self.schedulers.left_out()

    def habits(self) -> tuple[bool, bool]:
        """Return what the ranks must know of each other's loops: whether the body changes gradients
        before the step, and whether it steps a scheduler.
        """
        return self.writes, self.schedulers.in_body

    def learn(self, writes: bool, schedules: bool) -> None:
        """Learn the habits of all ranks: this one may have left out what shows them."""
        self.writes = writes
        self.schedulers.learn(schedules)

    def leave(self) -> None:
        """The loop was left inside the window, or at its end."""
        self.micro_batch = None
        if self._run is not None and self._deferred:
            self._take_deferred_step()
        self._left = self._run is not None
        if self._run is not None:
            self._run.restart_buffers()

    # -- what the loop calls ----------------------------------------------------------------------

    def _gate_optimizer(self) -> None:
        optimizer: Any = self.optimizer
        original = optimizer.step
        zero_grad = optimizer.zero_grad

        @functools.wraps(original)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            if self._withholds:
                return None
            if self._applies:
                return original(self._evaluate) if self._closures else original()
            if self.micro_batch is None:
                raise UsageError("step-outside-loop")
            loss = None
            if closure is not None and self._run is not None:
                self._closures.append((self.micro_batch, self._batch, closure))
                with torch.enable_grad():
                    loss = closure()
            self.asked = True
            self._check_enough()
            if self._run is not None and self.acts:
                if not self._run.completed:
                    self._complete_sum(self._run)
                if self._defers:
                    self._deferred = True
                    self._sum.hide()
                else:
                    self._step()
            return loss

        @functools.wraps(zero_grad)
        def gated_zero_grad(*args: Any, **options: Any) -> None:
            if self._run is None:
                zero_grad(*args, **options)

        step.prepared = True  # type: ignore[attr-defined]
        optimizer.step = step
        optimizer.zero_grad = gated_zero_grad

    @property
    def acts(self) -> bool:
        """Whether this is the last micro-batch of the window."""
        return self.micro_batch is not None and self.micro_batch.last

    def _evaluate(self) -> Tensor:
        """Return the loss of the window at the current weights, for an optimizer that evaluates its
        closure as often as it wants. The first time it has been computed already.
        """
        main = self._run
        assert main is not None
        assert main.window is not None
        run = main
        if self._evaluated:
            run = self._run = main.again(main.window)
            run.divides = main.divides
            self._sum.hide()
            try:
                self._compute_again(run)
            finally:
                self._run = main
        self._evaluated = True
        facts = run.average()
        mean = facts.loss / facts.weight if run.divides else facts.loss
        return torch.tensor(mean, dtype=torch.float64)

    def _compute_again(self, run: WindowRun) -> None:
        """Call all closures of the window once more."""
        for micro_batch, batch, closure in self._closures:
            if self._bound and inspect.isfunction(closure) and not closure.__defaults__:
                raise UsageError("closure-not-bound")
            self.begin(micro_batch, batch)
            with torch.enable_grad():
                closure()
            if run.micro_batch is not None:
                run.discard()
            if not micro_batch.last:
                run.restart_buffers()
        if not run.completed:
            self._complete_sum(run)
        run.finish_buffers()

    def _step(self) -> None:
        if self._sum.versions() != self._versions:
            self.writes = True
            if self.stepper.method.update == "sharded":
                raise UsageError("slices-written")
        self._evaluated = False
        self._applies = True
        try:
            self.result = self.stepper.step()
        finally:
            self._applies = False
        self._run = None
        if self.on_step is not None:
            self.on_step(self.result)

    def skip(self) -> None:
        """End the window without a step, if it has not ended: the gradients have overflowed."""
        if self._run is not None:
            self._withholds = True
            try:
                self._step()
            finally:
                self._withholds = False
