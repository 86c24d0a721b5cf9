"""The doors of benchmarks/fuzz.py: how each rank trains a case with Lockstep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

import lockstep
import lockstep.backend  # noqa: F401 - torch finds the backend then
from fuzz_case import STEPPERS, Case
from fuzz_models import OPTIMIZERS
from fuzz_oracle import Trace, buffers_of, copied
from lockstep.step.step_result import StepResult


def train(case: Case, world: lockstep.World) -> Trace:
    """Train a case through its door."""
    if case.door in STEPPERS:
        return SteppedTraining(case, world).run()
    if case.door != "backend":
        return wrapped(case, world, None)
    group = dist.new_group(backend="lockstep")
    try:
        return wrapped(case, world, group)
    finally:
        dist.destroy_process_group(group)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return copied(dict(model.named_parameters()))


class SteppedTraining:
    """A loop with a Stepper."""

    def __init__(self, case: Case, world: lockstep.World) -> None:
        self._case, self._world, self._data = case, world, case.data()
        # replicas that differ before the Stepper makes them equal
        self._build(case.model(seed=world.rank))
        self._trace = Trace()

    def _build(self, model: nn.Module) -> None:
        case, options = self._case, dict(self._case.options)
        self.model = model
        self.optimizer = case.optimizer_of(model)
        self.schedule = case.schedule_of(self.optimizer)
        self.average = case.average_of(model)
        trained: nn.Module = model
        if case.wrapped:
            trained = lockstep.DistributedDataParallel(model)
        if case.scaled:
            options["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        self.stepper = lockstep.Stepper(
            trained,
            self.optimizer,
            clip=case.clip,
            scheduler=None if case.by_hand else self.schedule,
            average=self.average,
            world=self._world,
            seed=case.seed,
            **options,
        )

    def run(self) -> Trace:
        if self._case.options.get("update") == "server":
            self._drawn()
        else:
            for step, window in enumerate(self._windows()):
                self._trace.steps.append(self._step(step, window))
        self.stepper.synchronize()
        self._end()
        return self._trace

    def _loader(self) -> lockstep.Loader:
        sizes = dict(self._case.sizes)
        data = Subset(self._data, range(sizes.pop("samples")))
        del sizes["epochs"]
        return lockstep.Loader(data, shuffle=False, **sizes)

    def _windows(self) -> Iterator[Iterable[Any]]:
        case = self._case
        if case.door == "stepper, loader":
            for epoch in self._loader().epochs(case.sizes["epochs"]):
                yield from epoch
            return
        for window in case.windows:
            batches = [self._data[list(samples)] for samples in window[self._world.rank]]
            yield iter(batches) if case.seed % 2 else batches

    def _compute(self, window: Iterable[Any]) -> StepResult:
        mean = self._case.weighing == "mean"
        for batch in self.stepper.micro_batches(window):
            loss, weight = self._case.loss(self.model, batch)
            self.stepper.backward(loss, weight, reduction="mean" if mean else "sum")
        return self.stepper.step()

    def _step(self, step: int, window: Iterable[Any]) -> dict[str, Any]:
        case = self._case
        if step == case.reload:
            self._reload()
        case.freeze(self.model, step)
        result = self._compute(window)
        if self.schedule is not None and case.by_hand:
            self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if not result.synchronized:
            return {}
        found: dict[str, Any] = {
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "model": parameters(self.model),
        }
        if not case.local:
            found |= {"loss": result.loss, "weight": result.weight, "applied": result.applied}
            if case.clip is not None and result.applied:
                found["norm"] = result.norm
        return found

    def _reload(self) -> None:
        """Build all again, and load the state."""
        case = self._case
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        trained = [each.requires_grad for each in self.model.parameters()]
        state, old = self.stepper.optimizer_state_dict(), self.schedule
        model = case.model(seed=9)
        model.load_state_dict(weights)
        for parameter, trains in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(trains)
        self._build(model)
        if self.schedule is not None:
            self.schedule.load_state_dict(old.state_dict())
        self.stepper.load_optimizer_state_dict(state)

    def _drawn(self) -> None:
        """A server: ranks draw slots, and the windows of a rank are not those of a case."""
        loader = self._loader()
        self.stepper.draws(loader)
        for epoch in loader.epochs(self._case.sizes["epochs"]):
            for window in epoch:
                self._compute(window)

    def _end(self) -> None:
        end = self._trace.end
        end["model"] = parameters(self.model)
        if self._case.options.get("update") == "server":
            return
        end["buffers"] = buffers_of(self.model)
        if not self._case.local:
            end["state"] = self.stepper.optimizer_state_dict()["state"]
        if self.average is not None:
            end["average"] = parameters(self.average.module)


def wrapped(case: Case, world: lockstep.World, group: dist.ProcessGroup | None) -> Trace:
    """A loop with a wrapper: ours, or torch's with our hook or our backend."""
    trace, model = Trace(), case.model(seed=world.rank)
    wrapper: Any
    if case.door in ("hook", "backend"):
        wrapper = nn.parallel.DistributedDataParallel(model, process_group=group, **case.options)
        if case.door == "hook":
            wrapper.register_comm_hook(None, lockstep.shared_memory_hook)
    else:
        wrapper = lockstep.DistributedDataParallel(model, world=world, **case.options)
    optimizer = _optimizer(case, model)
    schedule = case.schedule_of(optimizer)
    joining = (
        wrapper.join(divide_by_initial_world_size=case.by_all)
        if case.door == "join"
        else nullcontext()
    )
    with joining:
        for step, window in enumerate(case.windows):
            micros = window[world.rank]
            if not micros:
                break
            found = _averaged_step(case, step, micros, wrapper, optimizer)
            if schedule is not None:
                schedule.step()
            if case.door != "join":  # whose ranks take different numbers of steps
                found["rates"] = [group["lr"] for group in optimizer.param_groups]
                found["model"] = parameters(model)
                found = found if world.rank == 0 else {"model": found["model"]}
                trace.steps.append(found)
    trace.end["model"] = parameters(model)
    if isinstance(optimizer, lockstep.ShardedOptimizer):
        optimizer.consolidate_state_dict(to=0)
    if world.rank == 0 and case.door != "join":
        trace.end["buffers"] = buffers_of(model)
        trace.end["state"] = optimizer.state_dict()["state"]
    return trace


def _averaged_step(
    case: Case, step: int, micros: Sequence[range], wrapper: Any, optimizer: Optimizer
) -> dict[str, Any]:
    data, model = case.data(), wrapper.module
    case.freeze(model, step)
    model.zero_grad(set_to_none=case.set_to_none)
    found: dict[str, Any] = {"loss": 0.0}
    for place, samples in enumerate(micros):
        with nullcontext() if place == len(micros) - 1 else wrapper.no_sync():
            loss, _ = case.loss(wrapper, data[list(samples)])
            loss.backward()
        found["loss"] += loss.item()
    if case.clip is not None:
        found["norm"] = float(_clip(model, case.clip))
    optimizer.step()
    return found


def _optimizer(case: Case, model: nn.Module) -> Optimizer:
    if case.door != "sharded optimizer":
        return case.optimizer_of(model)
    kind, options = OPTIMIZERS[case.optimizer]
    return lockstep.ShardedOptimizer(case.parts(model), kind, **options, **case.flags)


def _clip(model: nn.Module, clip: float) -> torch.Tensor:
    """torch's own, which takes no sparse gradients."""
    sparse = [each for each in model.parameters() if each.grad is not None and each.grad.is_sparse]
    if not sparse:
        return nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norm = nn.utils.get_total_norm(dense)
    for gradient in gradients:
        gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
    return norm
