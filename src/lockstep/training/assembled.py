"""What a training is made of on this rank: model, optimizer, Stepper, Loader, evaluation, and
where it has come to.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.identity import check_storable
from lockstep.config.settings import Settings
from lockstep.config.task import Precision, Task
from lockstep.data.loader import is_iterable
from lockstep.data.windows import Window
from lockstep.runtime import randomness
from lockstep.step.forward import Forward, grad_scaler
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.build import Length, loader_of, model_of, optimizer_of, scheduler_of
from lockstep.training.inference.evaluation import Evaluation
from lockstep.training.metrics import finite
from lockstep.training.placed_model import place_model
from lockstep.training.resume import Identity, machine, recipe_of
from lockstep.training.run_directory import RunDirectory
from lockstep.training.saving import saving_in
from lockstep.training.state import TrainingState
from lockstep.training.task_digest import compare_tasks, task_digests
from lockstep.world.world import World


class AssembledTraining:
    """One training on this rank, put together. Intra-op threads, which belong to the process and
    not to it, are its caller's affair.
    """

    def __init__(
        self, task: Task, settings: Settings, world: World, run: RunDirectory | None
    ) -> None:
        self.task, self.settings, self.world, self.directory = task, settings, world, run
        grid = settings.mesh
        share = None if grid is None else (grid.share(world.rank), grid.replicas)
        self.loader = loader_of(task, world, settings.loader_workers, share, settings.balance)
        self.length = Length.of(
            task, settings, None if is_iterable(task.train_data) else len(self.loader)
        )
        self.precision: Precision = settings.precision or task.precision
        randomness.shared(task.seed)
        self.forward = Forward(model_of(task), task, self.precision, world.device)
        # what cannot be stored is found before the training, not after it
        check_storable(self.forward.model)
        self.placed = place_model(task, self.forward, settings, world)
        self.model = self.placed.runs
        self.optimizer = optimizer_of(task, self.model)
        recipe = recipe_of(task, settings, self.optimizer)  # before a scheduler touches it
        self.scheduler = scheduler_of(task, self.optimizer, self.length)
        self.placed.adopt(self.optimizer)
        self.stepper = self._new_stepper()
        self.evaluation = self.new_evaluation()
        self.identity = Identity(recipe, machine(), task_digests(task) if run is not None else {})
        compare_tasks(world.control, self.identity.digests)
        self.saves = saving_in(run, settings, self.stepper, self.loader)
        self.reached = TrainingState.of(task)

    def _new_stepper(self) -> Stepper:
        task, settings = self.task, self.settings
        stepper = Stepper(
            self.placed.module,
            self.optimizer,
            clip=task.clip,
            scaler=grad_scaler(self.precision, self.world.device),
            scheduler=self.scheduler if task.scheduler_per == "step" else None,
            seed=task.seed,
            unused=task.unused,
            reduce=settings.reduce,
            exact=settings.exact,
            compress=settings.compress,
            update=settings.update,
            staleness=settings.staleness,
            sync_every=settings.sync_every,
            outer=settings.outer,
            bucket_mb=settings.bucket_mb,
            model_shard=self.placed,
            world=self.world,
        )
        stepper.draws(self.loader)
        if self.length.steps is not None:
            stepper.meet_before(self.length.steps)
        return stepper

    def new_evaluation(self) -> Evaluation | None:
        if self.task.eval_data is None:
            return None
        return Evaluation(
            self.task,
            self.forward,
            self.world,
            loader_workers=self.settings.loader_workers,
            placed=self.placed,
        )

    def step(self, window: Window) -> StepResult:
        """One optimizer step, of which nothing is recorded."""
        self.placed.walk(self.stepper, window, self.forward)
        return self.stepper.step()

    def state(self) -> dict[str, Any]:
        """What a checkpoint says beside the Stepper's and the Loader's state."""
        found: dict[str, Any] = finite(
            {
                "task": self.task.name,
                "seed": self.task.seed,
                **self.reached.as_json(),
                "applied": self.reached.applied + self.stepper.applied,
                **asdict(self.identity),
            }
        )
        return found

    def resume(self) -> tuple[str, Checkpoint | None]:
        """Go on from the newest whole checkpoint of the run directory, if it has one; what has
        changed in the task since, and it.
        """
        changed = ""

        def check(found: Checkpoint) -> None:
            nonlocal changed
            changed = self.identity.check(found, self.settings, self.world)

        found = self.saves.resume(check)
        if found is not None:
            self.reached.load(found.state)
        self.saves.forget_after(self.reached.evaluated)
        return changed, found
