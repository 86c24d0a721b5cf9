"""A loop of Accelerate on Lockstep: the same training with any number of workers, and a resume in
the middle of an epoch.

    lockstep run --workers 2 examples/accelerate_loop.py

The first training saves after 10 steps, in the middle of the second epoch. The second one resumes
there, in place of a job that was killed, and ends with the same weights.
"""

import tempfile
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.integrations.accelerate import LockstepAccelerator

EPOCHS, SAVED = 3, 10


def loader() -> lockstep.Loader:
    inputs = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :5].sum(1, keepdim=True).sin())
    return lockstep.Loader(data, global_batch=64, micro_batch=16, seed=0)  # 8 steps, the last of 52


def train(folder: Path, *, resume: bool) -> nn.Module:
    accelerator = LockstepAccelerator()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    if resume:
        accelerator.load_state(str(folder))
    for _ in range(batches.epoch, EPOCHS):
        for inputs, targets in batches:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()  # at the last micro-batch of a step, else nothing
            optimizer.zero_grad()
            if accelerator.sync_gradients and batches.step + 1 == SAVED:
                accelerator.save_state(str(folder))
    found: nn.Module = accelerator.unwrap_model(model)
    return found


def main() -> None:
    accelerator = LockstepAccelerator()
    (name,) = broadcast_object_list([tempfile.mkdtemp()])
    whole, resumed = (train(Path(name), resume=resume) for resume in (False, True))
    both = zip(whole.parameters(), resumed.parameters(), strict=True)
    equal = all(torch.equal(one, other) for one, other in both)
    accelerator.print(f"{accelerator.num_processes} ranks: {equal=}")
    total = sum(each.double().sum().item() for each in whole.parameters())
    accelerator.print(f"weights {total:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
