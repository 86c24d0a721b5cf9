"""What runs on a rank of benchmarks/slow_link.py, which starts it and says in the environment what
to do.

    lockstep train slow_link_rank.py ...        the task itself, with every step noted
    slow_link_rank.py ddp --steps N             the same task, data and evaluation around torch's
                                                DistributedDataParallel
    slow_link_rank.py sums --reduce A,B         nothing but sums of its gradients

A note is the time and what has left through the interface so far; so what an evaluation takes and
sends is told apart from the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import lockstep
from baselines import Setting, TorchDDP, WeighedWindow
from lockstep.config.task import Task
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction
from lockstep.step.forward import Forward
from lockstep.step.stepper import Stepper
from lockstep.tools.timing.in_turns import take_turns
from lockstep.training.build import loader_of
from lockstep.training.inference.evaluation import Evaluation
from lockstep.training.metrics import finite
from lockstep.training.resolve import resolve

GIVEN = "LOCKSTEP_SLOW_LINK"  # JSON: task, set, notes (a folder), interface


class Notes:
    """Lines of JSON: one a step, one a synchronization before an evaluation, one an evaluation."""

    def __init__(self, folder: Path, interface: str) -> None:
        self._file = (folder / f"notes-{os.environ.get('RANK', '0')}.jsonl").open("w", buffering=1)
        self._counter = Path("/sys/class/net", interface, "statistics/tx_bytes")

    def write(self, kind: str, **facts: Any) -> None:
        line = {
            "kind": kind,
            "at": time.perf_counter(),
            "tx": int(self._counter.read_text()),
            **facts,
        }
        self._file.write(json.dumps(finite(line)) + "\n")

    def step(self, record: Mapping[str, Any]) -> None:
        self.write("step", step=record["step"], sent=record.get("bytes_sent"))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.write("evaluate", step=record["step"], metrics=dict(record["metrics"]))


def task() -> Task:
    """The task that the environment names, noting what happens on every rank, with a fused
    optimizer and no checkpoints of the best.
    """
    found, notes = _given()

    def optimizer(model: nn.Module) -> Optimizer:
        return fused(found.optimizer(model))

    _note_synchronizations(notes)
    return replace(
        found,
        optimizer=optimizer,
        on_step=notes.step,
        on_evaluate=notes.evaluated,
        callbacks_on="all",
        best=None,
        best_mode=None,
    )


def _note_synchronizations(notes: Notes) -> None:
    """The synchronization of local steps before an evaluation belongs to the training, and not to
    the evaluation.
    """
    synchronize = Stepper.synchronize

    def noted(stepper: Stepper) -> bool:
        before = stepper.everyone.bytes_sent
        found = synchronize(stepper)
        notes.write("met", sent=stepper.everyone.bytes_sent - before)
        return found

    setattr(Stepper, "synchronize", noted)  # noqa: B010


def _given() -> tuple[Task, Notes]:
    given = json.loads(os.environ[GIVEN])
    found = resolve(given["task"], given["set"])
    notes = Notes(Path(given["notes"]), given["interface"])
    notes.write("task", metric=found.best or "loss", mode=found.best_mode or "min")
    return found, notes


def fused(optimizer: Optimizer) -> Optimizer:
    """The same, in one kernel, where torch has it."""
    if "fused" in optimizer.defaults and not optimizer.state:
        for options in (optimizer.defaults, *optimizer.param_groups):
            options |= {"fused": True, "foreach": False}
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as its constructor does
    return optimizer


def train_with_ddp(steps: int, megabytes: float) -> None:
    """Around torch's DDP, gradients views of its buckets.

    A loss that is a sum must be divided before it is differentiated, by the weight of the whole
    step; that is taken to grow with the samples, as it does where every sample has as many tokens,
    so that nothing more has to travel.
    """
    given, notes = _given()
    with lockstep.init(backend="gloo") as world:
        build = given.optimizer
        given = replace(given, optimizer=lambda model: fused(build(model)))
        loader = loader_of(given, world)
        way = TorchDDP(
            Setting(task=given, world=world, precision=given.precision, steps=steps, keyed=True),
            megabytes,
        )
        forward = Forward(way.model, given, given.precision, world.device)
        evaluate = (
            None if given.eval_data is None else Evaluation(given, forward, world, loader_workers=0)
        )
        each, step = 0.0, 0
        for epoch in loader.epochs(10**6):
            for window in epoch:
                batches = list(window)
                each = each or _weight_of_a_sample(forward, batches[0], window.counts[0])
                way(
                    WeighedWindow(window, batches, 0.0, each * (window.cut.stop - window.cut.start))
                )
                step += 1
                notes.step({"step": step})
                if step == steps:
                    break
            if evaluate is not None and (metrics := evaluate()) is not None:
                notes.evaluated({"step": step, "metrics": metrics})
            if step == steps:
                return


def _weight_of_a_sample(forward: Forward, batch: Any, samples: int) -> float:
    with torch.no_grad():
        return float(forward.loss(forward(batch), batch)[1]) / samples


def sum_gradients(reduce: list[str], runs: int) -> dict[str, Any]:
    """Seconds of each sum of the task's gradients, and the bytes that the rank which sends most
    sends for one, by every reduction in turns.
    """
    given = json.loads(os.environ[GIVEN])
    found = resolve(given["task"], given["set"])
    with lockstep.init(backend="gloo") as world:
        ways: dict[str, Reducer] = {}
        sent: dict[str, int] = {}
        for name in reduce:
            ways[name] = Reducer(found.model(), world.group, reduction(name, world.group))
            before = world.group.bytes_sent
            _sum(ways[name])
            sent[name] = world.group.bytes_sent - before
        seconds = take_turns(
            {name: partial(_sum, reducer) for name, reducer in ways.items()}, runs, world, warm_up=1
        )
        most = torch.tensor(list(sent.values()))
        world.group.all_reduce(most, "max").wait()
        elements = sum(parameter.numel() for parameter in next(iter(ways.values())).parameters)
        return {
            "seconds": seconds,
            "sent": dict(zip(reduce, most.tolist(), strict=True)),
            "elements": elements,
        }


def _sum(reducer: Reducer) -> None:
    """Of zeros: nothing was computed, everything is sent."""
    reducer.finish()
    reducer.reset()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ddp", "sums"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--reduce", default="native")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "ddp":
        train_with_ddp(options.steps, options.bucket_mb)
        return
    found = sum_gradients(options.reduce.split(","), options.steps)
    if os.environ["RANK"] == "0":
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
