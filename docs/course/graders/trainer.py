"""Grader of the growing trainer: each stage against one process, on 2, 3 and 1 ranks."""

from __future__ import annotations

import io
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from grading import (
    PATIENCE,
    check,
    check_alike,
    check_call,
    close,
    failures_as_wrong,
    on_ranks,
)
from measure import STAGES, Meter, metered
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import World
from lockstep.errors import WorkerFailed
from lockstep.tasks.text import GPT

SAMPLES, BATCH, STEPS = 25, 12, 3
"""The last step has one sample, so some ranks have none."""
BUCKET_BYTES, EVERY = 56, 2


class Net(nn.Module):
    """Two heads, each for one kind of samples. Nobody uses the first one.

    The other two fill the first two buckets, which have different sizes. So some ranks send one in
    the backward pass, and others do not. The last bucket, of one number, is never full.
    """

    shift: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Linear(4, 6)
        self.register_buffer("shift", torch.randn(6))
        self.heads = nn.ModuleList(nn.Linear(6, outputs) for outputs in (2, 3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses."""
        hidden, losses = (self.body(self.scale * x) + self.shift).tanh(), torch.zeros(())
        for number, head in enumerate(self.heads):
            chosen = x[:, 0] == number
            if chosen.any():
                losses = losses + F.cross_entropy(head(hidden[chosen]), y[chosen], reduction="sum")
        return losses


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def parts_of_step(step: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of each rank. The first half of a step uses head 1, and the second head 2."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    x[:, 0] = 1 + torch.arange(SAMPLES) % BATCH // (BATCH // 2)
    rows = slice(step * BATCH, (step + 1) * BATCH)
    return list(zip(x[rows].tensor_split(size), y[rows].tensor_split(size), strict=True))


def flat(model: nn.Module) -> Tensor:
    """A copy of its weights and buffers."""
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


class Compared(Meter):
    """Raises Wrong on all ranks where they call different collectives."""

    def call(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        check_call(original.__name__, arguments.values())
        return super().call(original, arguments)


@dataclass
class Trained:
    """What a rank has after the training."""

    weights: Tensor
    calls: list[str]
    """Of all steps."""
    sent: float
    """Bytes of all steps."""
    buckets: list[int]
    """The sizes of its buckets."""
    state_numbers: int
    """In the optimizer, but for those that count steps."""


def grade_stage(lesson: ModuleType, stage: str) -> None:
    trainer = getattr(lesson, STAGES[stage])
    for size in (2, 3, 1):
        case = f"On {size} ranks" if size > 1 else "On 1 rank"
        options = options_of(stage)
        ranks = on_ranks(trained, size, trainer, options)
        if stage == "local_steps":
            check_local_steps(case, ranks)
        else:
            check_weights(case, ranks)
            if stage != "naive":
                check_buckets(case, ranks)
        if stage == "naive":
            check_number(case, ranks[0], len(list(Net(0).parameters())), "each parameter")
        if stage in ("overlap", "resumable"):
            check_overlap(case, on_ranks(sent_in_backward, size, trainer))
        if stage == "sharded":
            check_shards(case, ranks)
    if stage in ("resumable", "sharded"):
        check_kill(trainer)
    if stage == "sharded":
        check_prepare(trainer)


def options_of(stage: str) -> dict[str, int]:
    if stage == "local_steps":
        return {"every": EVERY}
    return {} if stage == "naive" else {"bucket_bytes": BUCKET_BYTES}


def trained(world: World, trainer_class: Any, options: dict[str, int]) -> Trained:
    """On a rank: train from weights that differ between the ranks."""
    with metered(Compared()) as meter:
        model = Net(seed=world.rank)
        trainer = trainer_class(model, sgd, **options)
        buckets = [sum(p.numel() for p in each) for each in getattr(trainer, "buckets", [])]
        right = expected_buckets() if "bucket_bytes" in options else []
        check(
            buckets == right,
            f"With bucket_bytes={BUCKET_BYTES} the sizes of `buckets` are {buckets} numbers. From the "
            f"last parameter to the first they are {right}.",
        )
        meter.clear()
        for step in range(STEPS):
            x, y = parts_of_step(step, world.size)[world.rank]
            if len(y):
                model(x, y).backward()
            trainer.step(len(y))
        check_alike("has taken its steps")
    states = trainer.optimizer.state.values()
    numbers = [value.numel() for state in states for value in state.values() if value.dim()]
    return Trained(flat(model), meter.calls, meter.bytes, buckets, sum(numbers))


def one_process(size: int, scale: Callable[[list[int]], list[float]]) -> Tensor:
    """The weights of one process, which divides the gradient of each rank's samples by `scale` of
    the ranks' numbers of samples.
    """
    model = Net(seed=0)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        parts = parts_of_step(step, size)
        for (x, y), divisor in zip(parts, scale([len(y) for _, y in parts]), strict=True):
            if len(y):
                (model(x, y) / divisor).backward()
        optimizer.step()
    return flat(model)


def check_weights(case: str, ranks: list[Trained]) -> None:
    size = len(ranks)
    for rank, result in enumerate(ranks):
        check(
            torch.equal(result.weights, ranks[0].weights),
            f"{case} the weights or buffers of rank {rank} differ from those of rank 0. Are all of "
            "them broadcast, and the numbers of samples summed? Does step() wait for all sums, and "
            "does a rank without a gradient add zeros?",
        )
    right = close(ranks[0].weights, one_process(size, lambda counts: [sum(counts)] * size))
    wrongs: dict[str, Callable[[list[int]], list[float]]] = {
        "You added the gradients up, and did not divide.": lambda counts: [1.0] * size,
        f"You divided by {size}, the number of ranks. Divide by the samples of all ranks.": (
            lambda counts: [size] * size
        ),
        "You averaged the means of the ranks. A rank with fewer samples must count less.": (
            lambda counts: [max(count, 1) * size for count in counts]
        ),
        "You divided by the samples of rank 0. Add up those of all ranks.": (
            lambda counts: [counts[0]] * size
        ),
    }
    for sentence, scale in wrongs.items():
        check(right or not close(ranks[0].weights, one_process(size, scale)), f"{case}: {sentence}")
    check(
        right,
        f"{case} the weights are not those of one process with all samples of each step. Does "
        "step() clear the gradients, and what it has counted?",
    )


def check_number(case: str, result: Trained, number: int, things: str) -> None:
    """There may be one message more, for the number of samples."""
    a_step = len(result.calls) / STEPS
    check(
        number <= a_step <= number + 1,
        f"{case} a step has {a_step:g} messages. It takes {number} for the gradients, one for "
        f"{things}, and one for the number of samples.",
    )


def expected_buckets() -> list[int]:
    sizes = [[0]]
    for parameter in reversed(list(Net(0).parameters())):
        if 4 * sum(sizes[-1]) >= BUCKET_BYTES:
            sizes.append([])
        sizes[-1].append(parameter.numel())
    return [sum(each) for each in sizes]


def check_buckets(case: str, ranks: list[Trained]) -> None:
    if not any("gather" in call for call in ranks[0].calls):
        check_number(case, ranks[0], len(ranks[0].buckets), "each bucket")


def sent_in_backward(world: World, trainer_class: Any) -> tuple[int, list[str]]:
    """On a rank: the number of buckets, and the calls until the backward pass had ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 2))
    with metered(Compared()) as meter:
        trainer = trainer_class(model, sgd, bucket_bytes=BUCKET_BYTES)
        for _ in range(2):
            meter.clear()
            model(torch.randn(3, 4)).sum().backward()
            check_alike("has ended the backward pass")
            calls = list(meter.calls)
            trainer.step(3)
    return len(trainer.buckets), calls


def check_overlap(case: str, ranks: list[tuple[int, list[str]]]) -> None:
    for buckets, calls in ranks:
        check(
            all(call.endswith("later") for call in calls),
            f"{case} the backward pass waits for a sum. Start it with async_op=True, and wait in "
            "sum_gradients().",
        )
        check(
            len(calls) == buckets,
            f"{case} {len(calls)} of {buckets} buckets were sent when the second backward pass had "
            "ended. Send each when its last gradient arrives, in every step.",
        )


def check_shards(case: str, ranks: list[Trained]) -> None:
    size, whole = len(ranks), sum(expected_buckets())
    padding = size * len(ranks[0].buckets)
    for rank, result in enumerate(ranks):
        check(
            result.state_numbers <= whole / size + padding,
            f"{case} the optimizer of rank {rank} holds {result.state_numbers} numbers of momentum, "
            f"for {whole} weights. It must hold those of its own parts only.",
        )
        bound = 4 * 2 * (size - 1) / size * (whole + padding + size)
        check(
            result.sent <= STEPS * bound,
            f"{case} rank {rank} sends {result.sent / STEPS:.0f} bytes a step. A reduce-scatter of "
            f"the gradients and an all-gather of the weights need {bound:.0f} at most.",
        )


def steps_with_checkpoints(
    world: World, trainer_class: Any, path: str, die_after: int
) -> tuple[int, Tensor, list[str]]:
    """On a rank: continue from the checkpoint if there is one, and save after each step."""
    with metered(Compared()):
        model = Net(seed=world.rank + 5)
        trainer = trainer_class(model, sgd, bucket_bytes=BUCKET_BYTES)
        began = trainer.load(Path(path))
        for step in range(began, STEPS):
            x, y = parts_of_step(step, world.size)[world.rank]
            if len(y):
                model(x, y).backward()
            trainer.step(len(y))
            if step + 1 == die_after:
                torch.save = dies_in_save
            trainer.save(Path(path), step + 1)
        names = sorted(os.listdir(Path(path).parent))
        check_alike("has saved its last step")
    return began, flat(model), names


_save = torch.save


def dies_in_save(state: Any, file: Any, **options: Any) -> None:
    """torch.save in a process that is killed when half of the file is written."""
    buffer = io.BytesIO()
    _save(state, buffer, **options)
    half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    if hasattr(file, "write"):
        file.write(half)
        file.flush()
    else:
        Path(file).write_bytes(half)
    os.kill(os.getpid(), signal.SIGKILL)


def is_whole(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError):
        return False
    return True


def check_kill(trainer: Any) -> None:
    """Kill the rank that writes the checkpoint of step 2. Then 2 and 3 ranks continue."""
    with tempfile.TemporaryDirectory() as folder:
        alone = on_ranks(steps_with_checkpoints, 2, trainer, f"{folder}/trainer.pt", 0)
    for _, _, names in alone:
        check(
            names == ["trainer.pt"],
            f"After save() the folder of the checkpoint holds {', '.join(names)}. It holds trainer.pt "
            "alone, and every rank waits for that.",
        )
    for size in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer.pt")
            with failures_as_wrong():
                try:
                    lockstep.launch(killed, 2, (trainer, str(path)), timeout=PATIENCE)
                except WorkerFailed as failed:
                    if failed.traceback:  # not that of the rank that was killed on purpose
                        raise
            check(
                is_whole(path),
                "A rank was killed in the middle of its second save(), and the first checkpoint is gone "
                "or damaged. Write to another name, and rename the file when it is whole.",
            )
            ranks = on_ranks(steps_with_checkpoints, size, trainer, str(path), 0)
        for rank, (began, weights, _) in enumerate(ranks):
            check(
                began == 1,
                f"A rank was killed in the middle of the save after step 2. Then load() returns {began} "
                f"on rank {rank}, and not 1.",
            )
            right = torch.equal if size == 2 else close
            check(
                right(weights, alone[rank % 2][1]),
                f"A rank was killed, {size} ranks continued, and the weights of rank {rank} are not "
                "those of a training that nobody killed. Are the optimizer's state and the weights "
                "whole in the checkpoint, and are all of them loaded, on every rank?",
            )


def killed(trainer: Any, path: str) -> None:
    with lockstep.init() as world:
        steps_with_checkpoints(world, trainer, path, die_after=2)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=32, depth=1, length=16, dropout=0.0)


def sequences() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 256, (22, 17), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def loss_of_text(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def by_trainer(world: World, trainer_class: Any) -> Tensor:
    """On a rank of two: an epoch of 22 sequences, 4 of each rank a step, 2 and none in the last."""
    model = gpt()
    trainer = trainer_class(model, adamw)
    x, y = sequences()
    for first in range(4 * world.rank, len(x) + 4 * world.rank, 8):
        rows = slice(first, first + 4)
        if len(y[rows]):
            loss_of_text(model, x[rows], y[rows]).backward()
        trainer.step(y[rows].numel())
    return flat(model)


def by_prepare(world: World) -> Tensor:
    model = gpt()
    optimizer = adamw(model.parameters())
    loader = DataLoader(TensorDataset(*sequences()), batch_size=8)
    model, optimizer, batches = lockstep.prepare(
        model,
        optimizer,
        loader,
        micro_batch=4,
        reduction="sum",
        weight=lambda pair: pair[1].numel(),
    )
    for _ in batches.epochs(1):
        for x, y in batches:
            loss_of_text(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def check_prepare(trainer: Any) -> None:
    (own, _), (library, _) = on_ranks(by_trainer, 2, trainer), on_ranks(by_prepare, 2)
    check(
        torch.equal(own, library),
        "A GPT on two ranks does not end with the bits of lockstep.prepare. The largest difference "
        f"is {(own - library).abs().max():.1e}. Sum first, then divide, then update.",
    )


def check_local_steps(case: str, ranks: list[Trained]) -> None:
    expected = local_copies(len(ranks))
    for rank, (result, right) in enumerate(zip(ranks, expected, strict=True)):
        check(
            len(result.calls) == STEPS // EVERY,
            f"{case} {STEPS} steps with every={EVERY} had {len(result.calls)} messages. The average "
            f"after step {EVERY} is the only one.",
        )
        check(
            close(result.weights, right, 1e-4),
            f"{case} rank {rank} has other weights. It takes steps with the mean gradient of its own "
            f"samples, leaves a step without samples out, and averages after {EVERY} steps.",
        )


def local_copies(size: int) -> Sequence[Tensor]:
    models = [Net(seed=0) for _ in range(size)]
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(STEPS):
        for model, optimizer, (x, y) in zip(
            models, optimizers, parts_of_step(step, size), strict=True
        ):
            optimizer.zero_grad()
            if len(y):
                (model(x, y) / len(y)).backward()
                optimizer.step()
        if (step + 1) % EVERY == 0:
            vectors = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
            mean = torch.stack(vectors).mean(0).detach()
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return [flat(model) for model in models]
