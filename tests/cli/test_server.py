"""`lockstep train --update server`: to the end, through a worker's death, a server's death, and
a request to stop.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.training_process import TrainingProcess, nobody_left

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
    with nobody_left(TrainingProcess(tmp_path, TASK)) as made:
        yield made


def samples(records: list[dict[str, Any]]) -> Counter[int]:
    """Of each epoch, those in windows that were applied."""
    found: Counter[int] = Counter()
    for each in records:
        found[each["epoch"]] += sum(each["samples_by_rank"])
    return found


def test_to_the_end(training: TrainingProcess) -> None:
    training.start(
        3, "--update", "server:lr=by-age", "--staleness", "2", "--checkpoint-every", "10"
    )
    code, out, err = training.end()
    assert code == 0, err
    assert out.startswith(
        f"my_task: {EPOCHS} epochs, {STEPS} steps, 3 workers, server:lr=by-age, staleness 2,"
        " messages | accuracy 0."
    )
    steps = training.records()
    assert sorted(each["step"] for each in steps) == list(range(1, STEPS + 1))
    assert all(each["gradient_age"] >= 0 and len(each["samples_by_rank"]) == 3 for each in steps)
    assert samples(steps) == {1: SAMPLES, 2: SAMPLES}
    assert [each["step"] for each in training.records("evaluate")] == [23, 46]
    assert (training.folder / "run" / "checkpoints" / "step-0000046").exists()


def test_the_rest_go_on_without_a_worker_that_was_killed(training: TrainingProcess) -> None:
    (training.folder / "slowly").touch()
    training.start(4, "--update", "server:shards=1", "--staleness", "inf")
    training.until(lambda: len(training.records()) >= 1)
    worker = training.rank(2)
    training.until(lambda: len(training.records()) >= 5)
    worker.kill()
    (training.folder / "slowly").unlink()
    code, out, err = training.end()
    assert code == 0, err
    assert "was killed by signal 9 (SIGKILL): the other ranks continue without it" in err
    assert f"{STEPS} steps, 3 workers" in out
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}
    assert sorted(each["step"] for each in training.records()) == list(range(1, STEPS + 1))
    assert sum(each["samples_by_rank"][2] for each in training.records() if each["epoch"] == 2) == 0


def test_a_shards_death_ends_the_run_which_can_be_gone_on_with(training: TrainingProcess) -> None:
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


def test_asked_to_stop_all_meet_and_save(training: TrainingProcess) -> None:
    (training.folder / "slowly").touch()
    training.start(3, "--update", "server", "--staleness", "inf")
    training.until(lambda: len(training.records()) >= 6)
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    code, out, err = training.end()
    assert (code, out) == (75, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("stopped after step ")]
    step = int(line.split()[3])
    assert sorted(each["step"] for each in training.records()) == list(range(1, step + 1))
    assert (training.folder / "run" / "checkpoints" / f"step-{step:07d}").exists()
    (training.folder / "slowly").unlink()
    training.start(4, "--update", "server", "--staleness", "inf")
    code, out, err = training.end()
    assert code == 0, err
    assert f"resumed from step {step} of {STEPS}" in err
    assert samples(training.records()) == {1: SAMPLES, 2: SAMPLES}


@pytest.mark.parametrize(("update", "rank"), [("server", 0), ("server", 2), ("server:shards=1", 1)])
def test_a_stopped_worker_is_the_one_that_is_blamed(
    training: TrainingProcess, update: str, rank: int
) -> None:
    (training.folder / "slowly").touch()
    training.start(3, "--update", update, "--stall-after", "3")
    training.until(lambda: len(training.records()) >= 6)
    training.rank(rank).suspend()
    code, _, err = training.end()
    assert code == 76, err
    (line,) = [line for line in err.splitlines() if line.startswith("STALL")]
    others = [each for each in range(3) if each != rank]
    assert re.search(rf"ranks {others[0]} and {others[1]} wait .*\. Rank {rank} .*: stopped", line)
    assert line.endswith(f"rank-{rank}.log")


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
    command = [sys.executable, "-m", "lockstep", "run", "--workers", "2", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    said = "PeerFailed: rank 1 has ended. The others cannot continue, because it held 100 % of the parameters"
    assert said in ended.stderr, ended.stderr
    assert "[server-rank-gone]" in ended.stderr
