"""The oracle of benchmarks/fuzz.py: what one process of plain torch computes for a case, from the
documented meaning of each door. No code of Lockstep runs here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuzz_case import STEPPERS, Case

Tensors = dict[str, Tensor]


class Unused(Exception):
    """A parameter got no gradient, and the case wants that to be an error."""


@dataclass(slots=True)
class Trace:
    """What a training left, step by step. What is not known or has no meaning is missing."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def buffers_of(model: nn.Module) -> Tensors:
    return copied(dict(model.named_buffers()))


@torch.no_grad()
def write(model: nn.Module, values: Tensors) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


class Replica:
    """A model with its optimizer, in one process."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.model()
        self.optimizer = case.optimizer_of(self.model)
        self.schedule = case.schedule_of(self.optimizer)
        self.average = case.average_of(self.model)
        self.data = case.data()
        self.trained: list[nn.Parameter] = []
        self.zeros: dict[nn.Parameter, Tensor] = {}
        """The gradients that the loop sets to zero, and not to None, before a step."""

    def begin(self, step: int) -> None:
        self.case.freeze(self.model, step)
        self.zeros = {}
        if not self.case.set_to_none:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    self.zeros[parameter] = torch.zeros_like(parameter.grad)
        self.model.zero_grad()
        self.trained = [each for each in self.model.parameters() if each.requires_grad]

    def window(self, micros: Sequence[range]) -> tuple[float, float]:
        """Add the gradients of these micro-batches, each of which starts from the same buffers.
        Return the sums of losses and weights; the buffers move by the weighted mean.
        """
        starts = buffers_of(self.model)
        moved = {
            name: torch.zeros_like(value, dtype=torch.float64) for name, value in starts.items()
        }
        losses = weights = 0.0
        for samples in micros:
            loss, weight = self.case.loss(self.model, self.data[list(samples)])
            if self.case.weighing == "mean":
                loss = loss * weight
            loss.backward()
            for name, buffer in self.model.named_buffers():
                moved[name] += (buffer - starts[name]).double() * float(weight)
            write(self.model, starts)
            losses, weights = losses + loss.item(), weights + float(weight)
        if weights > 0:
            write(self.model, moved_by(starts, moved, weights))
        return losses, weights

    def missing(self) -> None:
        """Treat parameters without a gradient as the option `unused` says."""
        for parameter in self.trained:
            if parameter.grad is None:
                if self.case.options["unused"] == "error":
                    raise Unused
                if self.case.options["unused"] == "zeros":
                    parameter.grad = torch.zeros_like(parameter)

    def apply(self, losses: float, weights: float) -> dict[str, Any]:
        """Divide, clip and step."""
        found: dict[str, Any] = {
            "loss": losses / weights if weights else math.nan,
            "weight": weights,
        }
        if weights:
            self.missing()
        finite = math.isfinite(losses)
        if self.case.clip is not None and weights and finite:
            found["norm"] = self.divide(weights, self.case.clip)
        elif weights and finite:
            self.divide(weights, None)
        found["applied"] = applied = bool(weights) and finite
        if applied:
            self.optimizer.step()
        if self.schedule is not None and (applied or self.case.by_hand):
            self.schedule.step()
        return found

    @torch.no_grad()
    def divide(self, divisor: float, clip: float | None) -> float:
        """Divide the gradients, and clip them by their common norm, which is returned."""
        gradients = [each.grad for each in self.trained if each.grad is not None]
        for parameter in self.trained:
            if (
                parameter.grad is not None
                and parameter.grad.is_sparse
                and self.case.door in STEPPERS
            ):
                parameter.grad = parameter.grad.to_dense()
        gradients = [each.grad for each in self.trained if each.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor)
        if clip is None:
            return 0.0
        dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        norm = math.sqrt(sum(float(each.abs().double().square().sum()) for each in dense))
        for gradient in gradients:
            gradient.mul_(min(1.0, clip / (norm + 1e-6)))
        return norm

    def told(self) -> dict[str, Any]:
        return {
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "model": copied(dict(self.model.named_parameters())),
        }

    def end(self) -> dict[str, Any]:
        found = {
            "model": copied(dict(self.model.named_parameters())),
            "buffers": buffers_of(self.model),
            "state": self.optimizer.state_dict()["state"],
        }
        if self.average is not None:
            found["average"] = copied(dict(self.average.module.named_parameters()))
        return found


def moved_by(starts: Tensors, moved: Tensors, weight: float) -> Tensors:
    """Whole numbers move by the rounded mean."""
    found = {}
    for name, start in starts.items():
        mean = moved[name] / weight
        found[name] = start + (mean if start.is_floating_point() else mean.round()).to(start.dtype)
    return found


def oracle(case: Case) -> Trace:
    """Train a case. Raises Unused where the ranks must raise UnusedParameters."""
    with one_thread(), torch.random.fork_rng():
        if case.door not in STEPPERS:
            return averaged(case)
        return local_steps(case) if case.local else summed(case)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summed(case: Case) -> Trace:
    """A Stepper: the sum of all gradients over the sum of all weights."""
    replica, trace = Replica(case), Trace()
    for step, window in enumerate(case.windows):
        replica.begin(step)
        found = replica.apply(*replica.window([each for micros in window for each in micros]))
        if replica.average is not None:
            replica.average.update_parameters(replica.model)
        trace.steps.append(found | replica.told())
    trace.end = replica.end()
    return trace


def averaged(case: Case) -> Trace:
    """A wrapper: the gradients of all ranks over the number of ranks. Each rank's forwards start
    from rank 0's buffers, so these are what rank 0's forwards leave. With join() some ranks have
    no micro-batches in the last steps.
    """
    replica, trace = Replica(case), Trace()
    errors = not (case.options["find_unused_parameters"] or case.options.get("static_graph"))
    for step, window in enumerate(case.windows):
        replica.begin(step)
        losses = 0.0
        for rank, micros in enumerate(window):
            left = buffers_of(replica.model)
            for samples in micros:
                loss, _ = case.loss(replica.model, replica.data[list(samples)])
                loss.backward()
                losses += loss.item() if rank == 0 else 0.0
            if rank > 0:
                write(replica.model, left)
        if errors and any(each.grad is None for each in replica.trained):
            raise Unused
        for parameter, zeros in replica.zeros.items():
            parameter.grad = zeros if parameter.grad is None else parameter.grad
        found: dict[str, Any] = {"loss": losses}
        active = sum(map(bool, window)) if case.door == "join" and not case.by_all else case.ranks
        norm = replica.divide(active, case.clip)
        if case.clip is not None:
            found["norm"] = norm
        replica.optimizer.step()
        if replica.schedule is not None:
            replica.schedule.step()
        trace.steps.append(found | replica.told())
    trace.end = replica.end()
    return trace


def local_steps(case: Case) -> Trace:
    """Every rank steps alone, and the replicas synchronize every few steps."""
    ranks = [Replica(case) for _ in range(case.ranks)]
    outer = Outer(case, ranks)
    trace = Trace()
    for step, window in enumerate(case.windows):
        for replica in ranks:
            replica.begin(step)
        if step < outer.after:
            found = outer.together(window)
        else:
            for rank, replica in enumerate(ranks):
                found = outer.alone(rank, *replica.window(window[rank]))
            found = outer.synchronize_if_due()
        trace.steps.append(found)
    outer.synchronize()
    trace.end = {
        name: value for name, value in ranks[0].end().items() if name in ("model", "buffers")
    }
    return trace


class Outer:
    """How replicas synchronize."""

    def __init__(self, case: Case, ranks: Sequence[Replica]) -> None:
        self._case, self._ranks = case, ranks
        kind, _, rest = (case.options.get("outer") or "average").partition(":")
        given = dict(part.split("=") for part in rest.split(",") if part)
        self.after = int(given.get("after", 0))
        self._lr, self._momentum = float(given.get("lr", 0.7)), 0.9
        self._nesterov = kind == "nesterov"
        self._momenta: Tensors = {}
        self._taken = 0
        self._begin()

    def _begin(self) -> None:
        """All replicas are equal now."""
        first = self._ranks[0].model
        self._start, self._buffers = copied(dict(first.named_parameters())), buffers_of(first)
        self._since, self._parted = [0.0] * len(self._ranks), False

    def together(self, window: Sequence[Sequence[range]]) -> dict[str, Any]:
        """A step with summed gradients."""
        first = self._ranks[0]
        losses, weights = first.window([each for micros in window for each in micros])
        for replica in self._ranks[1:]:
            for mine, other in zip(
                first.model.parameters(), replica.model.parameters(), strict=True
            ):
                other.grad = None if mine.grad is None else mine.grad.clone()
            write(replica.model, buffers_of(first.model))
        found = [replica.apply(losses, weights) for replica in self._ranks]
        self._begin()
        return found[0] | first.told()

    def alone(self, rank: int, losses: float, weights: float) -> dict[str, Any]:
        replica = self._ranks[rank]
        found = replica.apply(losses, weights)
        if not (found["applied"] or replica.schedule is None or self._case.by_hand):
            replica.schedule.step()  # ranks that step alone have one learning rate
        self._since[rank] += weights if found["applied"] else 0.0
        return found

    def synchronize_if_due(self) -> dict[str, Any]:
        self._taken, self._parted = self._taken + 1, True
        if self._taken % int(self._case.options["sync_every"]):
            return {}
        self.synchronize()
        return self._ranks[0].told()

    @torch.no_grad()
    def synchronize(self) -> None:
        if not self._parted:
            return
        total = sum(self._since)
        named = [dict(replica.model.named_parameters()) for replica in self._ranks]
        for name, start in self._start.items() if total else ():
            if not named[0][name].requires_grad:  # frozen: it stays, and its momentum ends
                self._momenta.pop(name, None)
                continue
            movement = torch.zeros_like(start)
            for weight, parameters in zip(self._since, named, strict=True):
                movement += (start - parameters[name]) * (weight / total)
            if self._nesterov:
                momentum = self._momenta.get(name, torch.zeros_like(start))
                self._momenta[name] = momentum * self._momentum + movement
                movement = (movement + self._momenta[name] * self._momentum) * self._lr
            start -= movement
        moved = {
            name: torch.zeros_like(value, dtype=torch.float64)
            for name, value in self._buffers.items()
        }
        for weight, replica in zip(self._since, self._ranks, strict=True):
            for name, buffer in replica.model.named_buffers():
                moved[name] += (buffer - self._buffers[name]).double() * weight
        buffers = moved_by(self._buffers, moved, total) if total else self._buffers
        for replica, parameters in zip(self._ranks, named, strict=True):
            for name, start in self._start.items():
                parameters[name].copy_(start)
            write(replica.model, copy.deepcopy(buffers))
        self._begin()
