"""DCP's writer of Lockstep's checkpoints (dcp.py has the reader):

model-00000.safetensors      the model's tensors by their plain names, or this rank's intervals
optimizer-00000.safetensors  all other tensors, named "/" and the whole key that DCP gives them
state.json                   under "dcp": values that are not tensors, by their whole keys
"""

from __future__ import annotations

from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.manifest import MANIFEST, MODEL_PART
from lockstep.collectives.plain_json import encoded
from lockstep.errors import UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.runtime.disk import remove_tree

VALUES = "dcp"  # key of these values in state.json


class LockstepWriter(dcp.StorageWriter):
    """Writes a Lockstep checkpoint for `dcp.save(..., storage_writer=...)`, without pickle. It
    appears complete or not at all. `lockstep checkpoints` and LockstepReader read it.

    All ranks write their parts into a folder beside `path`, which is renamed at the end. It
    replaces a checkpoint at `path`. A Stepper cannot resume from it, because it has no scheduler
    and no position in the data.

    Args:
        path: the folder to write, visible to all ranks. A name such as step-0000100 gives the step.
        model: the key of the model's state dict in the saved state; "": all tensors are the
            model's.

    Raises:
        UsageError: a value that is neither a tensor nor plain data; a tensor that is divided along
            several dims; no tensor of the model; something that is no checkpoint is at `path`.
    """

    def __init__(self, path: str | PathLike[str], *, model: str = "model") -> None:
        self._prefix = f"{model}." if model else ""
        self.reset(path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
            self._folder = self._path.with_name(f".{self._path.name}.dcp.unfinished")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs["rank"]
        if not kwargs["use_collectives"]:
            raise UsageError("dcp-cannot-save", what="with use_collectives=False")

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        if self._path.exists() and not (self._path / MANIFEST).is_file():
            reason = "something that is no checkpoint has this name"
            raise UsageError("cannot-write", name="checkpoint", file=self._path, reason=reason)
        remove_tree(self._folder, ignore_errors=True)  # left by a process that was killed
        self._folder.mkdir(parents=True)
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        model = []
        others = []
        values = {}
        for item in plan.items:
            key = item.index.fqn
            if item.tensor_data is None:
                # other planners return only the pickled value
                if not isinstance(planner, dcp.DefaultSavePlanner):
                    raise UsageError("dcp-cannot-save", what=f"{key} of a {type(planner)}")
                values[key] = encoded(planner.lookup_object(item.index), key)
            elif key.startswith(self._prefix):
                model += _pieces(key.removeprefix(self._prefix), item, planner.resolve_data(item))
            else:
                others += _pieces(f"/{key}", item, planner.resolve_data(item))
        entries = files.write_files(self._folder, files.parts(model, others, self._rank))
        size = sum(entry.bytes for entry in entries)
        written = entries, values
        return done([WriteResult(item.index, size, written) for item in plan.items[:1]])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        entries = []
        values: dict[str, Any] = {}
        for result in chain.from_iterable(results):
            rank_entries, rank_values = result.storage_data
            entries += rank_entries
            values |= rank_values
        if not any(entry.name.startswith(MODEL_PART) for entry in entries):
            remove_tree(self._folder)
            keys = list(metadata.state_dict_metadata)[:3]
            raise UsageError("state-without-model", prefix=self._prefix, keys=keys)
        step = folders.step_in(self._path.name) or 0
        files.commit(self._folder, self._path, step, entries, {VALUES: values})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)


def _pieces(name: str, item: dcp.WriteItem, data: Any) -> list[TensorPiece]:
    """Return the whole tensor, or this rank's interval of a divided one, or nothing if that is
    empty. The dim along which a tensor is divided becomes the first in memory order.
    """
    assert item.tensor_data is not None
    shape = item.tensor_data.size
    chunk = item.tensor_data.chunk
    divided = [dim for dim, size in enumerate(shape) if chunk.sizes[dim] != size]
    if not divided:
        return [TensorPiece(name, data)]
    if len(divided) > 1:
        raise UsageError("dcp-cannot-save", what=f"{item.index.fqn}, divided along dims {divided}")
    if not data.numel():
        return []
    [dim] = divided
    data = data.movedim(dim, 0)
    order = torch.empty([shape[dim], *data.shape[1:]], device="meta")
    strides = order.movedim(0, dim).stride()
    start = chunk.offsets[dim] * strides[dim]
    return [TensorPiece(name, data.flatten(), start, tuple(shape), strides)]


def done(value: Any) -> Future[Any]:
    """Return a future that already has this value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
