"""`lockstep train` from the outside: the last line, the run directory, and a sentence for every
mistake.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.checkpoints import files
from lockstep.checks.identity import sha256
from lockstep.errors import UsageError
from lockstep.launcher import start, supervise
from tests.cli.command import Command, command, process
from tests.ending import wait_gone
from tests.refused import refused

ROOT = Path(__file__).parents[2]
TASK = """
import os, signal, sys, time
from pathlib import Path
import torch
from helper import LR
from tests.training import toy

class Net(toy.Net):
    def __init__(self, fail, at):
        super().__init__()
        self.fail, self.at, self.calls = fail, at, 0

    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > self.at:
            if self.fail == "raise":
                raise ArithmeticError("in my model")
            if self.fail == "exit":
                sys.exit(0)
            if self.fail == "hang":
                Path("hanging").touch()
                signal.pause()
        return super().forward(x)

def task(lr: float = LR, fail: str = "", at: int = 3, micro_batch: int = 4):
    return toy.task(name=None, model=lambda: Net(fail, at), micro_batch=micro_batch)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Holds a task. In the end no process is left in it, wherever it hangs in the process tree. A
    fork server of this process may be, if the order of the tests had it start here.
    """
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "helper.py").write_text("LR = 0.1")
    yield tmp_path
    wait_gone(
        running
        for running in psutil.process_iter(["cwd", "pid"])
        if running.info["cwd"] in (str(tmp_path), str(tmp_path / "elsewhere"))
        and running.pid not in {os.getpid(), *start.pids()}
    )


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread anyway")
def test_beside_other_programs_a_worker_gets_the_free_cores_and_a_resume_keeps_the_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, running in (("quiet", 1), ("busy", (os.cpu_count() or 1) + 2)):
        (folder / name).write_text(f"0.00 0.00 0.00 {running}/100 1\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    line = "train my_task.py --workers 1 --run mine --epochs"
    for name, epochs, said in (("busy", 1, True), ("quiet", 2, False)):
        ended = process(f"{line} {epochs}", folder, LOCKSTEP_LOADAVG=str(folder / name))
        assert ended.code == 0, ended.err
        assert ("a worker gets 1 thread in place of" in ended.err) == said
        assert json.loads((folder / "mine" / "settings.json").read_text())["threads"] == 1


def test_the_main_job_from_another_folder(folder: Path, lockstep: Command) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    main_job = process(
        "train ../my_task.py --workers 2 --epochs 3 --set lr=0.05 --reduce shared_memory", elsewhere
    )
    assert main_job.code == 0, main_job.err
    (run,) = (elsewhere / "runs").iterdir()
    assert re.fullmatch(r"my_task-\d{8}-\d{6}", run.name)
    result = json.loads((run / "result.json").read_text())
    checkpoint = files.read(run / result["checkpoint"])
    accuracy = result["metrics"]["accuracy"]
    expected = (
        "my_task: 3 epochs, 12 steps, 2 workers, replicated, shared memory | accuracy"
        f" {accuracy:.4f} | weights sha256 {sha256(checkpoint.tensors)}\n"
    )
    assert main_job.out == expected
    progress = main_job.err.splitlines()
    assert re.match(r"global batch 11 = 3 micro-batches x 4.*2 ranks: 2, 1", progress[1])
    # a slow training has lines between these
    epochs = [line.partition(",")[0] for line in progress if ": accuracy" in line]
    assert epochs == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert progress[0] == f"run directory: runs/{run.name}"
    assert "run directory" not in "".join(progress[1:])
    assert (run / "rank-0.log").read_text().splitlines() == progress
    settings = json.loads((run / "settings.json").read_text())
    assert settings["task"] == str(folder / "my_task.py")
    assert (settings["workers"], settings["overrides"]) == (2, {"lr": "0.05"})

    task_and_run = f"train my_task.py --run {run}"
    again = lockstep(f"{task_and_run} --epochs 3 --set lr=0.05")
    assert (again.code, again.out) == (0, expected)
    assert "--fresh trains it again" in again.err
    other = lockstep(task_and_run)
    assert (other.code, other.out) == (2, "")
    assert re.fullmatch(
        r"error: run directory .* --run, .* --fresh .* \[run-finished\]\n", other.err
    )
    os.chdir(elsewhere)
    latest = lockstep("train ../my_task.py --run latest --resume")
    assert (latest.code, latest.out) == (0, expected)
    assert "step-0000012" in lockstep("checkpoints ls latest").out
    anew = lockstep(f"train ../my_task.py --run {run} --fresh --steps 1")
    assert anew.code == 0, anew.err
    assert (run / "before-1" / "result.json").exists()


def test_an_exception_and_an_exit_in_the_model_on_one_rank(folder: Path, lockstep: Command) -> None:
    """A run that fails before its first step leaves nothing."""
    line = "train my_task.py --workers 2 --run mine --set"
    raised = r"failed at step {} in forward: ArithmeticError: in my model"
    for at in (0, 3):
        ended = lockstep(f"{line} fail=raise --set at={at}")
        assert (ended.code, ended.out) == (1, "")
        log = ", log .*rank-1.log" if at else ""
        words = rf"rank 1 \(pid \d+, [^,]*{log}\) " + raised.format(f"{at + 1},")
        assert re.fullmatch(words, ended.err.splitlines()[-1]), ended.err
        assert 'my_task.py", line' in ended.err
        assert "lockstep/launcher" not in ended.err
        assert (folder / "mine").exists() is (at > 0)
        assert (".log" in ended.err) is (at > 0)
    ended = lockstep(f"{line} fail=exit --set at=0 --fresh")
    assert (ended.code, ended.out) == (1, "")
    left = r"rank 1 \(.*\) was ended by sys.exit\(0\) at step 1, in forward \(.*my_task.py:19\)"
    assert re.match(left, ended.err.splitlines()[-1]), ended.err


ENDS = """
import atexit, concurrent.futures, os, threading
from tests.training import toy

class Aborts:
    def __del__(self):
        os.abort()

aborts = Aborts()  # as a library's threads do when modules are taken apart under them
pool = concurrent.futures.ThreadPoolExecutor(1)
done = threading.Event()

def late():
    done.wait()
    kept.write("thread ")

def task():
    global kept
    kept = open("kept" + os.environ.get("RANK", ""), "w")
    kept.write("left open ")
    threading.Thread(target=late).start()
    pool.submit(lambda: (done.set(), kept.write("pool ")))
    atexit.register(lambda: kept.write("exit handler"))
    return toy.task(name=None, epochs=1)
"""


def test_a_task_s_own_threads_files_and_exit_handlers_have_their_end(
    folder: Path, lockstep: Command
) -> None:
    (folder / "my_task.py").write_text(ENDS)
    ended = lockstep("train my_task.py --workers 2 --run run")
    assert ended.code == 0, ended.err
    for rank in range(2):
        text = (folder / f"kept{rank}").read_text()
        assert text.startswith("left open ")
        assert text.endswith("exit handler")
        assert {"thread", "pool"} <= set(text.split())


@pytest.mark.rest  # Python's development mode cannot use the warm server: torch is imported twice
def test_nothing_is_left_open_that_python_would_warn_of(folder: Path) -> None:
    line = "train my_task.py --workers 1 --run run --steps 2"
    ended = process(line, folder, PYTHONDEVMODE="1")
    assert ended.code == 0, ended.err
    assert "ResourceWarning" not in ended.err


def interrupted(folder: Path, until: str, number: int, **variables: str) -> tuple[int, str, str]:
    """A training gets a signal when the file `until` is there. Its exit code, stdout and stderr."""
    line = "-m lockstep train my_task.py --workers 2 --set fail=hang"
    with subprocess.Popen(
        [sys.executable, *line.split()],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        while not (folder / until).exists():
            assert launcher.poll() is None
            time.sleep(0.01)
        launcher.send_signal(number)
        out, err = launcher.communicate()
    return launcher.returncode, out, err


@pytest.mark.rest  # waits until ranks that do not heed are ended
def test_ctrl_c_while_a_rank_hangs(folder: Path) -> None:
    code, out, err = interrupted(folder, "hanging", signal.SIGINT)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "stopped by Ctrl-C; all ranks have ended"
    assert "Traceback" not in err


def test_a_schedulers_signal_while_the_launcher_imports_is_75(folder: Path) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(1000)\n"
    )
    slow = f"{folder}{os.pathsep}{ROOT}"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        code, _, err = interrupted(folder, "importing", number, PYTHONPATH=slow)
        assert err == f"stopped by signal {int(number)} ({number.name}); no rank was running\n"
        assert code == 75
        (folder / "importing").unlink()
    assert not (folder / "runs").exists()


def test_a_mistake_that_only_the_ranks_see_is_one_sentence_and_leaves_no_run_directory(
    folder: Path, lockstep: Command
) -> None:
    ended = lockstep("train my_task.py --set micro_batch=12")
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert re.match(r"error: .*micro_batch=12 is larger than global_batch=11\. Make it", line)
    (folder / "helper.py").write_text("raise ArithmeticError('no data')")
    ended = lockstep("train my_task.py")
    assert ended.code == 1
    assert "helper.py" in ended.err
    assert "ArithmeticError: no data" in ended.err.splitlines()[-1]
    assert "lockstep/training" not in ended.err
    assert "rank-0.log" not in ended.err
    assert not (folder / "runs").exists()  # nothing was trained: nothing is kept


def test_a_task_that_ends_its_process_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervise, "supervise", lambda *args, **options: supervise.Outcome(0))
    with refused("task-ended-its-process", task="my_task.py"):
        command("train", "my_task.py")


def test_more_gpus_than_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    cases: list[tuple[int, dict[str, str], str, dict[str, int]]] = [
        (2, {"workers": "3"}, "too-few-gpus", {"workers": 3, "gpus": 2}),
        (1, {"workers": "2", "device": "cuda"}, "too-few-gpus", {"workers": 2, "gpus": 1}),
        (0, {"device": "cuda"}, "no-gpu-here", {}),
    ]
    for gpus, options, code, values in cases:
        monkeypatch.setattr(start, "gpus", lambda gpus=gpus: gpus)
        with refused(code, **values):
            command("train", "digits", **options)


def test_the_default_is_a_worker_for_each_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def note(target: object, workers: int, **options: object) -> None:
        asked.append(workers)
        raise UsageError("enough")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervise, "supervise", note)
    cases: list[tuple[int, dict[str, str], int]] = [
        (4, {}, 4),
        (0, {}, 1),
        (4, {"device": "cpu"}, 1),
        (4, {"workers": "2"}, 2),
        (0, {"balance": "2,1,1"}, 3),
    ]
    for gpus, options, _ in cases:
        monkeypatch.setattr(start, "gpus", lambda gpus=gpus: gpus)
        with pytest.raises(UsageError, match="enough"):
            command("train", "digits", **options)
    assert asked == [workers for *_, workers in cases]


KILLED = """
import os, signal
from pathlib import Path
from tests.training import toy

def on_step(record):
    rank, mark = os.environ["RANK"], Path(f"killed-{record['step']}")
    if rank == "1" and record["step"] == 10 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def task():
    return toy.task(name="toy", epochs=5, on_step=on_step, callbacks_on="all")
"""


def test_a_run_goes_on_with_fewer_workers_and_grows_back(folder: Path, lockstep: Command) -> None:
    (folder / "killed.py").write_text(KILLED)
    (folder / "whole.py").write_text(KILLED.replace("== 10", "== 0"))
    whole = lockstep("train whole.py --exact")
    killed = lockstep("train killed.py --workers 1:3 --run run --exact --checkpoint-every 4")
    assert killed.code == 0, killed.err
    assert killed.out.split("sha256 ")[1] == whole.out.split("sha256 ")[1]
    lines = killed.err.splitlines()
    assert [line for line in lines if line.startswith("restart")] == [
        "restart 1 of 3: 2 workers, from the newest checkpoint",
        "restart: 3 workers again, from the newest checkpoint",
    ]
    assert len([line for line in lines if line.startswith("resumed from step ")]) == 2
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == list(range(1, 21))


def test_without_a_range_a_killed_worker_ends_the_run(folder: Path, lockstep: Command) -> None:
    (folder / "killed.py").write_text(KILLED)
    killed = lockstep("train killed.py --workers 2 --run run")
    assert (killed.code, killed.out) == (137, "")
    assert "restart" not in killed.err
    (folder / "killed-10").unlink()
    again = lockstep("train killed.py --workers 2 --run run --max-restarts 1")
    assert again.code == 0, again.err
    assert "restart 1 of 1: 2 workers, from the beginning\n" in again.err


REPLACED = """
import os
from pathlib import Path
from tests.training import toy

def on_step(record):
    if list(Path("mine", "checkpoints").glob("step-*")) and not Path("moved").exists():
        os.rename("mine", "moved")
        Path("other").mkdir()
        {then}

def task():
    return toy.task(name=None, epochs=10**6, on_step=on_step)
"""


@pytest.mark.parametrize(
    "then",
    [
        "os.symlink('other', 'mine')",
        pytest.param("os.mkdir('mine')", marks=pytest.mark.rest),
        pytest.param("pass", marks=pytest.mark.rest),
    ],
)
def test_a_run_directory_that_goes_away_ends_the_run(
    folder: Path, lockstep: Command, then: str
) -> None:
    """It would train for ever; nothing is written to what has the name now."""
    (folder / "my_task.py").write_text(REPLACED.format(then=then))
    ended = lockstep("train my_task.py --workers 2 --run mine --checkpoint-every 4")
    assert ended.code == 1
    assert "mine was re" in ended.err
    assert "Traceback" not in ended.err
    assert "[run-directory-gone]" in ended.err
    assert not list((folder / "other").iterdir())
    assert (folder / "mine").exists() == (then != "pass")
    assert then == "pass" or not list((folder / "mine").iterdir())
    assert files.newest_whole(folder / "moved" / "checkpoints")[0]
