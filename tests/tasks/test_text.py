"""text: whole files are held out, no byte depends on the future, and bits are counted by the
byte.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lockstep import train
from lockstep.errors import TaskError
from lockstep.tasks import text
from tests.refused import refused


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        folder = tmp_path / ("package" if number % 2 else "other")
        folder.mkdir(exist_ok=True)
        (folder / f"m{number}.py").write_text(f"# {number}\n" * 20)
    for left_out in ("site-packages", "package/tests"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "x.py").write_text("left out")
    return tmp_path


def test_files_are_held_out_whole(library: Path) -> None:
    training, evaluation = (part.decode() for part in text.texts(10**6, 10**6, library))
    seen, held_out = (
        {line for line in part.splitlines() if line} for part in (training, evaluation)
    )
    assert not seen & held_out
    assert len(seen) + len(held_out) == 60
    assert 1 <= len(held_out) < 20
    assert "left out" not in training + evaluation
    (library / "package" / "long.py").write_text("x" * 100_000)
    longer = sum(map(len, text.texts(10**6, 10**6, library)))
    assert longer == len(training) + len(evaluation) + 16_384
    names = [file for _, file in text.files(library)]
    assert names != sorted(names)


def test_at_most_so_many_bytes_in_the_same_order(library: Path) -> None:
    whole = text.texts(10**6, 10**6, library)
    part = text.texts(500, 50, library)
    assert [len(each) for each in part] == [500, 50]
    assert all(full.startswith(cut) for full, cut in zip(whole, part, strict=True))


def test_sequences_meet_and_do_not_overlap() -> None:
    data = text.Sequences(b"abcdefghij", 3)
    pairs = [
        tuple(bytes(part.tolist()).decode() for part in data[number]) for number in range(len(data))
    ]
    assert pairs == [("abc", "bcd"), ("def", "efg"), ("ghi", "hij")]
    assert len(text.Sequences(b"abcdefghi", 3)) == 2
    assert len(text.Sequences(b"", 3)) == 0
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            data[wrong]


def test_no_byte_sees_the_future_and_all_see_the_past() -> None:
    model = text.GPT(32, 2, 16, 0.0)
    with torch.no_grad():
        here = torch.randint(256, (2, 16))
        later = here.clone()
        later[:, 8] = (later[:, 8] + 1) % 256
        before, after = model(here), model(later)
    assert before.shape == (2, 16, 256)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-6)


def test_dropout_only_where_it_is_set_and_in_training() -> None:
    here = torch.randint(256, (1, 16))
    for dropout, training, equal in ((0.0, True, True), (0.5, True, False), (0.5, False, True)):
        model = text.GPT(32, 1, 16, dropout).train(training)
        assert torch.equal(model(here), model(here)) == equal


def test_a_million_parameters_and_bits_by_the_byte() -> None:
    task = text.task()
    assert 0.9e6 < sum(parameter.numel() for parameter in task.model().parameters()) < 1.1e6
    assert task.metrics is not None
    target = torch.randint(256, (2, 16))
    value, weight = task.metrics(torch.zeros(2, 16, 256), (None, target))["bits_per_byte"]
    assert weight == 32
    assert math.isclose(float(value) / 32, 8.0, rel_tol=1e-6)


def test_too_little_text_and_a_width_that_the_heads_do_not_divide(tmp_path: Path) -> None:
    with refused("too-few-source-files", TaskError, folder=tmp_path):
        text.texts(100, 100, tmp_path)
    with refused("width-not-divisible", TaskError, width=30, heads=4):
        text.task(width=30)


def test_it_learns() -> None:
    result = train(
        text.task(width=32, depth=1, length=32, train_bytes=20_000, eval_bytes=2_000, lr=1e-2),
        steps=15,
    )
    assert result.metrics["bits_per_byte"] < 6.5
