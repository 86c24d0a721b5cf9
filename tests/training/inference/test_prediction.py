"""One row a sample, in order, each once, and the same bits for every number of ranks; in memory
and in files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, UsageError, WorkerFailed
from lockstep.testing import run_ranks
from lockstep.training.inference import prediction_files
from tests.refused import refused
from tests.training import toy

SIZES = (1, 7, 10, 64)


def net() -> toy.Net:
    torch.manual_seed(3)
    return toy.Net()


class Numbered(Dataset[tuple[Tensor, int]]):
    """Draws from the sample's stream, and says which sample it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.cat([torch.tensor([float(index)]), torch.randn(5)]), index


class Parts(nn.Module):
    """A dict of a number's place, three numbers, a flag and a half-precision grid; draws in eval
    mode too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.net(x) + torch.randn(3)
        return {
            "place": x[:, 0].long(),
            "out": -out.abs() * 0.0 + out,
            "flag": out[:, 0] > 0,
            "half": out.half().reshape(-1, 3, 1),
        }


def everything(world: lockstep.World, folder: str) -> dict[str, Any]:
    """Through every door, for every size."""
    found: dict[str, Any] = {}
    for count in SIZES:
        found[f"dict {count}"] = lockstep.predict(Parts(), Numbered(count), batch=4)
        found[f"batch {count}"] = lockstep.predict(net(), toy.data(count, 2)[:][0], batch=3)
        file = lockstep.predict(net(), Numbered(count), batch=4, out=Path(folder) / f"{count}.npy")
        found[f"file {count}"] = torch.from_numpy(np.load(file))
    return found


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    return bool(
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and ours.numpy().tobytes() == theirs.numpy().tobytes()
    )


def alone(fn: Any, *args: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with lockstep.init(backend="gloo") as world:
            return fn(world, *args)
    finally:
        torch.set_num_threads(before)


def test_the_same_bits_in_order_for_every_number_of_ranks(tmp_path: Path) -> None:
    expected = alone(everything, str(tmp_path))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for count in SIZES:
        assert expected[f"dict {count}"]["place"].tolist() == list(range(count))
    for workers in (2, 3, 8):
        folder = tmp_path / str(workers)
        for found in run_ranks(everything, workers, args=(str(folder),)):
            assert [name for name in expected if not same(found[name], expected[name])] == []
        # and no .part is left
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_it_is_the_models_output() -> None:
    x, y = toy.data(10, 2)[:]
    model = net()
    with torch.no_grad():
        expected = net().eval()(x)
    with lockstep.init(backend="gloo"):
        assert torch.equal(lockstep.predict(model, x, batch=10), expected)
        assert torch.equal(lockstep.predict(model, TensorDataset(x, y), batch=10), expected)
        assert torch.equal(lockstep.predict(model, {"x": x}, batch=10), expected)
        assert torch.equal(
            lockstep.predict(model, (y, x), batch=10, inputs=lambda part: (part[1],)), expected
        )
    assert (model.training, model.norm.training) == (True, True)


class Two(nn.Module):
    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        return x + more, x - more


def test_a_model_of_several_arguments_and_none_of_parameters() -> None:
    x = torch.arange(6.0)
    with lockstep.init(backend="gloo"):
        for batch in ((x, x), {"more": x, "x": x}):
            found = lockstep.predict(Two(), batch, batch=4)
            assert type(found) is tuple
            assert [part.tolist() for part in found] == [(2 * x).tolist(), [0.0] * 6]


def wrapped(world: lockstep.World) -> list[Tensor]:
    model = net()
    wrapper = lockstep.DistributedDataParallel(model)
    model.norm.running_mean += world.rank  # type: ignore[operator,union-attr]
    return [lockstep.predict(wrapper, toy.data(5, 2)[:][0]), model.norm.running_mean]  # type: ignore[list-item]


def test_a_wrapper_syncs_its_buffers_first() -> None:
    first, second = run_ranks(wrapped, 2)
    assert torch.equal(first[1], second[1])
    assert torch.allclose(first[1], torch.tensor(0.5))
    model = net().eval()
    model.norm.running_mean += 0.5  # type: ignore[operator,union-attr]
    for found in (first[0], second[0]):
        assert torch.allclose(found, model(toy.data(5, 2)[:][0]))


def apart(world: lockstep.World, folder: str) -> dict[str, Any]:
    """Ranks that do not see the file that rank 0 made: as on hosts without a common file system."""
    os.chdir(Path(folder) / str(world.rank))
    with refused("predictions-file-not-shared") as caught:
        lockstep.predict(net(), Numbered(10), batch=3, out="out.npy")
    return dict(caught.value.values)


def test_ranks_without_a_common_file_system_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    old = tmp_path / "2" / "out.npy.part"
    old.write_text("an older run's, of another host")
    assert run_ranks(apart, 3, args=(str(tmp_path),)) == [{"file": "out.npy", "ranks": [1, 2]}] * 3
    assert list(tmp_path.glob("*/*")) == [old]


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def test_bfloat16_is_written_as_float32_and_said(tmp_path: Path) -> None:
    x = torch.randn(5, 2)
    with (
        lockstep.init(backend="gloo"),
        pytest.warns(LockstepWarning, match="bfloat16"),
    ):
        file = lockstep.predict(Half(), x, out=tmp_path / "x.npy")
    assert np.load(file).tolist() == x.bfloat16().float().tolist()


def grown(world: lockstep.World, folder: str) -> float:
    """MiB that this rank's memory grew by at most, while it predicted 192 MiB, of which a third
    is its own.
    """
    x = torch.zeros(3 * 2**10, 1)
    lockstep.predict(Wide(), x[:64], batch=64, out=Path(folder) / "warm.npy")
    lockstep.evaluate(
        Wide(), TensorDataset(x[:64]), lambda output, batch: {"x": (output.sum(), 1)}, batch=64
    )
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now
    before = psutil.Process().memory_info().rss
    lockstep.predict(Wide(), x, batch=64, out=Path(folder) / "out.npy")
    peak = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return (int(peak.split()[1]) * 1024 - before) / 2**20


class Wide(nn.Module):
    """64 KiB a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(2.0**14)


def test_a_rank_does_not_hold_its_rows(tmp_path: Path) -> None:
    for peak in run_ranks(grown, 3, args=(str(tmp_path),)):
        assert peak < 40  # of its own 64; what an allocator keeps is not always the same


class Pools(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True)


class Ragged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) == 4 else x.double()


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Pools(),
            {},
            r"1 rows as 'prediction' for the 4 samples 0 to 3.* \[rows-are-not-samples\]",
        ),
        (
            Ragged(),
            {},
            (
                r"float64\[6\]\) for samples 8 to 9 but a tensor \(prediction float32\[6\]\) for"
                r" those before.* \[columns-differ\]"
            ),
        ),
        (
            Nothing(),
            {},
            r"the model, as 'prediction', returned a NoneType.* \[wrong-return-type\]",
        ),
        (nn.Identity(), {"batch": 0}, r"batch=0: .* at least 1.* \[wrong-value\]"),
        (
            nn.Identity(),
            {"out": "x.csv"},
            r"out x.csv has another ending than .npy.* \[wrong-ending\]",
        ),
        (
            nn.Identity(),
            {"out": "file/x.npy"},
            r"predictions file/x.npy cannot be written: .* \[cannot-write\]",
        ),
        (
            nn.Identity(),
            {"loader_workers": 1},
            r"data is a Tensor.* \[loading-options-for-a-batch\]",
        ),
        (
            nn.Identity(),
            {"inputs": lambda batch: batch},
            r"inputs returned a Tensor.*\[wrong-return-type\]",
        ),
        (Half, {}, r"model is a type.*\[not-a-module\]"),
    ],
)
def test_mistakes_are_sentences(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with lockstep.init(backend="gloo"), pytest.raises(UsageError, match=message):
        lockstep.predict(model, torch.zeros(10, 6), **{"batch": 4, **options})
    assert os.listdir() == ["file"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            (torch.zeros(3), torch.zeros(4)),
            r"3 in part 0, 4 in part 1.* \[tensors-of-unequal-length\]",
        ),
        ({"x": torch.tensor(1.0)}, r"part 'x' is a 0-d tensor.* \[not-a-batch-of-tensors\]"),
        (("x",), r"part 0 is a str.* \[not-a-batch-of-tensors\]"),
        (torch.zeros(0, 3), r"the batch is empty.* \[empty-dataset\]"),
        ((), r"\[batch-without-tensors\]"),
        (TensorDataset(torch.zeros(0)), r"the data set \(a TensorDataset\) is empty"),
        (
            3,
            "int is not a dataset. Give one with __len__ and __getitem__, or __iter__ for a stream",
        ),
    ],
)
def test_data_that_cannot_be_cut(data: Any, message: str) -> None:
    with lockstep.init(backend="gloo"), pytest.raises(UsageError, match=message):
        lockstep.predict(nn.Identity(), data)


def test_several_columns_do_not_fit_into_a_file(tmp_path: Path) -> None:
    with (
        lockstep.init(backend="gloo"),
        refused("npy-holds-one-tensor") as caught,
    ):
        lockstep.predict(Parts(), Numbered(5), out=tmp_path / "x.npy")
    assert caught.value.values["layout"].startswith("a dict (place int64[], ")
    assert list(tmp_path.iterdir()) == []


def test_without_a_world() -> None:
    with pytest.raises(UsageError, match=r"\[no-world-open\]"):
        lockstep.predict(nn.Identity(), torch.zeros(3))


def full(world: lockstep.World, folder: str) -> None:
    if world.rank == 1:
        prediction_files.write_all = without_room
    lockstep.predict(nn.Identity(), torch.zeros(9, 2), batch=2, out=Path(folder) / "x.npy")


def without_room(file: int, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_nothing_half_written_is_left_under_the_name(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerFailed, match=r"x.npy cannot be written: No space left on device \[cannot-write\]"
    ) as failed:
        run_ranks(full, 2, args=(str(tmp_path),))
    assert failed.value.rank == 1
    assert not (tmp_path / "x.npy").exists()


def differ(world: lockstep.World, what: str) -> str:
    model: nn.Module = Half() if what == "dtype" and world.rank == 2 else nn.Identity()
    try:
        lockstep.predict(model, torch.zeros(9 + (what == "rows" and world.rank == 1), 2), batch=2)
    except UsageError as error:
        return str(error)
    return "nothing said"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", r"rank 1 was given 10 rows, but rank 0 9. .* \[ranks-given-other-data\]"),
        (
            "dtype",
            (
                r"the model returned a tensor \(prediction bfloat16\[2\]\) for the batches of rank"
                r" 2 but .*float32.* for those of rank 0\. .* \[columns-differ\]"
            ),
        ),
    ],
)
def test_ranks_that_differ_are_told_on_all_of_them(what: str, message: str) -> None:
    for said in run_ranks(differ, 3, args=(what,)):
        assert re.match(message, said)
