"""Times a task's training on ranks of this host that do not wait for each other: each phase of a step, and when each gradient lands.

It is the training of `lockstep train`, with its Loader and Stepper. Several ranks train side by side, alone with their gradients, and begin every
step together: so they take memory bandwidth and caches from each other as they will, and what they say to each other costs nothing here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.cores import cores
from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.gradients.facts import numbers
from lockstep.gradients.layout import BUCKET, Entry, plan
from lockstep.launcher.spawn import launch
from lockstep.measure.memory import Peak
from lockstep.measure.turns import take_turns
from lockstep.plan.simulation.work import Leaves
from lockstep.plan.tasks.profile import Profile, Side
from lockstep.settings import Device, Settings
from lockstep.step_result import StepResult
from lockstep.task import Task
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.forward import matmul_precision
from lockstep.training.journal import Journal
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import Training
from lockstep.tuning.here import backend_of
from lockstep.tuning.trial import MANY_EPOCHS, Trial
from lockstep.world import World, init

_WARM_UP = 3  # steps: in the second the buckets follow the order of arrival
_FEWEST = 5
_MESSAGES = 41
_NEVER = 10**9  # steps between two meetings


def profile(
    source: Callable[[], Task], sides: Sequence[int], seconds: float, device: Device = "auto", *, talking: Sequence[int] = ()
) -> Profile:
    """With each of those numbers of ranks side by side, in fresh processes, for `seconds` in all; and how long a message takes among `talking` ranks.

    Raises WorkerFailed, and UsageError for no time.
    """
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds {seconds:g}: give a time above 0")
    found: list[_Seen] = []
    for ranks in sorted(set(sides)):
        every = launch(_on_rank, workers=ranks, args=(source, seconds / len(set(sides)), device))
        found.append(every[0])
    last = found[-1]
    return Profile(
        task=last.task,
        device=last.device,
        cores=cores(),
        global_batch=last.global_batch,
        micro_batch=last.micro_batch,
        buckets=last.buckets,
        width=last.width,
        buffers=last.buffers,
        weights=last.weights,
        states=last.states,
        peak=last.peak,
        messages={ranks: launch(_message, workers=ranks)[0] for ranks in talking},
        sides=[each.side for each in found],
    )


def _message() -> float:
    """Of as many numbers as the facts of a step are, over this host's loopback."""
    with init(backend="gloo") as world:
        note = torch.zeros(numbers(world.size), dtype=torch.float64)
        return statistics.median(take_turns({"sum": lambda: world.group.all_reduce(note).wait()}, _MESSAGES, world)["sum"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """What rank 0 has to say."""

    task: str
    device: str
    global_batch: int
    micro_batch: int
    buckets: Sequence[Leaves]
    width: int
    buffers: int
    weights: int
    states: int
    peak: float | None
    side: Side


@dataclass(frozen=True, slots=True)
class _Step:
    """Of one rank. Seconds: loading, forward and backward of a micro-batch."""

    whole: float
    loading: float
    forward: float
    """From the end of the micro-batch before."""
    backward: float
    optimizer: float
    micro_batches: int
    landed: dict[int, float] = field(default_factory=dict)
    """By the number of the parameter: the share of the last backward after which its gradient was there."""

    @property
    def other(self) -> float:
        return self.whole - self.optimizer - self.micro_batches * (self.loading + self.forward + self.backward)


def _on_rank(source: Callable[[], Task], seconds: float, device: Device) -> _Seen:
    task = source()
    with init(backend=backend_of(device)) as world:
        peak = _peak(world)
        alone: dict[str, Any] = {"sync_every": _NEVER} if world.size > 1 else {}
        training = Trial(task, Settings(task=task.name or "task", workers=world.size, **alone), world).training
        with matmul_precision(training.precision), _records(training) as record:
            steps = _Timed(training, world, record).take(seconds)
        return _seen(task, training, world, steps, None if peak is None else 2**20 * peak.mib())


def _peak(world: World) -> Peak | None:
    try:
        return Peak(world.device)
    except UsageError:  # no Linux: memory is left out
        return None


@contextmanager
def _records(training: Training) -> Iterator[Callable[[Window, StepResult], None]]:
    """What a training writes down of every step, written where nobody reads it. The task's own callbacks are not called."""
    task = replace(training.task, on_step=None, on_evaluate=None)
    with TemporaryDirectory(prefix="lockstep-profile-") as folder:
        directory = RunDirectory(Path(folder))
        told: dict[str, Any] = {"steps": None, "epochs": None, "says_skips": False, "sent": lambda: training.stepper.bytes_sent}
        with (
            Journal(task, training.world, directory, **told, screen=False) as journal,
            AnatomyFile(directory.path, training.stepper, begins(training.stepper, task, training.settings)) as anatomy,
        ):

            def record(window: Window, result: StepResult) -> None:
                anatomy.step(result, window, None)
                journal.step(window, float(training.optimizer.param_groups[0]["lr"]), result)

            yield record


class _Timed:
    """A training, step by step."""

    def __init__(self, training: Training, world: World, record: Callable[[Window, StepResult], None]) -> None:
        self._training, self._world, self._record = training, world, record
        self._windows = self._walk()
        self._marks: dict[int, float] | None = None
        for number, parameter in enumerate(training.stepper.reducer.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._land(number))

    def _walk(self) -> Iterator[Window]:
        """Windows as full as the first. Raises UsageError where that leaves this rank without a micro-batch."""
        full = None
        for epoch in self._training.loader.epochs(MANY_EPOCHS):
            for window in epoch:
                samples = window.cut.stop - window.cut.start
                full = full or samples
                if not len(window) and samples == full:
                    raise UsageError(
                        f"a step of {samples} samples has no micro-batch for each of {self._world.size} ranks side by side: give a smaller "
                        "micro_batch, fewer --ranks-per-host, or a larger data set"
                    )
                if samples == full:
                    yield window

    def _land(self, number: int) -> None:
        if self._marks is not None:
            self._marks.setdefault(number, self._now())

    def _now(self) -> float:
        """With the device's work done: on a GPU that takes a step's own overlap of host and device away, in exchange for knowing whose time it is."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return perf_counter()

    def take(self, seconds: float) -> list[_Step]:
        """Until the time is over, equally many on all ranks; without those that warm up."""
        for _ in range(_WARM_UP):
            self._step()
        found: list[_Step] = []
        end = perf_counter() + seconds
        while not self._world.agree(perf_counter() > end and len(found) >= _FEWEST, "all"):  # all ranks begin together
            found.append(self._step())
        return found

    def _step(self) -> _Step:
        training, stepper = self._training, self._training.stepper
        begin = self._now()
        window = next(self._windows)
        made = self._now()
        window.drain()
        loaded = self._now()
        forwards, backward = [], 0.0
        landed: dict[int, float] = {}
        last, ended = len(window) - 1, 0.0
        for place, batch in enumerate(stepper.micro_batches(window)):
            started = ended or self._now()
            loss, weight = training.forward.loss(training.forward(batch), batch)
            middle = self._now()
            self._marks = {} if place == last else None
            stepper.backward(loss, weight)
            ended = self._now()
            if self._marks:
                landed = {number: (at - middle) / (ended - middle) for number, at in self._marks.items()}
            self._marks = None
            forwards.append(middle - started)
            backward += (ended - middle) / len(window)
        before = self._now()
        result = stepper.step()
        stepped = self._now()
        self._record(window, result)
        end = self._now()
        forward = statistics.fmean(forwards[1:] or forwards)  # what precedes the first one belongs to the step
        return _Step(end - begin, (loaded - made) / len(window), forward, backward, stepped - before, len(window), landed)


def _seen(task: Task, training: Training, world: World, steps: list[_Step], peak: float | None) -> _Seen:
    reducer = training.stepper.reducer
    moving = [each for each in training.model.buffers() if each.is_floating_point()]
    states = [each for state in training.optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return _Seen(
        task=task.name or "task",
        device=world.device.type,
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        buckets=_buckets(reducer.names, reducer.parameters, steps),
        width=max(each.element_size() for each in reducer.parameters),
        buffers=sum(each.nbytes for each in moving),
        weights=sum(each.nbytes for each in training.model.parameters()),
        states=sum(each.nbytes for each in states),
        peak=peak,
        side=_side(world, steps),
    )


def _buckets(names: Sequence[str], parameters: Sequence[Tensor], steps: Sequence[_Step]) -> list[Leaves]:
    """As the Reducer lays them, in the order of arrival, and when the last gradient of each has landed. One that never lands comes at the end."""
    numbers = range(len(names))
    times = [[step.landed.get(number, 1.0) for step in steps if step.landed] or [1.0] for number in numbers]
    landed = [statistics.median(each) for each in times]
    entries = [Entry(name, each.numel(), each.dtype, each.device) for name, each in zip(names, parameters, strict=True)]
    layout = plan(entries, sorted(numbers, key=landed.__getitem__), bucket=BUCKET)
    found, ready = [], 0.0
    for bucket in layout.buckets:
        members = [span.parameter for span in bucket.spans]
        ready = min(1.0, max(ready, *(landed[number] for number in members)))
        shapes = tuple(tuple(parameters[number].shape) for number in members)
        found.append(Leaves(ready=ready, elements=sum(parameters[number].numel() for number in members), tensors=shapes))
    return found


def _side(world: World, steps: Sequence[_Step]) -> Side:
    """Medians over the steps, means over the ranks."""
    names = ("forward", "backward", "optimizer", "other", "loading")
    columns = [[getattr(step, name) for step in steps] for name in names]
    mine = torch.tensor([statistics.median(column) for column in columns], dtype=torch.float64)
    world.control.all_reduce(mine, "mean").wait()
    means: dict[str, float] = {
        name: max(0.0, mean) for name, mean in zip(names, mine.tolist(), strict=True)
    }  # a rest of differences may be -1e-4
    every = torch.zeros(world.size, len(steps), dtype=torch.float64)
    every[world.rank] = torch.tensor([step.whole for step in steps])
    world.control.all_reduce(every).wait()
    return Side(
        ranks=world.size,
        threads=torch.get_num_threads(),
        steps=len(steps),
        spread=spread_of(every),
        **means,
    )


def spread_of(seconds: Tensor) -> float:
    """Of [ranks, steps]: the standard deviation of one rank's step, over the median. What slows all ranks of a step alike has nobody wait.

    From quartiles, 1.349 deviations apart, so that one interruption in a hundred steps is not taken for a habit of all.
    """
    ranks = len(seconds)
    apart = seconds - (seconds.mean(0) if ranks > 1 else seconds.median())
    low, high = torch.quantile(apart.flatten(), torch.tensor([0.25, 0.75], dtype=seconds.dtype)).tolist()
    unbiased = (ranks / (ranks - 1)) ** 0.5 if ranks > 1 else 1.0
    return float(unbiased * (high - low) / 1.349 / seconds.median().item())
