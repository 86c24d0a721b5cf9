"""Read and write Lockstep's checkpoints by torch.distributed.checkpoint (DCP), on any number of
ranks:

    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, storage_reader=LockstepReader("runs/mine"))
    dcp.save(state, storage_writer=LockstepWriter("checkpoints/step-0000100"))

Nothing in a file is unpickled. DCP's planner does unpickle values that are not tensors, but only
bytes that the reader has just made from JSON.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.futures import Future

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.manifest import STATE, believed, check
from lockstep.checkpoints.pieces import METHOD, StoredTensor
from lockstep.checkpoints.plain import decoded
from lockstep.errors import UsageError
from lockstep.integrations.dcp_writer import VALUES, done
from lockstep.integrations.dcp_writer import LockstepWriter as LockstepWriter


class LockstepReader(dcp.StorageReader):
    """Reads checkpoints for `dcp.load(..., storage_reader=...)`: plain tensors and DTensors, on any
    number of ranks.

    Each rank maps the files and reads only the parts of each tensor that it needs. Before that,
    DCP's coordinator (rank 0) checks every byte against the manifest, once for all ranks. An error
    on one rank is a CheckpointException on all ranks; its `failures` has the rank's own error.

    Args:
        path: the folder of a checkpoint, or of a run or several checkpoints: then the newest.
        model: the key of the model's state dict; "" if its tensors have no key above them.
        optimizer: the key of the optimizer's state dict, as torch's `get_optimizer_state_dict`
            makes it. What LockstepWriter wrote keeps the key that it had.

    Raises:
        UsageError: there is no checkpoint; ranks found different ones.
        DamagedCheckpoint: a file has changed since it was written; the error names it.
    """

    def __init__(
        self, path: str | PathLike[str], *, model: str = "model", optimizer: str = "optimizer"
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.reset(path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        if checkpoint_id is None:
            return
        self._folder = folders.found(Path(checkpoint_id))[-1]
        checkpoint = files.read(self._folder, trusted=True)
        self._found = _contents(checkpoint, self._model, self._optimizer, by_name=True)

    def read_metadata(self) -> dcp.Metadata:
        return dcp.Metadata({key: _described(each) for key, each in self._found.items()})

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool) -> None:
        if is_coordinator:
            check(self._folder)

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return replace(plan, storage_data=self._folder.name)

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        names = sorted({plan.storage_data for plan in plans})
        if len(names) > 1:  # a training saved a checkpoint in the meantime
            raise UsageError("ranks-read-other-checkpoints", checkpoints=names)
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self._found[item.storage_index.fqn]
            if isinstance(stored, StoredTensor):
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored.read(item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
            else:
                torch.save(stored, stream := io.BytesIO())
                stream.seek(0)
                planner.load_bytes(item, stream)
        return done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model and the optimizer into `folder` with torch's own writer. `dcp.load` reads it
    with torch's own reader, which unpickles.
    """
    state = {
        key: found.read() if isinstance(found, StoredTensor) else found
        for key, found in _contents(checkpoint, "model", "optimizer", by_name=False).items()
    }
    with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _contents(
    checkpoint: Checkpoint, model: str, optimizer: str, *, by_name: bool
) -> dict[str, Any]:
    """Return tensors and other values by the keys that DCP gives them in a state of model and
    optimizer. `by_name`: also give the options of the optimizer's groups by parameter, as
    flatten_optimizer_state_dict=True does.
    """
    found: dict[str, Any] = {
        f"{model}.{name}" if model else name: tensor
        for name, tensor in checkpoint.model(every_name=True).items()
    }
    with believed(checkpoint.folder / STATE):
        for key, tensor in checkpoint.optimizer().items():
            state, _, name = key.partition("/")
            if not key.startswith(METHOD):
                found[f"{optimizer}.state.{name}.{state}" if state else name] = tensor
        found |= decoded(checkpoint.state.get(VALUES, {}))
        if (training := checkpoint.state.get("training")) is None:
            return found
        for name, numbers in training["optimizer"]["numbers"].items():
            for state, value in decoded(numbers).items():
                found[f"{optimizer}.state.{name}.{state}"] = value
        groups = [
            {**decoded(group["options"]), "params": group["parameters"]}
            for group in training["optimizer"]["groups"]
        ]
        each = [(name, group) for group in groups for name in group["params"] if by_name]
        for place, group in [*each, *enumerate(groups)]:
            for option, value in group.items():
                found[f"{optimizer}.param_groups.{place}.{option}"] = value
    return found


def _described(stored: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if not isinstance(stored, StoredTensor):
        return dcp.BytesStorageMetadata()
    size = torch.Size(stored.shape)
    whole = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return dcp.TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [whole])
