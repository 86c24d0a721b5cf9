"""`lockstep.prepare` with a run directory: a loop that was left goes on, with all that it carries."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep
from lockstep import runs
from lockstep.checkpoints.folders import written
from lockstep.errors import Preempted, UsageError
from lockstep.testing import run_ranks
from lockstep.tools.verify.finished_runs import differences
from tests.training.prepared import equal, plain_net, same_on_all, samples, state_of


def keeping_another(world: lockstep.World, folder: str) -> str:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best: Any = {"value": 0}
    data = DataLoader(samples(), batch_size=32)
    model, optimizer, loader, best = lockstep.prepare(
        model, optimizer, data, best, run=folder, checkpoint_every=1, world=world
    )
    try:
        for _ in loader.epochs(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                best["value"] = world.rank
    except UsageError as error:
        best["value"] = 0  # the world saves once more as it closes
        return error.code
    return ""


def test_what_a_run_keeps_is_equal_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(keeping_another, 2, (str(tmp_path),)) == ["saved-state-differs"] * 2


def trained_in_a_run(
    world: lockstep.World, folder: str, leave: int = 99, endless: bool = False, every: int = 3
) -> tuple[int, list[Tensor]]:
    """A GAN with a GradScaler, schedulers and BatchNorm. The loop is left after `leave` steps."""
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    d = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_g, of_d = torch.optim.AdamW(g.parameters(), 0.01), torch.optim.SGD(d.parameters(), 0.1, 0.9)
    falling = torch.optim.lr_scheduler.StepLR(of_d, 1, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
    data = DataLoader(samples(), batch_size=32, shuffle=True)
    average = torch.optim.swa_utils.AveragedModel(g)
    counted = {"steps": 0.0}
    g, d, of_g, of_d, loader, falling, *_ = lockstep.prepare(
        *(g, d, of_g, of_d, data, falling, scaler, average, counted),
        micro_batch=8,
        backwards=(1, 2),
        exact=True,
        world=world,
        run=folder,
        checkpoint_every=every,
    )
    loss = F.binary_cross_entropy_with_logits

    def body(x: Tensor) -> None:
        real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        made = g(x[:, :4])
        scaler.scale(loss(d(x), real)).backward()
        scaler.scale(loss(d(made.detach()), fake)).backward()
        scaler.step(of_d)
        scaler.scale(loss(d(made), real)).backward()
        scaler.step(of_g)
        scaler.update()
        lockstep.log(length=float(len(x)))
        if loader.stepped:
            average.update_parameters(g)
            counted["steps"] += 1

    if endless:
        for x, _ in loader.endless():
            body(x)
            if loader.step in (leave, 16):
                break
        assert counted["steps"] == loader.step
        return loader.step, state_of(g, d, average)
    for _ in loader.epochs(4):
        for x, _ in loader:
            body(x)
            if loader.step == leave:
                return loader.step, state_of(g, d, average)
        falling.step()
    assert counted["steps"] == loader.step
    return loader.step, state_of(g, d, average)


def test_a_loop_that_was_left_goes_on_with_the_same_bits_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    expected = run_ranks(trained_in_a_run, 1, (str(tmp_path / "whole"),))[0]
    assert expected[0] == 16
    for leave in (2, 7):  # before the first checkpoint, after it
        folder = str(tmp_path / f"left{leave}")
        assert run_ranks(trained_in_a_run, 2, (folder, leave))[0][0] == leave
        for step, state in run_ranks(trained_in_a_run, 3, (folder,)):
            assert step == 16
            assert equal(state, expected[1])
    assert differences(tmp_path / "whole", Path(folder)).sentences == []
    assert runs.read(Path(folder)).timeline is not None
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == list(range(1, 17))


def refused_run(world: lockstep.World, folder: str) -> dict[str, Any]:
    try:
        trained_in_a_run(world, folder)
    except UsageError as error:
        return {"code": error.code, "step": error.values["step"]}
    return {}


def test_models_of_different_steps_do_not_go_on_together(tmp_path: Path) -> None:
    run_ranks(trained_in_a_run, 2, (str(tmp_path), 13, False, 1))  # a checkpoint after each step
    first, second = written(tmp_path / "checkpoints"), written(tmp_path / "checkpoints-2")
    assert [path.name for path in first][-2:] == ["step-0000012", "step-0000013"]
    assert len(first) < 8
    assert {path.name for path in first} <= {path.name for path in second}
    assert len(second) < 10, "one of which the first model has none stays no longer"
    shutil.rmtree(tmp_path / "checkpoints-2" / "step-0000013")
    expected = {"code": "no-such-step", "step": 13}
    assert run_ranks(refused_run, 2, (str(tmp_path),)) == [expected] * 2


def test_a_loop_that_counts_steps_goes_on_too(tmp_path: Path) -> None:
    whole = run_ranks(trained_in_a_run, 2, (str(tmp_path / "whole"), 16, True))[0]
    folder = str(tmp_path / "left")
    run_ranks(trained_in_a_run, 2, (folder, 7, True))
    for ranks in (3, 1):  # the second time nothing is left to train
        for step, state in run_ranks(trained_in_a_run, ranks, (folder, 16, True)):
            assert step == 16
            assert equal(state, whole[1])


def asked_to_stop(world: lockstep.World, folder: str) -> int:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data = DataLoader(samples(), batch_size=20)
    model, optimizer, loader, falling = lockstep.prepare(
        model, optimizer, data, falling, run=folder, clip=0.1, world=world
    )
    try:
        for _ in loader.epochs(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                falling.step()
                if loader.step == 2 and world.rank == 0:
                    signal.raise_signal(signal.SIGTERM)
    except Preempted as stop:
        return stop.step
    return 0


def test_a_run_that_was_asked_to_stop_is_saved_and_not_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_ranks(asked_to_stop, 2, (str(folder),)) == [3, 3]
    run = runs.read(folder)
    assert run.state == "interrupted"
    assert [record.step for record in run.steps] == [1, 2, 3]
    assert [record.lr for record in run.steps] == [0.1, 0.05, 0.025]
    assert all((record.grad_norm or 0) > 0 for record in run.steps)
    sent = [record.bytes_sent or 0 for record in run.steps]
    assert sent[2] <= sent[1]  # of each step, and not of all so far
    assert not (folder / "result.json").exists()
    assert run_ranks(asked_to_stop, 3, (str(folder),)) == [0] * 3
    assert runs.read(folder).state == "finished"


def counted_again(world: lockstep.World, folder: str, loops: str) -> str:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, DataLoader(samples(), batch_size=32), run=folder, world=world
    )
    try:
        for _ in loader.epochs(1) if loops == "epochs" else range(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    except UsageError as error:
        return error.code
    return ""


def test_a_loop_that_counts_from_0_is_refused_after_a_resume(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run_ranks(counted_again, 2, (folder, "range")) == [""] * 2
    assert run_ranks(counted_again, 3, (folder, "range")) == ["epochs-after-resume"] * 3


# -- carried states -------------------------------------------------------------------------------


def recurrent(world: lockstep.World, folder: str | None = None, leave: int = 99) -> list[Tensor]:
    """Truncated backpropagation: each batch is the next chunk of 12 sequences; a micro-batch has
    some of them.
    """
    torch.manual_seed(0)
    model = nn.GRU(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    chunks: Any = list(torch.randn(9 * 12, 5, 3, generator=generator))
    model, optimizer, loader = lockstep.prepare(
        *(model, optimizer, DataLoader(chunks, batch_size=12)),
        micro_batch=3,
        exact=True,
        world=world,
        run=folder,
        checkpoint_every=2,
    )
    for _ in loader.epochs(2):
        for x in loader:
            output, hidden = model(x.transpose(0, 1), loader.carried.get("hidden"))
            loader.carried["hidden"] = hidden.detach()
            output.square().mean().backward()
            optimizer.step()
            if loader.step == leave:
                return state_of(model)
    return state_of(model)


def old_recurrent() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.GRU(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    chunks = torch.randn(9 * 12, 5, 3, generator=generator).split(12)
    hidden = None
    for x in chunks * 2:
        output, hidden = model(x.transpose(0, 1), hidden)
        hidden = hidden.detach()
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    return state_of(model)


def test_a_hidden_state_is_carried_on_any_number_of_ranks() -> None:
    for tensor, expected in zip(same_on_all(recurrent), old_recurrent(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def carried_by_copies(world: lockstep.World) -> None:
    """Two micro-batches a step; what the step before has carried is there, on idle ranks too."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(list(torch.arange(16.0).unsqueeze(1)), batch_size=4)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, micro_batch=2, world=world
    )
    for x in loader:
        if x[0] >= 4:
            assert torch.equal(loader.carried["x"] + 4, x)
        loader.carried["x"] = x
        model(x).mean().backward()
        optimizer.step()


def test_a_rank_without_a_micro_batch_carries_its_copy() -> None:
    run_ranks(carried_by_copies, 3)


def test_a_hidden_state_is_saved_with_the_run(tmp_path: Path) -> None:
    expected = run_ranks(recurrent, 1)[0]
    for ranks in (1, 2):
        folder = str(tmp_path / f"run{ranks}")
        run_ranks(recurrent, 3, (folder, 5))
        for state in run_ranks(recurrent, ranks, (folder,)):
            assert equal(state, expected)
