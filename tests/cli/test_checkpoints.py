"""`lockstep checkpoints`: listing, verifying, comparing and exporting, and a sentence for what
is not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lockstep.checkpoints import files
from lockstep.cli.checkpoints import app
from tests.checkpoints.model_alone import write_model
from tests.refused import refused

TENSORS = {
    "a.weight": torch.arange(6.0),
    "b": torch.tensor([1.0, float("nan")]),
    "n": torch.tensor(3),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "checkpoints"
    for step in (4, 8):
        folder = write_model(
            directory,
            step,
            {**TENSORS, "n": torch.tensor(step)},
            {"metrics": {"accuracy": step / 10}},
        )
        if step == 4:
            files.mark_best(folder, "accuracy", 0.4)
    return tmp_path / "run"


def called(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)


def refuses(line: str, code: str, **values: Any) -> None:
    with refused(code, **values):
        raise called(*line.split()).exception or AssertionError(line)


def test_ls(run: Path, tmp_path: Path) -> None:
    found = called("ls", run, "--json", tmp_path / "rows.json")
    first, second, total = found.stdout.splitlines()
    assert total.split()[0] == "all"
    assert first.startswith("step-0000004")
    assert first.endswith("accuracy 0.4000  best")
    assert second.endswith("accuracy 0.8000")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["name"]: row["best"] for row in rows} == {
        "step-0000004": True,
        "step-0000008": False,
    }


def test_verify_names_what_is_damaged(run: Path) -> None:
    assert called("verify", run).exit_code == 0
    file = run / "checkpoints" / "step-0000004" / "model.safetensors"
    octets = bytearray(file.read_bytes())
    octets[-1] ^= 1
    file.write_bytes(octets)
    found = called("verify", run / "checkpoints")
    assert found.exit_code == 1
    damaged, whole = found.stdout.splitlines()
    assert damaged.startswith("damaged: step-0000004: model.safetensors ")
    assert damaged.endswith(" [checkpoint-file-changed]")
    assert whole.startswith("whole: step-0000008 (2 files, ")


def test_one_checkpoint_alone(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "step-0000004"
    assert called("verify", folder).stdout.startswith("whole: step-0000004 ")
    assert called("ls", folder).stdout.startswith("step-0000004 ")
    called("export", folder, "--out", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["n"].item() == 4


def test_diff_goes_by_bits(run: Path) -> None:
    one, two = (run / "checkpoints" / name for name in ("step-0000004", "step-0000008"))
    same = called("diff", one, one)
    assert same.exit_code == 0
    assert same.stdout == "step 4 and step 4: 3 tensors are equal to the bit\n"
    found = called("diff", one, run)
    assert found.exit_code == 1
    assert found.stdout.splitlines() == [
        "n differs in 1 of 1 elements, by 4 at most",
        "step 4 and step 8: 1 of 3 tensors differ",
    ]
    write_model(
        two.parent, 9, {"a.weight": torch.zeros(2), "c": torch.zeros(1), "n": torch.tensor(4)}, {}
    )
    other = called("diff", one, run)
    assert other.exit_code == 1
    assert other.stdout.splitlines() == [
        "a.weight is torch.float32 [6] and torch.float32 [2]",
        "b is only in A",
        "c is only in B",
        "step 4 and step 9: 3 of 4 tensors differ",
    ]


def test_export(run: Path, tmp_path: Path) -> None:
    for options, step in (((), 8), (("--step", 4), 4), (("--best",), 4)):
        out = tmp_path / "model.safetensors"
        found = called("export", run, "--out", out, *options)
        assert found.stdout.startswith(f"{out}: the model of step {step}, ")
        assert load_file(out)["n"].item() == step
    called("export", run, "--out", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["n"].item() == 8


def test_what_cannot_work_is_refused(run: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    refuses(f"ls {nowhere}", "not-a-run-directory", directory=str(nowhere))
    refuses(f"ls {tmp_path}", "no-checkpoint", run=tmp_path)
    export = f"export {run} --out"
    steps = ["step-0000004", "step-0000008"]
    refuses(f"{export} x.pt --step 5", "no-such-step", step=5, there=steps)
    both = {"one": "--best", "other": "--step 4"}
    refuses(f"{export} x.pt --step 4 --best", "options-exclude-each-other", **both)
    for file in (nowhere / "x.safetensors", nowhere / "x.pt"):
        refuses(f"{export} {file}", "cannot-write", name="--out", file=file)
    endings = [".safetensors", ".pt", ".pth"]
    refuses(f"{export} model.bin", "wrong-ending", file=Path("model.bin"), endings=endings)
    formats = {"name": "--format", "value": "onnx", "choices": ["hf", "dcp"]}
    refuses(f"{export} {nowhere} --format onnx", "unknown-choice", **formats)
    refuses(f"{export} {run} --format dcp", "cannot-write", name="--out", file=run)
    refuses(f"{export} {nowhere} --format hf", "no-model-config")
