"""The loader that `lockstep.prepare` gives back: a loop over it is a loop over the windows of a Loader."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.plain_json import decoded, encoded
from lockstep.data.loader import Loader
from lockstep.data.padding import Padding
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.step.micro_batch import MicroBatch
from lockstep.step.own_loop import Trained
from lockstep.step.running_loops import backwards_of, note_copies
from lockstep.step.step_result import StepResult
from lockstep.training.script_run import ScriptRun
from lockstep.world.world import World

Reduction = Literal["mean", "sum", "as is"]
_PADDING = 2**47  # slots of padding's random streams begin here


class PreparedLoader:
    """This rank's micro-batches; each iteration is one epoch. All ranks get equally many in a
    window: a rank with fewer gets copies first, whose gradients are dropped.

    Args:
        loader: the Loader.
        trained: the models that its windows train.
        seed: of the random streams of the forwards.
        reduction: what a loss is.
        weight: returns what the loss of a batch is a mean over; None: its samples.
    """

    def __init__(
        self,
        loader: Loader,
        trained: Sequence[Trained],
        *,
        seed: int,
        reduction: Reduction,
        weight: Callable[[Any], float] | None = None,
    ) -> None:
        self.loader = loader
        self._trained = trained
        self._seed = seed
        self._reduction = reduction
        self._weight = weight
        self.run: ScriptRun | None = None
        self._logged: dict[str, tuple[float, float]] = {}
        self._of_epoch: dict[str, tuple[float, float]] = {}
        self._window: Window | None = None
        trained[0].on_step = self._stepped
        self._by_slot = BySlot()
        self._of_micro_batch: dict[str, Any] | None = None
        self._padding = Padding(loader)
        self._epoch: Any = None
        self._resumed = False
        self._number = 0
        self._windows = 0  # of this process
        self._logs = False  # whether any rank's loop logs
        self._last_step: int | None = None  # of a loop that counts steps

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
            if self._last_step is not None and self.step >= self._last_step:
                return
            self._window = window
            yield from self._micro_batches(window)
            self._agree_on_habits()
            metrics = self._collect() if self._logs else {}
            if self.run is not None:
                self.run.record(metrics)

    def _stepped(self, result: StepResult) -> None:
        if self.run is not None:
            assert self._window is not None
            self.run.stepped(self._window, result)

    def _agree_on_habits(self) -> None:
        """Tell the other ranks what this rank's loop does, after windows 1, 2, 4, 8, ...: a rank that
        leaves out micro-batches has not seen all of it.
        """
        self._windows += 1
        if self._windows & (self._windows - 1):
            return
        own = [bool(self._logged), [one.habits() for one in self._trained]]
        control = self._trained[0].stepper.world.control
        everybody = everybodys(own, control, "for the habits of a loop")
        self._logs = self._logs or any(logs for logs, _ in everybody)
        for number, one in enumerate(self._trained):
            writes = any(habits[number][0] for _, habits in everybody)
            one.learn(writes, any(habits[number][1] for _, habits in everybody))

    def _collect(self) -> dict[str, float]:
        """Return the means of what the window has logged, over all ranks, and add it to what the
        epoch has logged.
        """
        control = self._trained[0].stepper.world.control
        everybody = everybodys(self._logged, control, "for lockstep.log")
        self._logged.clear()
        sums: dict[str, tuple[float, float]] = {}
        for logged in everybody:
            for name, (value, weight) in logged.items():
                sums[name] = _plus(sums.get(name), value, weight)
                self._of_epoch[name] = _plus(self._of_epoch.get(name), value, weight)
        return _means(sums)

    @property
    def logged(self) -> dict[str, float]:
        """The means of what `lockstep.log` was given in this epoch, over all its windows that are
        over and over all ranks.
        """
        return _means(self._of_epoch)

    def endless(self, steps: int | None = None) -> Iterator[Any]:
        """Iterate over the batches of epoch after epoch, from where the training is. For a loop
        that counts steps (`loader.step`) and no epochs.

        Args:
            steps: of the whole training. Default: no end.
        """
        self._last_step = steps
        try:
            for _ in self.epochs(ENDLESS):
                yield from self
                if steps is not None and self.step >= steps:
                    break
        finally:
            self._last_step = None
        if self.run is not None:
            self.run.finish()

    def save_in(
        self, path: Path | str, *, schedulers: Sequence[Any], others: Sequence[Any], **options: Any
    ) -> None:
        """Save the training in this run directory from now on, and resume what is there.

        Args:
            path: the folder.
            schedulers: those of the optimizers.
            others: what else is saved.
            options: `every` and `keep` of a `ScriptRun`.
        """
        steppers = [one.stepper for one in self._trained]
        states = [*others, self._by_slot]
        self.run = ScriptRun(path, steppers, self.loader, schedulers, states, **options)
        self._resumed = self.run.resumed

    def __len__(self) -> int:
        """Return the number of iterations of an epoch. A stream's is not known: a TypeError."""
        count = 0
        for index in range(len(self.loader)):
            plan = self.loader.plan
            count += self._padding.most(plan.at(index, 0, index, self.loader.by_rank))
        return count

    def window(self, epoch: int, step: int) -> Window:
        """Return this rank's window of any step, as `lockstep.Loader.window` does: its micro-batches
        without copies. The position of the loop stays.

        Args:
            epoch: the number of the epoch.
            step: the number of the step in its epoch, from 0.
        """
        return self.loader.window(epoch, step)

    def indices(self, epoch: int, step: int) -> list[list[int]]:
        """Return the indices of each micro-batch of a step, as `lockstep.Loader.indices` does.

        Args:
            epoch: the number of the epoch.
            step: the number of the step in its epoch, from 0.
        """
        return self.loader.indices(epoch, step)

    @property
    def steps(self) -> int:
        """The number of optimizer steps of an epoch."""
        return len(self.loader)

    @property
    def step(self) -> int:
        """The steps that the training has taken."""
        return self._trained[0].stepper.steps

    @property
    def stepped(self) -> bool:
        """Whether this iteration is the last one of a step, whose `optimizer.step()` acts: for what
        the loop does once a step, such as an average of the weights.
        """
        micro_batch = self._trained[0].micro_batch
        return micro_batch is not None and micro_batch.last

    @property
    def carried(self) -> dict[str, Any]:
        """What the loop carries from one step to the next, such as the hidden state of a recurrent
        network: each micro-batch gets the dict that the micro-batch with its number had in the step
        before. It is empty at first, saved with the run, and right on any number of ranks.
        """
        if self._of_micro_batch is None:
            raise UsageError("outside-prepared-loop", call="loader.carried")
        return self._of_micro_batch

    def _micro_batches(self, window: Window) -> Iterator[Any]:
        several = window.cut.slots > 1
        defers = several and len(self._trained) > 1
        bound = several and not self.loader.depends_on_world_size
        for one in self._trained:
            one.open(window, divides=self._reduction != "as is", defers=defers, bound=bound)
        self._padding.begin(window)
        if len(window):
            self._padding.note(window[0], window.slots[0])
        own = len(window)
        state = randomness.get_state()
        left = True
        try:
            with backwards_of(self._trained):
                for index in range(own - self._padding.most(window.cut), own):
                    yield self._begin(window, index, last=index == own - 1)
                    for one in self._trained:
                        one.end()
            left = False
        finally:
            self._of_micro_batch = None
            if randomness is not None:  # None where a loop is left at the interpreter's end
                randomness.set_state(state)
                for one in self._trained if left else ():
                    one.leave()

    def _begin(self, window: Window, index: int, *, last: bool) -> Any:
        """Begin micro-batch `index` of this rank, and return its batch; a copy if it is negative."""
        if index < 0:
            batch, original = self._padding.copy(window)
            note_copies(True)
            self._of_micro_batch = self._by_slot.copy_of(original)
            slot = _PADDING + self.loader.rank
            micro_batch = MicroBatch(None, 0.0, last, self._reduction, self._logged)
        else:
            batch = window[index]
            slot = window.slots[index]
            self._padding.note(batch, slot)
            self._of_micro_batch = self._by_slot.of(slot)
            counted = window.counts[index] if self._weight is None else self._weight(batch)
            weight = float(counted)
            micro_batch = MicroBatch(index, weight, last, self._reduction, self._logged)
        for one in self._trained:
            one.begin(micro_batch, batch)
        randomness.step(self._seed, window.step, slot)
        return batch


def _plus(sum_: tuple[float, float] | None, value: float, weight: float) -> tuple[float, float]:
    before = sum_ or (0.0, 0.0)
    return before[0] + value, before[1] + weight


def _means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    means = {}
    for name, (value, weight) in sums.items():
        means[name] = value / weight if weight else math.nan
    return means


class BySlot:
    """What a loop carries from each micro-batch to the one with its number in the next step."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._own: dict[str, dict[str, Any]] = {}  # by the numbers of this rank's micro-batches
        self._copied: dict[str, dict[str, Any]] = {}  # of other ranks' micro-batches

    def of(self, slot: int) -> dict[str, Any]:
        """Return the values of the micro-batch with this number, which is this rank's."""
        number = str(slot)
        if number not in self._own:
            self._own[number] = self._loaded.get(number, {})
        return self._own[number]

    def copy_of(self, slot: int) -> dict[str, Any]:
        """Return the values for a copy of a micro-batch: this rank's own, copied, or what its copies of
        another rank's have carried so far.
        """
        number = str(slot)
        if number in self._own:
            return copy.deepcopy(self._own[number])
        if number not in self._copied:
            self._copied[number] = copy.deepcopy(self._loaded.get(number, {}))
        return self._copied[number]

    def state_dict(self) -> dict[str, Any]:
        """Return the values of all ranks, by the micro-batch's number. Every rank calls it."""
        world = World.current()
        own = encoded(self._own, "loader.carried")
        merged = dict(self._loaded)
        for values in everybodys(own, world.control, "for loader.carried"):
            merged |= decoded(values)
        return merged

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, from any number of ranks."""
        self._loaded = dict(state)
        self._own.clear()
        self._copied.clear()
