"""Accelerate's and Lightning Fabric's training step, to be compared with by
benchmarks/against_ddp.py: the same loop around their DDP.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from types import ModuleType

from torch import Tensor, nn

from baselines import TorchDDP
from lockstep.config.task import Precision


def imported(*names: str) -> ModuleType | None:
    """The first of these modules that is here. Imported with this file: the code of a library is
    not the memory of a step.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


accelerate = imported("accelerate")
lightning = imported("lightning_fabric", "lightning.fabric")


class ByAccelerate(TorchDDP):
    """accelerate.Accelerator().prepare(model, optimizer), with the same DDP inside."""

    def wrap(self) -> nn.Module:
        assert accelerate is not None
        options = accelerate.DistributedDataParallelKwargs(
            gradient_as_bucket_view=True, bucket_cap_mb=self.megabytes
        )
        cpu = self.setting.world.device.type == "cpu"
        with warnings.catch_warnings():
            # how many threads it sets, which do not stay
            warnings.filterwarnings("ignore", "OMP_NUM_THREADS", UserWarning)
            self.accelerator = accelerate.Accelerator(
                cpu=cpu, mixed_precision="no", kwargs_handlers=[options]
            )
        wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return wrapped  # type: ignore[no-any-return]

    def kept_back(self) -> AbstractContextManager[object]:
        kept: AbstractContextManager[object] = self.accelerator.no_sync(self.wrapped)
        return kept

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)


class ByFabric(TorchDDP):
    """Lightning Fabric's DDPStrategy, with the same DDP inside."""

    def wrap(self) -> nn.Module:
        assert lightning is not None
        strategies, environments = (
            importlib.import_module(f"{lightning.__name__}.{each}")
            for each in ("strategies", "plugins.environments")
        )
        world = self.setting.world
        strategy = strategies.DDPStrategy(
            # reads RANK, LOCAL_RANK and WORLD_SIZE, which ranks have
            cluster_environment=environments.TorchElasticEnvironment(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.megabytes,
        )
        self.fabric = lightning.Fabric(
            accelerator=world.device.type, devices=world.size, strategy=strategy
        )
        self.fabric.launch()
        wrapped, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        return wrapped  # type: ignore[no-any-return]

    def kept_back(self) -> AbstractContextManager[object]:
        kept: AbstractContextManager[object] = self.fabric.no_backward_sync(self.wrapped)
        return kept

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)


WRAPPERS = {"accelerate": ByAccelerate, "fabric": ByFabric}
_PACKAGES = {"accelerate": (accelerate, "accelerate"), "fabric": (lightning, "lightning-fabric")}


def left_out(variants: Sequence[str], precision: Precision) -> dict[str, str]:
    """Those that cannot be measured here, and why."""
    found = {}
    for name in variants:
        module, package = _PACKAGES.get(name.partition(":")[0], (None, ""))
        if package and module is None:
            found[name] = f"{package} is not installed: pip install {package}"
        elif package and precision == "fp16":
            found[name] = (
                "it brings a loss scale of its own, which is not the one that the others have with"
                " fp16"
            )
    return found


def versions() -> dict[str, str]:
    """Of what was compared, as installed, by distribution: `lightning_fabric` also comes with
    pytorch-lightning, which says so in its own name only.
    """
    distributions = metadata.packages_distributions()
    return {
        package: metadata.version(package)
        for module in (accelerate, lightning)
        if module is not None
        for package in distributions[module.__name__.partition(".")[0]]
    }
