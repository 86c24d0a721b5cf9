"""Measure the stages of your trainer, and print the table of all stages that were measured.

`python docs/course/measure.py naive` trains on two ranks over a simulated link of 1 Gbit/s;
`--solutions` measures the solution. The table stays in docs/course/measured.json.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grading import Wrong, check, on_ranks, replaced
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

import lockstep
from lockstep.tasks import digits, text

HERE = Path(__file__).parent
STAGES = {
    "naive": "Naive",
    "buckets": "Buckets",
    "overlap": "Overlap",
    "resumable": "Resumable",
    "sharded": "Sharded",
    "local_steps": "LocalSteps",
}
"""The classes of trainer.py, in the order of the lessons."""
TASKS = {"digits": digits.task, "text": text.task}
WARM_UP, STEPS = 2, 16
BANDWIDTH, LATENCY = 125e6, 50e-6  # of the simulated link: 1 Gbit/s in bytes per second; seconds
PATIENCE = timedelta(minutes=3)


def _reduce_scatter(size: int, part: Tensor, _: Any) -> float:
    return (size - 1) * part.nbytes


def _all_gather(size: int, _: Any, part: Tensor) -> float:
    return (size - 1) * part.nbytes


_SENT: dict[str, Callable[[int, Any, Any], float]] = {
    "all_reduce": lambda size, tensor, _: 2 * (size - 1) / size * tensor.nbytes,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": lambda size, tensor, _: tensor.nbytes,
    "barrier": lambda size, *_: 0.0,
}
"""Bytes that a rank sends in a ring, from the collective's first two arguments."""


class Meter:
    """What one rank sends, and how long it waits.

    `bandwidth` and `latency` make the collectives as slow as a link. Until a message of `async_op`
    is over that link the rank can compute. Without a bandwidth nothing is delayed.
    """

    def __init__(self, bandwidth: float = 0.0, latency: float = 0.0) -> None:
        self.bandwidth, self.latency = bandwidth, latency
        self.link_free = 0.0
        self.calls: list[str] = []
        self.clear()

    def clear(self) -> None:
        self.calls.clear()
        self.bytes, self.waited = 0.0, 0.0

    def call(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        name = original.__name__
        later = arguments.pop("async_op", False)
        size = dist.get_world_size()
        first, second = [*arguments.values(), None, None][:2]
        bytes_sent = _SENT[name](size, first, second)
        self.calls.append(f"{name} later" if later else name)
        self.bytes += bytes_sent
        arrival = 0.0
        if self.bandwidth and size > 1:
            begin = max(time.perf_counter(), self.link_free)
            arrival = begin + 2 * (size - 1) * self.latency + bytes_sent / self.bandwidth
            self.link_free = arrival
        handle = Handle(self, original(**arguments, async_op=True), arguments, arrival)
        return handle if later else handle.wait()


class Handle:
    """A collective that is under way. It keeps the tensors, so that this thread frees them: the
    profiler does not see what the backend's own thread frees.
    """

    def __init__(self, meter: Meter, work: Any, arguments: dict[str, Any], arrival: float) -> None:
        self.meter, self.work, self.arguments, self.arrival = meter, work, arguments, arrival

    def wait(self) -> None:
        begin = time.perf_counter()
        self.work.wait()
        time.sleep(max(0.0, self.arrival - time.perf_counter()))
        self.meter.waited += time.perf_counter() - begin


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """All collectives of torch.distributed pass through `meter`."""

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            arguments = inspect.signature(original).bind(*args, **options).arguments
            return meter.call(original, arguments)

        return call

    with replaced(_SENT, through):
        yield meter


def summed_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum")


def batches(data: Dataset[Any], micro_batch: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of each step, in the order of the data set."""
    for step in range(steps):
        first = (step * dist.get_world_size() + dist.get_rank()) * micro_batch
        rows = [data[index] for index in range(first, first + micro_batch)]
        yield torch.stack([x for x, _ in rows]), torch.stack([torch.as_tensor(y) for _, y in rows])


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(
    folder: str, stage: str, task_name: str, steps: int, meter: Meter
) -> tuple[float, float, nn.Module]:
    """On a rank: train, and return the seconds of the steps after the warm-up, the last loss, and
    the model.
    """
    sys.path.insert(0, str(HERE))
    trainer_class = getattr(import_module(f"{folder}.trainer"), STAGES[stage])
    task = TASKS[task_name]()
    torch.manual_seed(0)
    trainer = trainer_class(task.model(), adamw)
    loss, began = 0.0, time.perf_counter()
    for step, (x, y) in enumerate(batches(task.train_data, task.micro_batch, steps)):
        if step == WARM_UP:
            meter.clear()
            began = time.perf_counter()
        loss_sum = summed_loss(trainer.model, x, y)
        loss = loss_sum.item() / y.numel()
        loss_sum.backward()
        trainer.step(y.numel())
    return time.perf_counter() - began, loss, trainer.model


def measured(folder: str, stage: str, task_name: str) -> dict[str, Any]:
    """On a rank: the means of a step over the simulated link, and the weights at the end."""
    with lockstep.init(), metered(Meter(BANDWIDTH, LATENCY)) as meter:
        seconds, loss, model = train(folder, stage, task_name, WARM_UP + STEPS, meter)
    return {
        "messages": len(meter.calls) / STEPS,
        "MB sent": meter.bytes / STEPS / 1e6,
        "exposed ms": 1e3 * meter.waited / STEPS,
        "step ms": 1e3 * seconds / STEPS,
        "loss": loss,
        "weights": nn.utils.parameters_to_vector(model.parameters()).detach(),
    }


def measured_memory(folder: str, stage: str, task_name: str) -> float:
    """On a rank: the peak of a few steps."""
    with lockstep.init(), metered(Meter()) as meter:
        return peak_memory(lambda: train(folder, stage, task_name, WARM_UP, meter))


def peak_memory(run: Callable[[], Any]) -> float:
    """Megabytes of tensors that are alive at the same time at most, while `run()` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    alive = [each["args"]["Total Allocated"] for each in events if each.get("name") == "[memory]"]
    return max(alive) / 1e6


def row(folder: str, stage: str, task_name: str) -> dict[str, float]:
    """Measure a stage on two ranks. Rank 0 is shown."""
    task = folder, stage, task_name
    values, other = on_ranks(measured, 2, *task, open_world=False, patience=PATIENCE)
    weights = values.pop("weights"), other.pop("weights")
    check(
        stage == "local_steps" or torch.equal(*weights),
        "After the training the weights of the two ranks differ.",
    )
    peaks = on_ranks(measured_memory, 2, *task, open_world=False, patience=PATIENCE)
    return {**values, "peak MB": peaks[0]}


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows of one task, in the order of the stages."""
    columns = ["messages", "MB sent", "exposed ms", "step ms", "peak MB", "loss"]
    lines = ["stage      " + "".join(f"{name:>12}" for name in columns)]
    for stage in STAGES:
        if stage in rows:
            values = (rows[stage][name] for name in columns)
            lines.append(f"{stage:11}" + "".join(f"{value:12.2f}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--task", choices=TASKS, default="text")
    parser.add_argument("--solutions", action="store_true", help="not your trainer.py")
    options = parser.parse_args()
    file = HERE / "measured.json"
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    folder = "solutions" if options.solutions else "exercises"
    rows = tables.setdefault(f"{folder}, {options.task}", {})
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler says that it starts and ends
    for stage in options.stages:
        try:
            rows[stage] = row(folder, stage, options.task)
        except NotImplementedError:
            sys.exit(f"docs/course/{folder}/trainer.py, stage {stage}, is not solved yet.")
        except Wrong as wrong:
            sys.exit(f"{wrong}\nFind out more with pytest docs/course -k trainer_{stage}")
    file.write_text(json.dumps(tables, indent=2), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
