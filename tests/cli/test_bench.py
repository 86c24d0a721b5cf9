"""`lockstep bench` from the outside: tables, JSON with every column, a picture, and a refusal for
every mistake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import bench
from lockstep.schedules.algorithms import algorithms_of
from lockstep.tools.bench import collectives as measured
from lockstep.tools.bench import scaling
from lockstep.tools.timing.output_files import check_writable
from tests.cli.command import Command, command
from tests.refused import refused


def test_collectives_prints_a_table_and_writes_json(tmp_path: Path, lockstep: Command) -> None:
    ended = lockstep(
        "bench collectives --workers 2 --sizes 1K..4K --runs 2 --collective all_reduce,broadcast"
        " --json figures.json"
    )
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert {tuple(line[:3]) for line in lines[2:]} == {
        (kind, name, size)
        for kind in ("all_reduce", "broadcast")
        for size in ("1024", "4096")
        for name in ("native", *algorithms_of(kind))
    }
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    columns = "collective algorithm size workers runs p50 p99 wrong algbw busbw"
    for row, line in zip(rows, lines[2:], strict=True):
        assert set(row) == set(columns.split())
        assert [row["collective"], row["algorithm"], str(row["size"])] == line[:3]
        assert (row["workers"], row["runs"], row["wrong"]) == (2, 2, 0)
        assert row["busbw"] == row["algbw"]  # of two ranks


def test_sizes_go_up_by_four() -> None:
    for text, sizes in {
        "4K..64K": [4096, 16384, 65536],
        "4K..60K": [4096, 16384],
        "100": [100],
        "1..20": [1, 4, 16],
        "512k..2m": [2**19, 2**21],
        "1G": [2**30],
    }.items():
        assert bench._sizes(text) == sizes
    for text in ("4X..8X", "0..4K", "-4K", "4K..", "1.5K", "64K..4K", "1..2..3"):
        with refused("wrong-value", value=text):
            bench._sizes(text)


TASK = """
from tests.training import toy

def task(lr: float = 0.1, global_batch: int = 8):
    return toy.task(name=None, global_batch=global_batch, micro_batch=2)
"""


def test_train_times_a_task_of_ones_own(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    ended = lockstep(
        "bench train mine.py --workers 2 --steps 2 --set lr=0.5 --device cpu"
        " --variants ddp:5,sharded --json figures.json"
    )
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith("mine: global batch 8 = 4 micro-batches x 2; 2 ranks x 2; ")
    command = "lockstep train mine.py --workers 2 --device cpu --set lr=0.5"
    assert lines[-2] == ""
    assert lines[-1].startswith(f"{command} --update sharded --weights separate --threads ")
    report = json.loads((tmp_path / "figures.json").read_text())
    assert {row["variant"] for row in report["rows"]} == {"ddp:5", "sharded"}
    assert (report["workers"], report["device"]) == (2, "cpu")
    assert report["ddp"].startswith("ddp:5")


def test_variants_that_do_not_exist_are_refused() -> None:
    for names, code in (
        ("steppr", "unknown-choice"),
        ("ddp", "unknown-choice"),
        ("ddp:0", "wrong-value"),
        ("ddp:x", "wrong-value"),
        ("sharded,sharded", "given-twice"),
    ):
        with refused(code):
            command("bench", "train", "digits", "--variants", names)


def test_weak_scaling_with_json_and_a_picture(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "small.py").write_text(TASK)
    ended = lockstep(
        "bench scaling small.py --workers 1,2 --weak --set global_batch=16 --steps 2 --rounds 2"
        " --threads 1 --device cpu --no-loading --json figures.json --out scaling.svg"
    )
    assert (ended.code, ended.err) == (0, "")
    assert "weak scaling: the batch of a rank stays 16 (8 micro-batches of 2)" in ended.out
    assert "loading is not timed" in ended.out
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["mode"] == "weak"
    assert [row["workers"] for row in report["rows"]] == [1, 2]
    columns = "workers samples_per_s low high speedup efficiency threads step_ms"
    for row in report["rows"]:
        assert set(row) == set(columns.split())
        assert row["speedup"] == row["samples_per_s"] / report["rows"][0]["samples_per_s"]
        assert row["efficiency"] == row["speedup"] / row["workers"]
    assert (tmp_path / "scaling.svg").read_text().startswith("<svg")


class Noted(Exception):
    """The command has asked for its measurement."""


def test_options_reach_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def instead(task: str, workers: list[int], **options: Any) -> None:
        seen.update(options, task=task, workers=workers)
        raise Noted

    def options_of(line: str) -> dict[str, Any]:
        with pytest.raises(Noted):
            command("bench", "scaling", "digits", *line.split())
        return seen

    monkeypatch.setattr(scaling, "benchmark_scaling", instead)
    line = (
        "--workers 2,1 --weak --steps 7 --rounds 3 --threads 2 --no-loading --loader-workers 1"
        " --set lr=1 --device cpu --reduce native --compress bf16 --update sharded"
    )
    numbers = {"workers": [2, 1], "steps": 7, "rounds": 3, "threads": 2, "loader_workers": 1}
    words = {"task": "digits", "mode": "weak", "overrides": {"lr": "1"}, "device": "cpu"}
    methods = {"reduce": "native", "compress": "bf16", "update": "sharded"}
    assert options_of(line) == numbers | words | methods | {"loading": False, "exact": False}
    exact = options_of("--exact --device cpu")
    assert (exact["exact"], exact["compress"]) == (True, None)
    defaults = options_of("--device cpu")
    assert (defaults["mode"], defaults["loading"]) == ("strong", True)


def test_by_default_powers_of_two_up_to_the_gpus_else_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, gpus, device, workers in (
        (6, 0, "auto", [1, 2, 4]),
        (6, 8, "auto", [1, 2, 4, 8]),
        (6, 8, "cpu", [1, 2, 4]),
        (1, 8, "cpu", [1, 2]),
    ):
        monkeypatch.setattr("lockstep.runtime.cores.cores", lambda cores=cores: cores)
        monkeypatch.setattr("lockstep.launcher.start.gpus", lambda gpus=gpus: gpus)
        assert bench._powers_of_two(device) == workers


def test_collectives_that_do_not_exist_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "launch", None)
    for line, value in (
        ("--algorithms rign", "rign"),
        ("--algorithms native,", ""),
        ("--collective all_redcue", "all_redcue"),
        ("--collective broadcast --algorithms recursive_doubling", "recursive_doubling"),
    ):
        with refused("unknown-choice", value=value):
            command("bench", "collectives", *line.split())


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text("kept")
    check_writable(file, "--json")
    check_writable(tmp_path / "new.json", "--json")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.json": "kept"}
