"""`lockstep.prepare`: the loop that people have becomes data-parallel.

model, optimizer, loader, scheduler = lockstep.prepare(
    model, optimizer, loader, scheduler, micro_batch=32
)
for epoch in loader.epochs(10):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lockstep.data.from_dataloader import from_dataloader, is_shuffled
from lockstep.data.loader import Loader
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.step.own_loop import MicroBatch, Trained, backwards_of
from lockstep.step.step_result import StepResult
from lockstep.training.loop_functions import total
from lockstep.training.script_run import ScriptRun
from lockstep.world.world import World

Reduction = Literal["mean", "sum", "as is"]
_SHUFFLED = "lockstep: shuffle=True: the order is the keyed permutation of seed={seed}, on any number of ranks"
_PADDING = 2**47  # slots of padding's random streams begin here


class PreparedLoader:
    """This rank's micro-batches; each iteration is one epoch. All ranks get equally many in a
    window: a rank with fewer gets copies first, whose gradients are dropped.

    Args:
        loader: the Loader.
        trained: the models that its windows train.
        seed: of the random streams of the forwards.
        reduction: what a loss is.
    """

    def __init__(
        self, loader: Loader, trained: Sequence[Trained], *, seed: int, reduction: Reduction
    ) -> None:
        self.loader = loader
        self._trained = trained
        self._seed = seed
        self._reduction = reduction
        self.run: ScriptRun | None = None
        self._logged: dict[str, tuple[float, float]] = {}
        self._of_epoch: dict[str, tuple[float, float]] = {}
        self._window: Window | None = None
        trained[0].on_step = self._stepped
        self._epoch: Any = None
        self._resumed = False
        self._number = 0

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of epochs up to `count`, from where the training is.

        Args:
            count: epochs of the whole training.
        """
        self._resumed = False
        if self._number:  # of an earlier loop
            self.loader.load_state_dict(self.loader.state_dict())
        for epoch in self.loader.epochs(count):
            self._epoch = epoch
            yield epoch.number
            self._epoch = None
            if self.run is not None:
                self.run.go_on()
        if self.run is not None:
            self.run.finish()

    def __iter__(self) -> Iterator[Any]:
        if self._resumed:
            raise UsageError("epochs-after-resume")
        epoch = self._epoch
        self._epoch = None
        if epoch is None:
            epoch = next(self.loader.epochs(self._number + 1, self._number))
        self._number = epoch.number + 1
        self._of_epoch.clear()
        for window in epoch:
            if self.run is not None:
                self.run.go_on()
            self._window = window
            yield from self._micro_batches(window)
            metrics = self._collect()
            if self.run is not None:
                self.run.record(metrics)

    def _stepped(self, result: StepResult) -> None:
        if self.run is not None:
            assert self._window is not None
            self.run.stepped(self._window, result)

    def _collect(self) -> dict[str, float]:
        """Return the means of what the window has logged, over all ranks, and add it to what the
        epoch has logged.
        """
        logged = dict(self._logged)
        self._logged.clear()
        means = {}
        if logged:
            sums = total(**{name: value for name, (value, _) in logged.items()})
            weights = total(**{name: weight for name, (_, weight) in logged.items()})
            for name, weight in weights.items():
                means[name] = sums[name] / weight if weight else math.nan
                value, before = self._of_epoch.get(name, (0.0, 0.0))
                self._of_epoch[name] = value + sums[name], before + weight
        return means

    @property
    def logged(self) -> dict[str, float]:
        """The means of what `lockstep.log` was given in this epoch, over all its windows that are
        over and over all ranks.
        """
        means = {}
        for name, (value, weight) in self._of_epoch.items():
            means[name] = value / weight if weight else math.nan
        return means

    def endless(self) -> Iterator[Any]:
        """Iterate over the batches of epoch after epoch, from where the training is, without end.
        For a loop that counts steps (`loader.step`) and no epochs.
        """
        for _ in self.epochs(ENDLESS):
            yield from self

    def save_in(self, run: ScriptRun) -> None:
        """Save the training in this run directory from now on."""
        self.run = run
        self._resumed = run.resumed

    def __len__(self) -> int:
        """Return the number of iterations of an epoch."""
        plan = self.loader.plan
        count = 0
        for index in range(plan.steps_per_epoch):
            count += self._most(plan.at(index, 0, index, self.loader.by_rank))
        return count

    @property
    def steps(self) -> int:
        """The number of optimizer steps of an epoch."""
        return len(self.loader)

    @property
    def step(self) -> int:
        """The steps that the training has taken."""
        return self._trained[0].stepper.steps

    def _most(self, cut: Any) -> int:
        size = self.loader.size
        return max(len(cut.filled(rank, size)) for rank in range(size))

    def _micro_batches(self, window: Window) -> Iterator[Any]:
        several = window.cut.slots > 1
        defers = several and len(self._trained) > 1
        bound = several and not self.loader.depends_on_world_size
        for one in self._trained:
            one.open(window, divides=self._reduction != "as is", defers=defers, bound=bound)
        own = len(window)
        state = randomness.get_state()
        left = True
        try:
            with backwards_of(self._trained):
                for index in range(own - self._most(window.cut), own):
                    yield self._begin(window, index, last=index == own - 1)
                    for one in self._trained:
                        one.end()
            left = False
        finally:
            if randomness is not None:  # None where a loop is left at the interpreter's end
                randomness.set_state(state)
            if left:
                for one in self._trained:
                    one.leave()

    def _begin(self, window: Window, index: int, *, last: bool) -> Any:
        """Begin micro-batch `index` of this rank, and return its batch; a copy if it is negative."""
        rank, size = self.loader.rank, self.loader.size
        if index >= 0:
            batch = window[index]
            slot = window.slots[index]
        elif len(window):
            batch = window[0]
            slot = _PADDING + rank
        else:
            batch = window.turned(size - rank, rank, size)[0]
            slot = _PADDING + rank
        micro_batch = MicroBatch(
            index if index >= 0 else None,
            float(window.counts[index]) if index >= 0 else 0.0,
            last=last,
            reduction=self._reduction,
            logged=self._logged,
        )
        for one in self._trained:
            one.begin(micro_batch, batch)
        randomness.step(self._seed, window.step, slot)
        return batch


def prepare(
    *objects: Any,
    micro_batch: int | None = None,
    seed: int = 0,
    reduction: Reduction = "mean",
    backwards: int | Sequence[int] = 1,
    run: Path | str | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    **options: Any,
) -> Any:
    """Make the loop that you have data-parallel.

    Args:
        objects: models, optimizers, a DataLoader, schedulers, in any order.
        micro_batch: samples of a forward.
        seed: of the shuffle, of samples and of forwards.
        reduction: what a loss is.
        backwards: backwards of a micro-batch that reach the model; with several optimizers one
            number for each, in their order.
        run: a folder for checkpoints and metrics. A training that is there is resumed.
        checkpoint_every: steps between two checkpoints. Default: as often as costs less than 2 % of
            the time.
        keep: the newest checkpoints to keep.
        options: those of `lockstep.Stepper`.

    Returns:
        The same objects, in the order given; the DataLoader as a `PreparedLoader`.
    """
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    loaders = [one for one in objects if isinstance(one, DataLoader)]
    for given, what in ((models, "model"), (optimizers, "optimizer"), (loaders, "DataLoader")):
        if not given:
            raise UsageError("nothing-to-prepare", what=what)
    counts = [backwards] * len(optimizers) if isinstance(backwards, int) else backwards
    trained = []
    for optimizer, count in zip(optimizers, counts, strict=True):
        model = _model_of(optimizer, models)
        trained.append(Trained(model, optimizer, count, seed=seed, **options))
    schedulers = []
    scaler = None
    for one in objects:
        if isinstance(one, torch.amp.GradScaler):
            scaler = one
            for trainee in trained:
                trainee.gate_scaler(one)
        if isinstance(one, (LRScheduler, ReduceLROnPlateau)):
            schedulers.append(one)
            for trainee in trained:
                if trainee.optimizer is one.optimizer:
                    trainee.gate(one)
    prepared = []
    for one in objects:
        if isinstance(one, DataLoader):
            if is_shuffled(one) and World.current().rank == 0:
                print(_SHUFFLED.format(seed=seed), file=sys.stderr)
            loader = from_dataloader(one, micro_batch=micro_batch, seed=seed)
            one = PreparedLoader(loader, trained, seed=seed, reduction=reduction)
            if run is not None:
                steppers = [trainee.stepper for trainee in trained]
                every = checkpoint_every
                one.save_in(
                    ScriptRun(run, steppers, loader, schedulers, scaler, every=every, keep=keep)
                )
        prepared.append(one)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model, or the models together, whose parameters the optimizer has."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for model in models:
        if any(id(parameter) in own for parameter in model.parameters()):
            found.append(model)
    if not found:
        raise UsageError("optimizer-of-other-models")
    return found[0] if len(found) == 1 else nn.ModuleList(found)
