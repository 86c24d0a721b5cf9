"""What a user of Accelerate runs by `lockstep run`: two ranks train and save, three resume.

python accelerate_script.py FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    set_seed,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import lockstep
from lockstep.errors import DamagedCheckpoint, ReplicaDivergence
from lockstep.integrations.accelerate import LockstepAccelerator
from tests.integrations.scripts import RATE, data, net, same
from tests.refused import refused

GLOBAL_BATCH, MICRO_BATCH, EPOCHS, SAVED = 12, 3, 2, 9


def trained(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def loader(**options: Any) -> lockstep.Loader:
    options = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": 3, **options}
    return lockstep.Loader(data(), **options)


def labels(batch: Any) -> Tensor:
    return (batch[1] > 0).sum()


def loss_of(model: nn.Module, batch: Any, *, weighing: bool) -> Tensor:
    """The mean; class 0 counts for nothing where that is asked for."""
    x, y, _ = batch
    counted = y > 0 if weighing else y >= 0
    losses = F.cross_entropy(model(x), y, reduction="none")[counted]
    return losses.sum() / max(len(losses), 1)


def with_their_loader(kind: type[Accelerator], **options: Any) -> nn.Module:
    """20 steps, in Accelerate's own way."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
    assert accelerator.num_processes == 2
    bare = net(norm=True)
    optimizer, scheduler = trained(bare)
    plain = DataLoader(data(160), batch_size=2, shuffle=True)
    model, optimizer, scheduler, batches = accelerator.prepare(bare, optimizer, scheduler, plain)
    set_seed(0)
    steps = 0
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch, weighing=False))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert steps == 20
    assert accelerator.unwrap_model(model) is bare
    assert accelerator.get_state_dict(model).keys() == bare.state_dict().keys()
    assert len(accelerator.gather(torch.zeros(3))) == 6
    return bare


def parity(world: lockstep.World) -> None:
    hooks = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    for options in ({}, {"kwargs_handlers": [hooks]}):
        before = world.group.number
        ours = with_their_loader(LockstepAccelerator, **options)
        assert (world.group.number - before >= 20) == (not options)  # through shared memory
        same(
            ours.state_dict().values(),
            with_their_loader(Accelerator, **options).state_dict().values(),
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def with_our_loader(
    folder: Path, source: Any = loader, *, weighing: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Two epochs; the weights, the samples of each step and the learning rate at the end."""
    accelerator = LockstepAccelerator(weigh=labels if weighing else None)
    bare = net(norm=True)
    optimizer, scheduler = trained(bare)
    found: dict[str, Any] = {"seen": []}
    model, optimizer, scheduler, batches = accelerator.prepare(bare, optimizer, scheduler, source())
    if resume:
        accelerator.load_state(folder)
    for _ in range(batches.epoch, EPOCHS):
        seen: list[int] = []
        for batch in batches:
            seen += batch[2].tolist() if batches.weight or weighing else []
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch, weighing=weighing))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found["seen"].append(seen)
                seen = []
                if batches.step + 1 == SAVED and accelerator.num_processes == 2:
                    accelerator.save_state(folder)
    accelerator.end_training()
    found["weights"] = [each.tolist() for each in bare.parameters()]
    found["rate"] = scheduler.get_last_lr()
    return found


def gathers_and_noise() -> None:
    """Three micro-batches for two ranks, and a short last step: as many batches on all ranks, every
    sample once in `gather_for_metrics`, and noise that belongs to the micro-batch.
    """
    accelerator = LockstepAccelerator()
    lockstep.seed(3)
    batches = accelerator.prepare(loader(micro_batch=4, shuffle=False))
    model = accelerator.prepare(net())
    rank, before = accelerator.process_index, torch.get_rng_state()
    seen, names, copied = [], [], 0
    for x, _, index in batches:
        noise = torch.rand(3)
        with lockstep.stream("step", batches.step, batches.slot):
            assert torch.equal(noise, torch.rand(3))
        assert len(accelerator.gather(batches.weight + x.new_zeros(()))) == 2
        seen += accelerator.gather_for_metrics(index).tolist()
        names += accelerator.gather_for_metrics([f"{number}" for number in index.tolist()])
        copied += not batches.weight
    for _ in zip(batches, accelerator.prepare(loader(micro_batch=4)), strict=True):
        assert model.require_backward_grad_sync == accelerator.sync_gradients
    assert model.require_backward_grad_sync
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(seen) == sorted(map(int, names)) == list(range(83))
    assert copied == 7 * rank  # rank 1 has one micro-batch of each full step, and of the last
    assert accelerator.gather(torch.full((1 + rank, 2), rank)).tolist() == [[0, 0], [1, 1], [1, 1]]


def local_sgd() -> None:
    """Replicas that differ between the averages of LocalSGD, with a Loader too, are compared again
    afterwards.
    """
    accelerator = LockstepAccelerator()
    bare = net()
    model, optimizer, batches = accelerator.prepare(bare, trained(bare)[0], loader())
    equal = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        for batch in batches:
            accelerator.backward(loss_of(model, batch, weighing=False))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            first, second = accelerator.gather(bare[0].weight.detach()[None])
            if accelerator.sync_gradients:
                equal.append(torch.equal(first, second))
    assert equal == [False, True] * 3 + [False]  # two batches a step, an average every fourth
    accelerator.end_training()


def their_loader_is_checked() -> None:
    accelerator = LockstepAccelerator()
    bare = net()
    plain = DataLoader(data(), batch_size=4)
    model, optimizer, batches = accelerator.prepare(bare, trained(bare)[0], plain)
    with refused("replicas-differ", ReplicaDivergence, parameter="0.weight"):
        for number, batch in enumerate(batches):
            assert number < 2
            accelerator.backward(loss_of(model, batch, weighing=False))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                bare[0].weight[0, 0] += 1e-3 * accelerator.process_index


def stream(**options: Any) -> Any:
    sizes = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": 3}
    return lockstep.Loader(Stream(), **sizes, **options)


def refusals(folder: Path) -> None:
    with refused("keyword-without-meaning", name="gradient_accumulation_steps", value=2):
        LockstepAccelerator(gradient_accumulation_steps=2).prepare(loader())
    accelerator = LockstepAccelerator(
        gradient_accumulation_steps=1,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    with refused("trainer-loader", reason="its data set divides itself among the ranks"):
        accelerator.prepare(stream(sharding="dataset"))
    tiny = lockstep.Loader(Stream(), global_batch=4, micro_batch=4)
    alone = LockstepAccelerator().prepare(tiny)
    if accelerator.process_index == 0:
        assert len(next(iter(alone))[0]) == 4
    else:
        with refused("rank-without-batches", rank=1, size=2):
            next(iter(alone))
    model, batches = accelerator.prepare(net(), loader())
    assert model.find_unused_parameters
    assert accelerator.prepare(model) is model
    with refused("keyword-without-meaning", name="skip_first_batches"):
        accelerator.skip_first_batches(batches, 3)
    assert accelerator.prepare_scheduler(trained(model)[1]).split_batches
    next(iter(batches))
    for number, _ in enumerate(batches):
        assert accelerator.sync_gradients == (number == 1)
        if number == 0:
            with refused("saved-inside-a-step"):
                accelerator.save_state(folder / "never")
        else:
            accelerator.save_state(folder / "changed")
            break
    other = LockstepAccelerator()
    other.prepare(net(), loader(seed=4))
    with refused("another-training") as caught:
        other.load_state(folder / "changed")
    assert caught.value.values["differences"].endswith("seed was 3 and is 4")
    accelerator.wait_for_everyone()
    places = folder / "changed" / "lockstep.json"
    places.write_text("[")
    accelerator.wait_for_everyone()
    with refused("checkpoint-file-unreadable", DamagedCheckpoint, file="lockstep.json"):
        accelerator.load_state(folder / "changed")
    accelerator.wait_for_everyone()
    places.unlink(missing_ok=True)  # as Accelerate's own class saves
    accelerator.wait_for_everyone()
    with refused("saved-with-other-loaders", saved=0, here=1):
        accelerator.load_state(folder / "changed")
    if accelerator.process_index == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1e-3
    with refused("replicas-differ", ReplicaDivergence, parameter="0.weight"):
        accelerator.save_state(folder / "never")


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = LockstepAccelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=123))]
    ).world
    assert world.timeout == timedelta(seconds=123)
    found: dict[str, Any] = {}
    if world.size == 2:
        parity(world)
        refusals(folder)
        gathers_and_noise()
        local_sgd()
        their_loader_is_checked()
        found["weighing"] = with_our_loader(folder / "weighing", weighing=True)
        found["whole"] = with_our_loader(folder / "saved")
        found["stream"] = with_our_loader(folder / "stream", stream)
    else:
        found["resumed"] = with_our_loader(folder / "saved", resume=True)
        found["stream"] = with_our_loader(folder / "stream", stream, resume=True)
    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
