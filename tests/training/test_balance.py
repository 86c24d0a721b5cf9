"""Ranks of different speed, through Stepper and `train`: what they tell each other, what is
recorded, and with what it does not go.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep import testing
from lockstep.step.step_result import StepperClock
from lockstep.step.stepper import Stepper
from lockstep.testing import run_ranks
from lockstep.training.train import train
from tests.data.scripted import Scripted, scripted
from tests.refused import refused
from tests.training import toy

_DAWDLES = 0.2


def linear(balance: str, **options: Any) -> tuple[lockstep.Loader, torch.nn.Module, Stepper]:
    model = torch.nn.Linear(2, 1)
    loader = lockstep.Loader(
        TensorDataset(torch.randn(12, 2)), global_batch=6, micro_batch=2, balance=balance
    )
    return loader, model, Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def walk(
    loader: lockstep.Loader, model: torch.nn.Module, stepper: Stepper, epochs: int
) -> list[tuple[int, ...]]:
    found = []
    for epoch in loader.epochs(epochs):
        for window in epoch:
            for (x,) in stepper.micro_batches(window):
                stepper.backward(model(x).sum(), weight=len(x))
            found.append(stepper.step().samples_by_rank)
    return found


def told(world: lockstep.World) -> list[tuple[float, ...]]:
    """Rank 1 dawdles in its forwards, of which it has two and then one; rank 2 has none."""
    testing.slow_at(1, 1, "forward", _DAWDLES)
    loader, model, stepper = linear("auto")
    scripted(loader, {0: (1, 2, 0), 2: (2, 1, 0)})
    assert walk(loader, model, stepper, 3) == [(2, 4, 0)] * 2 + [(4, 2, 0)] * 4
    assert isinstance(loader.balancer, Scripted)
    return loader.balancer.told


def test_all_ranks_know_what_a_micro_batch_takes_each_without_the_waiting_for_others() -> None:
    ranks = run_ranks(told, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][0] == (0.0, 0.0, 0.0)  # there was no step before the first
    quick, slow, idle = (median(column) for column in zip(*ranks[0][1:], strict=True))
    assert slow > _DAWDLES > quick > 0
    # of one, where it had two
    assert min(each[1] for each in ranks[0][1:3]) < 1.5 * min(each[1] for each in ranks[0][3:])
    assert idle == 0


def slowly(world: lockstep.World, run: str | None, balance: str | None) -> str:
    """As if a micro-batch took rank 0 three times what it takes rank 1."""
    end = StepperClock.end

    def ended(clock: StepperClock, *told: Any) -> Any:
        found = end(clock, *told)
        clock.per_micro_batch = 0.1 if world.rank else 0.3
        return found

    StepperClock.end = ended  # type: ignore[method-assign]  # in this process, which ends with the test
    return train(toy.task(epochs=3), exact=True, run=run, balance=balance).sha256


def test_a_run_says_when_shares_move_and_its_bits_do_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert (
        len({*run_ranks(slowly, 2, (str(run), "auto")), *run_ranks(slowly, 1, (None, None))}) == 1
    )
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (moved,) = [record for record in records if record.get("event") == "balance"]
    assert moved == {
        "kind": "event",
        "event": "balance",
        "line": "micro-batches by rank: 1, 2 (rank 0 takes 3.0x as long for one as rank 1)",
        "step": 10,
        "micro_batches_by_rank": [1, 2],
        "seconds_by_rank": [pytest.approx(0.3), pytest.approx(0.1)],
    }
    assert next(record["line"] for record in records if record.get("event") == "start").startswith(
        "global batch 11 = 3 micro-batches x 4, the last 3; 2 ranks: 2, 1, by measured speed; "
    )
    assert [record["samples_by_rank"] for record in records if record["kind"] == "step"] == [
        [8, 3]
    ] * 9 + [[4, 7]] * 3


def with_local_steps(world: lockstep.World) -> list[tuple[int, ...]]:
    return walk(*linear("2,1", sync_every=2), 1)


def test_replicas_that_step_alone_keep_to_given_numbers() -> None:
    assert run_ranks(with_local_steps, 2) == [[(4, 2)] * 2] * 2


def refusals(world: lockstep.World) -> None:
    with refused("balance-with-sync-every", balance="auto", sync_every=2):
        walk(*linear("auto", sync_every=2), 1)
    loader, _, stepper = linear("2,1", update="server")
    with refused("balance-with-server", balance="2,1", update="server"):
        stepper.draws(loader)
    loader, _, _ = linear("auto")
    with refused("window-before-step"):
        list(next(loader.epochs(1)))


def test_by_hand_too_what_does_not_go_together_is_refused() -> None:
    run_ranks(refusals, 2)
