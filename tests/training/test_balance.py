"""Ranks of different speed, through `train` and a Stepper: what is recorded, the bits, and what
balance cannot be combined with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.step.stepper import Stepper
from lockstep.testing import run_ranks
from lockstep.training.train import train
from tests.refused import refused
from tests.training import toy


def trained(world: lockstep.World, run: str | None, balance: str | None) -> str:
    return train(toy.task(epochs=3), exact=True, run=run, balance=balance).sha256


def test_a_run_records_its_shares_and_its_bits_do_not_depend_on_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    digests = run_ranks(trained, 2, (str(run), "1,2"))
    assert {*digests} == {toy.alone(trained, None, None)}
    (start,) = [event for event in toy.records(run, "event") if event["event"] == "start"]
    assert start["line"].startswith(
        "global batch 11 = 3 micro-batches x 4, the last 3; 2 ranks: 1, 2; "
    )
    assert [step["samples_by_rank"] for step in toy.records(run, "step")] == [[4, 7]] * 12


def stepper_with(balance: str, **options: Any) -> tuple[lockstep.Loader, torch.nn.Module, Stepper]:
    model = torch.nn.Linear(2, 1)
    loader = lockstep.Loader(
        TensorDataset(torch.randn(12, 2)), global_batch=6, micro_batch=2, balance=balance
    )
    return loader, model, Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def in_a_loop_of_ones_own(world: lockstep.World) -> list[tuple[int, ...]]:
    loader, model, stepper = stepper_with("2,1", sync_every=2)
    samples = []
    for window in next(loader.epochs(1)):
        for (x,) in stepper.micro_batches(window):
            stepper.backward(model(x).sum(), weight=len(x))
        samples.append(stepper.step().samples_by_rank)
    loader, _, stepper = stepper_with("2,1", update="server")
    with refused("balance-with-server", balance="2,1", update="server"):
        stepper.draws(loader)
    return samples


def test_replicas_that_step_alone_keep_to_given_numbers_and_a_server_is_refused() -> None:
    assert run_ranks(in_a_loop_of_ones_own, 2) == [[(4, 2)] * 2] * 2
