"""PyTorch's own tests of its collectives, over Lockstep's backend or over gloo.

python -m tests.contract.torch_c10d OUT [--only NAME ...]            # over "lockstep"
BACKEND=gloo python -m tests.contract.torch_c10d OUT
"""

from __future__ import annotations

import os

import torch

from tests.contract import ranks

BACKEND = os.environ.get("BACKEND", "lockstep")
ranks.torchs_helpers()

from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

import lockstep.backend  # noqa: E402, F401  # registers it

theirs.BACKEND = BACKEND


class Suite(theirs.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    rank = 0
    world_size = ranks.RANKS

    def _barrier(self, *args: object, **kwargs: object) -> None:
        torch.distributed.barrier()


if __name__ == "__main__":
    ranks.main(ranks.bodies(Suite, of_wrapper=False), Suite, BACKEND)
