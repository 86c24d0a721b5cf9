"""PyTorch's own tests of DistributedDataParallel, with Lockstep's class or with torch's.

python -m tests.contract.torch_ddp OUT [--only NAME ...]            # Lockstep's
WRAPPER=torch python -m tests.contract.torch_ddp OUT                # torch's own
"""

from __future__ import annotations

import inspect
import itertools
import os
import unittest
from functools import partial
from typing import Any
from unittest.mock import ANY, MagicMock

import torch
import torch.distributed as dist
from torch import nn

from tests.contract import ranks

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
common_distributed.skip_if_lt_x_gpu = lambda count, **more: (
    (lambda body: body) if count <= ranks.RANKS else _skipped
)
common_distributed.init_multigpu_helper = lambda size, backend: {
    rank: [rank] for rank in range(size)
}
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


class Unused(nn.Module):
    """On one rank a parameter is not used."""

    def __init__(self, without: int) -> None:
        super().__init__()
        self.first, self.last = theirs.Task(), theirs.Task()
        self.without = without

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        found: torch.Tensor = self.last(x if rank == self.without else self.first(x))
        return found


class Suite(theirs.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
    rank = 0
    world_size = ranks.RANKS

    def _barrier(self, *args: object, **kwargs: object) -> None:
        dist.barrier()

    def test_ddp_uneven_inputs_of_small_models(self) -> None:
        """torch's test_ddp_uneven_inputs without its large convolution, which takes a CPU an
        hour.
        """
        ones = torch.ones(1, 2)
        power = theirs.powerSGD.PowerSGDState(
            None, start_powerSGD_iter=1, warm_start=False, use_error_feedback=False
        )
        cases = [
            theirs.DDPUnevenTestInput("batch norm", theirs.BatchNormNet(), ones, 1),
            theirs.DDPUnevenTestInput("linear", nn.Linear(20, 20), torch.ones(1, 20), 1),
            theirs.DDPUnevenTestInput("unused_params_model", Unused(1), (ones, self.rank), 1),
            theirs.DDPUnevenTestInput("unused_params_model", Unused(0), (ones, self.rank), 1),
            theirs.DDPUnevenTestInput(
                "hook",
                nn.Linear(20, 20),
                torch.ones(1, 20),
                1,
                False,
                theirs.default.allreduce_hook,
                None,
            ),
            theirs.DDPUnevenTestInput(
                "hook",
                nn.Linear(20, 20),
                torch.ones(1, 20),
                1,
                False,
                theirs.powerSGD.powerSGD_hook,
                power,
            ),
        ]
        # torch's body steps inside no_sync(): where ranks use other parameters their replicas then
        # differ, which ours finds
        cases += [
            each._replace(sync_interval=number + 2)
            for number, each in enumerate(cases)
            if "unused" not in each.name
        ]
        cases += [each._replace(throw_on_early_termination=True) for each in cases]
        for each, first in itertools.product(cases, (0, 5)):
            self._run_uneven_inputs_test(
                each, {0: first, 1: first + 2}, find_unused_params="unused" in each.name
            )


def names() -> list[str]:
    """The bodies that use the wrapper, themselves or through a helper."""
    bodies = {
        name: inspect.getsource(body)
        for name, body in vars(theirs.DistributedTest._DistTestBase).items()
        if inspect.isfunction(body)
    }
    using = {
        name
        for name, text in bodies.items()
        if "DistributedDataParallel" in text or "ddp" in name.lower()
    }
    while more := {
        name
        for name, text in bodies.items()
        if name not in using and any(f"self.{other}(" in text for other in using)
    }:
        using |= more
    return sorted(
        {name for name in using if name.startswith("test_")}
        | {name for name in vars(Suite) if name.startswith("test_")}
    )


def case(name: str, rank: int) -> unittest.TestCase:
    test = Suite(name)
    test.rank = rank
    return test


if __name__ == "__main__":
    ranks.main(names(), case)
