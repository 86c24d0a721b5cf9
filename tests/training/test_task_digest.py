"""A task's digests change with its source files and its samples."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

import lockstep
from lockstep.errors import ReplicaDivergence
from lockstep.training.resolve import resolve
from lockstep.training.task_digest import (
    changes,
    compare_tasks,
    sample_digests,
    source_digests,
    task_digests,
)
from lockstep.training.train import train
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

FILE = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep
import parts

SCALE = 0.5

def loss(output, batch):
    loss = F.cross_entropy(output, batch[1], reduction="sum") * SCALE
    return loss + parts.penalty(output), len(batch[1])

def task():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.arange(20) % 3)
    return lockstep.Task(
        model=lambda: torch.nn.Linear(4, 3), train_data=data, loss=loss, micro_batch=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), global_batch=4,
    )
"""
PARTS = "def penalty(output):\n    return output.square().sum() * 0.001\n"


def digests(folder: Path, edits: dict[str, str] | None = None) -> dict[str, str]:
    """Of the task in a new folder, with these texts replaced in its files."""
    folder.mkdir()
    for name, text in (("mine.py", FILE), ("parts.py", PARTS)):
        for old, new in (edits or {}).items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    with importing():
        task = resolve(str(folder / "mine.py"))
        return {**source_digests(task), **sample_digests(task.train_data, task.seed, seconds=inf)}


@contextmanager
def importing() -> Iterator[None]:
    """What the block imports, and the folders that it adds to sys.path, are removed after it."""
    modules, folders = set(sys.modules), sys.path.copy()
    try:
        yield
    finally:
        sys.path[:] = folders
        for name in set(sys.modules) - modules:
            del sys.modules[name]


def test_what_changed_is_named(tmp_path: Path) -> None:
    mine = "mine.py has changed"
    before = digests(tmp_path / "before")
    assert {"mine.py", "parts.py"} <= before.keys()
    assert digests(tmp_path / "elsewhere") == before
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({"SCALE = 0.5": "SCALE = 0.25"}, [mine]),
        ({"* 0.001": "* 0.002"}, ["parts.py has changed"]),
        (
            {"randn(20": "randn(21", "arange(20)": "arange(21)"},
            [mine, "train_data was 20 samples and is 21 samples"],
        ),
    ]
    for number, (edits, named) in enumerate(cases):
        words = changes(before, digests(tmp_path / str(number), edits))
        assert sorted(word for word in words if not word.startswith("sample ")) == sorted(named)
    words = changes(before, digests(tmp_path / "seed", {"manual_seed(0)": "manual_seed(1)"}))
    assert mine in words
    assert 2 <= len(words) <= 9
    assert all(re.fullmatch(r"mine.py has changed|sample \d+ has changed", word) for word in words)


def test_a_package_is_digested_as_a_whole_and_installed_packages_are_not(tmp_path: Path) -> None:
    files = {
        "ours/__init__.py": "",
        "ours/nets.py": "",
        "ours/tasks/__init__.py": "",
        "ours/tasks/mine.py": FILE.replace("import parts", "from ours import nets as parts"),
        "ours/site-packages/vendored_thing/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with importing():
        sys.path[:0] = [str(tmp_path), str(tmp_path / "ours/site-packages")]
        importlib.import_module("vendored_thing")
        task = importlib.import_module("ours.tasks.mine").task()
        sources = {name for name in source_digests(task) if name.endswith(".py")}
    assert sources == {"__init__.py", "nets.py", "tasks/__init__.py", "tasks/mine.py"}


def test_a_bundled_task_is_digested_without_the_rest_of_lockstep() -> None:
    sources = {name for name in source_digests(resolve("digits")) if name.endswith(".py")}
    assert "tasks/digits.py" in sources
    folder = Path(lockstep.__file__).parent
    assert sources <= {f"tasks/{file.name}" for file in folder.glob("tasks/*.py")}


def test_what_has_no_file_is_not_compared(tmp_path: Path) -> None:
    """A notebook, `python -`, a file that has gone, and what raises when it is looked at."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def loss(output, batch): ...\nclass Net: ...", "<stdin>", "exec"), scope)
    gone = tmp_path / "gone.py"
    exec(compile("def metrics(output, batch): ...", str(gone), "exec"), scope)

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self, batch: Any) -> Any: ...

    task = toy.task(loss=scope["loss"], model=scope["Net"], metrics=scope["metrics"], inputs=Odd())
    sources = source_digests(task)
    assert sources["loss"] == "loss"
    assert sources["model"] == "Net"
    assert "training/toy.py" in sources  # of the other functions
    assert not {"<stdin>", "gone.py"} & sources.keys()


def test_a_task_with_sparse_tensors_and_a_deep_value_has_digests() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    sparse = torch.eye(3).to_sparse()

    def loss(output: Any, batch: Any) -> Any:
        return toy.loss(output @ sparse, batch) if deep else None

    assert "training/test_task_digest.py" in source_digests(toy.task(loss=loss))
    first, second = (sample_digests([(sparse * by, 1)] * 4, 0, seconds=inf) for by in (1, 2))
    assert changes(first, second)
    assert sample_digests([deep] * 4, 0, seconds=inf) == {"train_data": "4 samples"}


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
        drawn = [self.own.random(), torch.rand(2, generator=self.torchs), torch.rand(2)]
        drawn += [np.random.rand(), random.random()]
        return {"x": torch.tensor([index + self.offset]), "drawn": drawn, "text": "ü", "none": None}


def states(data: Numbers) -> tuple[Any, ...]:
    drawn = data.torchs.get_state().tolist(), torch.get_rng_state().tolist()
    return data.own.bit_generator.state, *drawn, random.getstate(), np.random.get_state()[2]


def test_samples_are_read_without_a_trace() -> None:
    data = Numbers()
    nested = ConcatDataset([Subset(data, range(50)), Subset(data, range(50, 100))])
    before = states(data)
    first, again = sample_digests(data, 3, seconds=inf), sample_digests(nested, 3, seconds=inf)
    assert not data.opened
    assert first == sample_digests(data, 3, seconds=inf)
    assert again == sample_digests(nested, 3, seconds=inf)
    assert states(data) == before
    assert len(first) > 3
    assert changes(first, sample_digests(Numbers(1), 3, seconds=inf))


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
    assert len(sample_digests(toy.data(40, 0), 0, seconds=inf)) == 9
    assert sample_digests([object()] * 4, 0) == {"train_data": "4 samples"}
    assert sample_digests([np.array([object()])] * 4, 0) == {"train_data": "4 samples"}
    assert sample_digests([], 0) == {"train_data": "0 samples"}


def test_every_kind_of_sample_is_told_apart() -> None:
    for one, other in (
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(1, dtype=torch.complex128), torch.ones(1, dtype=torch.complex128)),
        (np.zeros(2), np.ones(2)),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"b": 1}),
        (b"a", b"b"),
        (1.0, 2.0),
    ):
        first, second = (sample_digests([value] * 4, 0, seconds=inf) for value in (one, other))
        assert first.keys() == second.keys()
        assert changes(first, second), (one, other)
        assert not changes(first, first)


def doubled(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    loss, weight = toy.loss(output, batch)
    return 2 * loss, weight


def differing(world: lockstep.World, folder: str) -> dict[str, Any]:
    odd = world.rank == 1
    told: dict[str, Any] = {}
    backwards = toy.task(collate=lambda samples: default_collate(samples[::-1]))
    for name, task in {
        "loss": toy.task(loss=doubled if odd else toy.loss),
        "samples": toy.task(train_data=toy.data(toy.SAMPLES, 1 + odd)),
        "collate": backwards if odd else toy.task(),
    }.items():
        with refused("task-differs-between-ranks", ReplicaDivergence, others="rank 1") as caught:
            train(task, run=f"{folder}/{name}", epochs=1, world=world)
        assert caught.value.values["ranks"] == [1]
        told[name] = caught.value.values["parameter"]
    sources = {**task_digests(toy.task()), "training/toy.py": f"sha256:{odd}"}
    with refused("task-differs-between-ranks", ReplicaDivergence, parameter="training/toy.py"):
        compare_tasks(world.control, sources)
    # what one rank has not read
    compare_tasks(world.control, {} if odd else task_digests(toy.task()))
    return told


def test_a_rank_with_another_task_is_named_at_the_start(tmp_path: Path) -> None:
    for parameters in on_team(differing, 3, (str(tmp_path),)):
        assert parameters["samples"].startswith("sample ")
    assert (parameters["loss"], parameters["collate"]) == ("loss", "collate")
