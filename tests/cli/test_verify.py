"""`lockstep verify` from the outside: the table, the sentence, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command, command, process
from tests.tools.verify.planted import __file__ as planted
from tests.tools.verify.test_finished_runs import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(Path(planted).read_text())
    return tmp_path


@pytest.fixture
def one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are forked, where otherwise one training would start fresh interpreters."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.usefixtures("one_hash_seed")
def test_exact_training_gives_the_same_bits(folder: Path, lockstep: Command) -> None:
    line = "verify my_task.py --workers 1,2,3 --steps 3 --exact --device cpu --json found.json"
    ended = lockstep(line)
    *table, last = ended.out.splitlines()
    assert last == "verify: my_task gives the same bits on 1, 2 and 3 workers (3 steps)"
    assert table[0].split() == ["workers", "steps", "loss", "at", "the", "end", "weights", "sha256"]
    rows = [line.split() for line in table[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[4:] for row in rows] == [[], ["same"], ["same"]]
    assert len({row[3] for row in rows}) == 1
    report = json.loads((folder / "found.json").read_text())
    assert (report["task"], report["same"], report["difference"]) == ("my_task", True, None)
    assert report["trainings"][2]["sha256"].startswith(rows[2][3])


@pytest.mark.usefixtures("one_hash_seed", "folder")
def test_other_training_agrees_within_rounding(lockstep: Command) -> None:
    text = lockstep("verify my_task.py --workers 1,2 --steps 3 --device cpu --update sharded").out
    assert "agrees" in text
    verdict = "verify: my_task gives the same values within rounding on 1 and 2 workers (3 steps)"
    assert text.splitlines()[-1] == verdict


@pytest.mark.rest  # four fresh interpreters
def test_the_order_of_a_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own ranks are started, not forked: each hashes text in its own way, unless
    PYTHONHASHSEED says how; also on one worker, twice.
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    ended = process("verify my_task.py --workers 1,1 --steps 1 --set fault=set --exact", folder)
    assert ended.code == 1, ended.err
    *table, where, why = ended.out.splitlines()
    assert table[2].split()[-1] == "differs"
    assert where.startswith(
        "verify: my_task differs. First difference: step 1, micro-batch 0 (of rank 0 of 1 and of"
        " rank 0 of 1): "
    )
    assert where.endswith("the first gradient that differs is that of last.bias")
    assert why.startswith(
        "likely cause: the order of a set (or hash() of text): with PYTHONHASHSEED=0 in all"
        " processes running this micro-batch"
    )
    assert "Traceback" not in ended.err
    names = {path.name for path in folder.iterdir()}
    assert names - {"__pycache__"} == {"my_task.py"}


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = run(tmp_path / "a"), run(tmp_path / "b"), run(tmp_path / "c", weight=2.0)
    command("verify", str(one), str(same))
    assert (
        capsys.readouterr().out
        == f"verify: {one} and {same} are equal, bit for bit: 3 steps, 1 evaluation and the weights"
        " of step-0000003\n"
    )
    with pytest.raises(SystemExit) as caught:
        command("verify", str(one), str(other), json=tmp_path / "found.json")
    assert caught.value.code == 1
    assert capsys.readouterr().out.splitlines()[0] == f"verify: {one} and {other} differ"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["same"] is False
    assert found["differences"] == [
        "weights (step-0000003): layer.weight differs in 1 of 3 elements, by 1 at most"
    ]
