"""`lockstep slurm`: what it takes for a task and what for a script, and mistakes that must not
wait in a queue.

The batch script: its text for one job, and that no word of it reaches a shell as anything but
a word.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.slurm import BatchJob, batch_script, limit
from lockstep.errors import TaskError
from tests.cli.command import command
from tests.refused import refused


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], target: str, *args: str, **options: object) -> str:
    command("slurm", target, *(["--", *args] if args else []), **options)
    return capsys.readouterr().out


def test_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "digits", "--exact", nodes=2, workers_per_node=4)
    assert (
        f"    {sys.executable} -P -m lockstep train digits --exact --run"
        f' {tmp_path}/runs/digits-"$SLURM_JOB_ID"\n' in text
    )
    assert f"--output={tmp_path}/logs/slurm-%j.log\n" in text
    assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize(
    "text",
    [
        "def task(): ...",
        "from others import make as task",
        "task = make",
        "if True:\n    task = 1",
        "from others import task",
    ],
)
def test_a_file_with_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert f"lockstep train {tmp_path}/mine.py --run {tmp_path}/runs/mine-" in printed(
        capsys, "mine.py"
    )


@pytest.mark.parametrize(
    "text", ["print(1)", "def other():\n    def task(): ...", "class A:\n    def task(self): ..."]
)
def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "script.py").write_text(text)
    found = printed(capsys, "script.py", "--lr", "0.1 0.2", job_name="a b")
    assert f"lockstep run {tmp_path}/script.py --lr '0.1 0.2'\ncode=" in found
    assert "--job-name='a b'\n" in found


def test_a_run_directory_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        printed(capsys, "digits", "--run", "here")
        .partition("train digits ")[2]
        .startswith("--run here\n")
    )


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("digit", "unknown-task"),
        ("nowhere.py", "task-file-missing"),
        ("broken.py", "task-file-not-python"),
    ],
)
def test_mistakes_in_the_task(tmp_path: Path, target: str, code: str) -> None:
    (tmp_path / "broken.py").write_text("def task(:")
    with refused(code, TaskError) as caught:
        command("slurm", target)
    assert target in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


@pytest.mark.parametrize(
    ("args", "options", "code", "values"),
    [
        (["--exat"], {}, "unknown-option", {"option": "--exat", "command": "lockstep train"}),
        (["--epochs", "x"], {}, "wrong-argument", {"name": "--epochs", "given": " x"}),
        (["more"], {}, "wrong-command-line", {"command": "lockstep train"}),
        (["--help"], {}, "option-not-for-a-job", {"option": "--help"}),
        (["--workers", "4"], {}, "option-not-for-a-job", {"option": "--workers 4"}),
        (["--max-restarts", "1"], {}, "option-not-for-a-job", {"option": "--max-restarts 1"}),
        ([], {"job_name": "a\nb"}, "control-character", {"option": "--job-name", "value": "a\nb"}),
        ([], {"job_name": ""}, "empty-value", {"option": "--job-name"}),
        ([], {"time": "1h"}, "wrong-type", {"value": "1h"}),
        ([], {"nodes": 0}, "not-a-whole-number", {"name": "nodes", "value": 0}),
        (
            [],
            {"log": Path("file/logs")},
            "cannot-make-folder",
            {"option": "--log", "folder": Path("file/logs"), "reason": "Not a directory"},
        ),
    ],
)
def test_mistakes(
    tmp_path: Path,
    args: list[str],
    options: dict[str, object],
    code: str,
    values: dict[str, object],
) -> None:
    (tmp_path / "file").touch()
    with refused(code, **values) as caught:
        command("slurm", "digits", *(["--", *args] if args else []), **options)
    if args:
        assert str(caught.value).startswith("after --: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("no-sbatch"):
        command("slurm", "digits", submit=True)


def test_what_sbatch_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit, match="1"):
        command("slurm", "digits", submit=True)
    assert capsys.readouterr() == ("", "error: sbatch refused the job: no such partition\n")


JOB = BatchJob(
    job_name="digits",
    command=["/env/bin/python", "-m", "lockstep", "train", "digits", "--exact"],
    nodes=2,
    workers_per_node=4,
    time="1:00:00",
    log="/home/me/logs",
    run="/home/me/runs/digits",
)
TEXT = """\
#!/usr/bin/env bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --time=1:00:00
#SBATCH --output=/home/me/logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue

# One task per rank. When the first one ends, the others get a minute to end. srun returns the highest exit code.
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=60 \\
    /env/bin/python -m lockstep train digits --exact --run /home/me/runs/digits-"$SLURM_JOB_ID"
code=$?
if [ "$code" -eq 75 ]; then  # preempted, and saved: the same job resumes
    scontrol requeue "$SLURM_JOB_ID" || printf "%s\\n" "lockstep: not requeued; submit the job again to resume" >&2
fi
exit "$code"
"""


def test_its_text() -> None:
    assert batch_script(JOB) == TEXT


def test_everything_that_can_be_asked_for() -> None:
    more = replace(
        JOB,
        partition="gpu",
        account="us",
        gpus_per_node=4,
        cpus_per_task=8,
        setup=["module load cuda", "x='a b'"],
        run=None,
    )
    text = batch_script(more)
    for line in ("partition=gpu", "account=us", "gpus-per-node=4", "cpus-per-task=8"):
        assert f"#SBATCH --{line}\n" in text
    # srun does not take it from the job
    assert "--ntasks-per-node=4 --cpus-per-task=8 --kill" in text
    assert "module load cuda\n" in text
    assert "--run" not in text


_WORDS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"),
    min_size=1,
    max_size=12,
)


@given(_WORDS, _WORDS)
def test_any_word_is_one_word(word: str, run: str) -> None:
    text = batch_script(replace(JOB, job_name=word, command=["python", word], run=run))
    name = next(line for line in text.split("\n") if "job-name" in line)
    assert shlex.split(name.removeprefix("#SBATCH ")) == [f"--job-name={word}"]
    called = text.partition("--wait=60 \\\n    ")[2].partition("\ncode=")[0]
    assert shlex.split(called) == ["python", word, "--run", f"{run}-$SLURM_JOB_ID"]


def stub(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def bash(job: BatchJob, folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Run the script where srun and scontrol only note what they were given."""
    stub(folder, "srun", f'printf "<%s>" "$@" > {folder}/srun.txt; exit {code}')
    stub(folder, "scontrol", f'echo "$@" > {folder}/scontrol.txt')
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash"],
        input=batch_script(job),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_a_shell_nothing_of_it_is_run(tmp_path: Path) -> None:
    nasty = [
        "$(touch a)",
        "`touch b`",
        "; touch c",
        "'; touch d; '",
        '"$(touch e)"',
        "$HOME",
        "*",
        "\\",
    ]
    job = replace(
        JOB,
        job_name=nasty[0],
        command=["python", *nasty],
        run="it's $(touch f)",
        partition=nasty[1],
        account=nasty[2],
        log="$(touch g)",
    )
    done = bash(job, tmp_path, 3)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scontrol", "srun", "srun.txt"]
    given = "".join(f"<{word}>" for word in ["python", *nasty, "--run", "it's $(touch f)-7"])
    assert (tmp_path / "srun.txt").read_text().endswith(f"<--wait=60>{given}")


def test_only_what_was_preempted_and_saved_is_queued_again(tmp_path: Path) -> None:
    assert bash(JOB, tmp_path, 75).returncode == 75
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"


def test_setup_comes_first_and_must_succeed(tmp_path: Path) -> None:
    well = replace(JOB, setup=["export LINE='a b'", "true  # a comment"], command=["python"])
    assert bash(well, tmp_path, 0).returncode == 0
    (tmp_path / "srun.txt").unlink()
    done = bash(replace(well, setup=["load() { return 4; }", "load 'it'"]), tmp_path, 0)
    assert (done.returncode, done.stderr) == (1, "lockstep: a line of --setup failed: load 'it'\n")
    assert not (tmp_path / "srun.txt").exists()


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"nodes": 0}, "not-a-whole-number", {"name": "nodes", "value": 0}),
        ({"workers_per_node": -1}, "not-a-whole-number", {"name": "workers_per_node", "value": -1}),
        ({"gpus_per_node": 0}, "not-a-whole-number", {"name": "gpus_per_node"}),
        ({"cpus_per_task": 0}, "not-a-whole-number", {"name": "cpus_per_task"}),
        (
            {"job_name": "a\n#SBATCH --wrap=x"},
            "control-character",
            {"option": "--job-name", "value": "a\n#SBATCH --wrap=x"},
        ),
        ({"partition": "a\rb"}, "control-character", {"option": "--partition", "value": "a\rb"}),
        ({"setup": ["a", "b\nc"]}, "control-character", {"option": "--setup", "value": "b\nc"}),
        ({"command": ["a\nb"]}, "control-character", {"option": "--command", "value": "a\nb"}),
        ({"account": ""}, "empty-value", {"option": "--account"}),
        ({"log": "/a%b"}, "percent-in-log", {"log": "/a%b"}),
        ({"time": "soon"}, "wrong-type", {"value": "soon"}),
    ],
)
def test_what_cannot_work(change: dict[str, object], code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        replace(JOB, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("time", "hours", "minutes", "seconds"),
    [
        ("90", 1, 30, 0),
        ("1:00", 0, 1, 0),
        ("1:30:05", 1, 30, 5),
        ("2-12", 60, 0, 0),
        ("1-0:30", 24, 30, 0),
        ("1-1:1:1", 25, 1, 1),
    ],
)
def test_time_limits_as_slurm_reads_them(time: str, hours: int, minutes: int, seconds: int) -> None:
    assert limit(time) == timedelta(hours=hours, minutes=minutes, seconds=seconds)


@pytest.mark.parametrize("time", ["", "0", "0:00", "1h", "1:2:3:4", "-1", "1-", "1:", " 1", "1.5"])
def test_what_is_no_time_limit(time: str) -> None:
    with refused("wrong-type", value=time):
        limit(time)
