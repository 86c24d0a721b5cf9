"""`lockstep replay` from the outside: what it prints, its exit code, its JSON."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.tools.replay.test_replay import trained


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("exact") / "run", workers=3, steps=9)


def test_the_command_prints_a_step(exact: Path, lockstep: Command) -> None:
    ended = lockstep(f"replay {exact} --step 8 --samples 2 --json out.json --device cpu")
    assert ended.code == 0, ended.err
    assert "same bits" in ended.out
    assert ended.out.count("\n") > 12
    report = json.loads(Path("out.json").read_text())
    (step,) = report["steps"]
    assert step["same_bits"] is True
    assert [one["rank"] for one in step["micro_batches"]] == [0, 0, 1, 2]
    assert len(step["samples"]) == 2
    ended = lockstep(f"replay {exact} --step 7:9 -n 2 --device cpu")
    assert ended.code == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines()] == ["step", "7", "8", "9"]
    ended = lockstep(f"replay {exact} --bisect --step 7:9 --device cpu --json out.json")
    assert ended.code == 0, ended.err
    assert json.loads(Path("out.json").read_text())["step"] is None


def test_the_command_fails_where_a_loss_cannot_be_reproduced(
    exact: Path, tmp_path: Path, lockstep: Command
) -> None:
    path = shutil.copytree(exact, tmp_path / "copy")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    for record in records:
        if record.get("step") == 8 and record["kind"] == "step":
            record["loss"] = math.nextafter(record["loss"], math.inf)
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    ended = lockstep(f"replay {path} --step 8 --device cpu")
    assert ended.code == 1
    assert "cannot be reproduced" in ended.out
    ended = lockstep(f"replay {path} --bisect --device cpu --json out.json")
    assert ended.code == 1
    assert json.loads(Path("out.json").read_text())["step"] == 8
    assert f"lockstep replay {path} --step 8" in ended.out


def test_options_that_do_not_go_together(exact: Path, tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for line in (
        "--step 8 --break step -n 2",
        "--bisect --samples 1",
        "--step 8 --to full",
        "--step 8 --samples -1",
        "--step 8 -n 0",
        "--step 8 --slot 1",
    ):
        ended = lockstep(f"replay {exact} {line}")
        assert ended.code == 2, line
        assert "error:" in ended.err
