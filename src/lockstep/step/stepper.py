"""One optimizer step over one window of micro-batches, with any distribution over the ranks.

    for window in epoch:                                     # one optimizer step
        for x, y in stepper.micro_batches(window):           # this rank's share, possibly none
            stepper.backward(loss_sum(model(x), y), weight=len(y))
        stepper.step()

The step's gradient is the sum of all gradients divided by the sum of all weights, over every
micro-batch of every rank: the gradient that one process would compute. A rank without micro-batches
takes part with zeros, so that no distribution can hang.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lockstep.checks.divergence import Named, OverwrittenCheck, ReplicaCheck, digests
from lockstep.checks.start import compare_start, optimizer_numbers
from lockstep.checks.trainable import check_kinds
from lockstep.checks.witness import Witness
from lockstep.collectives.group import Group
from lockstep.config import knob
from lockstep.config.documented import takes_fields
from lockstep.config.parallelism import Parallelism
from lockstep.config.task import SchedulerPer, Unused
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.gradients.exact import check_window
from lockstep.gradients.saved_state import KeepsState
from lockstep.runtime import preemption, randomness, status
from lockstep.step.assembly import StepperOptions, assemble, check_drawn
from lockstep.step.data_parallel import DistributedDataParallel
from lockstep.step.learning_rate import follow_epoch
from lockstep.step.loss_scale import LossScale
from lockstep.step.model_shard import ModelShard
from lockstep.step.step_result import Outcomes, StepperClock, StepResult, allow_scheduler
from lockstep.step.window_run import WindowRun, summed
from lockstep.step.witnessed_step import local_state, witnessed
from lockstep.step.wrapper_arguments import Checks
from lockstep.updates.local_steps import LocalSteps
from lockstep.updates.server.worker import ServerUpdate
from lockstep.updates.update import Applied, may_draw
from lockstep.world.world import World

Batch = TypeVar("Batch")


@takes_fields(Parallelism, leaves_out=("mesh",))
class Stepper:
    """Trains `model` with `optimizer`, one window at a time.

    A window holds the micro-batches of one optimizer step. The step's gradient is the sum of all
    gradients divided by the sum of all weights, over the micro-batches of all ranks: the gradient
    that one process would compute. A rank without micro-batches takes part with zeros.

    Example::

        stepper = lockstep.Stepper(model, torch.optim.AdamW(model.parameters()))
        for epoch in loader.epochs(10):
            for window in epoch:  # one optimizer step
                for x, y in stepper.micro_batches(window):
                    loss = F.cross_entropy(model(x), y, reduction="sum")
                    stepper.backward(loss, weight=len(y))
                result = stepper.step()

    On a GPU no step waits for the device, with two exceptions: `clip` with an optimizer that is not
    fused, and `clip` with a scheduler. These need the norm of the gradient on the host.

    Args:
        model: a bare module, whose weights are made equal on all ranks here; or a
            `lockstep.DistributedDataParallel`.
        optimizer: an optimizer of the model's parameters.
        clip: maximum norm of the gradient. It is applied once, after the sum is divided.
        scaler: a `torch.amp.GradScaler`, for fp16.
        scheduler: a learning rate scheduler.
        scheduler_per: when it steps: after every applied update, or where a Loader's next epoch
            begins.
        seed: seed of the random numbers of each forward (dropout). They depend on (seed, step,
            slot), and not on the rank.
        bucket_mb: MiB of gradients that are sent together; default 25. For a bare module.
        unused: how to treat a parameter that gets no gradient on any rank. "error": raise
            UnusedParameters; "zeros": its gradient is zeros; "skip": its `.grad` stays None.
        average: a `torch.optim.swa_utils.AveragedModel` of the model, which you update. Its
            replicas are compared, and `Checkpoints` save it.
        checks: "full" compares the set-up at the start, and the replicas after steps 1 and 2 and at
            least every 100 steps; "start" only compares the set-up; "off" compares nothing.
        trace_nonfinite: inspect every gradient before it is summed. The warning of a skipped step
            then names the rank and the parameter where a nan or inf came first. Without it, only
            the window after a skipped step is inspected.
        model_shard: this rank's part of a model that is split over a mesh, as `lockstep train
            --mesh` creates it; `model` is then its `module`.
        world: the world of this rank. Default: the world of torch's process group.
        method: the following fields of config/parallelism.py.
        <fields>

    With `update="sharded"` the weights are the same, bit for bit. The optimizer's groups hold
    pieces of parameters: use `optimizer_state_dict`. After a step a parameter's `.grad` holds the
    sum only in this rank's slice.

    With `update="server"` ranks draw micro-batches and do not wait for each other.

    `exact=True` needs the windows of a Loader. The order of every sum is one tree over the window's
    slots, and the process computes deterministically, on one intra-op thread, until the world
    closes. `World.compute_deterministically` chooses another number of threads.

    With `compress`, the part of a gradient that is left out is added in later steps.

    Raises:
        UsageError: an optimizer of other parameters, or values that cannot be combined.
        ReplicaDivergence, UnusedParameters: on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_per: SchedulerPer = "step",
        seed: int = 0,
        bucket_mb: float | None = None,
        unused: Unused = "error",
        average: AveragedModel | None = None,
        checks: Checks = "full",
        trace_nonfinite: bool = False,
        model_shard: ModelShard | None = None,
        world: World | None = None,
        **method: Any,
    ) -> None:
        check_kinds(model, optimizer)
        self._options = options = StepperOptions(
            clip=clip,
            scaler=scaler,
            scheduler=scheduler,
            scheduler_per=scheduler_per,
            seed=seed,
            bucket_mb=bucket_mb,
            unused=unused,
            average=average,
            checks=checks,
            trace_nonfinite=trace_nonfinite,
        )
        self.model_shard = model_shard or ModelShard()
        knob.known(knob.knobs(Parallelism).keys() - {"mesh"}, method, "Stepper")
        self.method = Parallelism(**method, mesh=self.model_shard.mesh)
        options.check(self.method)
        self.world = world = world or World.current()
        options.check_models(model, world)
        options.compare(model, optimizer, self.model_shard.replicas(world.group))
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.average = average
        self.replicas = ReplicaCheck() if checks == "full" else None
        # on a mesh the ranks that exchange facts hold different parts of the model, whose digests
        # cannot be compared
        comparable = checks == "full" and self.model_shard.mesh is None
        self._overwritten = OverwrittenCheck() if comparable else None
        self.steps = 0
        self._stop = False
        self._outcomes = Outcomes(world, scheduler if scheduler_per == "step" else None, scaler)
        self.everyone = model.group if isinstance(model, DistributedDataParallel) else world.group
        """All ranks of this training. `group` holds the ranks whose gradients are summed in a
        step: only this rank if it steps alone.
        """
        self._work_with(model)
        self._loss_scale = LossScale(scaler, world.device)
        self.clock = StepperClock(world.device)
        self._compares_data = checks != "off"
        self.witness = Witness.of(self.method.witnessed, seed, self.group)
        self._run: WindowRun | None = None
        self._version = -1
        """The version of the first parameter's memory after the last step."""
        if self.replicas is not None:
            world.last_comparison.add(self._last_digests)

    def _work_with(self, model: nn.Module) -> None:
        """Assemble reducer and update for `model`, as the method requires at this step."""
        if self.method.exact:
            self.world.compute_deterministically()
        alone = self.method.alone_after(self.steps)
        self._parts = parts = assemble(
            model,
            self.optimizer,
            self.method,
            self._options,
            alone=alone,
            shard=self.model_shard,
            everyone=self.everyone,
            world=self.world,
        )
        self.model = parts.model
        """The bare module."""
        self.reducer = parts.reducer
        self.update = parts.update
        self.group = parts.reducer.group
        self.steps_alone = alone
        """Whether each rank steps, or pushes to a server, with its own gradients only."""
        self._parts_later = self.method.alone and not alone
        if self.world.rank == 0 and self.steps == 0:
            parts.warn_of_forgotten(stacklevel=4)
        self._outcomes.trace = parts.trace

    def part_if_due(self) -> None:
        """Begin local steps if they are due: `outer` can begin them after some steps.
        `micro_batches` calls this. All ranks call it at the same point.
        """
        if self._parts_later and self.method.alone_after(self.steps):
            self.reducer.reset()
            order = self.reducer.order
            self._work_with(self.model)
            # with some backends the position in a bucket decides the order of addition
            self.reducer.lay(order)
            self.update.follow()

    @property
    def facts_rank(self) -> int:
        """This rank's index in `StepResult.waited_by_rank`."""
        return self._parts.facts_group.rank

    # -- the window -------------------------------------------------------------------------------

    def micro_batches(self, window: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches of one window. The gradients are sent during the
        last backward.

        Every rank calls it, also a rank without micro-batches in this window.

        Args:
            window: a window of a `lockstep.Loader`, or any iterable of this rank's own batches.

        Returns:
            An iterator over the batches. Call `backward` once for each.
        """
        run = self.open(window)
        if self.witness is not None and run.window is not None and self.witness.due(run.window):
            return witnessed(self, self.witness, run, run.window)
        return run.walk(window)

    def open(self, window: Iterable[Any]) -> WindowRun:
        """Begin a window. `micro_batches` does it; a loop that cannot be written with it goes on
        with the methods of the result. Every rank calls it.

        Args:
            window: as for `micro_batches`.

        Raises:
            UsageError: not a window, or another one is open.
        """
        if not isinstance(window, Iterable):
            raise UsageError("not-a-window", kind=type(window).__name__)
        if self._run is not None:
            raise UsageError("window-still-open")
        self.clock.open()
        if self.method.update != "server":  # whose update knows the step of the draw
            status.step(self.steps + 1)
        if not self._outcomes.known_at_once:
            self._outcomes.settle()
        if self._parts_later:
            self.part_if_due()
        if self._compares_data:
            self._compare_data(window)
        loaded = window if isinstance(window, Window) else None
        if self.method.exact:
            loaded = check_window(window)
        if self.method.update == "server" and (loaded is None or not loaded.drawn):
            raise UsageError("slots-not-drawn")
        if self._options.scheduler_per == "epoch" and self.scheduler is not None:
            follow_epoch(self.scheduler, loaded)
        parts = self._parts
        parts.reducer.reset(None if loaded is None else loaded.cut)
        if parts.trace.due or parts.reducer.on_ready is not None:
            parts.trace.begin()
        if parts.update.follows:
            parts.update.follow()
        if parts.reducer.generation != parts.buffers.generation:
            parts.follow_model(self.world)
        self._run = run = WindowRun(
            loaded,
            self.steps,
            parts,
            self.world,
            seed=self._options.seed,
            exact=self.method.exact,
            reports=self.model_shard.reports,
            scale=self._loss_scale,
            factor=1.0 if self.scaler is None else self._loss_scale.begin(window),
            overwritten=self._overwritten,
        )
        run.stops = self._stop
        if self.clock.latest is not None:  # they travel with the facts of this step
            times = self.clock.latest
            run.facts.add_times(times.forward + times.backward, times.waits)
        status.enter("data")
        return run

    @contextmanager
    def acting_on(self, run: WindowRun) -> Iterator[None]:
        """In this block `backward` belongs to another run of the open window. If the caller's loop is
        left inside it, `step` refuses.

        Args:
            run: a result of `WindowRun.again`.
        """
        before = self._run
        self._run = run
        yield
        self._run = before

    def _compare_data(self, window: object) -> None:
        """At the first window, check that all ranks have the same data set, batches and seed."""
        self._compares_data = False
        with status.inside("checks"):
            compare_start(self.group, window.recipe if isinstance(window, Window) else {})

    def backward(
        self, loss: Tensor, weight: float | Tensor, *, reduction: Literal["sum", "mean"] = "sum"
    ) -> None:
        """Compute the gradients of this micro-batch. Call it once for each micro-batch.

        Args:
            loss: a scalar: the sum of the losses, or their mean with reduction="mean".
            weight: the weight of the loss: its number of samples or tokens. 0 is allowed.
            reduction: "sum", or "mean": the loss is then multiplied by `weight`.

        Raises:
            UsageError: called outside the loop over `micro_batches`, or twice for a micro-batch, or
                after an exception ended a backward of this window.
        """
        run = self._run
        if run is None or run.micro_batch is None:
            raise UsageError("backward-outside-window")
        if self.reducer.unfinished:
            raise UsageError("backward-interrupted")
        if run.counted:
            raise UsageError("second-backward")
        loss = summed(loss, weight, reduction)
        factor = run.count(loss, weight)
        if not loss.requires_grad and isinstance(weight, (int, float)) and weight == 0:
            return
        if factor != 1:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        status.enter("backward")
        with self.reducer.backward():
            loss.backward()
        status.enter("forward")

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the world was opened, as Lockstep's groups count
        them.
        """
        sent = self.everyone.bytes_sent
        return sent if self.model_shard.mesh is None else sent + self.model_shard.sent()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, also if each rank holds only a part. Every rank
        calls it, and gets the state.
        """
        return self.update.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a whole optimizer. Every rank calls it.

        Args:
            state: a result of `optimizer_state_dict`, from any number of ranks and either update.
        """
        self.update.load_state_dict(state)

    def keepers(self) -> list[KeepsState]:
        """The objects other than the optimizer whose state a checkpoint keeps."""
        return [self.reducer.reduction, self.update]

    def request_stop(self) -> None:
        """Ask all ranks to stop: `StepResult.stop` is true on all of them after the next step. A
        signal does the same, after `World.heed_signals`.
        """
        self._stop = True
        if self._run is not None:
            self._run.stops = True

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """End the window: finish the sum, divide it by the weight, clip, step the optimizer and
        then the scheduler. Every rank calls it.

        Nothing is updated if all weights are 0, if the loss is not finite, or if the gradient is
        not finite (with `clip` or a scaler). `StepResult.reason` then gives the reason.

        Returns:
            A StepResult, the same on all ranks.

        Raises:
            ReplicaDivergence, UnusedParameters: on all ranks.
            UsageError: called without a window, or inside the loop over `micro_batches`, or after
                an exception ended a backward of this window.
        """
        run = self._run
        parts = self._parts
        if run is None:
            raise UsageError("step-without-window")
        run.check_can_end()
        facts, divisor = run.complete()
        self._run = None
        if self._overwritten is not None and self._overwritten.differ(facts, self.steps):
            self.check_replicas(f"in step {self.steps + 1}")
        if self.scaler is not None:
            self._loss_scale.record_weight(facts.weight)
        parts.buffers.finish(facts.weight, facts.newly_moving > 0)
        hidden = None if self.world.device.type == "cuda" else self.reducer.timeline.hidden()
        if facts.weight and self.reducer.someone_misses:
            parts.unused()
        if self.method.update != "server":  # whose ranks only send
            status.enter("optimizer")
        stream: AbstractContextManager[None] = nullcontext()
        if may_draw(self.optimizer):
            stream = randomness.update(self._options.seed, run.step)
        with stream:
            ended = self.update.end(self.steps, facts, divisor)
        self.steps = ended.steps
        if ended.outcome is not None:
            self._outcomes.ended = self.steps, ended.outcome, facts, self.steps_alone
            if self._outcomes.known_at_once:
                self._outcomes.settle()
        if ended.windows:
            self._outcomes.skipped(ended.windows)
        if self.replicas is not None and self.steps >= self.replicas.next_step:
            self.check_replicas()
        if self.witness is not None and run.record is not None:
            self.witness.keep(local_state(self), self.steps)
        self._version = self.reducer.parameters[0]._version
        status.enter("loop")
        return StepResult(
            loss=ended.loss / ended.weight if ended.weight else math.nan,
            weight=ended.weight,
            step=self.steps,
            stop=ended.stop,
            samples_by_rank=self._own_samples(run) if self.steps_alone else facts.samples_by_rank,
            bytes_sent=self.bytes_sent,
            outcome=ended.outcome or Applied(),
            synchronized=ended.synchronized,
            windows=ended.windows,
            times=self.clock.end(ended.number, hidden),
            busy_by_rank=facts.busy_by_rank,
            waited_by_rank=facts.waited_by_rank,
        )

    def leave_out(self) -> StepResult:
        """Take a step without its window, in place of `micro_batches` and `step`: nothing is
        computed or updated, also by the scheduler. Later steps keep their numbers, samples and
        random streams. Every rank calls it for the same window.

        Returns:
            A StepResult that was not applied, with a loss of nan and no samples.

        Raises:
            UsageError: a window is open; or the ranks step alone, with local steps or a server.
        """
        if self.method.alone:
            raise UsageError("skip-does-not-fit", option=self.method.describe())
        if self._run is not None:
            raise UsageError("window-still-open")
        allow_scheduler(self.optimizer)  # a scheduler of epochs may step before the first update
        self.steps += 1
        status.step(self.steps)
        return StepResult(
            loss=math.nan,
            weight=0.0,
            step=self.steps,
            stop=False,
            samples_by_rank=(0,) * self.everyone.size,
            bytes_sent=self.bytes_sent,
            outcome=Applied(reason="it was left out"),
        )

    def _own_samples(self, run: WindowRun) -> tuple[int, ...]:
        """Return the samples of each rank, for a rank that steps alone: those of the Loader's
        window, else zeros.
        """
        if run.window is None:
            return (0,) * self.everyone.size
        return run.window.samples_by_rank(self.everyone.rank, self.everyone.size)

    def draws(self, loader: Any) -> None:
        """With update="server": `loader` hands out slots to the ranks that ask, instead of fixed
        shares. With another update this does nothing.

        Every rank calls it once, before the first epoch. Each rank then gets as many windows as it
        can compute. It gets an empty window whenever all ranks synchronize: at the end of an epoch,
        at a step given to `synchronize_before`, and after a request to stop.
        `StepResult.synchronized` is then true.

        Args:
            loader: a Loader over a map-style data set.
        """
        if isinstance(self.update, ServerUpdate):
            check_drawn(loader, self.method, self.everyone)
            if self._options.checks != "off":
                compare_start(self.everyone, loader.recipe)
            loader.draw = self.update.draw

    def synchronize_before(self, step: int) -> None:
        """With update="server": make all ranks synchronize after `step` steps, for a checkpoint.
        All ranks call it with the same value.

        Args:
            step: the number of steps, counted from the start of the training.
        """
        if isinstance(self.update, ServerUpdate):
            self.update.synchronize_before(step)

    @property
    def between_synchronizations(self) -> bool:
        """Whether this rank's model cannot be saved now: true with a server, except when all ranks
        have just synchronized.
        """
        return self.method.server and not self.synchronized

    @property
    def applied(self) -> int:
        """Steps of this process whose update was applied, not skipped. With a server, rank 0
        counts the steps of all ranks, and the other ranks count 0.
        """
        return self._outcomes.applied

    @property
    def synchronized(self) -> bool:
        """Whether all ranks hold the same model: always, except between two synchronizations of
        local steps or of a server's workers.
        """
        return self.update.synchronized

    def synchronize(self) -> bool:
        """With local steps: synchronize the replicas, for an evaluation or at the end. Every rank
        calls it.

        If no rank has stepped since the last call, it only waits for the end of the last step.

        Returns:
            Whether a rank has asked to stop.
        """
        if self.between_synchronizations:
            raise UsageError("workers-not-together", call="Stepper.synchronize()")
        self._outcomes.settle()
        if not isinstance(self.update, LocalSteps):
            return False
        return self.update.synchronize(stop=self._stop or preemption.asked)

    @property
    def alike(self) -> Group:
        """The ranks that hold the same part of the model."""
        return self.model_shard.replicas(self.everyone)

    def undo_forwards(self) -> None:
        """Undo what forwards since the last step have done to moving buffers, such as BatchNorm's
        statistics: each rank has seen other samples. The next window does it too.
        """
        self._parts.buffers.restore()

    def check_replicas(self, when: str | None = None) -> None:
        """Compare the replicas now: every bit of weights, buffers and optimizer state. Every rank
        calls it, between steps.

        It does nothing without checks="full", or while replicas may differ (`synchronized` is
        False). State that is divided among the ranks is not compared.

        Args:
            when: the beginning of the error message. Default: "after step N".

        Raises:
            ReplicaDivergence: on all ranks; it names the tensor and the ranks.
        """
        if self.replicas is not None and self.synchronized:
            self.undo_forwards()
            with status.inside("checks"):
                self.replicas.compare(self._alike(), self.steps, when or f"after step {self.steps}")

    def _alike(self) -> Sequence[tuple[Group, Named]]:
        """Return pairs of ranks and tensors that are equal on these ranks between steps."""
        return self.model_shard.alike(self.alike, self.replicated())

    def _last_digests(self) -> Mapping[str, int]:
        """Return digests of what is equal on all ranks after the last step, by name and ranks.
        Nothing if this rank has changed its weights since, for example to evaluate an average.
        """
        if not self.synchronized or self.reducer.parameters[0]._version != self._version:
            return {}
        self.undo_forwards()
        return digests(self._alike())

    def replicated(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are equal on all ranks with the same part of the model, between
        steps and while `synchronized`, with names.
        """
        named = [
            *self.model.named_parameters(),
            *self._parts.buffers.named(),
            *self._options.averaged(),
            *self.update.replicated(),
            *optimizer_numbers(self.optimizer, self.world.device),
        ]
        return [(name, tensor) for name, tensor in named if name not in self.reducer.ignored]
