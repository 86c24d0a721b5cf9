"""A training that is asked to stop stops after a step, saves, and leaves with 75; the same
command goes on to the same weights.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.training.train import train
from tests.cli.training_process import TrainingProcess, nobody_left
from tests.training import toy

TASK = """
import os, time
from pathlib import Path
from tests.training import toy

class Net(toy.Net):
    def forward(self, x):
        if not self.training and Path("slow evaluation").exists():
            with open("evaluated", "a") as file:
                file.write("x")
            time.sleep(0.3)
        if self.training and Path("slowly").exists():
            time.sleep(0.1)
        return super().forward(x)

def task():
    while Path("not yet").exists():
        Path(f"waiting-{os.environ['RANK']}").touch()
        time.sleep(0.01)
    return toy.task(name=None, model=Net, epochs=6, eval_micro_batch=1)
"""


class Training(TrainingProcess):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TASK, "--exact", "--loader-workers", "1")

    def steps(self) -> int:
        return len(self.records())

    def sha256(self) -> str:
        return str(json.loads((self.folder / "run" / "result.json").read_text())["sha256"])

    def evaluations(self) -> list[object]:
        return [
            {key: value for key, value in record.items() if key != "seconds"}
            for record in self.records("evaluate")
        ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[object]]:
    """The weights and evaluations of a training that nobody asks to stop, in this process."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    task = toy.task(name=None, epochs=6, eval_micro_batch=1)
    train(task, exact=True, run=training.folder / "run")
    return training.sha256(), training.evaluations()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with nobody_left(Training(tmp_path)) as made:
        yield made


def hit(training: Training, who: str, number: signal.Signals) -> None:
    everybody = training.everybody()
    chosen = (
        [training.rank(1)] if who == "rank" else everybody[-1:] if who == "launcher" else everybody
    )
    for process in chosen:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def check_resumed(training: Training, undisturbed: object) -> str:
    """The same command on one rank ends as if nothing had happened. Returns what it says."""
    for name in ("slowly", "slow evaluation"):
        (training.folder / name).unlink(missing_ok=True)
    training.start(workers=1)
    ended, _, err = training.end()
    assert ended == 0, err
    assert (training.sha256(), training.evaluations()) == undisturbed
    return err


@pytest.mark.parametrize(
    ("who", "number", "code"),
    [
        ("everybody", signal.SIGTERM, 75),
        pytest.param("rank", signal.SIGUSR1, 75, marks=pytest.mark.rest),
        pytest.param("launcher", signal.SIGINT, 130, marks=pytest.mark.rest),
    ],
)
def test_in_a_step(
    training: Training, undisturbed: object, who: str, number: signal.Signals, code: int
) -> None:
    """`everybody`: as schedulers do it, loader workers too."""
    (training.folder / "slowly").touch()
    training.start()
    training.until(lambda: training.steps() >= 6)
    hit(training, who, number)
    before = training.steps()
    ended, out, err = training.end()
    assert (ended, out) == (code, "")
    (stopped,) = [line for line in err.splitlines() if line.startswith("stopped after step ")]
    step = int(stopped.split()[3])
    assert before <= step <= before + 3
    assert stopped.endswith(f"step {step} of 24, saved: resume with the same command and --run run")
    assert "Traceback" not in err
    *_, newest = sorted((training.folder / "run" / "checkpoints").iterdir())
    assert newest.name == f"step-{step:07d}"
    assert f"resumed from step {step} of 24" in check_resumed(training, undisturbed)


def test_in_an_evaluation_which_is_made_up_for(training: Training, undisturbed: object) -> None:
    """21 samples, of which every one takes its time."""
    (training.folder / "slow evaluation").touch()
    training.start()
    training.until((training.folder / "evaluated").exists)
    hit(training, "rank", signal.SIGTERM)
    ended, _, err = training.end()
    assert ended == 75, err
    assert "stopped after step 4 of 24, saved" in err
    # it was not waited for the end of the evaluation
    assert len((training.folder / "evaluated").read_text()) < 21
    check_resumed(training, undisturbed)


def start_until_ranks_wait(training: Training) -> None:
    (training.folder / "not yet").touch()
    waiting = [training.folder / f"waiting-{rank}" for rank in (0, 1)]
    for file in waiting:  # of the start before
        file.unlink(missing_ok=True)
    training.start()
    training.until(lambda: all(file.exists() for file in waiting))


def test_while_it_starts_and_a_second_signal_does_not_wait(training: Training) -> None:
    start_until_ranks_wait(training)
    hit(training, "everybody", signal.SIGTERM)
    (training.folder / "not yet").unlink()
    ended, out, err = training.end()
    assert (ended, out) == (75, ""), err
    assert "Traceback" not in err
    start_until_ranks_wait(training)
    assert training.process is not None
    training.process.send_signal(signal.SIGINT)
    assert training.process.stderr is not None
    line = training.process.stderr.readline()
    assert line == "Ctrl-C: stopping after this step; repeat it to stop at once\n"
    training.process.send_signal(signal.SIGINT)
    ended, _, err = training.end()
    assert (ended, err) == (130, "stopped by Ctrl-C; all ranks have ended\n")


def test_a_rank_that_is_killed_meanwhile_begins_nothing_anew(training: Training) -> None:
    (training.folder / "slowly").touch()
    training.start(workers="1:2")
    training.until(lambda: training.steps() >= 2)
    rank = training.rank(1)
    rank.suspend()  # the others cannot take the step after which they would leave
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    assert training.process.stderr is not None
    while "stopping after this step" not in training.process.stderr.readline():
        pass
    rank.kill()
    ended, _, err = training.end()
    assert ended == 75, err
    assert f"rank 1 (pid {rank.pid}, " in err
    assert "was killed by signal 9" in err
    assert "restart" not in err
    assert err.endswith("stopped by signal 15 (SIGTERM); all ranks have ended\n")
