"""Times the work of a step: each of its phases, and when each gradient is complete. Plans use this
profiler.

`profile` measures a task with the training of `lockstep train`, its Loader and its Stepper. Several
ranks of this host train side by side and start every step together, but do not exchange gradients.
So they share memory bandwidth and caches as in a real training, and the times contain no
communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.config import knob
from lockstep.config.settings import Device, Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS, Window
from lockstep.errors import UsageError
from lockstep.gradients.facts import numbers
from lockstep.launcher.launch import launch
from lockstep.runtime.cores import cores
from lockstep.step.step_result import StepResult
from lockstep.tools.timing.in_turns import take_turns, trial
from lockstep.tools.timing.profile import PhaseTimes, Profile, laid_out
from lockstep.training.anatomy import AnatomyFile, begins
from lockstep.training.journal import Journal
from lockstep.training.loop import Training
from lockstep.training.opening import backend_of, matmul_precision
from lockstep.training.run_directory import RunDirectory
from lockstep.world.world import World, init

_WARM_UP = 3  # steps: the second one orders the buckets by arrival
_FEWEST = 5
_MESSAGES = 41
_NEVER = 10**9  # steps between two synchronizations


class Stopwatch:
    """Times laps, and records after which share of a lap each parameter's gradient is complete.

    It waits for the GPU at the end of each lap. This removes the overlap of host and device in a
    step, but assigns the time to the right phase.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._ready: dict[int, float] | None = None
        self._hooks = []
        for number, parameter in enumerate(parameters):
            record = partial(self._record, number)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(record))
        self._began = self._now()

    def lap(self) -> float:
        """Return the seconds since the last lap, and start the next one."""
        before = self._began
        self._began = self._now()
        return self._began - before

    def record_gradients(self) -> None:
        """Record gradients in the lap that starts now."""
        self._ready = {}

    def ready_shares(self, lap: float) -> list[float]:
        """Return, for each parameter, after which share of the recorded lap its gradient was
        complete: 1 if it got none. `lap`: the seconds of this lap.
        """
        ready = self._ready or {}
        self._ready = None
        begin = self._began - lap
        shares = []
        for number in range(len(self._hooks)):
            seconds = ready.get(number, self._began) - begin
            shares.append(min(1.0, seconds / lap))
        return shares

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, number: int, parameter: Tensor) -> None:
        if self._ready is not None:
            self._ready.setdefault(number, self._now())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def profile(
    source: Callable[[], Task],
    sides: Sequence[int],
    seconds: float,
    device: Device = "auto",
    *,
    talking: Sequence[int] = (),
) -> Profile:
    """Profile a task for about `seconds`, divided among the numbers of ranks in `sides`. Each
    number of ranks runs in new processes. Also time a message for each number in `talking`.

    Raises WorkerFailed, and UsageError if `seconds` is not above 0.
    """
    knob.number("seconds", seconds, above=0)
    counts = sorted(set(sides))
    profiles: list[Profile] = []
    for ranks in counts:
        arguments = source, seconds / len(counts), device
        profiles.append(launch(_on_rank, workers=ranks, args=arguments)[0])
    measured = [profile.sides[0] for profile in profiles]
    messages = {ranks: launch(_message, workers=ranks)[0] for ranks in talking}
    return replace(profiles[-1], sides=measured, messages=messages)


def _message() -> float:
    """Return the seconds of an all-reduce as large as a step's facts, on this host's loopback."""
    with init(backend="gloo") as world:
        note = torch.zeros(numbers(world.size), dtype=torch.float64)
        ways = {"sum": lambda: world.group.backend_all_reduce(note).wait()}
        return statistics.median(take_turns(ways, _MESSAGES, world)["sum"])


def _on_rank(source: Callable[[], Task], seconds: float, device: Device) -> Profile:
    """Profile the task on one rank. The caller uses the profile of rank 0."""
    task = source()
    with init(backend=backend_of(device)) as world:
        settings = Settings(task=task.name or "task", workers=world.size)
        if world.size > 1:
            settings = replace(settings, sync_every=_NEVER)
        training = trial(task, settings, world)
        with matmul_precision(training.precision), _records(training) as record:
            timed = _Timed(training, world, record)
            timed.time_steps(seconds)
        parameters = training.stepper.reducer.parameters
        ready_shares = [
            statistics.median(column) for column in zip(*timed.ready_shares, strict=True)
        ]
        averaged = [buffer for buffer in training.model.buffers() if buffer.is_floating_point()]
        return Profile(
            task=task.name or "task",
            device=world.device.type,
            cores=cores(),
            global_batch=task.global_batch,
            micro_batch=task.micro_batch,
            buckets=laid_out(parameters, ready_shares),
            width=max(parameter.element_size() for parameter in parameters),
            buffers=sum(buffer.nbytes for buffer in averaged),
            sides=[timed.side()],
            messages={},
        )


@contextmanager
def _records(training: Training) -> Iterator[Callable[[Window, StepResult], None]]:
    """Give the block a function that records a step as a training does, so that its cost is in the
    profile. The files are temporary; the task's callbacks are not called.
    """
    task = training.task
    stepper = training.stepper
    with TemporaryDirectory(prefix="lockstep-profile-") as folder:
        directory = RunDirectory(Path(folder))
        header = begins(
            stepper,
            micro_batch=task.micro_batch,
            global_batch=task.global_batch,
            loader_workers=training.settings.loader_workers,
        )
        with (
            Journal(
                None,
                training.world,
                directory,
                epochs=None,
                says_skips=False,
                sent=lambda: stepper.bytes_sent,
            ) as journal,
            AnatomyFile(directory.path, stepper, header) as anatomy,
        ):

            def record(window: Window, result: StepResult) -> None:
                anatomy.step(result, window)
                journal.step(window, float(training.optimizer.param_groups[0]["lr"]), result)

            yield record


class _Timed:
    """Times the steps of a training."""

    def __init__(
        self, training: Training, world: World, record: Callable[[Window, StepResult], None]
    ) -> None:
        self._training = training
        self._world = world
        self._record = record
        self._windows = self._walk()
        self._watch = Stopwatch(training.stepper.reducer.parameters, world.device)
        self.steps: list[dict[str, float]] = []
        """Seconds of each step's phases, by their names in PhaseTimes."""
        self.totals: list[float] = []
        """Seconds of each step."""
        self.ready_shares: list[list[float]] = []
        """For each step and parameter: the share of the last backward after which its gradient
        was complete.
        """

    def _walk(self) -> Iterator[Window]:
        """Yield windows with as many samples as the first. Raises UsageError if such a window
        gives this rank no micro-batch.
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

    def time_steps(self, seconds: float) -> None:
        """Time steps for `seconds`, the same number on all ranks, after the warm-up."""
        for _ in range(_WARM_UP):
            self._step()
        self.steps.clear()
        self.totals.clear()
        self.ready_shares.clear()
        end = perf_counter() + seconds
        while not self._world.agree(perf_counter() > end and len(self.steps) >= _FEWEST, "all"):
            # `agree` makes all ranks start together
            self._step()

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        return self._training.forward.loss(self._training.forward(batch), batch)

    def _step(self) -> None:
        stepper, watch = self._training.stepper, self._watch
        watch.lap()
        begin = perf_counter()
        window = next(self._windows)
        watch.lap()
        window.drain()
        loading = watch.lap() / len(window)
        forwards, backward = [], 0.0
        for index, batch in enumerate(stepper.micro_batches(window)):
            if index == 0:
                watch.lap()  # time before the first micro-batch belongs to `other`
            loss, weight = self._loss(batch)
            forwards.append(watch.lap())
            if index == len(window) - 1:
                watch.record_gradients()
            stepper.backward(loss, weight)
            last = watch.lap()
            backward += last / len(window)
        self.ready_shares.append(watch.ready_shares(last))
        watch.lap()
        result = stepper.step()
        optimizer = watch.lap()
        self._record(window, result)
        watch.lap()
        total = perf_counter() - begin
        forward = statistics.fmean(forwards[1:] or forwards)
        other = total - optimizer - len(window) * (loading + forward + backward)
        self.steps.append(
            {
                "loading": loading,
                "forward": forward,
                "backward": backward,
                "optimizer": optimizer,
                "other": other,
            }
        )
        self.totals.append(total)

    def side(self) -> PhaseTimes:
        """Return the median of each phase over the steps, averaged over the ranks."""
        medians = {}
        for name in self.steps[0]:
            medians[name] = statistics.median(step[name] for step in self.steps)
        phases = torch.tensor(list(medians.values()), dtype=torch.float64)
        self._world.control.all_reduce(phases, "mean").wait()
        # `other` is a difference and can be slightly negative, such as -1e-4
        means = {name: max(0.0, mean) for name, mean in zip(medians, phases.tolist(), strict=True)}
        seconds = torch.zeros(self._world.size, len(self.steps), dtype=torch.float64)
        seconds[self._world.rank] = torch.tensor(self.totals)
        self._world.control.all_reduce(seconds).wait()
        return PhaseTimes(
            ranks=self._world.size,
            threads=torch.get_num_threads(),
            steps=len(self.steps),
            spread=spread_of(seconds),
            **means,
        )


def spread_of(seconds: Tensor) -> float:
    """Return the standard deviation of one rank's step, divided by the median step. `seconds` has
    shape [ranks, steps]. A delay that all ranks share in a step does not count: no rank waits.

    It is computed from the quartiles, which are 1.349 standard deviations apart, so that one
    interruption in a hundred steps has little effect.
    """
    ranks = len(seconds)
    usual = seconds.mean(0) if ranks > 1 else seconds.median()
    deviations = (seconds - usual).flatten()
    quartiles = torch.quantile(deviations, torch.tensor([0.25, 0.75], dtype=seconds.dtype))
    low, high = quartiles.tolist()
    unbiased = (ranks / (ranks - 1)) ** 0.5 if ranks > 1 else 1.0
    return float(unbiased * (high - low) / 1.349 / seconds.median().item())
