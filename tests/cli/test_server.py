"""`lockstep train --update server`: to the end, through a worker's death, a server's death, and a request to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
EPOCHS, SAMPLES, STEPS = 2, 250, 46
TASK = f"""
import time
from pathlib import Path
from tests.training import toy

class Net(toy.Net):
    def forward(self, x):
        if self.training and Path("slowly").exists():
            time.sleep(0.02)
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net, train_data=toy.data({SAMPLES}, 1), epochs={EPOCHS})
"""


class Training:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        (folder / "my_task.py").write_text(TASK)

    def start(self, workers: int | str, *options: str) -> None:
        command = [sys.executable, "-m", "lockstep", "train", "my_task.py", "--workers", str(workers), "--run", "run", *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, there: Callable[[], bool]) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 60
        while not there():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        metrics = self.folder / "run" / "metrics.jsonl"
        if not metrics.exists():
            return []
        found = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [each for each in found if each["kind"] == kind]

    def rank(self, number: int) -> psutil.Process:
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        raise AssertionError(f"rank {number} is not there")

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=100)
        return self.process.returncode, out, err


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]


def samples(records: list[dict[str, Any]]) -> Counter[int]:
    """Of each epoch, those in windows that were applied."""
    found: Counter[int] = Counter()
    for each in records:
        found[each["epoch"]] += sum(each["samples_by_rank"])
    return found


def test_to_the_end(training: Training) -> None:
    training.start(3, "--update", "server:lr=by-age", "--staleness", "2", "--checkpoint-every", "10")
    code, out, err = training.end()
    assert code == 0, err
    assert out.startswith(f"my_task: {EPOCHS} epochs, {STEPS} steps, 3 workers, server:lr=by-age, staleness 2, messages | accuracy 0.")
    steps = training.records()
    assert sorted(each["step"] for each in steps) == list(range(1, STEPS + 1))
    assert all(each["gradient_age"] >= 0 and len(each["samples_by_rank"]) == 3 for each in steps)
    assert samples(steps) == {1: SAMPLES, 2: SAMPLES}
    assert [each["step"] for each in training.records("evaluate")] == [23, 46]
    assert (training.folder / "run" / "checkpoints" / "step-0000046").exists()


def test_the_rest_go_on_without_a_worker_that_was_killed(training: Training) -> None:
    (training.folder / "slowly").touch()
    training.start(4, "--update", "server:shards=1", "--staleness", "inf")
    training.until(lambda: len(training.records()) >= 5)
    training.rank(2).kill()
    (training.folder / "slowly").unlink()
    code, out, err = training.end()
    assert code == 0, err
    assert "was killed by signal 9 (SIGKILL): the rest go on without it" in err
    assert f"{STEPS} steps, 3 workers" in out
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}
    assert sorted(each["step"] for each in training.records()) == list(range(1, STEPS + 1))
    assert sum(each["samples_by_rank"][2] for each in training.records() if each["epoch"] == 2) == 0


def test_a_shards_death_ends_the_run_which_can_be_gone_on_with(training: Training) -> None:
    (training.folder / "slowly").touch()
    training.start(3, "--update", "server", "--checkpoint-every", "5")
    training.until(lambda: len(training.records()) >= 12)
    killed = training.rank(1)
    killed.kill()
    code, out, err = training.end()
    assert (code, out) == (137, "")
    assert f"rank 1 (pid {killed.pid}" in err.splitlines()[-1]
    assert "was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    (training.folder / "slowly").unlink()
    training.start(2, "--update", "server", "--checkpoint-every", "5")
    code, out, err = training.end()
    assert code == 0, err
    assert "resumed from step " in err
    assert f"{STEPS} steps, 2 workers" in out
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}


def test_asked_to_stop_all_meet_and_save(training: Training) -> None:
    (training.folder / "slowly").touch()
    training.start(3, "--update", "server", "--staleness", "inf")
    training.until(lambda: len(training.records()) >= 6)
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    code, out, err = training.end()
    assert (code, out) == (75, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("stopped as asked after step ")]
    step = int(line.split()[5])
    assert sorted(each["step"] for each in training.records()) == list(range(1, step + 1))
    assert (training.folder / "run" / "checkpoints" / f"step-{step:07d}").exists()
    (training.folder / "slowly").unlink()
    training.start(4, "--update", "server", "--staleness", "inf")
    code, out, err = training.end()
    assert code == 0, err
    assert f"resumed from step {step} of {STEPS}" in err
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}


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


def test_who_held_what_is_said_of_a_shard_that_has_gone(tmp_path: Path) -> None:
    """It leaves without a word and with code 0: what the others say of it is all there is."""
    (tmp_path / "script.py").write_text(LEAVES)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 1
    assert "PeerFailed: rank 1, which held 100 % of the parameters, has gone" in ended.stderr, ended.stderr
    assert "the same command goes on" in ended.stderr
