"""One optimizer step over one window of micro-batches, however they are spread over the ranks.

    for window in epoch:                                     # one optimizer step
        for x, y in stepper.micro_batches(window):           # this rank's share, possibly none
            stepper.backward(loss_sum(model(x), y), weight=len(y))
        stepper.step()

The step's gradient is the sum of all gradients divided by the sum of all weights, over every micro-batch of every rank: what one
process would compute. A rank without micro-batches takes part with zeros, so no split can hang.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import randomness, status
from lockstep.balance import Balance
from lockstep.checkpoints.pieces import Keeps
from lockstep.checks.given import check_kinds, summed
from lockstep.checks.nonfinite import NonFiniteTrace
from lockstep.checks.overwritten import OverwrittenCheck
from lockstep.checks.replicas import ReplicaCheck
from lockstep.checks.start import compare_start, optimizer_fields
from lockstep.checks.unused import UnusedCheck, shortly
from lockstep.collectives.group import Group
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import LockstepWarning, UsageError
from lockstep.gradients.alone import Alone
from lockstep.gradients.buffers import MovingBuffers
from lockstep.gradients.compiled import cut_by_buckets
from lockstep.gradients.compression.choice import owes
from lockstep.gradients.exact.choice import check_window
from lockstep.gradients.facts import Facts, FactsMessage
from lockstep.method import Compression, Method, Outer
from lockstep.step_clock import StepTimes
from lockstep.step_result import StepResult
from lockstep.stepper_clock import StepperClock
from lockstep.stepper_outcomes import Outcomes
from lockstep.stepper_reducer import reducer_of, set_up_of
from lockstep.stepper_window import LossScale, MicroBatch, OpenWindow, with_last
from lockstep.task import UNUSED, Unused
from lockstep.updates.applied import Applied
from lockstep.updates.choice import choose_update
from lockstep.updates.held import Held, SplitNorm
from lockstep.world import World
from lockstep.wrapper_arguments import Checks, check_checks

Batch = TypeVar("Batch")

Begin = Callable[[int, int], None]
Count = Callable[[int, Tensor, float | Tensor], Tensor]
_STAGES = 2**48  # apart from each other: a slot's numbers for the stages of a pipeline
NOTHING = "every rank's weight is 0: the window holds nothing to learn from"


class Stepper:
    """Trains `model` with `optimizer`, one window at a time.

    On a GPU no step waits for the device, but for what was true before its last backward (the weights, the losses); with `clip`, an
    optimizer that is not fused, or a scheduler, has the host wait for the gradient's norm.

    Args:
        model: a bare module (it is made equal on all ranks here), or a `lockstep.DistributedDataParallel`, whose reducer is then used.
        optimizer: over the model's parameters.
        clip: the largest norm of the gradient, applied once, after the sum is divided.
        scaler: a `torch.amp.GradScaler`, for fp16.
        scheduler: stepped after every applied update.
        seed: keys the randomness of each micro-batch's forward (dropout) by (seed, step, slot), so that no rank decides it.
        reduce: how gradients are summed: auto, native, central, ring, tree, halving_doubling, shared_memory, hierarchical.
        update: who applies them. "replicated": every rank. "sharded": each rank its share of the parameters, with its share of the optimizer's
            state, and all exchange them: the same weights, bit for bit; the optimizer's groups then hold pieces of parameters, so use
            `optimizer_state_dict`. "server": ranks draw micro-batches (`draws`) and do not wait for each other.
        exact: the same bits on any number of ranks: every sum follows one tree over the window's slots, and the process computes
            deterministically, on one intra-op thread, until the world closes (`world.compute_deterministically` says otherwise). It needs a
            Loader's windows.
        compress: gradients travel in fewer bytes: bf16, fp16, int8, powersgd:RANK, topk:SHARE; what is left out comes in later steps.
        staleness: at the server: how many steps a rank may be ahead of the slowest.
        sync_every: every rank steps alone, and the replicas are averaged every so many steps.
        outer: what is done with that average: "average" or "nesterov".
        bucket_mb: MiB of gradients that travel together (25), for a bare module.
        unused: what a parameter that gets no gradient on any rank is: "error", "zeros", or "skip" (its `.grad` stays None).
        checks: "full" compares the replicas (`check_replicas`) after steps 1 and 2 and at least every 100 steps, and the set-up at the start;
            "start" only that; "off" nothing.
        trace_nonfinite: look at every gradient before it is summed, so that a skipped step names the rank and the parameter in which a nan or
            inf came up first; without it that is looked for in the window after a skipped one.
        held: of a model that is split over a mesh, this rank's part (`lockstep train --mesh`); `model` is then its `module`.
        world: default: the world of torch's process group.

    Raises:
        UsageError: an optimizer over other parameters, or `backward` and `step` called out of their place.
        ReplicaDivergence, UnusedParameters: on all ranks alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        seed: int = 0,
        reduce: str = "auto",
        update: str = "replicated",
        exact: bool = False,
        compress: str | Compression | None = None,
        staleness: float | str | None = None,
        sync_every: int | None = None,
        outer: str | Outer | None = None,
        bucket_mb: float | None = None,
        unused: Unused = "error",
        checks: Checks = "full",
        trace_nonfinite: bool = False,
        held: Held | None = None,
        world: World | None = None,
    ) -> None:
        check_kinds(model, optimizer)
        if clip is not None and not clip > 0:
            raise UsageError(f"clip={clip}: the largest norm that a gradient may have is above 0; leave it out for no clipping")
        if unused not in UNUSED:
            raise UsageError(f"unused={unused!r}: choose one of {', '.join(UNUSED)}")
        check_checks(checks)
        self.method = Method(
            reduce=reduce,
            exact=exact,
            compress=compress,
            update=update,
            staleness=staleness,
            sync_every=sync_every,
            outer=outer,
            mesh=None if held is None else held.mesh,
        )
        self.held = held
        if self.method.alone and scheduler is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch: a rank without micro-batches steps the scheduler all the same
        if self.method.server is not None and unused == "skip":
            raise UsageError(
                "unused='skip' with update='server': a rank knows only of its own draw what got a gradient; use error or zeros"
            )
        if self.method.alone and scaler is not None and scaler.is_enabled():
            raise UsageError("a loss scaler needs one scale for all ranks, and ranks that step alone would each find their own: use bf16")
        if self.method.compression is not None and owes(self.method.compression) and scaler is not None and scaler.is_enabled():
            raise UsageError(
                f"compress={compress!r} remembers what it has left out of gradients, and a loss scaler changes their unit: use bf16 for either"
            )
        self.world = world or World.current()
        if checks != "off":
            alike = self.world.group if held is None else held.data
            compare_start(*set_up_of(model, alike, {**optimizer_fields(optimizer), "clip": clip, "seed": seed}))
        self.optimizer = optimizer
        self._bucket_mb, self._unused_policy, self._trace_nonfinite = bucket_mb, unused, trace_nonfinite
        self.replicas = ReplicaCheck() if checks == "full" else None
        # the facts of a step on a mesh come from ranks that hold different parts: nothing in them can be compared
        self._overwritten = OverwrittenCheck() if checks == "full" and held is None else None
        self.steps, self._stop = 0, False
        self._clip, self.scaler, self.scheduler, self._seed = clip, scaler, scheduler, seed
        self._outcomes = Outcomes(self.world, scheduler, scaler)
        self._work_with(model)
        self.exact = exact
        if exact:
            self.world.compute_deterministically()
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.zeros((), device=self.world.device))  # it makes its state at the first loss, and a rank may have none
        self._loss_scale = LossScale(scaler, self.world.device)
        self.clock = StepperClock(self.world.device)
        self._compares_start = self._compares_data = checks != "off"
        self._window: OpenWindow | None = None

    def _work_with(self, model: nn.Module) -> None:
        """Take charge of the model's gradients, as the method has it now."""
        alone = self._is_alone()
        summed_over = self.world.group if self.held is None else self.held.data
        self.reducer, self.model = reducer_of(model, self.method, self._bucket_mb, summed_over, alone=alone)
        self.group = self.reducer.group
        self.everyone = self.world.group if alone or self.held is not None else self.group
        """All ranks of this training; `group` are those whose gradients are summed in a step, this rank alone where it steps alone."""
        self._told = self.group if alone else self.everyone  # whose facts of a step this rank knows
        self._reports = self.held is None or self.held.reports
        self.reducer.guarded, self.reducer.expecting = True, False
        norm = None if self.held is None else SplitNorm(self.held)
        self.update = choose_update(self.method, self.model, self.everyone, alone=alone, norm=norm)
        left_out = self._left_out()
        self.update.bind(self.reducer, self.optimizer)
        if left_out and self.world.rank == 0 and self.steps == 0:
            warnings.warn(
                f"the optimizer does not hold {shortly(left_out)}: their gradients are summed, and never applied. Give them to the optimizer, "
                "or freeze them",
                LockstepWarning,
                stacklevel=3,
            )
        self._buffers = MovingBuffers(self.model, self.group, self.world.device)
        self._generation, self._layouts = self.reducer.generation, self.reducer.layouts
        self._unused = UnusedCheck(self.reducer, self._unused_policy)
        self._outcomes.trace = NonFiniteTrace(self.reducer, always=self._trace_nonfinite)
        self.update.open(self.world, self.scheduler, self._clip, self._wants_stop)

    def _is_alone(self) -> bool:
        """Whether the next step is this rank's own."""
        return self.method.alone and (self.method.local is None or self.steps >= self.method.local.after)

    def part_if_due(self) -> None:
        """Begin to step alone, where the method has that begin after some steps. Every rank calls it alike; `micro_batches` does."""
        if self._is_alone() and self._told is self.everyone:
            self.reducer.reset()
            order = self.reducer.order
            self._work_with(self.model)
            self.reducer.lay(order)  # where a sum lies decides, at some backends, in which order it is added up
            self.follow_layout()

    def _left_out(self) -> list[str]:
        """Parameters that are trained by name but not by the optimizer: usually forgotten, always paid for."""
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [name for name, parameter in zip(self.reducer.names, self.reducer.parameters, strict=True) if id(parameter) not in held]

    @property
    def place(self) -> int:
        """This rank's among those of `StepResult.waited_by_rank`."""
        return self._told.rank

    # -- the window ----------------------------------------------------------------------------------------------------------------

    def micro_batches(self, window: Iterable[Batch]) -> Iterator[Batch]:
        """Walk this rank's micro-batches of one window: a `lockstep` Window or any iterable of batches (equal on no two ranks).

        This is the place that knows the last one: in its backward the gradients leave for the other ranks.
        """
        opened = self._open(window)
        for place, (batch, last) in enumerate(with_last(window)):
            slot = opened.slot(place)
            opened.count(place)
            opened.micro = MicroBatch(last, slot if self.exact else 0)
            self._buffers.open()
            self._outcomes.trace.open(place)
            keyed = randomness.micro_batch(self._seed, opened.step, slot)
            try:
                with keyed, self.reducer.window(last=last), cut_by_buckets(self.reducer.bucket_bytes, wanted=self.group.size > 1):
                    status.enter("forward")
                    yield batch
            finally:  # also when the user's loop breaks off: step() then sums what was there
                self._buffers.shut(opened.micro.weight, opened.micro.row)
                opened.micro = None
            status.enter("data")

    def at_once(self, window: Iterable[Batch], run: Callable[[Sequence[Batch], Begin, Count], None]) -> None:
        """Walk a window whose micro-batches a pipeline runs, in an order of its own, forward and backward.

        `run(batches, begin, count)` calls `begin(place, stage)` before a stage's forward of a micro-batch, and `count(place, loss, weight)`, where
        the loss is known, for what is to be differentiated. Gradients have come when it returns.
        """
        opened = self._open(window)
        batches = list(window)

        def begin(place: int, stage: int) -> None:
            status.enter("forward")
            randomness.step(self._seed, opened.step, opened.slot(place) + stage * _STAGES)

        def count(place: int, loss: Tensor, weight: float | Tensor) -> Tensor:
            loss = summed(loss, weight, "sum")
            opened.count(place)
            opened.note(weight, loss)
            return loss

        opened.backwards, self.reducer.expecting = len(batches), True
        try:
            with randomness.preserved(devices=True), self.reducer.window(last=False):
                run(batches, begin, count)
        finally:
            self.reducer.expecting = False
        status.enter("data")

    @property
    def bytes_sent(self) -> int:
        """That this rank has sent since the world was opened, as far as Lockstep's own groups count it."""
        return self.everyone.bytes_sent + (0 if self.held is None else self.held.sent())

    def _open(self, window: Iterable[Batch]) -> OpenWindow:
        """Begin a window."""
        if not isinstance(window, Iterable):
            raise UsageError(f"micro_batches() walks a window or a list of batches, not a {type(window).__name__}")
        if self._window is not None:
            raise UsageError("a second window was opened before step() ended the first: call stepper.step() once after each window")
        self.clock.open()
        status.step(self.steps + 1)
        self._outcomes.settle()
        self.part_if_due()
        self._compare_data(window)
        self.update.begin(window, self.steps)
        ours = check_window(window) if self.exact else window if isinstance(window, Window) else None
        if ours is not None and ours.balancer is not None:
            Balance().check(self.method, self.everyone.size)
        self.reducer.reset(None if ours is None else ours.cut)
        self._outcomes.trace.begin()
        self.follow_layout()
        if self.reducer.generation != self._generation:  # layers were added, replaced or frozen: perhaps with buffers
            self._generation = self.reducer.generation
            self._buffers = MovingBuffers(self.model, self.group, self.world.device)
        slots = ours.cut.slots if self.exact and ours is not None else 0
        self._buffers.begin(slots)
        self.reducer.stray = False
        facts = FactsMessage(self._told, self.world.device, slots)
        self.clock.tell(facts)
        self._window = OpenWindow(
            ours,
            self.steps,
            facts,
            rank=self.world.rank,
            reports=self._reports,
            samples=self._samples_told_by(ours),
            loss_scale=self._loss_scale.begin(window),
        )
        status.enter("data")
        return self._window

    def _samples_told_by(self, ours: Window | None) -> tuple[int, ...]:
        """Of each rank, where ranks tell each other nothing: in a window of ours by what is dealt out; () where the facts tell."""
        if self._told is self.everyone:
            return ()
        size = self.everyone.size
        return (0,) * size if ours is None else ours.samples_by_rank(self.everyone.rank, size)

    def follow_layout(self) -> None:
        """Where buckets have been laid anew the update follows. Every rank calls it alike; `micro_batches` does."""
        if self.reducer.layouts != self._layouts:
            self._layouts = self.reducer.layouts
            self.update.follow()

    def _compare_data(self, window: object) -> None:
        """Once, with the first window: the same data set, cut alike, from the same seed on all ranks."""
        if self._compares_data:
            self._compares_data = False
            with status.inside("checks"):
                compare_start(self.group, window.recipe if isinstance(window, Window) else {})

    def backward(self, loss: Tensor, weight: float | Tensor, *, reduction: Literal["sum", "mean"] = "sum") -> None:
        """Compute the gradients of this micro-batch, once. `weight` is what the loss counts: samples, tokens.

        `loss` is a scalar: the sum of the losses, or, with reduction="mean", their mean over `weight`, which is multiplied back.
        A weight of 0 is fine. Raises UsageError outside the `micro_batches` loop and when called twice for one micro-batch.
        """
        opened = self._window
        if opened is None or opened.micro is None:
            raise UsageError("backward() belongs inside the loop over stepper.micro_batches(window)")
        micro = opened.micro
        if micro.done:
            raise UsageError("backward() was called twice for one micro-batch: add the losses and call it once")
        loss = summed(loss, weight, reduction)
        micro.done, micro.weight = True, weight
        opened.backwards += 1
        opened.note(weight, loss, micro.row)
        scale = self._scale_of(opened, weight)
        if micro.last:
            self._send(opened.facts)
        if not loss.requires_grad and isinstance(weight, (int, float)) and weight == 0:
            return
        scaled = loss * scale if scale != 1 else loss
        status.enter("backward")
        self.reducer.expecting = True
        try:
            (self.scaler.scale(scaled) if self.scaler is not None else scaled).backward()
        finally:
            self.reducer.expecting = False
        status.enter("forward")

    def _scale_of(self, opened: OpenWindow, weight: float | Tensor = 0.0) -> float:
        """What the losses of this step are multiplied by. `weight`: of the micro-batch that asks first."""
        if opened.loss_scale is None:
            opened.loss_scale = self._loss_scale.agree(self._told, weight)
        return opened.loss_scale

    def _send(self, facts: FactsMessage) -> None:
        if self._overwritten is not None and self.group.size > 1:
            self._overwritten.tell(facts, self.steps, [*self.update.overwritten(), *self._buffers.starts])
        facts.send(stop=self._wants_stop(), newly_moving=self._buffers.newly_moving)

    def _wants_stop(self) -> bool:
        return self._stop or self.world.asked_to_stop

    def optimizer_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` of the whole optimizer, whoever holds which part of it. Every rank calls it, and gets it."""
        return self.update.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a whole optimizer's state, made with any number of ranks and either update. Every rank calls it."""
        self.update.load_state_dict(state)

    def keepers(self) -> list[Keeps]:
        """What has a state of its own beside the optimizer's."""
        reduction = self.reducer.reduction
        found: list[Any] = [reduction.meeting if isinstance(reduction, Alone) else reduction, self.update]
        return [each for each in found if hasattr(each, "kept")]

    def request_stop(self) -> None:
        """Ask all ranks to stop: after the next step, `StepResult.stop` is true on every one of them. (`World.heed_signals`: a signal asks too.)"""
        self._stop = True

    # -- the step ------------------------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """End the window: finish the sum, divide by the weight, clip, step the optimizer and the scheduler. Every rank calls it.

        Where all weights are 0, the loss is not finite, or (with `clip` or a scaler) the gradient is not, nothing is updated and `reason` says so.
        """
        opened = self._window
        if opened is None:
            raise UsageError("step() was called without a window: walk one with stepper.micro_batches(window) first")
        if opened.micro is not None:
            raise UsageError("step() was called inside the loop over stepper.micro_batches(window); it belongs after it")
        if self.reducer.stray and not opened.backwards:
            raise UsageError(
                "gradients arrived, but stepper.backward() was never called: call stepper.backward(loss, weight=...) in place of loss.backward()"
            )
        status.enter("reduce")
        scale = self._scale_of(opened)
        if not opened.facts.sent:
            self._send(opened.facts)
        self._window = None
        facts, divisor = self._finish(opened, scale)
        if self._overwritten is not None and self._overwritten.differ(facts, self.steps):
            self._buffers.open()  # as they were when the step began
            self.check_replicas(f"in step {self.steps + 1}")
        self._loss_scale.note(facts.weight)
        if opened.ours is not None and opened.ours.balancer is not None:
            opened.ours.balancer.note(facts.each_by_rank)
        self._buffers.finish(facts.weight, facts.newly_moving > 0)
        if facts.weight:
            self._unused()
        with randomness.update(self._seed, opened.step):
            ended = self.update.end(self.steps, facts, lambda: self._apply(facts, divisor))
        self.steps, self.everyone = ended.steps, ended.everyone or self.everyone
        if ended.outcome is not None:
            self._outcomes.note(self.steps, ended.outcome, facts, alone=self._told is not self.everyone)
            if self._outcomes.known_at_once:
                self._outcomes.settle()
        self._outcomes.skipped(ended.windows)
        stop = self.update.meet_if_due(ended)
        if self.replicas is not None and self.replicas.due(self.steps):
            self.check_replicas()
        status.enter("loop")
        return StepResult(
            loss=ended.loss / ended.weight if ended.weight else math.nan,
            weight=ended.weight,
            stop=stop,
            samples_by_rank=opened.samples or facts.samples_by_rank,
            bytes_sent=self.bytes_sent,
            outcome=ended.outcome or Applied(),
            together=self.together,
            gradient_age=ended.gradient_age,
            windows=ended.windows,
            times=self._end_clock(ended.number, opened.backwards),
            busy_by_rank=facts.busy_by_rank,
            waited_by_rank=facts.waited_by_rank,
        )

    def _end_clock(self, window: int, micro_batches: int) -> tuple[StepTimes, ...]:
        """The step has ended; those whose times are known since."""
        hidden = None if self.world.device.type == "cuda" else self.reducer.departures.hidden()
        return self.clock.end(window, micro_batches, hidden)

    def draws(self, loader: Any) -> None:
        """With update="server": have `loader`, a Loader over a data set whose samples have numbers, deal out slots in place of fixed shares.

        Every rank calls it, once, before the first epoch. Each then walks as many windows as it gets, and an empty one wherever all meet: at an
        epoch's end, where `meet_before` says, and where one is asked to stop; `StepResult.together` is true there. With another update it does nothing.
        """
        dealer = self.update.dealer
        if dealer is None:
            return
        if not isinstance(loader, Loader):
            raise UsageError(
                f"slots of a {type(loader).__name__} cannot be drawn: with update='server' the samples of a data set need numbers"
            )
        if loader.balance is not None:
            loader.balance.check(self.method, self.everyone.size)
        if self._compares_start:
            compare_start(self.everyone, loader.recipe)
        loader.draws = dealer

    def meet_before(self, step: int) -> None:
        """With update="server": have all ranks meet when `step` steps were taken, for a checkpoint, say. Every rank calls it alike."""
        self.update.meet_before(step)

    @property
    def between_meetings(self) -> bool:
        """Whether this rank's model is no state of the training that could be kept: at a server, but where all ranks meet."""
        return self.update.between_meetings

    @property
    def applied(self) -> int:
        """Steps of this process whose update was applied, not skipped. At a server, rank 0 hears of all, the others of none."""
        return self._outcomes.applied

    @property
    def together(self) -> bool:
        """Whether all ranks hold the same model: always, but between the meetings of local steps, and of a server's workers."""
        return self.update.together

    def meet(self) -> bool:
        """Have replicas that step alone meet now, for an evaluation or an end. Every rank calls it; whether one of them asks to stop.

        Where they have not parted since the last meeting, or never do, it only sees how the last step ended.
        """
        if self.between_meetings:
            raise UsageError(
                "between its meetings the workers of a server walk different windows: evaluate where StepResult.together is true"
            )
        self._outcomes.settle()
        return self.update.meet(stop=self._wants_stop())

    def _finish(self, opened: OpenWindow, scale: float) -> tuple[Facts, float]:
        """The sum complete, and what it is still to be divided by."""
        if self.held is not None:
            self.held.collect()
            self.reducer.take_in()
        self.reducer.look_for_cleared()  # before the others are waited for
        reduction = self.reducer.reduction
        if reduction.divisor is None:
            self.reducer.finish()
            facts = opened.facts.wait()
            return facts, facts.weight * scale
        facts = opened.facts.wait()
        reduction.divisor = facts.weight * scale or 1.0
        try:
            self.reducer.finish()
        finally:
            reduction.divisor = 1.0
        return facts, 1.0

    @property
    def alike(self) -> Group:
        """The ranks that hold the same part of the model."""
        return self.everyone if self.held is None else self.held.data

    def check_replicas(self, when: str | None = None) -> None:
        """Compare the replicas now, every bit of weights, buffers and optimizer state. Every rank calls it, between steps.

        It does nothing without checks="full", and where each rank has a model of its own (`together`). State that is divided among the
        ranks is compared with nothing. Raises ReplicaDivergence on all ranks, naming the tensor and the ranks.

        Args:
            when: What the error begins with; default: after which step.
        """
        if self.replicas is not None and self.together:
            with status.inside("checks"):
                self.replicas.compare(self.alike, self._replicated(), self.steps, when or f"after step {self.steps}")

    def _replicated(self) -> list[tuple[str, Tensor]]:
        tensors = [*self.model.named_parameters(), *self._buffers.named()]
        return [*((name, each) for name, each in tensors if name not in self.reducer.ignored), *self.update.replicated()]

    def _apply(self, facts: Facts, divisor: float) -> Applied:
        if facts.weight == 0:
            return Applied(reason=NOTHING)
        if not math.isfinite(facts.loss) and self.scaler is None:
            return Applied(reason=f"the loss is {facts.loss}: this update would make every weight nan")
        return self.update.apply(divisor, self._clip, self.scaler)
