"""An evaluation over ranks counts some samples twice.

https://github.com/pytorch/pytorch/issues/25162

`DistributedSampler` repeats samples until all ranks have equally many. So 9 samples on 2 ranks are
scored as 10, and the accuracy is another one.

The line: `lockstep.evaluate(model, data, fn)` for the loop over a `DistributedSampler`. Nothing is
repeated: no rank waits for another inside of it, and sums and counts are added once.

    lockstep run --workers 2 examples/upstream/pytorch_25162.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

RIGHT = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 1, 1])  # whether the model is
DATA = TensorDataset(RIGHT[:, None])
MODEL = nn.Identity()


def described(accuracy: float) -> str:
    return f"accuracy {accuracy:.3f}; of the {len(RIGHT)} samples {RIGHT.mean():.3f} are right"


def before(world: lockstep.World) -> str:
    total = torch.zeros(2)
    for (batch,) in DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, shuffle=False)):
        total += torch.tensor([MODEL(batch).sum(), len(batch)])
    torch.distributed.all_reduce(total)
    return described(float(total[0] / total[1]))


def after(world: lockstep.World) -> str:
    def score(output: Tensor, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"accuracy": (output.sum(), len(output))}

    return described(lockstep.evaluate(MODEL, DATA, score)["accuracy"])


if __name__ == "__main__":
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
