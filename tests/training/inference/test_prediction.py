"""One row a sample, in order, each once, and the same bits for every number of ranks; in memory
and in files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
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
from tests.teams import on_team
from tests.training import toy

SIZES = (1, 7, 10, 64)


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
        self.net = toy.net()

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
        found[f"batch {count}"] = lockstep.predict(toy.net(), toy.data(count, 2)[:][0], batch=3)
        file = Path(folder) / f"{count}.npy"
        lockstep.predict(toy.net(), Numbered(count), batch=4, out=file)
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


def test_the_same_bits_in_order_for_every_number_of_ranks(tmp_path: Path) -> None:
    expected = toy.alone(everything, str(tmp_path))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for count in SIZES:
        assert expected[f"dict {count}"]["place"].tolist() == list(range(count))
    for workers in (2, 3, 8):
        folder = tmp_path / str(workers)
        for found in on_team(everything, workers, args=(str(folder),)):
            assert [name for name in expected if not same(found[name], expected[name])] == []
        # and no .part is left
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_it_is_the_models_output() -> None:
    x, y = toy.data(10, 2)[:]
    model = toy.net()
    with torch.no_grad():
        expected = model.eval()(x)
    model.train()
    with lockstep.init(backend="gloo"):
        for data in (x, TensorDataset(x, y), {"x": x}):
            assert torch.equal(lockstep.predict(model, data, batch=10), expected)
        found = lockstep.predict(model, (y, x), batch=10, inputs=lambda part: (part[1],))
        assert torch.equal(found, expected)
    assert (model.training, model.norm.training) == (True, True)


class Function(nn.Module):
    """A model without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        return self.function(x, **others)


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


def wrapped(world: lockstep.World) -> list[Any]:
    model = toy.net()
    wrapper = lockstep.DistributedDataParallel(model)
    batch = toy.data(5, 2)[:][0]
    results: list[Any] = []
    for use in (
        lambda: lockstep.predict(wrapper, batch),
        lambda: lockstep.evaluate(
            wrapper, TensorDataset(batch), lambda out, _: {"sum": (out.sum(), 1)}, batch=5
        ),
    ):
        model.norm.running_mean.fill_(world.rank)  # type: ignore[operator,union-attr]
        results.append(use())
    return results


def test_a_wrapper_syncs_its_buffers_first() -> None:
    model = toy.net().eval()
    model.norm.running_mean.fill_(0.5)  # type: ignore[operator,union-attr]
    expected = model(toy.data(5, 2)[:][0])
    for predictions, metrics in on_team(wrapped, 2):
        assert torch.allclose(predictions, expected)
        assert metrics["sum"] == pytest.approx(expected.sum().item(), rel=1e-5)


def apart(world: lockstep.World, folder: str) -> dict[str, Any]:
    """Ranks that do not see the file that rank 0 made: as on hosts without a common file system."""
    with (
        contextlib.chdir(Path(folder) / str(world.rank)),
        refused("predictions-file-not-shared") as caught,
    ):
        lockstep.predict(toy.net(), Numbered(10), batch=3, out="out.npy")
    return dict(caught.value.values)


def test_ranks_without_a_common_file_system_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    old = tmp_path / "2" / "out.npy.part"
    old.write_text("an older run's, of another host")
    assert on_team(apart, 3, args=(str(tmp_path),)) == [{"file": "out.npy", "ranks": [1, 2]}] * 3
    assert list(tmp_path.glob("*/*")) == [old]


def half() -> nn.Module:
    return Function(lambda x: x.bfloat16())


def test_a_file_has_one_column_and_bfloat16_as_float32(tmp_path: Path) -> None:
    x = torch.randn(5, 2)
    with lockstep.init(backend="gloo"):
        with refused("npy-holds-one-tensor"):
            lockstep.predict(Parts(), Numbered(5), out=tmp_path / "x.npy")
        assert list(tmp_path.iterdir()) == []
        with pytest.warns(LockstepWarning, match="bfloat16"):
            file = lockstep.predict(half(), x, out=tmp_path / "x.npy")
    assert np.load(file).tolist() == x.bfloat16().float().tolist()


def grown(world: lockstep.World, folder: str) -> float:
    """MiB that this rank's memory grew by at most, while it predicted 192 MiB, of which a third
    is its own.
    """
    x = torch.zeros(3 * 2**10, 1)
    lockstep.predict(wide(), x[:64], batch=64, out=Path(folder) / "warm.npy")
    lockstep.evaluate(
        wide(), TensorDataset(x[:64]), lambda output, batch: {"x": (output.sum(), 1)}, batch=64
    )
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now
    before = psutil.Process().memory_info().rss
    lockstep.predict(wide(), x, batch=64, out=Path(folder) / "out.npy")
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    return (int(peak.split()[1]) * 1024 - before) / 2**20


def wide() -> nn.Module:
    """64 KiB a row."""
    return Function(lambda x: x + torch.arange(2.0**14))


def test_a_rank_does_not_hold_its_rows(tmp_path: Path) -> None:
    for peak in on_team(grown, 3, args=(str(tmp_path),)):
        assert peak < 40  # of its own 64; what an allocator keeps is not always the same


# -- refused -------------------------------------------------------------------------------------


def test_mistakes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    mean = Function(lambda x: x.mean(0, keepdim=True))
    changing = Function(lambda x: x if len(x) == 4 else x.double())
    identity = nn.Identity()
    model: Any
    options: dict[str, Any]
    for model, options, code, message in (
        (mean, {}, "rows-are-not-samples", "1 rows as 'prediction' for the 4 samples 0 to 3"),
        (changing, {}, "columns-differ", "float64[6]) for samples 8 to 9 but a tensor"),
        (Function(lambda x: None), {}, "wrong-return-type", "as 'prediction', returned a NoneType"),
        (Function, {}, "not-a-module", "model is a type"),
        (identity, {"batch": 0}, "wrong-value", "batch=0: "),
        (identity, {"out": "x.csv"}, "wrong-ending", "x.csv"),
        (identity, {"out": "file/x.npy"}, "cannot-write", "file/x.npy"),
        (identity, {"loader_workers": 1}, "loading-options-for-a-batch", "data is a Tensor"),
        (identity, {"inputs": lambda batch: batch}, "wrong-return-type", "inputs returned a T"),
    ):
        with lockstep.init(backend="gloo"), refused(code) as refusal:
            lockstep.predict(model, torch.zeros(10, 6), **{"batch": 4, **options})
        assert message in str(refusal.value)
        assert os.listdir() == ["file"]


def test_data_that_cannot_be_cut_is_refused() -> None:
    with lockstep.init(backend="gloo"):
        for data, code in (
            ((torch.zeros(3), torch.zeros(4)), "tensors-of-unequal-length"),
            ({"x": torch.tensor(1.0)}, "not-a-batch-of-tensors"),
            (("x",), "not-a-batch-of-tensors"),
            (torch.zeros(0, 3), "empty-dataset"),
            (TensorDataset(torch.zeros(0)), "empty-dataset"),
            ((), "batch-without-tensors"),
            (3, "not-a-loaders-dataset"),
        ):
            with refused(code):
                lockstep.predict(nn.Identity(), data)
    with refused("no-world-open"):
        lockstep.predict(nn.Identity(), torch.zeros(3))


def full(world: lockstep.World, folder: str) -> None:
    if world.rank == 1:
        prediction_files.write_all = without_room
    lockstep.predict(nn.Identity(), torch.zeros(9, 2), batch=2, out=Path(folder) / "x.npy")


def without_room(file: int, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_nothing_half_written_is_left_under_the_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"No space left on device \[cannot-write\]") as failed:
        run_ranks(full, 2, args=(str(tmp_path),))
    assert failed.value.rank == 1
    assert not (tmp_path / "x.npy").exists()


def differ(world: lockstep.World, what: str) -> tuple[str, str]:
    model = half() if what == "dtype" and world.rank == 2 else nn.Identity()
    rows = 9 + (what == "rows" and world.rank == 1)
    with pytest.raises(UsageError) as refusal:
        lockstep.predict(model, torch.zeros(rows, 2), batch=2)
    return refusal.value.code, str(refusal.value)


def test_ranks_that_differ_are_told_on_all_of_them() -> None:
    for code, message in on_team(differ, 3, args=("rows",)):
        assert code == "ranks-given-other-data"
        assert message.startswith("rank 1 was given 10 rows, but rank 0 9. ")
    for code, message in on_team(differ, 3, args=("dtype",)):
        assert code == "columns-differ"
        assert "(prediction bfloat16[2]) for the batches of rank 2 but" in message
        assert "for those of rank 0" in message
