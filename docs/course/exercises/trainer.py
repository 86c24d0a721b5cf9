"""The trainer of lessons 3 to 9: each stage is a class that changes the one before it.

Grade a stage with `pytest docs/course -k trainer_naive` (buckets, overlap, resumable, sharded,
local_steps), and measure it with `python docs/course/measure.py naive`. Use the collectives of
torch.distributed with `import torch.distributed as dist` and `dist.all_reduce(...)`, so that they
can be counted. The process group is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
BUCKET_BYTES = 1 << 20


class Naive:
    """Stage 1, lesson 3: one all-reduce for each gradient, after the backward pass.

    A step is `loss.backward()`, with the *sum* of the losses of this rank's samples, and then
    `step(samples)`. Every rank takes it. A rank without samples has no gradients, and another one
    may lack some.

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
        raise NotImplementedError

    def sum_gradients(self) -> None:
        """Replace each `.grad` by the sum over all ranks. A rank without one adds zeros."""
        raise NotImplementedError

    def step(self, samples: int) -> None:
        """Update the weights with the mean gradient of the samples of all ranks, and clear it.

        Args:
            samples: of this rank in this step.
        """
        raise NotImplementedError


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
        raise NotImplementedError

    def sum_gradients(self) -> None:
        """As before, with one flat tensor for each bucket."""
        raise NotImplementedError


class Overlap(Buckets):
    """Stage 3, lesson 5: a bucket is sent when its last gradient arrives, during the backward pass.

    There is one backward pass a step. Buckets are sent in their order, the same on all ranks: one
    that is complete waits for those before it. What is not complete when the backward pass ends is
    sent in `sum_gradients`. `step` sends nothing before that: each rank may have sent another number
    of buckets.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(model, make_optimizer, bucket_bytes)
        raise NotImplementedError  # register_post_accumulate_grad_hook on each parameter

    def sum_gradients(self) -> None:
        """Send what is left, and wait for all sums."""
        raise NotImplementedError


class Resumable(Overlap):
    """Stage 4, lesson 8: a checkpoint from which any number of ranks continues.

    `load` reads with `torch.load(path, weights_only=True)`.
    """

    def save(self, path: Path, step: int) -> None:
        """Write weights, buffers, the optimizer's state and the number of steps taken.

        Every rank calls this, and one writes. A kill at any moment leaves the old checkpoint or the
        new one. No rank goes on before the file is there.
        """
        raise NotImplementedError

    def load(self, path: Path) -> int:
        """Continue from a checkpoint. Return its number of steps, or 0 if there is no file."""
        raise NotImplementedError


class Sharded(Resumable):
    """Stage 5, lesson 9: each rank updates 1/N of each bucket, and has the optimizer's state of it.

    The gradients of a bucket are reduce-scattered (`dist.reduce_scatter`) when the last one arrives,
    and the updated weights are all-gathered after the step. A bucket is padded with zeros to a
    multiple of N. `updated` holds this rank's part of each bucket, as an nn.Parameter. A checkpoint
    holds the whole state. Change what is sent, what is updated, and what is saved; leave the rest to
    the stages before.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(model, make_optimizer, bucket_bytes)
        raise NotImplementedError


class LocalSteps(Naive):
    """Stage 6, lesson 9: each rank takes its own steps, with the mean gradient of its own samples.

    A rank without samples leaves a step out. After every `every` steps the weights are averaged, in
    one all-reduce.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, every: int = 8) -> None:
        super().__init__(model, make_optimizer)
        raise NotImplementedError
