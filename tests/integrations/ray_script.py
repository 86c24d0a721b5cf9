"""A driver that trains with Ray Train, as users write them; it runs in a process of its own.

python ray_script.py ADDRESS FOLDER
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import lockstep
from tests.training import toy

KILLED_AFTER = 8  # steps, in the first attempt; checkpoints are due after steps 3, 6, 9, ...


def train_fn(config: dict[str, Any]) -> None:
    """Train the toy, resuming from the folder's newest checkpoint; rank 0 leaves there what the
    end was: size, step resumed from, sha256.
    """
    folder = Path(config["folder"])
    world = lockstep.init()
    torch.manual_seed(0)
    model = toy.Net()
    stepper = lockstep.Stepper(model, toy.sgd(model), exact=True)
    loader = lockstep.Loader(toy.data(toy.SAMPLES, 1), global_batch=11, micro_batch=4, seed=0)
    checkpoints = lockstep.Checkpoints(folder / "checkpoints", stepper, loader, every=3)
    found = checkpoints.resume()
    for epoch in loader.epochs(4):
        for window in epoch:
            for x, y in stepper.micro_batches(window):
                stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            stepper.step()
            checkpoints.step()
            if (
                config["killed"]
                and found is None
                and stepper.steps == KILLED_AFTER
                and world.rank == 0
            ):
                die_on_a_larger_cluster(folder)
    checkpoints.close()
    if world.rank == 0:
        digest = hashlib.sha256(
            b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        ).hexdigest()
        (folder / "end").write_text(
            f"{world.size} workers, from step {found and found.step}: {digest}"
        )


def die_on_a_larger_cluster(folder: Path) -> None:
    """Wait until the test has added a node, have Ray Train count the nodes now (it does so every
    20 s), and be killed.
    """
    import ray

    (folder / "waiting").touch()
    while not (folder / "added").exists():
        time.sleep(0.02)
    coordinator: Any = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    ray.get(coordinator.get_reserved_resources.remote("", recompute=True))
    os.kill(os.getpid(), signal.SIGKILL)


def main(address: str, folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lockstep.integrations.ray_train import LockstepConfig

    ray.init(address=address, log_to_driver=False)
    TorchTrainer(
        train_fn,
        train_loop_config={"folder": folder, "killed": True},
        torch_config=LockstepConfig(),
        scaling_config=ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 2}),
        run_config=RunConfig(
            storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
