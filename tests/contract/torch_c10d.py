"""PyTorch's own tests of its collectives, over Lockstep's backend or over gloo.

python -m tests.contract.torch_c10d OUT [--only NAME ...]            # over "lockstep"
BACKEND=gloo python -m tests.contract.torch_c10d OUT
"""

from __future__ import annotations

import inspect
import os
import unittest
from typing import Any

import torch

from tests.contract import ranks

BACKEND = os.environ.get("BACKEND", "lockstep")
# Which bodies there are follows from this variable, as torch's module is imported: those for gloo
# are those for CPUs.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=str(ranks.RANKS),
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
    PYTORCH_PRINT_REPRO_ON_FAILURE="0",
)
ranks.without_expecttest()

from torch.testing._internal import common_distributed  # noqa: E402

common_distributed.skip_if_no_gpu = lambda body: body
common_distributed.init_multigpu_helper = lambda size, backend: {
    rank: [rank] for rank in range(size)
}

from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

import lockstep.backend  # noqa: E402, F401  # registers it

theirs.BACKEND = BACKEND


class Suite(theirs.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    rank = 0
    world_size = ranks.RANKS

    def _barrier(self, *args: object, **kwargs: object) -> None:
        torch.distributed.barrier()


def names() -> list[str]:
    """The bodies that do not use torch's wrapper, themselves or through a helper, and do not
    name NCCL.
    """
    bodies: dict[str, Any] = {
        name: inspect.getsource(body)
        for name, body in vars(theirs.DistributedTest._DistTestBase).items()
        if inspect.isfunction(body)
    }
    wrapping = {
        name
        for name, text in bodies.items()
        if "DistributedDataParallel" in text or "ddp" in name.lower()
    }
    while more := {
        name
        for name, text in bodies.items()
        if name not in wrapping and any(f"self.{each}(" in text for each in wrapping)
    }:
        wrapping |= more
    return sorted(
        name
        for name in bodies
        if name.startswith("test_") and name not in wrapping and "nccl" not in name
    )


def case(name: str, rank: int) -> unittest.TestCase:
    test = Suite(name)
    test.rank = rank
    return test


if __name__ == "__main__":
    ranks.main(names(), case, BACKEND)
