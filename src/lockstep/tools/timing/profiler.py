"""Times the work of a step: each of its phases, and when each gradient lands. The one profiler of
plans, ratios and benchmarks.

`profile` is of a task, on ranks of this host that do not wait for each other. It is the training of
`lockstep train`, with its Loader and Stepper. Several ranks train side by side, alone with their
gradients, and begin every step together: so they take memory bandwidth and caches from each other
as they will, and what they say to each other costs nothing here. `counted` is of a model by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import knob
from lockstep.config.settings import Device, Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import UsageError
from lockstep.gradients.facts import numbers
from lockstep.launcher.launch import launch
from lockstep.runtime.cores import cores
from lockstep.step.forward import matmul_precision
from lockstep.step.step_result import StepResult
from lockstep.tools.timing.in_turns import Trial, take_turns
from lockstep.tools.timing.machine import Peak
from lockstep.tools.timing.profile import PhaseTimes, Profile, laid_out
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.journal import Journal
from lockstep.training.loop import Training
from lockstep.training.opening import backend_of, intra_op_threads
from lockstep.training.run_directory import RunDirectory
from lockstep.world.world import World, init

_WARM_UP = 3  # steps: in the second the buckets follow the order of arrival
_FEWEST = 5
_MESSAGES = 41
_NEVER = 10**9  # steps between two meetings
# of a model by itself: the least and the most, and seconds of what is between
_REPEATS, _BUDGET = (5, 50), 2.0


class Stopwatch:
    """Laps, each with the device's work done, and after which share of a lap each of the
    parameters' gradients landed.

    On a GPU that takes a step's own overlap of host and device away, in exchange for knowing whose
    time it is.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._marks: dict[int, float] | None = None
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._marker(number))
            for number, each in enumerate(parameters)
        ]
        self._began = self._now()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._began = self._began, self._now()
        return self._began - before

    def listen(self) -> None:
        """In the lap that begins."""
        self._marks = {}

    def landed(self, lap: float) -> list[float]:
        """By parameter, shares of the lap that was listened to and has taken so long. What never
        landed comes at the end.
        """
        marks, self._marks = self._marks or {}, None
        begin = self._began - lap
        return [
            min(1.0, (marks.get(number, self._began) - begin) / lap)
            for number in range(len(self._hooks))
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _marker(self, number: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            if self._marks is not None:
                self._marks.setdefault(number, self._now())

        return mark

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Of one micro-batch on one device."""

    flops: int
    """Of matrix products, convolutions and attention: torch's FlopCounterMode has no others. 0:
    the model has none of them.
    """
    forward: float
    """Seconds, as `backward`: the median of some repetitions."""
    backward: float
    landed: Sequence[float]
    """For each trained parameter, in the model's order: the share of the backward after which
    its gradient was complete.
    """


def counted(model: nn.Module, loss: Callable[[], Tensor]) -> Counted:
    """`loss` runs the forward of `model` on a batch of its own and gives one number to
    differentiate. Raises UsageError where it does not.

    The model is left as it was found: gradients, buffers (batch normalisation moves its statistics)
    and the random streams are put back.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    forwards: list[float] = []
    backwards: list[float] = []
    with _as_found(model, device):
        for _ in range(2):  # the first ones warm up
            checked(loss()).backward()
        flops = flops_of(lambda: loss().backward())
        watch = Stopwatch([], device)
        while len(forwards) < _REPEATS[0] or (
            len(forwards) < _REPEATS[1] and sum(forwards) + sum(backwards) < _BUDGET
        ):
            watch.lap()
            found = loss()
            forwards.append(watch.lap())
            found.backward()
            backwards.append(watch.lap())
        landed = _landed(model, loss, device)
    return Counted(
        flops=flops,
        forward=statistics.median(forwards),
        backward=statistics.median(backwards),
        landed=landed,
    )


def _landed(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> list[float]:
    """In one more backward, which nobody times but for this."""
    watch = Stopwatch([each for each in model.parameters() if each.requires_grad], device)
    try:
        found = loss()
        watch.lap()
        watch.listen()
        found.backward()
        return watch.landed(watch.lap())
    finally:
        watch.close()


def flops_of(work: Callable[[], object]) -> int:
    """Of all that is dispatched; a compiled model is counted as it is written."""
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def checked(found: object) -> Tensor:
    """What a loss returned. Raises UsageError where it cannot be differentiated."""
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}"
        )
        raise UsageError("loss-not-a-number", what=what)
    if not found.requires_grad:
        raise UsageError("loss-without-parameters")
    return found


@contextmanager
def _as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    gradients = [(each, each.grad) for each in model.parameters()]
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def profile(
    source: Callable[[], Task],
    sides: Sequence[int],
    seconds: float,
    device: Device = "auto",
    *,
    talking: Sequence[int] = (),
    threads: int | None = None,
) -> Profile:
    """With each of those numbers of ranks side by side, in fresh processes, for `seconds` in all;
    and how long a message takes among `talking` ranks.

    `threads`: intra-op threads of each rank; default: the cores shared among them. Raises
    WorkerFailed, and UsageError for no time.
    """
    knob.number("seconds", seconds, above=0)
    counts = sorted(set(sides))
    found: list[Profile] = [
        launch(_on_rank, workers=ranks, args=(source, seconds / len(counts), device, threads))[0]
        for ranks in counts
    ]
    messages = {ranks: launch(_message, workers=ranks)[0] for ranks in talking}
    return replace(found[-1], sides=[each.sides[0] for each in found], messages=messages)


def _message() -> float:
    """Of as many numbers as the facts of a step are, over this host's loopback."""
    with init(backend="gloo") as world:
        note = torch.zeros(numbers(world.size), dtype=torch.float64)
        ways = {"sum": lambda: world.group.backend_all_reduce(note).wait()}
        return statistics.median(take_turns(ways, _MESSAGES, world)["sum"])


def _on_rank(
    source: Callable[[], Task], seconds: float, device: Device, threads: int | None
) -> Profile:
    """What rank 0 has to say counts."""
    task = source()
    with init(backend=backend_of(device)) as world, intra_op_threads(threads):
        peak = None
        with suppress(UsageError):  # no Linux: memory is left out
            peak = Peak(world.device)
        alone: dict[str, Any] = {"sync_every": _NEVER} if world.size > 1 else {}
        training = Trial(
            task, Settings(task=task.name or "task", workers=world.size, **alone), world
        ).training
        with matmul_precision(training.precision), _records(training) as record:
            timed = _Timed(training, world, record)
            timed.take(seconds)
        parameters = training.stepper.reducer.parameters
        states = [
            each
            for state in training.optimizer.state.values()
            for each in state.values()
            if isinstance(each, Tensor)
        ]
        return Profile(
            task=task.name or "task",
            device=world.device.type,
            cores=cores(),
            global_batch=task.global_batch,
            micro_batch=task.micro_batch,
            buckets=laid_out(
                parameters,
                [statistics.median(column) for column in zip(*timed.landed, strict=True)],
            ),
            width=max(each.element_size() for each in parameters),
            buffers=sum(
                each.nbytes for each in training.model.buffers() if each.is_floating_point()
            ),
            weights=sum(each.nbytes for each in training.model.parameters()),
            states=sum(each.nbytes for each in states),
            peak=None if peak is None else 2**20 * peak.mib(),
            sides=[timed.side()],
            flops=timed.flops,
            messages={},
        )


@contextmanager
def _records(training: Training) -> Iterator[Callable[[Window, StepResult], None]]:
    """What a training writes down of every step, written where nobody reads it. The task's own
    callbacks are not called.
    """
    task = replace(training.task, on_step=None, on_evaluate=None)
    with TemporaryDirectory(prefix="lockstep-profile-") as folder:
        directory = RunDirectory(Path(folder))
        told: dict[str, Any] = {
            "epochs": None,
            "says_skips": False,
            "sent": lambda: training.stepper.bytes_sent,
        }
        with (
            Journal(task, training.world, directory, **told) as journal,
            AnatomyFile(
                directory.path, training.stepper, begins(training.stepper, task, training.settings)
            ) as anatomy,
        ):

            def record(window: Window, result: StepResult) -> None:
                anatomy.step(result, window, None)
                journal.step(window, float(training.optimizer.param_groups[0]["lr"]), result)

            yield record


class _Timed:
    """A training, step by step."""

    def __init__(
        self, training: Training, world: World, record: Callable[[Window, StepResult], None]
    ) -> None:
        self._training, self._world, self._record = training, world, record
        self._windows = self._walk()
        self._watch = Stopwatch(training.stepper.reducer.parameters, world.device)
        self.steps: list[dict[str, float]] = []
        """Seconds of the phases of each, by their names in PhaseTimes."""
        self.whole: list[float] = []
        """Seconds of each step."""
        self.landed: list[list[float]] = []
        """Of each step, by parameter: the share of the last backward after which its gradient
        was there.
        """
        self.flops = 0

    def _walk(self) -> Iterator[Window]:
        """Windows as full as the first. Raises UsageError where that leaves this rank without a
        micro-batch.
        """
        full = None
        for epoch in self._training.loader.epochs(ENDLESS):
            for window in epoch:
                samples = window.cut.stop - window.cut.start
                full = full or samples
                if not len(window) and samples == full:
                    raise UsageError("idle-rank-profiled", samples=samples, ranks=self._world.size)
                if samples == full:
                    yield window

    def take(self, seconds: float) -> None:
        """Until the time is over, equally many on all ranks; without those that warm up."""
        self._count()
        for _ in range(_WARM_UP):
            self._step()
        for kept in (self.steps, self.whole, self.landed):
            kept.clear()
        end = perf_counter() + seconds
        while not self._world.agree(perf_counter() > end and len(self.steps) >= _FEWEST, "all"):
            # all ranks begin together
            self._step()

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        return self._training.forward.loss(self._training.forward(batch), batch)

    def _count(self) -> None:
        """The FLOPs of the first micro-batch, on a graph that the training knows nothing of."""
        window = next(self._windows)
        batch = window[0]
        window.drain()
        trained = list(self._training.stepper.reducer.parameters)
        with _as_found(self._training.model, self._world.device):
            self.flops = flops_of(
                lambda: torch.autograd.grad(self._loss(batch)[0], trained, allow_unused=True)
            )

    def _step(self) -> None:
        stepper, watch = self._training.stepper, self._watch
        watch.lap()
        begin = perf_counter()
        window = next(self._windows)
        watch.lap()
        window.drain()
        loading = watch.lap() / len(window)
        forwards, backward = [], 0.0
        for place, batch in enumerate(stepper.micro_batches(window)):
            if place == 0:
                watch.lap()  # what precedes the first one belongs to the step
            loss, weight = self._loss(batch)
            forwards.append(watch.lap())
            if place == len(window) - 1:
                watch.listen()
            stepper.backward(loss, weight)
            last = watch.lap()
            backward += last / len(window)
        self.landed.append(watch.landed(last))
        watch.lap()
        result = stepper.step()
        optimizer = watch.lap()
        self._record(window, result)
        watch.lap()
        whole = perf_counter() - begin
        forward = statistics.fmean(forwards[1:] or forwards)
        other = whole - optimizer - len(window) * (loading + forward + backward)
        self.steps.append(
            {
                "loading": loading,
                "forward": forward,
                "backward": backward,
                "optimizer": optimizer,
                "other": other,
            }
        )
        self.whole.append(whole)

    def side(self) -> PhaseTimes:
        """Medians over the steps, means over the ranks."""
        rows = self.steps
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        mine = torch.tensor(list(medians.values()), dtype=torch.float64)
        self._world.control.all_reduce(mine, "mean").wait()
        # a rest of differences may be -1e-4
        means = {name: max(0.0, mean) for name, mean in zip(medians, mine.tolist(), strict=True)}
        every = torch.zeros(self._world.size, len(rows), dtype=torch.float64)
        every[self._world.rank] = torch.tensor(self.whole)
        self._world.control.all_reduce(every).wait()
        threads = torch.get_num_threads()
        return PhaseTimes(
            ranks=self._world.size,
            threads=threads,
            steps=len(rows),
            spread=spread_of(every),
            **means,
        )


def spread_of(seconds: Tensor) -> float:
    """Of [ranks, steps]: the standard deviation of one rank's step, over the median. What slows all
    ranks of a step alike has nobody wait.

    From quartiles, 1.349 deviations apart, so that one interruption in a hundred steps is not taken
    for a habit of all.
    """
    ranks = len(seconds)
    apart = seconds - (seconds.mean(0) if ranks > 1 else seconds.median())
    low, high = torch.quantile(
        apart.flatten(), torch.tensor([0.25, 0.75], dtype=seconds.dtype)
    ).tolist()
    unbiased = (ranks / (ranks - 1)) ** 0.5 if ranks > 1 else 1.0
    return float(unbiased * (high - low) / 1.349 / seconds.median().item())
