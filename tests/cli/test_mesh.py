"""`lockstep train --mesh`: from the command to the last line, and what other commands make of
the run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [
    "--set",
    "train_bytes=3000",
    "--set",
    "eval_bytes=600",
    "--set",
    "width=16",
    "--set",
    "depth=2",
    "--set",
    "length=8",
]


def lockstep(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words], cwd=folder, capture_output=True, text=True
    )


def test_a_pipeline_from_the_command_to_its_evaluation(tmp_path: Path) -> None:
    found = lockstep(
        "train",
        "text",
        "--mesh",
        "pipeline=2",
        "--schedule",
        "gpipe",
        "--steps",
        "3",
        "--run",
        "r",
        *SMALL,
        folder=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    last = found.stdout.splitlines()[-1]
    assert re.match(
        r"text: 3 steps, 2 workers, mesh pipeline=2 gpipe, replicated, .* \| weights sha256"
        r" [0-9a-f]{64}$",
        last,
    )
    assert "mesh pipeline=2: a rank holds" in found.stderr
    said = json.loads((tmp_path / "r" / "mesh.json").read_text())
    assert [each["pipeline"] for each in said["ranks"]] == [0, 1]
    names = [name for each in said["ranks"] for stage in each["stages"].values() for name in stage]
    assert names == ["bytes", "blocks.0", "blocks.1", "norm", "head"]
    whole = lockstep("evaluate", "text", "--run", "r", *SMALL, folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    metric = re.search(r"bits_per_byte ([\d.]+)", last)
    assert metric is not None
    assert metric[1] in whole.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--mesh", "data=2,pipeline=2", "--workers", "3"],
            "--mesh data=2,pipeline=2 has 4 ranks (data 2 x pipeline 2), but the run has 3",
        ),
        (
            ["--mesh", "pipe=2"],
            "--mesh pipe=2: there is no axis 'pipe'; did you mean pipeline?",
        ),
        (
            ["--mesh", "pipeline=2", "--workers", "1:2"],
            "--mesh pipeline=2 fixes the number of ranks. Give exactly 2 workers, and no range."
            " [range-of-workers]",
        ),
        (
            ["--schedule", "gpipe"],
            "--schedule gpipe configures a pipeline, but the mesh has no pipeline axis.",
        ),
        (
            ["--mesh", "shard=2", "--exact"],
            (
                "--exact with --mesh shard=2: torch's parallelism adds in its own order."
                " Leave one out. [mesh-with-exact]"
            ),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    words: list[str], message: str, tmp_path: Path
) -> None:
    found = lockstep("train", "text", *words, folder=tmp_path)
    assert found.returncode == 2
    assert message in found.stderr
    assert list(tmp_path.iterdir()) == []
