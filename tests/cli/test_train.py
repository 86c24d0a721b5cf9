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
from lockstep.checkpoints.identity import sha256
from lockstep.errors import UsageError
from lockstep.launcher import start, supervise
from lockstep.training.run_directory import RunDirectory
from tests.cli.command import command
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
            if self.fail == "hang":
                Path("hanging").touch()
                signal.pause()
        return super().forward(x)

def task(lr: float = LR, fail: str = "", at: int = 3, micro_batch: int = 4):
    return toy.task(name=None, model=lambda: Net(fail, at), micro_batch=micro_batch)
"""


def lockstep(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "train", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "helper.py").write_text("LR = 0.1")
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_runs_on(tmp_path: Path) -> Iterator[None]:
    """No process is left in the test's folder, wherever it hangs in the process tree."""
    yield
    left = [
        process
        for process in psutil.process_iter(["cwd", "pid"])
        if process.info["cwd"] in (str(tmp_path), str(tmp_path / "elsewhere"))
    ]
    wait_gone(left)


def test_the_main_job_from_another_folder(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = lockstep(
        "../my_task.py", "--workers", "2", "--epochs", "3", "--set", "lr=0.05", cwd=elsewhere
    )
    assert done.returncode == 0, done.stderr
    (run,) = (elsewhere / "runs").iterdir()
    assert re.fullmatch(r"my_task-\d{8}-\d{6}", run.name)
    result = json.loads((run / "result.json").read_text())
    checkpoint = files.read(run / result["checkpoint"])
    accuracy = result["metrics"]["accuracy"]
    expected = (
        "my_task: 3 epochs, 12 steps, 2 workers, replicated, shared memory | accuracy"
        f" {accuracy:.4f} | weights sha256 {sha256(checkpoint.tensors)}\n"
    )
    assert done.stdout == expected
    progress = done.stderr.splitlines()
    assert re.match(r"global batch 11 = 3 micro-batches x 4.*2 ranks: 2, 1", progress[1])
    assert [line.partition(",")[0] for line in progress[2:-1]] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert progress[0] == progress[-1] == f"run directory: runs/{run.name}"
    assert (run / "rank-0.log").read_text().splitlines() == progress[:-1]
    settings = json.loads((run / "settings.json").read_text())
    assert settings["task"] == str(folder / "my_task.py")
    assert (settings["workers"], settings["overrides"]) == (2, {"lr": "0.05"})
    again = lockstep(
        str(folder / "my_task.py"),
        "--run",
        str(run),
        "--epochs",
        "3",
        "--set",
        "lr=0.05",
        cwd=folder,
    )
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "--fresh trains it again" in again.stderr
    other = lockstep(str(folder / "my_task.py"), "--run", str(run), cwd=folder)
    assert (other.returncode, other.stdout) == (2, "")
    assert re.fullmatch(
        r"error: run directory .* --run, .* --fresh .* \[run-finished\]\n",
        other.stderr,
    )
    shown = lockstep(str(folder / "my_task.py"), "--run", str(run), "--resume", cwd=folder)
    assert (shown.returncode, shown.stdout) == (0, done.stdout)
    anew = lockstep(
        str(folder / "my_task.py"), "--run", str(run), "--fresh", "--steps", "1", cwd=folder
    )
    assert anew.returncode == 0, anew.stderr
    assert (run / "before-1" / "result.json").exists()


def test_an_exception_in_the_model_on_one_rank(folder: Path) -> None:
    done = lockstep("my_task.py", "--workers", "2", "--set", "fail=raise", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert re.fullmatch(
        r"rank 1 \(pid \d+, .*, log .*rank-1.log\) failed at step 4, in forward: ArithmeticError:"
        r" in my model",
        lines[-1],
    )
    assert 'my_task.py", line' in done.stderr
    assert 'raise ArithmeticError("in my model")' in done.stderr
    assert "lockstep/launcher" not in done.stderr


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


def test_a_task_s_own_threads_files_and_exit_handlers_have_their_end(folder: Path) -> None:
    (folder / "my_task.py").write_text(ENDS)
    done = lockstep("my_task.py", "--workers", "2", "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text = (folder / f"kept{rank}").read_text()
        assert text.startswith("left open ")
        assert text.endswith("exit handler")
        assert {"thread", "pool"} <= set(text.split())


def test_nothing_is_left_open_that_python_would_warn_of(folder: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "dev",
        "-m",
        "lockstep",
        "train",
        "my_task.py",
        "--workers",
        "1",
        "--run",
        "run",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONDEVMODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr


UNUSED = """
import torch
from tests.training import toy

class Net(toy.Net):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)

def task(unused: str = "error"):
    return toy.task(name=None, model=Net, unused=unused)
"""


@pytest.mark.parametrize("unused", ["error", "zeros", "skip"])
def test_parameters_that_nothing_uses_may_be_meant(folder: Path, unused: str) -> None:
    (folder / "my_task.py").write_text(UNUSED)
    done = lockstep(
        "my_task.py",
        "--workers",
        "2",
        "--run",
        "run",
        "--steps",
        "2",
        "--set",
        f"unused={unused}",
        cwd=folder,
    )
    assert (done.returncode == 0) == (unused != "error"), done.stderr
    assert ("'spare.weight', 'spare.bias' got no gradient on any rank" in done.stderr) == (
        unused == "error"
    )


def test_ctrl_c(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "my_task.py",
        "--workers",
        "2",
        "--set",
        "fail=hang",
    ]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        while not (folder / "hanging").exists():
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate()
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped by Ctrl-C; all ranks have ended"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        (
            [],
            "x = 1",
            r"my_task.py: .* \[task-function-missing\]",
        ),
        (
            ["--set", "micro_batch=12"],
            TASK,
            r"micro_batch=12 is larger than global_batch=11\. Make it at most 11",
        ),
    ],
)
def test_mistakes_in_the_file_are_sentences(
    folder: Path, args: list[str], text: str, message: str
) -> None:
    (folder / "my_task.py").write_text(text)
    done = lockstep("my_task.py", *args, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match("error: .*" + message, done.stderr)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()  # nothing was trained: nothing is kept


def test_the_users_own_import_error_is_the_users_traceback(folder: Path) -> None:
    (folder / "helper.py").write_text("import no_such_module")
    done = lockstep("my_task.py", cwd=folder)
    assert done.returncode == 1
    assert "helper.py" in done.stderr
    assert "No module named 'no_such_module'" in done.stderr.splitlines()[-1]
    assert "lockstep/training" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_while_the_launcher_imports_is_75(
    folder: Path, number: signal.Signals
) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "lockstep", "train", "my_task.py"]
    slow = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        command, cwd=folder, env=slow, stderr=subprocess.PIPE, text=True
    ) as launcher:
        while not (folder / "importing").exists():
            assert launcher.poll() is None
            time.sleep(0.01)
        launcher.send_signal(number)
        assert launcher.stderr is not None
        assert (
            launcher.stderr.read()
            == f"stopped by signal {int(number)} ({number.name}); no rank was running\n"
        )
    assert launcher.returncode == 75
    assert not (folder / "runs").exists()


def test_a_sys_exit_in_the_loss_fails_with_its_line(folder: Path) -> None:
    text = (
        "import sys\n\ndef loss(output, batch):\n    sys.exit(0)\n\nfrom tests.training import"
        " toy\ndef task():\n    return toy.task(loss=loss)\n"
    )
    (folder / "my_task.py").write_text(text)
    done = lockstep("my_task.py", "--workers", "2", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(
        r"rank [01] \(.*\) was ended by sys.exit\(0\) at step 1, in forward \(.*my_task.py:4\)",
        done.stderr.splitlines()[-1],
    )
    assert "in loss" in done.stderr


def test_a_task_that_ends_its_process_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(supervise, "supervise", lambda *args, **options: supervise.Outcome(0))
    with refused("task-ended-its-process", task="my_task.py"):
        command("train", "my_task.py")


@pytest.mark.parametrize(
    ("task", "options", "code", "values"),
    [
        ("digit", {}, "unknown-task", {"task": "digit"}),
        ("nowhere.py", {}, "task-file-missing", {"task": "nowhere.py"}),
        ("digits", {"epochs": 1, "steps": 1}, "epochs-and-steps", {"epochs": 1, "steps": 1}),
        ("digits", {"device": "tpu"}, "unknown-choice", {"name": "device", "value": "tpu"}),
        ("digits", {"precision": "fp8"}, "unknown-choice", {"name": "precision", "value": "fp8"}),
        ("digits", {"reduce": "gossip"}, "unknown-choice", {"name": "reduce", "value": "gossip"}),
        ("digits", {"balance": "fast"}, "wrong-value", {"name": "balance", "value": "fast"}),
        (
            "digits",
            {"balance": "2,1", "workers": "3"},
            "balance-of-other-count",
            {"balance": "2,1", "given": 2, "workers": 3},
        ),
        ("digits", {"balance": "1", "update": "server"}, "balance-with-server", {}),
        ("digits", {"set": ["lr"]}, "not-a-pair", {"where": "--set", "text": "lr"}),
        ("digits", {"run": Path("file")}, "run-directory-not-writable", {"path": "file"}),
        ("digits", {"run": Path("file/run")}, "run-directory-not-writable", {"path": "file/run"}),
    ],
)
def test_mistakes_on_the_command_line_start_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    options: dict[str, object],
    code: str,
    values: dict[str, object],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with refused(code, **values):
        command("train", task, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("workers", ["0", "-2"])
def test_workers_that_are_no_number_or_range(workers: str) -> None:
    with pytest.raises(UsageError, match=f"{workers}.*: give "):
        command("train", "digits", workers=workers)


@pytest.mark.parametrize("option", [{"balance": "2,1"}, {"mesh": "data=2"}])
def test_a_range_of_workers_with_a_place_for_each_rank(option: dict[str, str]) -> None:
    ((name, value),) = option.items()
    with refused("range-of-workers", name=name, value=value, workers=2):
        command("train", "digits", workers="1:2", **option)


def test_a_run_directory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        RunDirectory.claim(tmp_path / "run", "x"),
        refused("run-directory-in-use", path=str(tmp_path / "run")) as caught,
    ):
        command("train", "digits", run=tmp_path / "run")
    assert caught.value.values["owner"].startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize(
    ("gpus", "options", "code", "values"),
    [
        (2, {"workers": "3"}, "too-few-gpus", {"workers": 3, "gpus": 2}),
        (
            1,
            {"workers": "2", "device": "cuda"},
            "too-few-gpus",
            {"workers": 2, "gpus": 1},
        ),
        (0, {"device": "cuda"}, "no-gpu-here", {}),
    ],
)
def test_more_gpus_than_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    options: dict[str, object],
    code: str,
    values: dict[str, int],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "gpus", lambda: gpus)
    with refused(code, **values):
        command("train", "digits", **options)


@pytest.mark.parametrize(
    ("gpus", "options", "workers"),
    [
        (4, {}, 4),
        (0, {}, 1),
        (4, {"device": "cpu"}, 1),
        (4, {"workers": "2"}, 2),
        (0, {"balance": "2,1,1"}, 3),
    ],
)
def test_the_default_is_a_worker_for_each_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    options: dict[str, object],
    workers: int,
) -> None:
    asked = []

    def note(target: object, workers: int, **options: object) -> None:
        asked.append(workers)
        raise UsageError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "gpus", lambda: gpus)
    monkeypatch.setattr(supervise, "supervise", note)
    with pytest.raises(UsageError, match="enough"):
        command("train", "digits", **options)
    assert asked == [workers]


def test_resume_where_nothing_can_be_gone_on_from(folder: Path) -> None:
    missing = lockstep("my_task.py", "--run", "run", "--resume", cwd=folder)
    assert (missing.returncode, missing.stdout) == (77, "")
    assert missing.stderr == "error: --resume: no checkpoint in run can be resumed: it has none\n"
    for options, message in (
        (("--resume",), "Give --run DIR"),
        (("--run", "run", "--resume", "--fresh"), "leave out --fresh"),
    ):
        done = lockstep("my_task.py", *options, cwd=folder)
        assert done.returncode == 2
        assert message in done.stderr


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


def test_a_run_goes_on_with_fewer_workers_and_grows_back(folder: Path) -> None:
    (folder / "killed.py").write_text(KILLED)
    (folder / "whole.py").write_text(KILLED.replace("== 10", "== 0"))
    options = ("--exact", "--checkpoint-every", "4")
    whole = lockstep("whole.py", *options, cwd=folder)
    done = lockstep("killed.py", "--workers", "1:3", "--run", "run", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("sha256 ")[1] == whole.stdout.split("sha256 ")[1]
    said = [line for line in done.stderr.splitlines() if line.startswith(("restart", "resumed"))]
    assert [line for line in said if line.startswith("restart")] == [
        "restart 1 of 3: 2 workers, from the newest checkpoint",
        "restart: 3 workers again, from the newest checkpoint",
    ]
    assert len([line for line in said if line.startswith("resumed from step ")]) == 2
    records = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 21))


def test_without_a_range_a_killed_worker_ends_the_run(folder: Path) -> None:
    (folder / "killed.py").write_text(KILLED)
    done = lockstep("killed.py", "--workers", "2", "--run", "run", cwd=folder)
    assert (done.returncode, done.stdout) == (137, "")
    assert "restart" not in done.stderr
    (folder / "killed-10").unlink()
    again = lockstep(
        "killed.py", "--workers", "2", "--run", "run", "--max-restarts", "1", cwd=folder
    )
    assert again.returncode == 0, again.stderr
    assert "restart 1 of 1: 2 workers, from the newest checkpoint" in again.stderr


@pytest.mark.parametrize(("at", "stays"), [(0, False), (2, True)], ids=["first-step", "later-step"])
def test_a_run_that_fails_before_its_first_step_leaves_nothing(
    folder: Path, at: int, stays: bool
) -> None:
    run = lockstep(
        "my_task.py",
        "--workers",
        "2",
        "--run",
        "mine",
        "--set",
        "fail=raise",
        "--set",
        f"at={at}",
        cwd=folder,
    )
    assert run.returncode == 1
    assert "ArithmeticError" in run.stderr
    assert (folder / "mine").exists() is stays
    assert (".log" in run.stderr) is stays


REPLACED = """
import os
from pathlib import Path
from tests.training import toy

def on_step(record):
    if list(Path("mine", "checkpoints").glob("step-*")) and not Path("moved").exists():
        how = Path("how").read_text()
        os.rename("mine", "moved")
        Path("other").mkdir()
        if how == "symlink":
            os.symlink("other", "mine")
        elif how == "folder":
            os.mkdir("mine")

def task():
    return toy.task(name=None, epochs=10**6, on_step=on_step)
"""


@pytest.mark.parametrize("how", ["symlink", "folder", "nothing"])
def test_a_run_directory_that_goes_away_ends_the_run(folder: Path, how: str) -> None:
    """It would train for ever; nothing is written to what has the name now."""
    (folder / "how").write_text(how)
    (folder / "my_task.py").write_text(REPLACED)
    run = lockstep(
        "my_task.py", "--workers", "2", "--run", "mine", "--checkpoint-every", "4", cwd=folder
    )
    assert run.returncode == 1
    assert "mine was re" in run.stderr
    assert "Traceback" not in run.stderr
    assert "[run-directory-gone]" in run.stderr
    assert not list((folder / "other").iterdir())
    assert (folder / "mine").exists() == (how != "nothing")
    assert how == "nothing" or not list((folder / "mine").iterdir())
    assert files.newest_whole(folder / "moved" / "checkpoints")[0]
