"""A task's model as this rank has it while it trains: whole, or its part of one that lies over a
mesh (model_parallel/).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoints.identity import sha256, weights
from lockstep.config.settings import Settings, check_parts
from lockstep.config.task import Task
from lockstep.data.loader import is_iterable
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.step.forward import Forward
from lockstep.step.model_shard import Whole
from lockstep.step.stepper import Stepper
from lockstep.training.inference.evaluation import OwnRows
from lockstep.training.memory_use import Activations
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.split_model import SplitModel


class WholeModel(Whole, OwnRows):
    """All of it, on this rank's device. Beside what the Stepper asks (model_shard.py), what the
    training loop does; SplitModel answers the same.
    """

    holder = "rank"
    """Who walks a share of the data; of a split model a "replica", which is several ranks."""

    def __init__(self, model: nn.Module, world: World, *, compiles: bool) -> None:
        """`compiles`: by torch.compile, in place, so that the weights keep their names."""
        super().__init__(world)
        self.module = model.to(world.device)
        """Whose gradients the Stepper sums."""
        self.runs = self.module
        """What is trained, under the names of the whole model: for the task's optimizer."""
        self._activations = Activations(counts=not compiles)
        if compiles:
            self.module.compile()

    @property
    def activations(self) -> int | None:
        """Bytes that the forward of a micro-batch keeps for its backward; None where they are
        not known.
        """
        return self._activations.bytes

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was made for `runs` update `module`: it does."""

    def walk(self, stepper: Stepper, window: Window, forward: Forward) -> None:
        """All of a window's micro-batches, forward and backward."""
        for batch in stepper.micro_batches(window):
            loss, weight = self._activations.watch(self.module, partial(_loss, forward, batch))
            stepper.backward(loss, weight)

    def idle(self) -> str | None:
        """How long this rank waited for others within its steps, in words, where that can be
        told.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """For mesh.json: where this rank stands, and what it holds."""
        return {"rank": self._world.rank, "data": self._world.rank, "layers": "all"}

    def digest(self) -> str:
        """SHA-256 of the whole model's weights. Every rank calls it."""
        return sha256(weights(self.module))


def _loss(forward: Forward, batch: Any) -> tuple[Tensor, float | Tensor]:
    return forward.loss(forward(batch), batch)


def place_model(
    task: Task, forward: Forward, settings: Settings, world: World
) -> WholeModel | SplitModel:
    """`forward.model`, where the settings have it; `forward` then runs what is here. A model
    that is split is taken apart.
    """
    compiles = task.compile if settings.compile is None else settings.compile
    grid = settings.mesh
    if grid is None or grid.only_data:
        return WholeModel(forward.model, world, compiles=bool(compiles))
    check_parts(grid, settings.precision or task.precision, compile=compiles)
    if is_iterable(task.train_data) and grid.replicas not in (1, world.size):
        raise UsageError(
            "mesh-with-iterable",
            mesh=str(settings.mesh),
            shares=grid.replicas,
            world_size=world.size,
        )
    # with torch's engines, which take a second to import
    from lockstep.model_parallel.split_model import SplitModel

    placed = SplitModel(
        task,
        forward.model,
        grid,
        world,
        schedule=settings.schedule,
        split=settings.split,
        forward=forward,
    )
    forward.model = placed.modes
    return placed
