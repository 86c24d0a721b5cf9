"""`lockstep plan --model`: what is printed and written, and sentences for what cannot be
planned.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError
from tests.refused import refused


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_text_and_the_json_of_vgg(tmp_path: Path) -> None:
    file = tmp_path / "vgg.json"
    text = plan(
        "--model",
        "vgg16",
        "--device",
        "p100",
        "--network",
        "25GbE",
        "--nodes-of",
        "4",
        "--workers",
        "1..512",
        "--json",
        str(file),
    )
    assert (
        "vgg16: 138.4 million parameters, 30.9 GFLOP an image forward; 64 images per device and step\n"
        in text
    )
    found = json.loads(file.read_text())
    assert (found["model"], found["device"]) == ("vgg16", "p100")
    assert [row["workers"] for row in found["rows"]] == [2**power for power in range(10)]
    assert {"workers", "step_ms", "efficiency", "limiting"} <= set(found["rows"][0])
    efficiencies = [row["efficiency"] for row in found["rows"]]
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert f"{found['rows'][-1]['step_ms']:.1f} ms" in text


def test_gpt3_does_not_fit_and_how_many_devices_it_takes() -> None:
    text = plan("--model", "gpt3-175b", "--device", "a100-80g", "--workers", "8")
    assert "no: weights, gradients, optimizer\n" in text
    assert "no layout fits" in text
    assert [
        line.split()[2]
        for line in text.splitlines()
        if line.startswith("mesh ") and line.endswith("yes")
    ] == ["46", "40"]


def test_a_way_that_is_given_is_the_only_one() -> None:
    text = plan(
        "--model",
        "resnet50",
        "--device",
        "p100",
        "--workers",
        "4",
        "--compress",
        "bf16",
        "--network",
        "10Gbit",
    )
    assert "compress bf16" in text
    assert "update sharded  " in text  # of the table of what fits
    assert text.count("replicated") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "vgg", "--device", "p100"], "model='vgg' is unknown. Choose one of"),
        (["--model", "vgg16", "--device", "p1000"], "device='p1000' is unknown. Choose one of"),
        (["--model", "vgg16", "--device", "p100", "--batch", "0"], "batch=0"),
        (["--model", "vgg16", "--device", "p100", "--batch", "-1"], "batch=-1"),
    ],
)
def test_a_model_that_cannot_be_planned(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        ([], "option-missing", {"option": "--model vgg16", "needed": "--device NAME"}),
        (["--device", "p100", "--workers", "0"], "wrong-type", {"value": "0"}),
        (["--device", "p100", "--network", "here"], "not-on-network-here", {"what": "--model"}),
        (
            ["--device", "p100", "--noise-scale"],
            "option-of-another-plan",
            {"option": "--noise-scale", "plan": "--model"},
        ),
    ],
)
def test_what_cannot_be_planned(words: list[str], code: str, values: dict[str, str]) -> None:
    words = ["--model", "vgg16", *words]
    with refused(code, **values):
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
