"""The trainer of lessons 3 to 9: each stage is a class that changes the one before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
BUCKET_BYTES = 1 << 20


class Naive:
    """Stage 1, lesson 3: one all-reduce for each gradient, after the backward pass.

    A step is `loss.backward()`, with the *sum* of the losses of this rank's samples, and then
    `step(samples)`. Every rank takes it. A rank without samples has no gradients.

    Args:
        model: its weights become those of rank 0, in place.
        make_optimizer: returns an optimizer of these parameters.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.updated: Sequence[nn.Parameter] = self.parameters
        """What the optimizer updates."""
        self.optimizer = make_optimizer(self.updated)
        self.broadcast()

    def broadcast(self) -> None:
        """Give all ranks the weights and buffers of rank 0."""
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def sum_gradients(self) -> None:
        """Replace each `.grad` by the sum over all ranks. A rank without one adds zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def step(self, samples: int) -> None:
        """Update the weights with the mean gradient of all ranks' samples, and clear it."""
        self.sum_gradients()
        total = torch.tensor(float(samples))
        dist.all_reduce(total)
        for parameter in self.updated:
            parameter.grad /= total
        self.optimizer.step()
        self.optimizer.zero_grad()


class Buckets(Naive):
    """Stage 2, lesson 5: one all-reduce for each bucket.

    `buckets` holds the parameters from the last to the first, as their gradients arrive. A bucket
    is closed when it has `bucket_bytes` or more.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(model, make_optimizer)
        self.buckets: list[list[nn.Parameter]] = []
        room = 0
        for parameter in reversed(self.parameters):
            if room <= 0:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(parameter)
            room -= parameter.nbytes

    def sum_gradients(self) -> None:
        for bucket in self.buckets:
            flat = take_gradients(bucket)
            dist.all_reduce(flat)
            set_gradients(bucket, flat)


def take_gradients(bucket: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of a bucket as one new tensor, zeros where there is none, and clear
    them: their memory is free again.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    for parameter in bucket:
        parameter.grad = None
    return torch.cat([gradient.flatten() for gradient in gradients])


def set_gradients(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Give each parameter of a bucket its part of `flat` as the gradient."""
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad = part.view_as(parameter)


class Overlap(Buckets):
    """Stage 3, lesson 5: a bucket is sent when its last gradient arrives, during the backward pass.

    There is one backward pass a step. Buckets are sent in their order, the same on all ranks.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(model, make_optimizer, bucket_bytes)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[Any, Tensor]] = []  # handle and tensor of each bucket, in order
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.arrived, number))

    def arrived(self, number: int, parameter: Tensor) -> None:
        """Autograd calls this when the gradient of a parameter of bucket `number` is complete."""
        self.missing[number] -= 1
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self.send()

    def send(self) -> None:
        """Start the sum of the next bucket."""
        flat = take_gradients(self.buckets[len(self.sent)])
        self.sent.append((dist.all_reduce(flat, async_op=True), flat))

    def sum_gradients(self) -> None:
        for bucket, flat in zip(self.buckets, self.received(), strict=True):
            set_gradients(bucket, flat)

    def received(self) -> list[Tensor]:
        """Send what is left (this rank did not use all parameters), and wait for all sums."""
        while len(self.sent) < len(self.buckets):
            self.send()
        for handle, _ in self.sent:
            handle.wait()
        sums = [flat for _, flat in self.sent]
        self.sent = []
        self.missing = [len(bucket) for bucket in self.buckets]
        return sums


class Resumable(Overlap):
    """Stage 4, lesson 8: a checkpoint from which any number of ranks continues."""

    def state(self) -> dict[str, Any]:
        """Model and optimizer, the same on any number of ranks. Every rank calls this."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path, step: int) -> None:
        """Write the state after `step` steps. A kill leaves the old checkpoint or the new one."""
        state = {"step": step, **self.state()}
        if dist.get_rank() == 0:
            new = path.with_name(path.name + ".new")
            with new.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        dist.barrier()  # nobody goes on before the file is there

    def load(self, path: Path) -> int:
        """Continue from a checkpoint. Return its step, or 0 if there is none."""
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        self.load_state(state)
        return int(state["step"])


class Sharded(Resumable):
    """Stage 5, lesson 9: each rank updates 1/N of each bucket, and has the optimizer's state of it.

    The gradients of a bucket are reduce-scattered, and the updated weights are all-gathered. A
    bucket is padded with zeros to a multiple of N. `updated` holds this rank's part of each bucket.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(model, make_optimizer, bucket_bytes)
        self.updated = [nn.Parameter(own_part(flat_weights(each))) for each in self.buckets]
        self.optimizer = make_optimizer(self.updated)

    def send(self) -> None:
        parts = all_parts(take_gradients(self.buckets[len(self.sent)]))
        part = torch.empty_like(parts[0])
        self.sent.append((dist.reduce_scatter(part, parts, async_op=True), part))

    def sum_gradients(self) -> None:
        for parameter, part in zip(self.updated, self.received(), strict=True):
            parameter.grad = part

    def step(self, samples: int) -> None:
        super().step(samples)
        self.gather_weights()

    def gather_weights(self) -> None:
        for bucket, part in zip(self.buckets, self.updated, strict=True):
            flat = gathered(part.detach())
            sizes = [parameter.numel() for parameter in bucket]
            with torch.no_grad():
                for parameter, weights in zip(bucket, flat[: sum(sizes)].split(sizes), strict=True):
                    parameter.copy_(weights.view_as(parameter))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer_state(gathered)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for bucket, part in zip(self.buckets, self.updated, strict=True):
                part.copy_(own_part(flat_weights(bucket)))
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.load_state_dict(self.optimizer_state(own_part))

    def optimizer_state(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The optimizer's state; what belongs to the elements of a bucket is changed: its parts
        are `gathered`, or this rank's `own_part` is cut out.
        """
        state = self.optimizer.state_dict()
        changed: dict[int, dict[str, Tensor]] = {}
        for number, of_bucket in state["state"].items():
            size = sum(parameter.numel() for parameter in self.buckets[number])
            changed[number] = {
                name: change(value[:size]) if value.dim() else value  # the number of steps has none
                for name, value in of_bucket.items()
            }
        return {**state, "state": changed}


def flat_weights(bucket: Sequence[nn.Parameter]) -> Tensor:
    """The weights of a bucket as one new tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in bucket])


def all_parts(flat: Tensor) -> list[Tensor]:
    """Cut a flat tensor into one part for each rank, after padding it."""
    size = dist.get_world_size()
    padding = -len(flat) % size
    padded = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    return list(padded.chunk(size))


def own_part(flat: Tensor) -> Tensor:
    return all_parts(flat)[dist.get_rank()].clone()


def gathered(part: Tensor) -> Tensor:
    """The parts of all ranks as one tensor."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


class LocalSteps(Naive):
    """Stage 6, lesson 9: each rank takes its own steps, and weights are averaged every `every`.

    A rank without samples leaves a step out. The average is one all-reduce.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, every: int = 8) -> None:
        super().__init__(model, make_optimizer)
        self.every = every
        self.steps = 0

    def step(self, samples: int) -> None:
        if samples:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= samples
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.steps % self.every == 0:
            self.average_weights()

    def average_weights(self) -> None:
        flat = flat_weights(self.parameters)
        dist.all_reduce(flat)
        mean = flat / dist.get_world_size()
        nn.utils.vector_to_parameters(mean, self.parameters)
