"""A checkpoint of Lockstep, loaded by torch.distributed.checkpoint into a model that FSDP2 shards,
and saved again without pickle.

    lockstep run --workers 2 examples/dcp_load.py
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import lockstep
from lockstep.integrations.dcp import LockstepReader, LockstepWriter


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))


def trained(folder: Path) -> nn.Module:
    """Five steps, of which the last is saved."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepper = lockstep.Stepper(model, optimizer, update="sharded")
    inputs = torch.randn(320, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :5].sum(1, keepdim=True).sin())
    loader = lockstep.Loader(data, global_batch=64, micro_batch=16, seed=0)
    checkpoints = lockstep.Checkpoints(folder, stepper, loader, every=5)
    for window in next(iter(loader.epochs(1))):
        for x, y in stepper.micro_batches(window):
            stepper.backward(nn.functional.mse_loss(model(x), y, reduction="sum"), weight=len(y))
        stepper.step()
        checkpoints.step()
    checkpoints.close()
    return model


def main() -> None:
    torch.manual_seed(0)
    with lockstep.init() as world:
        folder = Path("runs/dcp-load")
        model = trained(folder / "trained")

        sharded = made()
        for layer in sharded:
            fully_shard(layer)
        optimizer = torch.optim.AdamW(sharded.parameters())  # of the parameters as they are now
        weights, states = get_state_dict(sharded, optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, storage_reader=LockstepReader(folder / "trained"))
        set_state_dict(sharded, optimizer, model_state_dict=weights, optim_state_dict=states)

        saved = folder / "step-0000005"
        dcp.save(state, storage_writer=LockstepWriter(saved))
        again = made()
        dcp.load({"model": again.state_dict()}, storage_reader=LockstepReader(saved))
        for name, tensor in model.state_dict().items():
            part = sharded.state_dict()[name]
            assert torch.equal(part.full_tensor(), tensor)
            assert torch.equal(again.state_dict()[name], tensor)
        steps = int(optimizer.state[next(sharded.parameters())]["step"])
        if world.rank == 0:
            print(f"{world.size} ranks, {steps} steps: the same weights, sharded and saved again")


if __name__ == "__main__":
    main()
