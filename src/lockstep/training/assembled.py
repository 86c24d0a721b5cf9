"""The parts of a training on this rank: model (whole, or a part of one that is split over a mesh,
model_parallel/), optimizer, Stepper, Loader, evaluation, and the progress of the training, which
checkpoints store besides the model.

Every rank sees the same metrics (evaluation is equal on all ranks, to the bit), so all ranks make
the same decision without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.pieces import check_storable
from lockstep.checkpoints.save_and_resume import Checkpoints
from lockstep.checks.identity import sha256, weights
from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.config.settings import Settings, check_parts
from lockstep.config.task import Precision, Task
from lockstep.data.loader import is_iterable
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import UsageError
from lockstep.step.forward import Forward
from lockstep.step.model_shard import ModelShard
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.build import Length, loader_of, model_of, optimizer_of, scheduler_of
from lockstep.training.inference.evaluation import Evaluation, OwnRows
from lockstep.training.metrics import finite
from lockstep.training.opening import grad_scaler
from lockstep.training.resume import Identity, machine, recipe_of
from lockstep.training.run_directory import RunDirectory
from lockstep.training.saving import saving_in
from lockstep.training.state import TrainingState
from lockstep.training.task_digest import compare_tasks, task_digests
from lockstep.training.weight_average import NoAverage, WeightAverage
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.split_model import SplitModel


class WholeModel(ModelShard, OwnRows):
    """The whole model, on this rank's device. It has what the Stepper needs (model_shard.py) and
    what the training loop needs; SplitModel has the same interface.
    """

    holder = "rank"
    """What computes one share of the data. For a split model "replica", which is several ranks."""

    def __init__(self, model: nn.Module, world: World, *, compiles: bool, exact: bool) -> None:
        """`compiles`: use torch.compile, in place, so that the weights keep their names. `exact`:
        compile separate kernels for each shape.
        """
        super().__init__(world)
        self.module = model.to(world.device)
        """The module whose gradients the Stepper sums."""
        self.runs = self.module
        """The trained module, with the whole model's parameter names, for the task's optimizer."""
        if compiles:
            # with dynamic shapes, the kernels would depend on the shapes that this rank saw before
            self.module.compile(dynamic=False if exact else None)

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer that was built for `runs` update `module`. Here they are the same."""

    def walk(self, stepper: Stepper, window: Window, forward: Forward) -> None:
        """Compute forward and backward of all micro-batches of a window."""
        for batch in stepper.micro_batches(window):
            loss, weight = forward.loss(forward(batch), batch)
            stepper.backward(loss, weight)

    def describe(self) -> dict[str, Any]:
        """Return this rank's place and what it holds, for mesh.json."""
        return {"rank": self._world.rank, "data": self._world.rank, "layers": "all"}

    def digest(self) -> str:
        """Return the SHA-256 of the whole model's weights. Every rank calls it."""
        return sha256(weights(self.module))


def place_model(
    task: Task, forward: Forward, settings: Settings, world: World
) -> WholeModel | SplitModel:
    """Place `forward.model` as the settings say, whole or split over a mesh. A split takes the
    model apart, and `forward` then runs this rank's part.
    """
    compiles = task.compile if settings.compile is None else settings.compile
    grid = settings.mesh
    if grid is None or grid.only_data:
        return WholeModel(forward.model, world, compiles=bool(compiles), exact=settings.exact)
    precision = settings.precision or task.precision
    check_parts(grid, precision, compile=compiles, average=task.average is not None)
    if is_iterable(task.train_data) and grid.replicas not in (1, world.size):
        raise UsageError(
            "mesh-with-iterable",
            mesh=str(settings.mesh),
            shares=grid.replicas,
            world_size=world.size,
        )
    # imported late: torch's engines take a second to import
    from lockstep.model_parallel.split_model import SplitModel

    placed = SplitModel(
        task,
        forward.model,
        grid,
        world,
        schedule=settings.schedule,
        forward=forward,
    )
    forward.model = placed.runs
    return placed


class AssembledTraining:
    """One training on this rank, with all its parts. Intra-op threads belong to the process, so the
    caller sets them.
    """

    def __init__(
        self, task: Task, settings: Settings, world: World, run: RunDirectory | None
    ) -> None:
        self.task = task
        self.settings = settings
        self.world = world
        self.directory = run
        grid = settings.mesh
        share = None if grid is None else (grid.share(world.rank), grid.replicas)
        self.loader = loader_of(task, world, settings.loader_workers, share, settings.balance)
        self.loader.left_out = settings.left_out
        steps_per_epoch = None if is_iterable(task.train_data) else len(self.loader)
        self.length = Length.of(task, settings, steps_per_epoch)
        self._check_left_out()
        self.precision: Precision = settings.precision or task.precision
        self.forward = Forward(model_of(task), task, self.precision, world.device)
        # fails now, and not after the training, if something cannot be stored
        check_storable(self.forward.model)
        self.model_shard = place_model(task, self.forward, settings, world)
        self.model = self.model_shard.runs
        self.optimizer = optimizer_of(task, self.model)
        recipe = recipe_of(task, settings, self.optimizer)  # before a scheduler touches it
        self.scheduler = scheduler_of(task, self.optimizer, self.length)
        self.model_shard.adopt(self.optimizer)
        self.average = NoAverage() if task.average is None else WeightAverage(task, self.model)
        self.stepper = self._new_stepper()
        self.evaluation = self.new_evaluation()
        self.identity = Identity(recipe, machine(), task_digests(task) if run is not None else {})
        compare_tasks(world.control, self.identity.digests)
        by_epoch = self.scheduler if task.scheduler_per == "epoch" else None
        self.saving = saving_in(run, settings, self.stepper, self.loader, by_epoch)
        self.progress = TrainingState.of(task)

    def _check_left_out(self) -> None:
        """Raise UsageError if `skip` names steps after the end, or leaves no step."""
        left_out = self.settings.left_out
        steps = self.length.steps
        if steps is None or not left_out.ranges:
            return
        last = left_out.ranges[-1].stop - 1
        if last > steps:
            raise UsageError("skip-after-the-end", skip=str(left_out), steps=steps)
        if left_out.ranges[0] == range(1, steps + 1):
            raise UsageError("skip-leaves-nothing", skip=str(left_out), steps=steps)

    def _new_stepper(self) -> Stepper:
        task = self.task
        settings = self.settings
        method = {name: getattr(settings, name) for name in knob.knobs(Parallelism)}
        del method["mesh"]  # `model_shard` handles it
        if self.world.size == 1 and (settings.grow or settings.grow_if_wanted):
            method["witness"] = None  # needs other ranks; they have died, and may come back
        stepper = Stepper(
            self.model_shard.module,
            self.optimizer,
            clip=task.clip,
            scaler=grad_scaler(self.precision, self.world.device),
            scheduler=self.scheduler if task.scheduler_per == "step" else None,
            seed=task.seed,
            unused=task.unused,
            average=self.average.model,
            bucket_mb=settings.bucket_mb,
            model_shard=self.model_shard,
            world=self.world,
            **method,
        )
        stepper.draws(self.loader)
        if self.length.steps is not None:
            stepper.synchronize_before(self.length.steps)
        return stepper

    def new_evaluation(self) -> Evaluation | None:
        if self.task.eval_data is None:
            return None
        return Evaluation(
            self.task,
            self.forward,
            self.world,
            loader_workers=self.settings.loader_workers,
            runner=self.model_shard,
        )

    def step(self, window: Window) -> StepResult:
        """Take one optimizer step without recording it.

        Args:
            window: the next one of `windows`.
        """
        self.model_shard.walk(self.stepper, window, self.forward)
        result = self.stepper.step()
        self.average.after_step(result, self.stepper.steps)
        return result

    def load(self, directory: Path, step: int) -> Mapping[str, Any]:
        """Go on after `step`, whose checkpoint is loaded. Every rank calls it. Nothing is written.

        Args:
            directory: the folder of checkpoints.
            step: optimizer steps that were taken before it was saved.

        Returns:
            What the checkpoint stores besides the tensors.

        Raises:
            UsageError: there is no such checkpoint, or it is of another training.
        """
        by_epoch = self.scheduler if self.task.scheduler_per == "epoch" else None
        checkpoints = Checkpoints(
            directory, self.stepper, self.loader, scheduler=by_epoch, read_only=True
        )
        checkpoint = checkpoints.resume(step)
        if checkpoint is None or checkpoint.step != step:
            raise UsageError("no-checkpoint", run=directory)
        self.progress.load(checkpoint.state)
        return checkpoint.state

    def windows(self) -> Iterator[Window]:
        """Yield the windows from the current position on, without those of `skip`. Between two
        epochs, synchronize and step the scheduler as `Training.run` does, without its evaluations
        and records.
        """
        if self.loader.state_dict()["epoch"] > self.progress.epochs:
            self._between_epochs()  # the checkpoint was saved before the end of its epoch was handled
        for epoch in self.loader.epochs(self.length.epochs or ENDLESS):
            for window in epoch:
                if window.step + 1 in self.loader.left_out:
                    self.stepper.leave_out()
                else:
                    yield window
            self._between_epochs()

    def _between_epochs(self) -> None:
        self.progress.epochs += 1
        self.stepper.synchronize()
        if self.task.scheduler_per == "epoch" and self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides the Stepper's and the Loader's state."""
        state: dict[str, Any] = {"task": self.task.name, "seed": self.task.seed}
        state |= self.progress.as_json()
        state["applied"] = self.progress.applied + self.stepper.applied
        state |= asdict(self.identity)
        return {name: finite(value) for name, value in state.items()}

    def resume(self) -> tuple[str, Checkpoint | None]:
        """Resume from the newest complete checkpoint of the run directory, if there is one. Return
        what has changed in the task since then, in words, and the checkpoint.
        """
        changed = ""

        def check(checkpoint: Checkpoint) -> None:
            nonlocal changed
            changed = self.identity.check(checkpoint, self.settings, self.world)

        checkpoint = self.saving.resume(check)
        if checkpoint is not None:
            self.progress.load(checkpoint.state)
        self.saving.forget_after(self.progress.evaluated)
        return changed, checkpoint
