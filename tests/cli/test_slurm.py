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
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.slurm import batch_script
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
    text = printed(capsys, "digits", "--run", "here")
    assert text.partition("train digits ")[2].startswith("--run here\n")
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"lockstep train {tmp_path}/mine.py --run {tmp_path}/runs/mine-"
    for text in (
        "def task(): ...",
        "from others import make as task",
        "task = make",
        "if True:\n    task = 1",
        "from others import task",
    ):
        (tmp_path / "mine.py").write_text(text)
        assert line in printed(capsys, "mine.py"), text


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        "print(1)",
        "def other():\n    def task(): ...",
        "class A:\n    def task(self): ...",
    ):
        (tmp_path / "script.py").write_text(text)
        batch = printed(capsys, "script.py", "--lr", "0.1 0.2")
        assert f"lockstep run {tmp_path}/script.py --lr '0.1 0.2'\ncode=" in batch
        assert "--job-name=script\n" in batch


def test_mistakes_in_the_options_after_the_dashes(tmp_path: Path) -> None:
    for line, code, values in (
        ("--exat", "unknown-option", {"option": "--exat", "command": "lockstep train"}),
        ("--epochs x", "wrong-argument", {"name": "--epochs", "given": " x"}),
        ("more", "wrong-command-line", {"command": "lockstep train"}),
        ("--workers 4", "option-not-for-a-job", {"option": "--workers 4"}),
        ("--max-restarts 1", "option-not-for-a-job", {"option": "--max-restarts 1"}),
    ):
        with refused(code, **values) as caught:
            command("slurm", "digits", "--", *line.split())
        assert str(caught.value).startswith("after --: ")
    assert list(tmp_path.iterdir()) == []


def test_without_sbatch_and_what_sbatch_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, refused("no-sbatch"):
        patch.setenv("PATH", str(tmp_path))
        command("slurm", "digits", submit=True)
    stub(tmp_path, "sbatch", "echo no such partition >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit, match="3"):
        command("slurm", "digits", submit=True)
    assert capfd.readouterr() == ("", "no such partition\n")


JOB = ("digits", "/env/bin/python -m lockstep train digits --exact", 2, 4)
TEXT = batch_script(*JOB)
OPTIONS = """
--job-name=digits --nodes=2 --ntasks=8 --ntasks-per-node=4 --output=slurm-%j.log
--open-mode=append --signal=USR1@120 --requeue
"""


def test_its_options() -> None:
    lines = TEXT.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    assert options == OPTIONS.split()
    srun = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=60 \\"
    assert lines[lines.index(srun) + 1].strip() == JOB[1]


_WORDS = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"),
    min_size=1,
    max_size=12,
)


@given(_WORDS)
def test_a_name_cannot_add_a_line_or_an_option(name: str) -> None:
    text = batch_script(name, *JOB[1:])
    (line,) = [line for line in text.split("\n") if "--job-name" in line]
    assert len(shlex.split(line.removeprefix("#SBATCH "))) == 1
    assert len(text.split("\n")) == len(TEXT.split("\n"))


def stub(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def bash(text: str, folder: Path, code: int, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script where srun and scontrol only note what they were given."""
    stub(
        folder,
        "srun",
        f'printf "<%s>" "$@" > {folder}/srun.txt; echo "$SRUN_CPUS_PER_TASK" > {folder}/cpus.txt;'
        f" exit {code}",
    )
    stub(folder, "scontrol", f'echo "$@" > {folder}/scontrol.txt')
    return subprocess.run(
        ["bash"],
        input=text,
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_a_shell_nothing_of_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "it's $(touch f)"
    folder.mkdir()
    script = folder / "$(touch g).py"
    script.write_text("print(1)")
    nasty = ["$(touch a)", "`touch b`", "; touch c", "'; touch d; '", '"$(touch e)"']
    nasty += ["$HOME", "*", "\\", "two\nlines"]
    text = printed(capsys, str(script), *nasty)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    done = bash(text, stubs, 3)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    names = sorted(path.name for path in stubs.iterdir())
    assert names == ["cpus.txt", "scontrol", "srun", "srun.txt"]
    words = "".join(f"<{word}>" for word in ["run", str(script), *nasty])
    assert (stubs / "srun.txt").read_text().endswith(words)


def test_only_what_was_preempted_and_saved_is_queued_again(tmp_path: Path) -> None:
    """And the cores that the job gives a task reach it."""
    assert bash(TEXT, tmp_path, 75).returncode == 75
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    assert (tmp_path / "cpus.txt").read_text() == "\n"
    (tmp_path / "scontrol.txt").unlink()
    assert bash(TEXT, tmp_path, 1, SLURM_CPUS_PER_TASK="6").returncode == 1
    assert not (tmp_path / "scontrol.txt").exists()
    assert (tmp_path / "cpus.txt").read_text() == "6\n"
