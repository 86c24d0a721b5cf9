"""A run that resumes in the middle of its second epoch goes on in the order of the first.

https://github.com/huggingface/accelerate/issues/2016

`load_state` and `skip_first_batches` restore how many batches were done, not the order they came
in. Some samples of the epoch are trained twice, and as many never.

The line: `lockstep.Loader(data, global_batch=8)` for the DataLoader. Registered, its place is saved
with the rest, and the order follows from epoch and step.

    lockstep run --workers 2 examples/upstream/accelerate_2016.py
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

import lockstep

DATA = TensorDataset(torch.arange(64))
DONE = 3  # steps of the 8 in the second epoch, when the run is saved


def samples(batches: Iterable[Any]) -> list[int]:
    return [int(sample) for (batch,) in batches for sample in batch]


def by_accelerate(folder: str, *, resume: bool) -> list[int]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=True))
    if resume:
        accelerator.load_state(folder)
        return samples(skip_first_batches(loader, DONE))
    samples(loader)  # the first epoch
    done = samples(islice(loader, DONE))
    accelerator.save_state(folder)
    return done


def by_lockstep(folder: str, *, resume: bool) -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = lockstep.Loader(DATA, global_batch=8)
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(folder)
        return [each for epoch in loader.epochs(2) for window in epoch for each in samples(window)]
    first, second = loader.epochs(2)
    list(first)
    done = [each for window in islice(second, DONE) for each in samples(window)]
    accelerator.save_state(folder)
    return done


def trained(run: Any) -> str:
    """What all ranks train in the second epoch, before and after the resume."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        torch.distributed.broadcast_object_list(shared)
        mine = run(shared[0], resume=False)
        torch.distributed.barrier()  # rank 0 has written what is registered
        mine += run(shared[0], resume=True)
        times = Counter(lockstep.collectives.all_gather(torch.tensor(mine)).tolist())
    twice = sum(count > 1 for count in times.values())
    return f"{twice} of 64 samples trained twice, {64 - len(times)} never"


def before(world: lockstep.World) -> str:
    return trained(by_accelerate)


def after(world: lockstep.World) -> str:
    return trained(by_lockstep)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="accelerate")  # it sets OMP_NUM_THREADS, and warns
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
