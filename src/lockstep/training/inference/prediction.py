"""Prediction: one row per sample, in the order of the data set, on any number of ranks.

data/evaluation_batches.py          the batches of this rank
RowsInMemory          all rows, on every rank
prediction_files.py   a batch's output as named columns, and rows streamed to a file
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.data.evaluation_batches import BatchRows, DatasetRows, Piece, Rows, is_batch
from lockstep.errors import UsageError
from lockstep.step.forward import outputs
from lockstep.training.inference.apply import check_out
from lockstep.training.inference.model_call import Call, as_arguments, bare, device_of, evaluating
from lockstep.training.inference.prediction_files import (
    NpyFile,
    RowLayout,
    agreed,
    same,
    split,
)
from lockstep.world.world import World

_AT_ONCE = 2**21  # numbers of 8 bytes per all-reduce


def predict(
    model: nn.Module,
    data: Dataset[Any] | Tensor | tuple[Tensor, ...] | dict[str, Tensor],
    *,
    batch: int = 64,
    out: Path | str | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    inputs: Callable[[Any], Any] | None = None,
    seed: int = 0,
    world: World | None = None,
) -> Any:
    """Return the model's output for every row of `data`, in order, computed on all ranks.

    All ranks call it, with the same data. The model runs in eval mode without gradients; modes and
    random states are restored. For a DistributedDataParallel, `sync_buffers()` is called first, and
    its `.module` runs. Nothing is sent before all batches are done. With equal intra-op threads on
    the ranks (`torch.set_num_threads`) the result has the same bits for every world size.

    Example::

        logits = lockstep.predict(model, test_data, batch=256)  # [len(test_data), classes]
        lockstep.predict(model, test_data, out="logits.npy")

    Args:
        model: a module, or a wrapper around one; equal on all ranks. It returns a tensor, or a
            tuple, list or dict of tensors, with one row for each sample.
        data: a map-style data set; or one batch: a tensor, or a tuple or dict of tensors with equal
            first dimensions.
        batch: rows per forward, at fixed positions. The last forward has the rest.
        out: a .npy file, for a model that returns one tensor. Rows are streamed to it, and no rank
            holds them. All ranks must see its folder. The file is complete or absent.
        collate: list of samples -> batch. Default: torch's.
        loader_workers: processes of each rank that load data.
        inputs: batch -> the model's arguments, a tuple or a dict of keywords. Default for a data
            set: the first part of its batch. Default for one batch: all of it, a dict as keywords.
        seed: seed of the random numbers that the data set and the model draw.
        world: the world to use. Default: the open one.

    Returns:
        Without `out`: all rows in the model's own container, on every rank. They are on the CPU for
        a data set, on the model's device for one batch. With `out`: its path.

    Raises:
        UsageError: no world is open, no rows, batch < 1, another extension, an output whose rows
            are not the input's, batches whose columns differ, or a file that cannot be written.
    """
    world = world or World.current()
    file = None if out is None else check_out(Path(out))
    module = bare(model)
    device = device_of(module, world)
    if is_batch(data):
        if collate is not None or loader_workers:
            raise UsageError("loading-options-for-a-batch", type=type(data).__name__)
        call = Call(module, inputs or as_arguments)
        batches = BatchRows(data, world, batch=batch, device=device)
        return run(call, batches, world, seed=seed, out=file, device=device)
    rows = DatasetRows(
        data,  # type: ignore[arg-type]  # what is no batch is a data set, or refused as one
        world,
        batch=batch,
        seed=seed,
        collate=collate,
        loader_workers=loader_workers,
        device=device,
    )
    return run(Call(module, inputs), rows, world, seed=seed, out=file)


def run(
    call: Any,
    rows: Rows,
    world: World,
    *,
    seed: int,
    out: Path | None,
    device: torch.device | str = "cpu",
) -> Any:
    """Run `call` (which has a `.model`) on all rows, as `predict` does. A collective. `device`: of
    the result without `out`.
    """
    sink = RowsInMemory(rows.total, world, device) if out is None else NpyFile(out, rows, world)
    layout: RowLayout | None = None
    try:
        with evaluating(call.model):
            for piece, output in outputs(call, rows, seed):
                batch_layout, tensors = split(output, piece)
                del output
                layout = layout or batch_layout
                samples = f"samples {piece.rows.start} to {piece.rows.stop - 1}"
                same(layout, batch_layout, samples, "those before")
                sink.put(piece, layout, tensors)
                del tensors
        return sink.finish(agreed(layout, rows.total, world))
    except BaseException:
        sink.discard()
        raise
    finally:
        rows.close()


class RowsInMemory:
    """All rows on every rank. A rank writes its own rows, and an all-reduce adds the others': bytes
    plus zeros, so the result is exact.
    """

    def __init__(self, total: int, world: World, device: torch.device | str) -> None:
        self._total = total
        self._world = world
        self._device = device
        self._columns: list[Tensor] = []

    def put(self, piece: Piece, layout: RowLayout, tensors: list[Tensor]) -> None:
        self._columns = self._columns or self._zeros(layout)
        for column, tensor in zip(self._columns, tensors, strict=True):
            column[piece.rows.start : piece.rows.stop] = tensor

    def finish(self, layout: RowLayout) -> Any:
        columns = self._columns or self._zeros(layout)
        for column in columns:
            numbers = torch.empty(0, dtype=torch.int64).set_(column.untyped_storage())
            for part in numbers.split(_AT_ONCE):
                self._world.control.all_reduce(part).wait()
        return layout.joined([column.to(self._device) for column in columns])

    def discard(self) -> None:
        self._columns = []

    def _zeros(self, layout: RowLayout) -> list[Tensor]:
        """Return the columns, with room for whole numbers of 8 bytes."""
        columns = []
        for column in layout.columns:
            size = self._total * column.row_bytes
            numbers = torch.zeros(math.ceil(size / 8), dtype=torch.int64)
            data = numbers.view(torch.uint8)[:size]
            columns.append(data.view(column.torch_dtype).reshape(self._total, *column.shape))
        return columns
