"""Jobs that `lockstep slurm` submits to a real SLURM: preempted, queued again, and finished with
the bits of an undisturbed training.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.slurm import batch_script
from tests.launcher.slurm.cluster import Cluster, until

pytestmark = pytest.mark.rest

LOCKSTEP = [sys.executable, "-m", "lockstep"]
OPTIONS = ["--exact", "--steps", "60", "--checkpoint-every", "1000"]
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def submitted(done: subprocess.CompletedProcess[str]) -> str:
    found = re.match(r"Submitted batch job (\d+)", done.stdout)
    assert found is not None, done.stderr
    return found[1]


def records(run: Path, kind: str) -> list[dict[str, object]]:
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in found if record["kind"] == kind]


@pytest.mark.timeout(600)
def test_preempted_requeued_and_the_same_bits(slurm: Cluster, tmp_path: Path) -> None:
    """Takes a minute: SLURM looks at its queue, and queues a job again, every so many seconds."""
    submit = [*LOCKSTEP, "slurm", "digits", "--workers-per-node", "2", "--submit", "--"]
    job = submitted(slurm.run(*submit, *OPTIONS, "--loader-workers", "1", cwd=tmp_path))
    run, log = tmp_path / "runs" / f"digits-{job}", tmp_path / f"slurm-{job}.log"
    until(lambda: records(run, "step") or None, "the first step", 200)
    # reaches every process of the step, those that load data too
    slurm.run("scancel", "--signal=USR1", job)
    queued = slurm.wait(job, lambda said: said["Restarts"] == "1")
    assert queued["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
    ended = slurm.wait(job, lambda said: said["JobState"] in OVER)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    last = log.read_text().splitlines()[-1]
    assert last.startswith("digits: ")
    assert "stopped after step " in log.read_text()
    assert "resumed from step " in log.read_text()
    assert "Traceback" not in log.read_text()
    assert [record["step"] for record in records(run, "step")] == list(range(1, 61))
    command = [*LOCKSTEP, "train", "digits", *OPTIONS]
    undisturbed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert last.rpartition(" ")[2] == undisturbed.stdout.split()[-1], undisturbed.stderr


def test_what_was_cancelled_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    """SIGTERM comes first, and a training would save and leave with 75, but the user wants no
    more of it.
    """
    (tmp_path / "saves.py").write_text(
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "pathlib.Path('runs').touch()\n"
        "while True: time.sleep(0.1)\n"
    )
    command = shlex.join([sys.executable, str(tmp_path / "saves.py")])
    number = subprocess.run(
        ["sbatch", "--parsable", "--time=5"],  # its options override the script's lines
        input=batch_script("cancelled", command, 1, 2),
        cwd=tmp_path,
        env=slurm.env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    until(lambda: (tmp_path / "runs").exists() or None, "the job's start", 60)
    slurm.run("scancel", number)
    queue = ("squeue", "--noheader", "--jobs", number)
    until(lambda: not slurm.run(*queue).stdout.strip() or None, "the job's end", 60)
    said = slurm.job(number)
    assert (said["JobState"], said["Restarts"]) == ("CANCELLED", "0")
