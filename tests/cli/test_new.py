"""`lockstep new`: a skeleton names what is missing, and checks what was written."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import command
from tests.refused import refused

ORDER = """generator = torch.Generator().manual_seed(100 * seed + epoch)
    return torch.randperm(samples, generator=generator).tolist()"""
SAMPLER = {
    "epoch_order": ORDER,
    "padded": "return (indices * ranks)[: -(-len(indices) // ranks) * ranks]",
    "part_of_rank": "return indices[rank::ranks]",
}
TRAINER = {
    "set_up": 'dist.init_process_group("gloo")',
    "broadcast_model": """for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)""",
    "average_gradients": """for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= samples""",
}
TASK = {
    "network": "return nn.Linear(10, 2)",
    "loss": 'return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])',
}


def written(kind: str, parts: dict[str, str], folder: Path) -> Path:
    """Write the skeleton, and these functions in it."""
    file = folder / f"{kind}.py"
    command("new", kind, str(file))
    text = file.read_text()
    for name, code in parts.items():
        gap = f'raise NotImplementedError("{name}")'
        assert gap in text
        text = text.replace(gap, code)
    file.write_text(text)
    return file


def printed(*words: str | Path) -> str:
    return subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("kind", "parts"), [("sampler", SAMPLER), ("trainer", TRAINER), ("task", TASK)]
)
def test_what_is_missing_is_named(
    kind: str,
    parts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    first = next(iter(parts))
    file = written(kind, {}, tmp_path)
    capsys.readouterr()
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out == f"{first} is not written yet\n"


def sampler_prints(
    parts: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    file = written("sampler", SAMPLER | parts, folder)
    capsys.readouterr()
    runpy.run_path(str(file), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_a_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = sampler_prints({}, tmp_path, capsys)
    assert [line[:6] for line in lines[:4]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [line.partition(": ")[2] for line in lines[4:]] == ["yes"] * 4


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"epoch_order": ORDER.replace(" + epoch", "")}, "epoch 1 has another order: NO"),
        (
            {"padded": "return indices + indices[: -len(indices) % ranks]"},
            "NO: with 1 sample and 4 ranks, each rank must get it once",
        ),
        ({"padded": "return indices"}, "all ranks have equally many samples: NO"),
        ({"part_of_rank": "return indices[:3]"}, "every sample is used: NO"),
    ],
)
def test_a_wrong_sampler(
    parts: dict[str, str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in sampler_prints(parts, tmp_path, capsys)


def test_a_trainer(tmp_path: Path) -> None:
    lines = printed(written("trainer", TRAINER, tmp_path)).splitlines()
    assert lines[0] == "the averaged gradient is that of one process: yes"
    assert lines[1].startswith("step 0: loss ")
    assert lines[-1] == "the replicas are equal: yes"


@pytest.mark.rest
def test_a_trainer_under_a_launcher(tmp_path: Path) -> None:
    file = written("trainer", TRAINER, tmp_path)
    out = printed("-m", "lockstep", "run", "--workers", "3", file)
    assert "gradient is that of one process: yes\n" in out
    assert "over 3 ranks\n" in out


@pytest.mark.rest
@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            {"average_gradients": TRAINER["average_gradients"].replace("samples", "2")},
            "the averaged gradient is that of one process: NO\n",
        ),
        ({"broadcast_model": "pass"}, "the replicas are equal: NO\n"),
    ],
)
def test_a_wrong_trainer(parts: dict[str, str], line: str, tmp_path: Path) -> None:
    assert line in printed(written("trainer", TRAINER | parts, tmp_path))


def test_a_task(tmp_path: Path) -> None:
    lines = printed(written("task", TASK, tmp_path)).splitlines()
    assert lines[-2:] == [
        "the loss has fallen: yes",
        "it does not depend on the number of ranks: yes",
    ]


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "sampler.py"
    file.write_text("mine")
    with refused("cannot-write", name="FILE", reason="File exists"):
        command("new", "sampler", str(file))
    assert file.read_text() == "mine"
