"""`lockstep run --check-replicas`: weights of a plain torch script that differ between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launcher.rank import Target
from lockstep.launcher.supervise import supervise

TRAIN = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))

def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)

def backward(model, step=0):
    generator = torch.Generator().manual_seed(size * step + rank)
    model(torch.randn(4, 3, generator=generator)).square().sum().backward()

def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size

def train(model, steps=3, averages=True, optimizer=None):
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        if averages:
            average(model)
        optimizer.step()
"""

WRONG = {
    "seeds that differ": ("after step 1", "train(net(seed=rank))"),
    "no average": ("after step 1", "train(net(), averages=False)"),
    "no average in the second step": (
        "after step 2",
        "model = net(); optimizer = sgd(model)\n"
        "train(model, 1, True, optimizer); train(model, 1, False, optimizer)",
    ),
    "no_sync where it steps": (
        "after step 1",
        "model = DDP(net()); optimizer = sgd(model)\n"
        "with model.no_sync(): backward(model)\n"
        "optimizer.step()",
    ),
    "the second of two models": ("after step 1", "train(net()); train(net(seed=rank))"),
    "the last step of rank 0 alone": (
        "after the last step",
        "model = net(); optimizer = sgd(model)\n"
        "train(model, 5, True, optimizer)\n"
        "if rank == 0: optimizer.step()\n"
        "dist.destroy_process_group()\n"
        "sys.exit(0)",
    ),
}
RIGHT = {
    "averaged by hand": "train(net()); dist.destroy_process_group()",
    "DDP": "train(DDP(net()), averages=False)",
    "weights of rank 0's own after the end": (
        "model = net(); train(model)\nif rank == 0: torch.nn.init.zeros_(model[0].weight)"
    ),
    "sharded by torch": (
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "model = net(); fully_shard(model, mesh=init_device_mesh('cpu', (size,)))\n"
        "train(model, averages=False)"
    ),
    "a sharded optimizer of torch's": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "model = net()\n"
        "train(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))"
    ),
    "sharded by Lockstep": (
        "import lockstep\n"
        "with lockstep.init() as world:\n"
        "    model = net(); stepper = lockstep.Stepper(model, sgd(model), update='sharded')\n"
        "    for step in range(3):\n"
        "        for x in stepper.micro_batches([torch.ones(2, 3) * rank]):\n"
        "            stepper.backward(model(x).sum(), weight=2)\n"
        "        stepper.step()"
    ),
    "an optimizer of no module": (
        "own = torch.nn.Parameter(torch.ones(2) * rank); own.grad = torch.ones(2)\n"
        "sgd_of_own = torch.optim.SGD([own], 0.1); sgd_of_own.step(); train(net())"
    ),
}


def run(tmp_path: Path, text: str, workers: int) -> int:
    (tmp_path / "script.py").write_text(TRAIN + text)
    target = Target(script=str(tmp_path / "script.py"), check_replicas=True)
    return supervise(target, workers).exit_code


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_differ_are_named(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    when, text = WRONG[name]
    workers = 3 if "seeds" in name else 2
    assert run(tmp_path, text, workers) != 0
    shown = capfd.readouterr().err
    assert "[replicas-of-script-differ]" in shown
    assert when in shown
    assert "0.weight'" in shown


@pytest.mark.parametrize(
    ("name", "workers"), [("averaged by hand", 1), *[(name, 2) for name in RIGHT]]
)
def test_replicas_that_are_equal_or_none_pass(
    name: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, RIGHT[name], workers) == 0, capfd.readouterr().err


def test_without_the_option_nothing_is_compared(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN + WRONG["seeds that differ"][1])
    assert supervise(Target(script=str(tmp_path / "script.py")), 2).exit_code == 0
