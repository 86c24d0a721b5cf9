"""Prediction: one row a sample, in the order of the data set, on several ranks as on one.

rows.py     which batches are this rank's        columns.py   a batch's output as named columns
sink.py     all rows in memory                   npy.py, parquet.py   streamed to a file
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import UsageError
from lockstep.inference import out_file
from lockstep.inference.call import Call, as_arguments, bare, device_of
from lockstep.inference.columns import Layout, same, split
from lockstep.inference.npy import Npy
from lockstep.inference.parquet import Parquet
from lockstep.inference.rows import BatchRows, DatasetRows, Rows, evaluating, is_batch, outputs
from lockstep.inference.sink import Memory, Sink, agreed
from lockstep.world import World


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
    """The model's output for every row of `data`, in order, computed on all ranks. All ranks call it, with the same data.

    The model runs as it is, in eval mode and without gradients; modes and random states are put back. A DistributedDataParallel's
    `sync_buffers()` is called first and its `.module` run. It returns a tensor, or a tuple, list or dict of tensors, of one row a sample;
    nothing is sent before all batches are done. With equal intra-op threads on the ranks (`torch.set_num_threads`) the result has the
    same bits for every world size.

    Args:
        model: a module, or a wrapper around one; equal on all ranks.
        data: a map-style data set, or one batch: a tensor, or a tuple or dict of tensors with equal first dimensions.
        batch: rows of a forward, at fixed positions; the last has what is left.
        out: a file that ends in .npy (one tensor) or .parquet (columns by name; needs pyarrow). Rows are streamed to it; no rank holds more
            than its own. It is there whole or not at all.
        collate, loader_workers: how a data set is loaded; list of samples -> batch, and processes of each rank.
        inputs: batch -> the model's arguments, a tuple or a dict of keywords. Default: of a data set's batch the first part; one batch is
            all arguments, a dict the keywords.
        seed: keys what the data set draws, and the model.
        world: default: the open one.

    Returns:
        Without `out`, all rows in the model's own container, on every rank: of a data set on the CPU, of one batch on the model's device.
        With `out`, its path.

    Raises:
        UsageError: no world is open, no rows, batch < 1, an unknown extension, an output whose rows are not the input's, batches whose
            columns differ, or a file that cannot be written.
    """
    found = World.current() if world is None else world
    file = None if out is None else out_file.check(Path(out))
    module = bare(model)
    device = device_of(module, found)
    if not is_batch(data):
        rows: DatasetRows | BatchRows = DatasetRows(
            data,  # type: ignore[arg-type]  # what is no batch is a data set, or refused as one
            found,
            batch=batch,
            seed=seed,
            collate=collate,
            loader_workers=loader_workers,
            device=device,
        )
        return run(Call(module, inputs), rows, found, seed=seed, out=file)
    if collate is not None or loader_workers:
        raise UsageError(f"collate and loader_workers are for a data set, and data is a {type(data).__name__}, one batch: leave them out")
    rows = BatchRows(data, found, batch=batch, device=device)
    joined = run(Call(module, inputs or as_arguments), rows, found, seed=seed, out=file)
    return joined if file is not None else _moved(joined, device)


def run(call: Any, rows: Rows, world: World, *, seed: int, out: Path | None) -> Any:
    """`call` (which has a `.model`) on all rows; see predict. A collective."""
    sink: Sink = Memory(rows.total, world) if out is None else _file(out, rows, world)
    layout: Layout | None = None
    try:
        with evaluating(call.model):
            for piece, output in outputs(call, rows, seed):
                this, tensors = split(output, piece)
                del output
                if layout is None:
                    layout = this
                same(layout, this, f"samples {piece.rows.start} to {piece.rows.stop - 1}", "those before")
                sink.put(piece, layout, tensors)
                del tensors
        return sink.finish(agreed(layout, rows.total, world))
    except BaseException:
        sink.discard()
        raise
    finally:
        rows.close()


def _file(out: Path, rows: Rows, world: World) -> Sink:
    return Npy(out, rows, world) if out.suffix == ".npy" else Parquet(out, rows, world)


def _moved(joined: Any, device: Any) -> Any:
    if isinstance(joined, Tensor):
        return joined.to(device)
    if isinstance(joined, dict):
        return {name: part.to(device) for name, part in joined.items()}
    return type(joined)(part.to(device) for part in joined)
