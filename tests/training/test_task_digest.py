"""A task's digests change with the code and the samples that decide its weights, and with
nothing else.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

import lockstep
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.testing import run_ranks
from lockstep.training.resolve import resolve
from lockstep.training.task_digest import (
    changes,
    code_digests,
    compare_tasks,
    sample_digests,
    task_digests,
)
from lockstep.training.train import train
from tests.refused import refused
from tests.training import toy

FILE = '''
"""A task."""
from functools import partial
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep
import parts

SCALE = 0.5

class Base(torch.nn.Module):
    def forward(self, x):
        return self.net(x) * 1.0

class Net(Base):
    width = 3

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, self.width)

def smoothed(loss, by):
    return loss * (1 - by)

def loss(output, batch, *, by=0.1):
    """The loss."""
    # summed
    return smoothed(F.cross_entropy(output, batch[1], reduction="sum"), by) * SCALE + parts.penalty(output), len(batch[1])

def task(lr=0.1):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.arange(20) % 3)
    return lockstep.Task(
        model=Net, train_data=data, eval_data=data, loss=partial(loss, by=0.2), global_batch=4, micro_batch=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics=lambda output, batch: {"right": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))},
    )
'''
PARTS = "def penalty(output):\n    return output.square().sum() * 0.001\n"


def digests(folder: Path, edits: dict[str, str] | None = None, **overrides: str) -> dict[str, str]:
    """Of the task in a new folder, with these texts replaced in its files."""
    folder.mkdir()
    for name, text in (("mine.py", FILE), ("parts.py", PARTS)):
        for old, new in (edits or {}).items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    try:
        return task_digests(resolve(str(folder / "mine.py"), overrides))
    finally:
        sys.path.remove(str(folder))
        for name in ("mine", "parts"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ({'reduction="sum"': 'reduction="mean"'}, ["mine.py: loss has changed"]),
        ({"* (1 - by)": "* (1 + by)"}, ["mine.py: smoothed has changed"]),
        ({"SCALE = 0.5": "SCALE = 0.25"}, ["mine.py: loss, SCALE was 0.5 and is 0.25"]),
        ({"* 1.0": "* 2.0"}, ["mine.py: Base.forward has changed"]),
        ({"width = 3": "width = 4"}, ["mine.py: Net, width was 3 and is 4"]),
        ({"* 0.001": "* 0.002"}, ["parts.py: penalty has changed"]),
        ({"argmax(1)": "argmin(1)"}, ["mine.py: task.<lambda> (metrics) has changed"]),
        (
            {"by=0.2": "by=0.3"},
            [
                "loss was partial of mine.py: loss, (), {'by': 0.2} and is partial of mine.py:"
                " loss, (), {'by': 0.3}"
            ],
        ),
        (
            {"randn(20": "randn(21", "arange(20)": "arange(21)"},
            ["train_data was 20 samples and is 21 samples"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changed_is_named(tmp_path: Path, edits: dict[str, str], named: list[str]) -> None:
    found = changes(digests(tmp_path / "a"), digests(tmp_path / "b", edits))
    assert [each for each in found if "samples of train_data" not in each] == named


def test_an_override_that_code_reads_is_named(tmp_path: Path) -> None:
    found = changes(digests(tmp_path / "a"), digests(tmp_path / "b", lr="0.2"))
    assert found == ["mine.py: task.<lambda> (optimizer), lr was 0.1 and is 0.2"]


def test_samples_that_changed_are_counted(tmp_path: Path) -> None:
    (found,) = changes(
        digests(tmp_path / "a"), digests(tmp_path / "b", {"manual_seed(0)": "manual_seed(1)"})
    )
    # two of the 8 are the same, and on a busy machine fewer are read
    assert re.match(
        r"([1-7]) of \1 samples of train_data that were compared have changed \(number ", found
    )


def test_comments_docstrings_lines_places_and_other_functions_decide_nothing(
    tmp_path: Path,
) -> None:
    edits = {
        "# summed": "",
        '"""The loss."""': '"""What is made small."""',
        "\nclass Base": "\n\ndef unused():\n    pass\n\nclass Base",
    }
    assert changes(digests(tmp_path / "a"), digests(tmp_path / "b", edits)) == []


def test_code_is_compared_on_the_same_python_only() -> None:
    before = code_digests(toy.task())
    assert before["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    now = code_digests(toy.task(loss=lambda output, batch: toy.loss(output, batch)))
    assert changes(before, now) == ["loss was toy.py: loss and is test_task_digest.py: "
        "test_code_is_compared_on_the_same_python_only.<lambda> (loss)"]  # fmt: skip
    assert changes({**before, "python": "3.99"}, now) == []
    assert changes({}, now) == []


class Smoothed(nn.CrossEntropyLoss):
    def __call__(self, output: Any, batch: Any) -> Any:
        return self.forward(output, batch[1]), len(batch[1])


def test_the_settings_of_a_loss_that_is_an_object_count() -> None:
    before, now = (code_digests(toy.task(loss=Smoothed(label_smoothing=by))) for by in (0.0, 0.1))
    assert [each.split(" was ")[0] for each in changes(before, now)] in (
        ["loss"],
        ["loss has changed"],
    )
    assert before == code_digests(toy.task(loss=Smoothed(label_smoothing=0.0)))


def test_values_that_refer_to_themselves_and_places_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    place = Path.cwd() / "data"

    def loss(output: Any, batch: Any) -> Any:
        return toy.loss(output, batch) if loop and place and str(place) else loss(output, batch)

    before = code_digests(toy.task(loss=loss))
    place = Path("/somewhere/else")
    assert changes(before, code_digests(toy.task(loss=loss))) == []


# -- samples -------------------------------------------------------------------------------------


class Numbers(Dataset[Any]):
    """Opens its file at the first access, and draws from generators of its own and from the
    global ones.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.opened = offset, False
        self.own, self.torchs = np.random.default_rng(1), torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.opened = True
        if index % 7 == 0:
            raise OSError("no such file")
        drawn = [
            self.own.random(),
            torch.rand(2, generator=self.torchs),
            torch.rand(2),
            np.random.rand(),
            random.random(),
        ]
        return {"x": torch.tensor([index + self.offset]), "drawn": drawn, "text": "ü", "none": None}


def test_samples_are_read_without_a_trace() -> None:
    data = Numbers()
    nested = ConcatDataset([Subset(data, range(50)), Subset(data, range(50, 100))])
    states = (
        data.own.bit_generator.state,
        data.torchs.get_state(),
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[2],
    )
    first, again = sample_digests(data, 3, seconds=None), sample_digests(nested, 3, seconds=None)
    assert not data.opened
    assert first == sample_digests(data, 3, seconds=None)
    assert again == sample_digests(nested, 3, seconds=None)
    assert states[0] == data.own.bit_generator.state
    assert torch.equal(states[1], data.torchs.get_state())
    assert torch.equal(states[2], torch.get_rng_state())
    assert (states[3], states[4]) == (random.getstate(), np.random.get_state()[2])
    assert len(first) > 3
    assert changes(first, sample_digests(Numbers(1), 3, seconds=None))


class Unkeyed(Numbers):
    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_samples_that_cannot_be_compared_are_left_out() -> None:
    assert sample_digests(Unkeyed(), 0) == {"train_data": "100 samples"}
    assert sample_digests(Stream(), 0) == {}
    assert len(sample_digests(toy.data(40, 0), 0, seconds=0.0)) == 2  # one is always read
    assert len(sample_digests(toy.data(40, 0), 0, count=3, seconds=None)) == 4


@pytest.mark.parametrize(
    "pair",
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(1, dtype=torch.complex128), torch.ones(1, dtype=torch.complex128)),
        (np.zeros(2), np.ones(2)),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"b": 1}),
        (b"a", b"b"),
        (1.0, 2.0),
    ],
    ids=str,
)
def test_every_kind_of_sample_is_told_apart(pair: tuple[Any, Any]) -> None:
    first, second = (sample_digests([value] * 4, 0) for value in pair)
    assert first.keys() == second.keys()
    assert changes(first, second)
    assert not changes(first, first)


def doubled(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    loss, weight = toy.loss(output, batch)
    return 2 * loss, weight


def by_rank(rank: int) -> Any:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        print(rank, end="")
        return toy.loss(output, batch)

    return loss


def found(world: lockstep.World, folder: str) -> dict[str, Any]:
    odd = world.rank == 1
    told: dict[str, Any] = {}
    for name, task in {
        "loss": toy.task(loss=doubled if odd else toy.loss),
        "samples": toy.task(train_data=toy.data(toy.SAMPLES, 1 + odd)),
        "collate": toy.task(
            collate=(lambda samples: default_collate(samples[::-1])) if odd else None
        ),
    }.items():
        code = "samples-differ-between-ranks" if name == "samples" else "task-differs-between-ranks"
        with refused(code, ReplicaDivergence, others="rank 1") as caught:
            train(task, run=f"{folder}/{name}", epochs=1, world=world)
        told[name] = caught.value.values["ranks"], caught.value.values["parameter"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compare_tasks(world.control, task_digests(toy.task(loss=by_rank(world.rank))))
    told["value"] = [str(each.message) for each in warned if each.category is LockstepWarning]
    # what one rank has not read
    compare_tasks(world.control, {} if odd else task_digests(toy.task()))
    return told


def test_a_rank_with_another_task_is_named_at_the_start(tmp_path: Path) -> None:
    first, second, third = run_ranks(found, 3, args=(str(tmp_path),))
    for each in (first, second, third):
        assert [each[name][0] for name in ("loss", "samples", "collate")] == [[1]] * 3
    assert first["loss"][1] == "loss"
    assert first["samples"][1].startswith("sample ")
    assert first["collate"][1] == "collate"
    assert len(first["value"]) == 1
    assert "rank is 0 on rank 0 and 1 on rank 1" in first["value"][0]
    assert second["value"] == third["value"] == []
