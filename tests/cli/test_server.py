"""`lockstep train --update server`: to the end, through a worker's death, a server's death, and
a request to stop.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lockstep as package
from lockstep.runtime import status
from tests.cli.command import Command
from tests.cli.training_process import TrainingProcess, nobody_left
from tests.training import toy

EPOCHS, SAMPLES, STEPS = 2, 250, 46
TASK = f"""
import os, time
from pathlib import Path
from tests.training import toy

class Net(toy.Net):
    def forward(self, x):
        if self.training and Path("slowly").exists():
            time.sleep(0.1)
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net, train_data=toy.data({SAMPLES}, 1), epochs={EPOCHS})
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[TrainingProcess]:
    with nobody_left(TrainingProcess(tmp_path, TASK, "--update", "server")) as made:
        yield made


def start_slowly(training: TrainingProcess, steps: int, workers: int | str, *options: str) -> None:
    """Return when it has trained so many steps."""
    (training.folder / "slowly").touch()
    training.start(workers, *options)
    training.until(lambda: len(training.records()) >= steps)


def check_resumed(training: TrainingProcess, workers: int, *options: str) -> str:
    """The same command goes to the end, and every sample has counted once. Returns what it says."""
    (training.folder / "slowly").unlink()
    training.start(workers, *options)
    code, out, err = training.end()
    assert code == 0, err
    assert f"{STEPS} steps, {workers} workers" in out
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}
    return err


def samples(records: list[dict[str, Any]]) -> Counter[int]:
    """Of each epoch, those in windows that were applied."""
    found: Counter[int] = Counter()
    for each in records:
        found[each["epoch"]] += sum(each["samples_by_rank"])
    return found


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.rest)])
def test_a_killed_worker_restarts_the_run_from_its_checkpoint(
    training: TrainingProcess, rank: int
) -> None:
    start_slowly(training, 12, "2:3", "--checkpoint-every", "5")
    killed = training.rank(rank)
    (training.folder / "slowly").unlink()
    killed.kill()
    code, out, err = training.end()
    assert code == 0, err
    assert "was killed by signal 9 (SIGKILL)" in err
    assert "resumed from step " in err
    line = rf"my_task: {EPOCHS} epochs, {STEPS} steps, [23] workers, server, staleness 4, messages"
    assert re.match(line + r" \| accuracy 0\.", out), out
    steps = training.records()
    assert sorted(each["step"] for each in steps) == list(range(1, STEPS + 1))
    assert all(each["gradient_age"] >= 0 for each in steps)
    assert samples(steps) == {1: SAMPLES, 2: SAMPLES}
    assert [each["step"] for each in training.records("evaluate")] == [23, 46]
    assert (training.folder / "run" / "checkpoints" / "step-0000046").exists()


@pytest.mark.rest
def test_a_workers_death_ends_a_run_with_a_fixed_number_of_workers(
    training: TrainingProcess,
) -> None:
    start_slowly(training, 12, 3, "--checkpoint-every", "5")
    killed = training.rank(1)
    killed.kill()
    code, out, err = training.end()
    assert (code, out) == (137, "")
    assert f"rank 1 (pid {killed.pid}" in err.splitlines()[-1]
    assert "was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    assert "resumed from step " in check_resumed(training, 2, "--checkpoint-every", "5")


def test_asked_to_stop_all_meet_and_save(training: TrainingProcess) -> None:
    start_slowly(training, 6, 3, "--staleness", "inf")
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    code, out, err = training.end()
    assert (code, out) == (75, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("stopped after step ")]
    step = int(line.split()[3])
    assert sorted(each["step"] for each in training.records()) == list(range(1, step + 1))
    assert (training.folder / "run" / "checkpoints" / f"step-{step:07d}").exists()
    resumed = check_resumed(training, 4, "--staleness", "inf")
    assert f"resumed from step {step} of {STEPS}" in resumed


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.rest)])
def test_a_stopped_worker_is_the_one_that_is_blamed(training: TrainingProcess, rank: int) -> None:
    start_slowly(training, 6, 3, "--stall-after", "3")
    training.rank(rank).suspend()
    code, _, err = training.end()
    assert code == 76, err
    (line,) = [line for line in err.splitlines() if line.startswith("STALL")]
    one, other = (number for number in range(3) if number != rank)
    assert re.search(rf"ranks {one} and {other} wait .*\. Rank {rank} .*: stopped", line)
    assert line.endswith(f"rank-{rank}.log")


def test_the_step_on_a_page_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is ten times as patient in the first step."""
    steps: list[int] = []
    monkeypatch.setattr(status, "step", steps.append)
    with package.init(backend="gloo"):
        model = toy.Net()
        stepper = package.Stepper(model, toy.sgd(model), update="server")
        loader = package.Loader(toy.data(44, 1), global_batch=11, micro_batch=4)
        stepper.draws(loader)
        for epoch in loader.epochs(1):
            for window in epoch:
                for batch in stepper.micro_batches(window):
                    stepper.backward(*toy.loss(model(batch[0]), batch))
                stepper.step()
    assert steps == sorted(steps)
    assert {1, 2, 3, 4} <= {*steps}


LEAVES = """
import os, time
import torch
import lockstep
from tests.training import toy

with lockstep.init() as world:
    model = toy.Net()
    stepper = lockstep.Stepper(model, toy.sgd(model), update="server", staleness="inf")
    loader = lockstep.Loader(toy.data(44, 1), global_batch=11, micro_batch=4)
    stepper.draws(loader)
    for epoch in loader.epochs(10**6):
        for window in epoch:
            for batch in stepper.micro_batches(window):
                if world.rank == 1 and window.epoch == 1:
                    os._exit(0)
                stepper.backward(*toy.loss(model(batch[0]), batch))
            stepper.step()
"""


def test_a_worker_that_leaves_silently_is_named(tmp_path: Path, lockstep: Command) -> None:
    """It leaves with code 0: what the others report of it is all there is."""
    (tmp_path / "script.py").write_text(LEAVES)
    ended = lockstep("run --workers 2 script.py")
    assert ended.code == 1
    assert "PeerFailed: rank 1 has ended" in ended.err, ended.err
    assert "[peer-gone]" in ended.err
