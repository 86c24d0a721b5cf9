"""What a user of Lightning runs by `lockstep run --workers 2`, in one start: its import takes
seconds.

python lightning_script.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import DamagedCheckpoint, ReplicaDivergence, UnusedParameters
from lockstep.integrations.lightning import (
    Batches,
    LockstepCheckpointIO,
    LockstepFabricStrategy,
    LockstepStrategy,
)
from tests.integrations.scripts import RATE, data, net, same
from tests.refused import refused

GLOBAL_BATCH, SAVED = 8, 7
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):
    def __init__(self, loader: Callable[[], Any], bare: nn.Module) -> None:
        super().__init__()
        self.net, self.loader = bare, loader
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, number: int) -> Any:
        x, y, which = batch
        self.seen.append(which.tolist())
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.loader()


class Weighing(Module):
    def training_step(self, batch: Any, number: int) -> Any:
        """Class 0 counts for nothing."""
        x, y, _ = batch
        counted = y > 0
        loss = F.cross_entropy(self.net(x), y, reduction="none")[counted].sum()
        weight = int(counted.sum())
        return {"loss": loss / max(weight, 1), "weight": weight}


class Manual(Module):
    def __init__(self, loader: Callable[[], Any], bare: nn.Module) -> None:
        super().__init__(loader, bare)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()


class Thawing(Module):
    """With a validation in each epoch, after which Lightning leaves the wrapper in eval mode."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)  # type: ignore[index]

    def validation_step(self, batch: Any, number: int) -> None:
        assert not self.training

    def val_dataloader(self) -> Any:
        return Batches(lockstep.Loader(data(16), global_batch=GLOBAL_BATCH))


class Drifting(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            with torch.no_grad():
                module.net[0].weight[0, 0] += 1e-3


def plain() -> DataLoader[Any]:
    return DataLoader(data(80), batch_size=4)


def windows() -> Batches:
    return Batches(lockstep.Loader(data(), global_batch=GLOBAL_BATCH, seed=3))


def fitted(
    module: pl.LightningModule, strategy: Any = "lockstep", *, resume: Any = None, **options: Any
) -> list[Tensor]:
    options = {"max_epochs": 2, "enable_checkpointing": False, **QUIET, **options}
    pl.Trainer(strategy=strategy, **options).fit(module, ckpt_path=resume)
    return [each.detach().clone() for each in module.parameters()]


def parity() -> None:
    """20 steps as with Lightning's own DDP."""
    for kind, options in (
        (Module, {"max_epochs": 2}),
        (
            Module,
            {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ),
        (Module, {"max_epochs": 2, "precision": "bf16-mixed"}),
        (Manual, {"max_epochs": 2}),
    ):
        modules = [kind(plain, net(norm=True)) for _ in range(2)]
        ours = fitted(modules[0], **options)
        assert (modules[0].trainer.global_step, modules[0].trainer.world_size) == (20, 2)
        theirs = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        same(ours, fitted(modules[1], theirs, devices=2, **options))
        assert modules[1].seen == modules[0].seen


def by_fabric(strategy: Any, folder: Path | None) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    bare = net(norm=True)
    model, optimizer = fabric.setup(bare, torch.optim.Adam(bare.parameters()))
    loader = fabric.setup_dataloaders(plain())
    for number, (x, y, _) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(F.cross_entropy(model(x), y))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    if folder is not None:
        before = [each.detach().clone() for each in bare.parameters()]
        fabric.save(folder, {"model": model, "optimizer": optimizer, "step": 5})
        with torch.no_grad():
            bare[0].weight.zero_()  # type: ignore[union-attr,operator]
        left: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(folder, left)
        assert left["step"] == 5
        assert all(map(torch.equal, before, bare.parameters()))
    return [each.detach().clone() for each in bare.parameters()]


def thawing() -> None:
    """Lightning's DDP has to be told that a frozen layer gets no gradient."""
    modules = [Thawing(plain, net(norm=True)) for _ in range(2)]
    ours = fitted(modules[0])
    theirs = DDPStrategy(cluster_environment=TorchElasticEnvironment(), find_unused_parameters=True)
    same(ours, fitted(modules[1], theirs, devices=2))


def walked_otherwise(seen: list[list[int]]) -> None:
    """Loaders made anew in each epoch; and two batches again and again."""
    module = Module(windows, net())
    fitted(module, reload_dataloaders_every_n_epochs=1)
    assert module.seen == seen
    module.seen.clear()
    fitted(module, overfit_batches=2)
    assert module.seen == seen[:2] * 2


def refusals() -> None:
    for name, value in (("start_method", "spawn"), ("ddp_comm_hook", print)):
        with refused("keyword-without-meaning", name=name):
            LockstepStrategy(**{name: value})
    with refused("lightning-devices", devices=4, size=2):
        fitted(Module(plain, net()), devices=4)
    with refused("sync-batch-norm-on-cpu"):
        fitted(Module(plain, net(norm=True)), sync_batchnorm=True)
    loader = lockstep.Loader(data(), global_batch=8, micro_batch=2)
    with refused("trainer-loader", reason="a step has 4 micro-batches for 2 ranks"):
        fitted(Module(lambda: Batches(loader), net()))
    with refused("trainer-loader", reason="it is one of several train loaders"):
        fitted(Module(lambda: {"a": windows(), "b": plain()}, net()))
    tail = lockstep.Loader(data(81), global_batch=8)  # a last step of one sample
    with refused("trainer-loader", reason="its last step leaves ranks without samples"):
        next(iter(Batches(tail)))
    with refused("replicas-differ", ReplicaDivergence, parameter="net.0.weight"):
        fitted(Module(plain, net()), callbacks=[Drifting()], max_steps=4)

    def spare() -> nn.Module:
        bare = net()
        bare.add_module("unused", nn.Linear(1, 1))
        bare.forward = lambda x: nn.Sequential.forward(bare[:4], x)  # type: ignore[method-assign,index,arg-type]
        return bare

    with refused("unused-parameters", UnusedParameters):
        fitted(Module(plain, spare()), max_steps=2)
    fitted(Module(plain, spare()), LockstepStrategy(find_unused_parameters=True), max_steps=2)


def checkpoints(folder: Path) -> None:
    """They hold tensors and plain values only."""
    files = LockstepCheckpointIO()
    wide = torch.arange(3000.0).view(50, 60)
    saved: dict[str, Any] = {
        "global_step": 4,
        "state_dict": {"a/b": wide.t(), "scalar": torch.tensor(2)},
        "optimizer_states": [{"state": {0: {"exp_avg": wide + 1}}, "betas": (0.9, 0.99)}],
        "best": torch.tensor(0.5),
    }
    place = folder / "deep" / "step=4.ckpt"
    for _ in range(2):  # the second takes the first one's place
        files.save_checkpoint(saved, place)
    assert [each.name for each in place.parent.iterdir()] == [place.name]
    assert load_file(place / "model.safetensors").keys() == {"a/b", "scalar"}
    torch.testing.assert_close(files.load_checkpoint(place), saved, rtol=0, atol=0)
    with refused("value-not-storable", what="the checkpoint['hyper_parameters']['net']"):
        files.save_checkpoint({"hyper_parameters": {"net": nn.Linear(1, 1)}}, folder / "other")
    torch.save(saved, folder / "theirs.ckpt")
    with refused("checkpoint-is-pickled"):
        files.load_checkpoint(folder / "theirs.ckpt")
    with refused("unknown-checkpoint-url"):
        files.save_checkpoint(saved, "s3://bucket/step=4.ckpt")
    with refused("keyword-without-meaning", name="storage_options"):
        files.save_checkpoint(saved, place, storage_options={})
    (place / "state.json").write_text("{}")
    with refused("checkpoint-file-changed", DamagedCheckpoint, file="state.json"):
        files.load_checkpoint(place)
    link = place.with_name("last.ckpt")
    link.symlink_to(place)
    files.remove_checkpoint(link)
    files.remove_checkpoint(place)
    files.remove_checkpoint(place)
    link.symlink_to(place)  # to nothing
    files.save_checkpoint(saved, link)
    files.save_checkpoint(saved, folder / "theirs.ckpt")  # in the place of a file of torch.save
    assert [each.name for each in place.parent.iterdir()] == [link.name]
    torch.testing.assert_close(files.load_checkpoint(link), saved, rtol=0, atol=0)
    assert [each.name for each in folder.glob("*theirs*")] == ["theirs.ckpt"]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert TorchElasticEnvironment.detect()
    found: dict[str, Any] = {}
    parity()
    thawing()
    same(
        by_fabric(LockstepFabricStrategy(checkpoint_io=LockstepCheckpointIO()), folder / "fabric"),
        by_fabric(FabricDDP(cluster_environment=TorchElasticEnvironment()), None),
    )
    refusals()
    checkpoints(folder / f"rank-{lockstep.World.current().rank}")
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    whole = Module(windows, net())
    options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
    options["plugins"] = [LockstepCheckpointIO()]
    found["weights"] = [each.tolist() for each in fitted(whole, **options)]
    found["seen"] = whole.seen
    walked_otherwise(whole.seen)
    found["accumulated"] = [
        each.tolist() for each in fitted(Weighing(windows, net()), accumulate_grad_batches=4)
    ]
    world = lockstep.World.current()
    rank = world.rank
    world.close()
    # the same process as a run of one worker
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    resumed = Module(windows, net())
    saved = folder / f"step={SAVED}.ckpt"
    found["resumed"] = [
        each.tolist() for each in fitted(resumed, resume=saved, plugins=[LockstepCheckpointIO()])
    ]
    found["seen after"] = resumed.seen
    (folder / f"2-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
