"""Replicas against torch's DataParallel on the first and the last GPU. On a CPU, which DataParallel
leaves alone, against the bare module; tests/step/test_replicas.py has its semantics on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep


@pytest.mark.parametrize("algorithm", ["ring", "central"])
def test_losses_and_weights_are_those_of_data_parallel(device: str, algorithm: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    last = torch.cuda.device_count() - 1
    devices = ["cuda:0", f"cuda:{last}"] if device == "cuda" else ["cpu", "cpu"]
    replicas = lockstep.Replicas(module, 2, devices, algorithm=algorithm)
    replicas.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    theirs = nn.DataParallel(module.to(device))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(10, 16), torch.randint(0, 4, (10,))
        sgd.zero_grad()
        expected = F.cross_entropy(theirs(x.to(device)), y.to(device))  # of the gathered outputs
        expected.backward()
        sgd.step()
        loss = replicas.gradients(
            (x, y), lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum")
        )
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        replicas.average_gradients()
        replicas.update()
    replicas.check()
    for ours, other in zip(replicas.master.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other.cpu(), rtol=0, atol=1e-5)
