"""`lockstep verify` from the outside: the table, the sentence, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.errors import WorkerFailed
from tests.cli.command import command, process
from tests.refused import refused
from tests.tools.verify.planted import __file__ as planted
from tests.tools.verify.test_finished_runs import run


@pytest.fixture
def one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are forked, where otherwise one training would start fresh interpreters."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.usefixtures("one_hash_seed")
def test_digits_gives_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(
        "verify",
        "digits",
        workers="1,2,3",
        steps=3,
        exact=True,
        device="cpu",
        json=tmp_path / "found.json",
    )
    *table, last = capsys.readouterr().out.splitlines()
    assert last == "verify: digits gives the same bits on 1, 2 and 3 workers (3 steps)"
    assert table[0].split() == ["workers", "steps", "loss", "at", "the", "end", "weights", "sha256"]
    rows = [line.split() for line in table[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[4:] for row in rows] == [[], ["same"], ["same"]]
    assert len({row[3] for row in rows}) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["task"], found["same"], found["difference"]) == ("digits", True, None)
    assert found["trainings"][2]["sha256"].startswith(rows[2][3])


@pytest.mark.usefixtures("one_hash_seed")
def test_digits_agrees_within_rounding_without_exact(capsys: pytest.CaptureFixture[str]) -> None:
    command("verify", "digits", workers="1,2", steps=3, device="cpu", update="sharded")
    out = capsys.readouterr().out
    assert "agrees" in out
    assert (
        out.splitlines()[-1]
        == "verify: digits gives the same values within rounding on 1 and 2 workers (3 steps)"
    )


def test_the_order_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own ranks are started, not forked: each hashes text in its own way, unless
    PYTHONHASHSEED says how; also on one worker, twice.
    """
    (tmp_path / "my_task.py").write_text(Path(planted).read_text())
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    line = "verify my_task.py --workers 1,1 --steps 1 --set fault=set --exact"
    ended = process(line, tmp_path)
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
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [
        "my_task.py"
    ]


@pytest.mark.usefixtures("one_hash_seed")
def test_an_exception_in_the_task_is_the_ranks_own(tmp_path: Path) -> None:
    text = Path(planted).read_text()
    (tmp_path / "my_task.py").write_text(
        text.replace("return found, len(batch[1])", 'raise ArithmeticError("in my loss")')
    )
    with pytest.raises(WorkerFailed, match="ArithmeticError: in my loss"):
        command("verify", str(tmp_path / "my_task.py"), workers="1,2", steps=1, device="cpu")


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


@pytest.mark.parametrize(
    ("line", "code", "values"),
    [
        ("digits --steps 0", "wrong-value", {"name": "steps", "value": 0}),
        ("digits --exact --reduce central", "exact-with-reduce", {"reduce": "central"}),
        ("digit", "unknown-task", {"task": "digit"}),
        ("digits --workers 2", "wrong-value", {"value": "2"}),
        ("digits --workers 1,two", "wrong-value", {"value": "1,two"}),
        ("digits --workers 1,0", "wrong-value", {"value": "1,0"}),
        ("a b c", "task-or-two-runs", {"given": "3 arguments"}),
        (
            "a b --exact --steps 3",
            "options-exclude-each-other",
            {"one": "--exact, --steps", "other": "RUN_A RUN_B"},
        ),
        ("a b", "not-a-run-directory", {"directory": "a"}),
        (".", "task-or-two-runs", {"given": "the folder ."}),
    ],
)
def test_mistakes_on_the_command_line_are_refused(
    line: str, code: str, values: dict[str, object]
) -> None:
    with refused(code, **values):
        command("verify", *line.split())
