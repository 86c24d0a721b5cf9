"""A training step inside of a host's own loop, with the host's DDP and with Lockstep, in turns.

    python benchmarks/trainers.py --workers 2
    python benchmarks/trainers.py --hosts lightning,fabric --models cnn --rounds 5

Each rank runs every host's loop `--rounds` times each way, and alternates which comes first. A row
has the median time of a step with the host's own DDP (gloo), that with Lockstep, and their ratio.
The first steps of each fit are left out. A host adds itself to HOSTS.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import lockstep
from cases import cnn, images, small_mlp
from lockstep.testing import run_ranks
from lockstep.tools.timing.output_files import table

Data = DataLoader[tuple[Tensor, ...]]
Fit = Callable[[nn.Module, Data, bool], list[float]]
"""(model, this rank's batches of (input, target), whether by Lockstep) -> when each step ended."""
_WARM_UP = 5  # steps of each fit


def by_lightning(model: nn.Module, data: Data, ours: bool) -> list[float]:
    from lightning import pytorch
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from lockstep.integrations.lightning import LockstepStrategy

    ends: list[float] = []

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            ends.append(perf_counter())
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    size = lockstep.World.current().size
    pytorch.Trainer(
        strategy=LockstepStrategy()
        if ours
        else DDPStrategy(
            cluster_environment=TorchElasticEnvironment(), gradient_as_bucket_view=True
        ),
        accelerator="cpu",
        devices=size,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), data)
    return ends


def by_fabric(model: nn.Module, data: Data, ours: bool) -> list[float]:
    from lightning import fabric
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy

    from lockstep.integrations.lightning import LockstepFabricStrategy

    size = lockstep.World.current().size
    made = fabric.Fabric(
        accelerator="cpu",
        devices=size,
        strategy=LockstepFabricStrategy()
        if ours
        else DDPStrategy(
            cluster_environment=TorchElasticEnvironment(), gradient_as_bucket_view=True
        ),
    )
    made.launch()
    wrapped, optimizer = made.setup(model, optimizer_of(model))
    ends = []
    for x, y in data:
        optimizer.zero_grad()
        made.backward(loss_of(wrapped(x), y))
        optimizer.step()
        ends.append(perf_counter())
    return ends


def by_accelerate(model: nn.Module, data: Data, ours: bool) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from lockstep.integrations.accelerate import LockstepAccelerator

    keywords = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    kind = LockstepAccelerator if ours else Accelerator
    accelerator = kind(cpu=True, kwargs_handlers=[keywords])
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
    ends = []
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped(x), y))
        optimizer.step()
        ends.append(perf_counter())
    return ends


def by_transformers(model: nn.Module, data: Data, ours: bool) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lockstep.integrations.transformers import LockstepTrainer

    ends: list[float] = []
    size = lockstep.World.current().size

    class Timed(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            ends.append(perf_counter())

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net(x), labels)}

    def collated(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, labels = (torch.stack(each) for each in zip(*samples, strict=True))
        return {"x": x, "labels": labels}

    arguments = TrainingArguments(
        "unused",
        use_cpu=True,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=size if ours else 1,  # over all ranks; of each
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        max_grad_norm=0,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    whole: Any = ConcatDataset([data.dataset] * size)
    (LockstepTrainer if ours else Trainer)(
        WithLoss(),
        arguments,
        train_dataset=whole,
        data_collator=collated,
        optimizers=(optimizer_of(model), None),
        callbacks=[Timed()],
    ).train()
    return ends


HOSTS: dict[str, Fit] = {
    "lightning": by_lightning,
    "fabric": by_fabric,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
}
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": small_mlp, "cnn": cnn}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) if target.ndim == 1 else F.mse_loss(output, target)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batches(model: str, rank: int, steps: int) -> Data:
    """32 samples a step."""
    generator = torch.Generator().manual_seed(rank)
    count = 32 * steps
    if model == "cnn":
        return DataLoader(TensorDataset(*images(count, generator)), batch_size=32)
    samples = torch.randn(2, count, 1024, generator=generator)
    return DataLoader(TensorDataset(*samples), batch_size=32)


def compare(
    world: lockstep.World, hosts: list[str], model: str, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Of each host: the median seconds of a step with its own DDP and with Lockstep."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    data = batches(model, world.rank, _WARM_UP + 1 + steps)
    found = {}
    for name in hosts:
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for ours in (False, True) if number % 2 == 0 else (True, False):
                torch.manual_seed(0)
                ends = HOSTS[name](MODELS[model](), data, ours)[_WARM_UP:]
                taken[ours] += [after - before for before, after in pairwise(ends)]
                gc.collect()  # a wrapper in a cycle keeps its memory
                world.barrier()
        found[name] = [statistics.median(taken[ours]) for ours in (False, True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    hosts = options.hosts.split(",")
    rows: list[list[Any]] = []
    for model in options.models.split(","):
        found = run_ranks(
            compare,
            options.workers,
            args=(hosts, model, options.steps, options.rounds),
            timeout=timedelta(minutes=10),
        )[0]
        for host, (theirs, ours) in found.items():
            rows.append(
                [
                    host,
                    model,
                    f"{1e3 * theirs:.1f} ms",
                    f"{1e3 * ours:.1f} ms",
                    f"{ours / theirs:.2f}",
                ]
            )
    print(table(["host", "model", "its own DDP", "Lockstep", "ratio"], rows))


if __name__ == "__main__":
    main()
