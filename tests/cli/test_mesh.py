"""`lockstep train --mesh`: from the command to the last line, and what other commands make of
the run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import Command, command, words_of
from tests.refused import refused

SMALL = (
    "--set train_bytes=3000 --set eval_bytes=600 --set width=16 --set depth=2 --set length=8"
    " --device cpu"
)


def test_a_pipeline_from_the_command_to_its_evaluation(tmp_path: Path, lockstep: Command) -> None:
    trained = lockstep(f"train text --mesh pipeline=2 --schedule gpipe --steps 3 --run r {SMALL}")
    assert trained.code == 0, trained.err
    last = trained.out.splitlines()[-1]
    assert re.match(
        r"text: 3 steps, 2 workers, mesh pipeline=2 gpipe, replicated, .* \| weights sha256"
        r" [0-9a-f]{64}$",
        last,
    )
    assert "mesh pipeline=2: a rank holds" in trained.err
    ranks = json.loads((tmp_path / "r" / "mesh.json").read_text())["ranks"]
    assert [rank["pipeline"] for rank in ranks] == [0, 1]
    stages = [*ranks[0]["stages"].values(), *ranks[1]["stages"].values()]
    names = [name for stage in stages for name in stage]
    assert names == ["bytes", "blocks.0", "blocks.1", "norm", "head"]
    evaluated = lockstep(f"evaluate text --run r {SMALL}")
    assert evaluated.code == 0, evaluated.err
    metric = re.search(r"bits_per_byte ([\d.]+)", last)
    assert metric is not None
    assert metric[1] in evaluated.out


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--mesh data=2,pipeline=2 --workers 3", "mesh-of-other-size"),
        ("--mesh pipe=2", "unknown-name"),
        ("--mesh pipeline=2 --workers 1:2", "range-of-workers"),
        ("--schedule gpipe", "no-pipeline"),
        ("--mesh shard=2 --exact", "mesh-with-exact"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    line: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code):
        command("train", "text", *words_of(line))
    assert list(tmp_path.iterdir()) == []
