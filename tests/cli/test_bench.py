"""`lockstep bench` from the outside: a table, JSON with every column, a picture, and a sentence for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lockstep.cli.app import app
from lockstep.cli.bench import _sizes
from lockstep.errors import UsageError, WorkerFailed
from lockstep.tools.bench import collectives as measured
from lockstep.tools.bench import training_step
from lockstep.tools.timing.output_files import check_writable
from tests.cli.command import command
from tests.refused import refused

COLUMNS = {
    "collective",
    "algorithm",
    "size",
    "workers",
    "runs",
    "p50",
    "p99",
    "wrong",
    "algbw",
    "busbw",
}


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (measured, training_step):
        monkeypatch.setattr(each, "launch", None)


def figures(
    kind: str, workers: int, sizes: list[int], algorithms: list[str], runs: int | None = None
) -> list[measured.CollectiveTime]:
    """In place of measuring: the last algorithm is twice as fast as the others."""
    return [
        measured.CollectiveTime(
            collective=kind,
            algorithm=name,
            size=size,
            workers=workers,
            runs=runs or 8,
            p50=(2 - (name == algorithms[-1])) * 1e-5,
            p99=3e-5,
            wrong=0,
        )
        for size in sizes
        for name in algorithms
    ]


# -- collectives ---------------------------------------------------------------------------------


def test_collectives_prints_a_table_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "bench",
        "collectives",
        "--workers",
        "2",
        "--sizes",
        "1K..4K",
        "--runs",
        "2",
    ]
    command += [
        "--collective",
        "all_reduce",
        "--algorithms",
        "native,ring",
        "--json",
        "figures.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines[2:]] == [
        ["all_reduce", name, size] for size in ("1024", "4096") for name in ("native", "ring")
    ]
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["algorithm"], row["size"]) for row in rows] == [
        (line[1], int(line[2])) for line in lines[2:]
    ]
    for row in rows:
        assert set(row) == COLUMNS
        assert (row["collective"], row["workers"], row["runs"], row["wrong"]) == (
            "all_reduce",
            2,
            2,
            0,
        )
        assert row["busbw"] == row["algbw"]  # of two ranks


def test_several_collectives_with_all_their_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "measure", figures)
    done = bench(
        "collectives", "--collective", "broadcast,all_to_all", "--sizes", "64", "--workers", "3"
    )
    assert done.exit_code == 0, done.output
    found = [tuple(line.split()[:2]) for line in done.stdout.splitlines()[2:]]
    expected = [
        (kind, name)
        for kind in ("broadcast", "all_to_all")
        for name in ("native", *measured.algorithms_of(kind))
    ]
    assert found == expected


# -- train ---------------------------------------------------------------------------------------

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep
from tests.refused import refused


def task(lr: float = 0.1, broken: bool = False) -> lockstep.Task:
    random = torch.Generator().manual_seed(0)
    return lockstep.Task(
        model=lambda: nn.Linear(6, 3),
        train_data=TensorDataset(torch.randn(64, 6, generator=random), torch.randint(0, 3, (64,), generator=random)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]) if broken else (F.cross_entropy(output, batch[1], reduction="sum"), 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        global_batch=16,
        micro_batch=4,
    )
"""


def test_train_times_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "bench",
        "train",
        "mine.py",
        "--workers",
        "2",
        "--steps",
        "2",
        "--set",
        "lr=0.5",
    ]
    command += [
        "--device",
        "cpu",
        "--variants",
        "ddp:5,stepper:native",
        "--json",
        "figures.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mine: global batch 16 = 4 micro-batches x 4; 2 ranks x 2; ")
    assert [line.split()[0] for line in lines[2:5]] == ["variant", "ddp:5", "stepper:native"]
    command_of_fastest = (
        "lockstep train mine.py --workers 2 --device cpu --set lr=0.5 --reduce native"
    )
    assert lines[5:] == ["", command_of_fastest]
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [(row["variant"], len(row["seconds"])) for row in found["rows"]] == [
        ("ddp:5", 2),
        ("stepper:native", 2),
    ]
    assert (found["best"], found["workers"], found["device"]) == ("ddp:5", 2, "cpu")
    assert found["rows"][1]["apart"] < 1e-4


def of_rank(
    source: object, names: list[str], steps: int, device: str, others: object
) -> training_step._Found:
    """In place of measuring: the last one has trained something else."""
    return training_step._Found(
        "as it is", {name: [0.1] * steps for name in names}, {names[-1]: 0.9}, 1.0, []
    )


def test_train_says_what_trained_something_else_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_step, "launch", lambda fn, workers, args: [of_rank(*args)])
    (tmp_path / "mine.py").write_text(TASK)
    file = tmp_path / "figures.json"
    done = bench(
        "train",
        str(tmp_path / "mine.py"),
        "--device",
        "cpu",
        "--variants",
        "ddp:5,stepper:native",
        "--json",
        str(file),
    )
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith(
        "stepper:native trained something else: its weights lie 0.9 of the way"
    )
    assert json.loads(file.read_text())["workers"] == 2  # without GPUs


def test_train_tells_what_failed_on_a_rank(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    done = bench(
        "train",
        str(tmp_path / "mine.py"),
        "-n",
        "1",
        "--device",
        "cpu",
        "--variants",
        "local",
        "--set",
        "broken=true",
    )
    assert (done.exit_code, done.stdout) == (1, "")
    assert isinstance(done.exception, WorkerFailed)
    assert "Task: loss returned a Tensor" in str(done.exception)
    assert "[wrong-return-type]" in str(done.exception)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["digist"],
            "task 'digist' is unknown: the bundled tasks are digits, text (did you mean 'digits'?)",
        ),
        (
            ["text", "--variants", "ddp:25,stepper"],
            "variant='stepper' is unknown. Choose one of ddp:MB",
        ),
        (["text", "--variants", ""], "variant='' is unknown. Choose one of ddp:MB"),
        (["text", "--set", "widht=3"], "--set widht"),
        (["text", "--set", "width"], "--set: 'width' is not a pair. Write name=value"),
        (
            ["text", "--workers", "9"],
            (
                "9 workers: a step of task text (global_batch=16, micro_batch=2) has no micro-batch"
                " for some"
            ),
        ),
        (["text", "--workers", "0"], "workers=0: give a whole number of at least 1"),
        (["text", "--steps", "0"], "steps=0: give a whole number of at least 1"),
        (["text", "--device", "gpu"], "device='gpu' is unknown. Choose one of auto, cpu, cuda"),
    ],
)
def test_mistakes_in_train_are_sentences_and_start_nothing(args: list[str], message: str) -> None:
    done = bench("train", *args)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(message)
    assert done.stdout == ""


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K..64K", [4096, 16384, 65536]),
        ("4K..60K", [4096, 16384]),
        ("100", [100]),
        ("1..20", [1, 4, 16]),
        ("512k..2m", [2**19, 2**21]),
        ("1G", [2**30]),
    ],
)
def test_sizes_go_up_by_four(text: str, sizes: list[int]) -> None:
    assert _sizes(text) == sizes


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--algorithms", "rign"],
            (
                "all_reduce: algorithm='rign' is unknown. Choose one of native, auto,"
                " shared_memory, central, ring"
            ),
        ),
        (["--algorithms", "native,"], "all_reduce: algorithm='' is unknown"),
        (
            ["--collective", "all_redcue"],
            "collective='all_redcue' is unknown. Choose one of all_reduce, broadcast",
        ),
        (
            ["--collective", "broadcast", "--algorithms", "recursive_doubling"],
            "broadcast: algorithm='recursive_doubling' is unknown",
        ),
    ],
)
def test_mistakes_are_sentences_and_start_nothing(args: list[str], message: str) -> None:
    done = bench("collectives", *args)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(message)
    assert done.stdout == ""


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("sizes", ["4X..8X", "0..4K", "-4K", "4K..", "1.5K", "64K..4K", "1..2..3"])
def test_sizes_that_are_no_range(sizes: str) -> None:
    with refused("wrong-value", value=sizes):
        command("bench", "collectives", f"--sizes={sizes}")


@pytest.mark.parametrize(("option", "value"), [("--runs", 0), ("--runs", -1), ("--workers", 0)])
def test_at_least_one_of_each(option: str, value: int) -> None:
    with refused("wrong-value", name=option[2:].replace("-", "_"), value=value):
        command("bench", "collectives", f"{option}={value}")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["collectives"], "--json"),
        (["train", "digits"], "--json"),
        (["scaling", "digits"], "--json"),
        (["scaling", "digits"], "--out"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, command: list[str], option: str
) -> None:
    file = tmp_path / "missing" / "out.svg"
    done = bench(*command, option, str(file))
    assert isinstance(done.exception, UsageError)
    said = f"{option} {file} cannot be written: No such file or directory [cannot-write]"
    assert str(done.exception) == said


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("ending", ["", ".txt", ".png"])
def test_a_picture_of_no_kind(tmp_path: Path, ending: str) -> None:
    done = bench("scaling", "digits", "--plot", str(tmp_path / f"times{ending}"))
    assert isinstance(done.exception, UsageError)
    assert done.exception.code == "wrong-ending"
    assert done.exception.values["endings"] == [".svg"]
    assert list(tmp_path.iterdir()) == []


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text("kept")
    check_writable(file, "--json")
    check_writable(tmp_path / "new.json", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert file.read_text() == "kept"
