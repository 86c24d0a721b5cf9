"""Ranks of different speed, through `train` and a Stepper: what is recorded, the bits, and what
balance cannot be combined with.
"""

from __future__ import annotations

import json
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
    assert (
        len({*run_ranks(trained, 2, (str(run), "1,2")), *run_ranks(trained, 1, (None, None))}) == 1
    )
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert next(record["line"] for record in records if record.get("event") == "start").startswith(
        "global batch 11 = 3 micro-batches x 4, the last 3; 2 ranks: 1, 2; "
    )
    steps = [record["samples_by_rank"] for record in records if record["kind"] == "step"]
    assert steps == [[4, 7]] * 12


def stepper_with(balance: str, **options: Any) -> tuple[lockstep.Loader, torch.nn.Module, Stepper]:
    model = torch.nn.Linear(2, 1)
    loader = lockstep.Loader(
        TensorDataset(torch.randn(12, 2)), global_batch=6, micro_batch=2, balance=balance
    )
    return loader, model, Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def with_local_steps(world: lockstep.World) -> list[tuple[int, ...]]:
    loader, model, stepper = stepper_with("2,1", sync_every=2)
    samples = []
    for window in next(loader.epochs(1)):
        for (x,) in stepper.micro_batches(window):
            stepper.backward(model(x).sum(), weight=len(x))
        samples.append(stepper.step().samples_by_rank)
    return samples


def test_replicas_that_step_alone_keep_to_given_numbers() -> None:
    assert run_ranks(with_local_steps, 2) == [[(4, 2)] * 2] * 2


def with_server(world: lockstep.World) -> None:
    loader, _, stepper = stepper_with("2,1", update="server")
    with refused("balance-with-server", balance="2,1", update="server"):
        stepper.draws(loader)


def test_a_loop_of_ones_own_is_refused_the_same_combinations() -> None:
    run_ranks(with_server, 2)
