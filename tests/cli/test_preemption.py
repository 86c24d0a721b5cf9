"""A training that is asked to stop stops after a step, saves, and leaves with 75; the same command goes on to the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TASK = """
import os, time
from pathlib import Path
from tests.training import toy

class Net(toy.Net):
    def forward(self, x):
        if not self.training and Path("slowly").exists():
            with open("evaluated", "a") as file:
                file.write("x")
            time.sleep(0.3)
        elif Path("slowly").exists():
            time.sleep(0.02)
        return super().forward(x)

def task():
    while Path("not yet").exists():
        Path(f"waiting-{os.environ['RANK']}").touch()
        time.sleep(0.01)
    return toy.task(name=None, model=Net, epochs=6, eval_micro_batch=1)
"""


class Training:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        (folder / "my_task.py").write_text(TASK)

    def start(self, workers: int | str = 2) -> None:
        command = [sys.executable, "-m", "lockstep", "train", "my_task.py", "--exact", "--workers", str(workers), "--run", "run"]
        command += ["--loader-workers", "1"]
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

    def steps(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count('"kind": "step"') if metrics.exists() else 0

    def everybody(self) -> list[psutil.Process]:
        assert self.process is not None
        launcher = psutil.Process(self.process.pid)
        return [*launcher.children(recursive=True), launcher]

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; nobody is left."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def sha256(self) -> str:
        return str(json.loads((self.folder / "run" / "result.json").read_text())["sha256"])

    def evaluations(self) -> list[object]:
        records = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "seconds"} for record in records if record["kind"] == "evaluate"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[object]]:
    """The weights and evaluations of a training that nobody asks to stop."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    training.start(workers=2)
    ended, _, err = training.end()
    assert ended == 0, err
    return training.sha256(), training.evaluations()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()
    left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
    assert not left


def hit(training: Training, who: str, number: signal.Signals) -> None:
    everybody = training.everybody()
    chosen = {"launcher": everybody[-1:], "rank": training.everybody()[-1].children()[-1:], "everybody": everybody}[who]
    for process in chosen:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.parametrize(
    ("who", "number", "code"),
    [
        ("launcher", signal.SIGTERM, 75),
        ("launcher", signal.SIGUSR1, 75),
        ("launcher", signal.SIGINT, 130),
        ("launcher", signal.SIGHUP, 129),
        ("rank", signal.SIGUSR1, 75),
        ("everybody", signal.SIGTERM, 75),
    ],
)
def test_in_a_step(training: Training, undisturbed: object, who: str, number: signal.Signals, code: int) -> None:
    """`everybody`: as schedulers do it, loader workers too."""
    (training.folder / "slowly").touch()
    training.start()
    training.until(lambda: training.steps() >= 6)
    hit(training, who, number)
    assert training.process is not None
    before = training.steps()
    ended, out, err = training.end()
    assert (ended, out) == (code, "")
    stopped = [line for line in err.splitlines() if line.startswith("stopped as asked after step ")]
    assert len(stopped) == 1, err
    step = int(stopped[0].split()[5])
    assert before <= step <= before + 3
    assert stopped[0].endswith(f"step {step} of 24, saved: the same command goes on")
    assert "Traceback" not in err
    assert [path.name for path in sorted((training.folder / "run" / "checkpoints").iterdir())][-1] == f"step-{step:07d}"
    (training.folder / "slowly").unlink()
    training.start(workers=1)
    ended, _, err = training.end()
    assert ended == 0, err
    assert f"resumed from step {step} of 24" in err
    assert (training.sha256(), training.evaluations()) == undisturbed


def test_in_an_evaluation_which_is_made_up_for(training: Training, undisturbed: object) -> None:
    """21 samples, of which every one takes its time."""
    (training.folder / "slowly").touch()
    training.start()
    training.until((training.folder / "evaluated").exists)
    hit(training, "rank", signal.SIGTERM)
    ended, _, err = training.end()
    assert ended == 75, err
    assert "stopped as asked after step 4 of 24, saved" in err
    assert len((training.folder / "evaluated").read_text()) < 21, "it was not waited for the end of the evaluation"
    (training.folder / "slowly").unlink()
    training.start(workers=1)
    ended, _, err = training.end()
    assert ended == 0, err
    assert (training.sha256(), training.evaluations()) == undisturbed


@pytest.mark.parametrize("who", ["launcher", "everybody"])
def test_while_it_starts(training: Training, who: str) -> None:
    (training.folder / "not yet").touch()
    training.start()
    training.until(lambda: all((training.folder / f"waiting-{rank}").exists() for rank in (0, 1)))
    hit(training, who, signal.SIGTERM)
    (training.folder / "not yet").unlink()
    ended, out, err = training.end()
    assert (ended, out) == (75, ""), err
    assert "Traceback" not in err


def test_a_second_signal_does_not_wait(training: Training) -> None:
    (training.folder / "not yet").touch()
    training.start()
    training.until(lambda: all((training.folder / f"waiting-{rank}").exists() for rank in (0, 1)))
    assert training.process is not None
    training.process.send_signal(signal.SIGINT)
    assert training.process.stderr is not None
    assert training.process.stderr.readline() == "Ctrl-C: stopping after this step; once more to stop now\n"
    training.process.send_signal(signal.SIGINT)
    ended, _, err = training.end()
    assert (ended, err) == (130, "stopped by Ctrl-C; all ranks have ended\n")


def test_a_rank_that_is_killed_meanwhile_begins_nothing_anew(training: Training) -> None:
    (training.folder / "slowly").touch()
    training.start(workers="1:2")
    training.until(lambda: training.steps() >= 2)
    rank = next(child for child in training.everybody()[-1].children() if child.environ()["RANK"] == "1")
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
    assert "going on with" not in err
    assert err.endswith("stopped by signal 15 (SIGTERM); all ranks have ended\n")
