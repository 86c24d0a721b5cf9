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
from lockstep.collectives.plain_json import decoded
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
        self._model = model
        self._optimizer = optimizer
        self.reset(path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        if checkpoint_id is None:
            return
        self._folder = folders.found(Path(checkpoint_id))[-1]
        checkpoint = files.read(self._folder, trusted=True)
        self._contents = _contents(checkpoint, self._model, self._optimizer, by_name=True)

    def read_metadata(self) -> dcp.Metadata:
        return dcp.Metadata({key: _described(value) for key, value in self._contents.items()})

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
            value = self._contents[item.storage_index.fqn]
            if isinstance(value, StoredTensor):
                target = planner.resolve_tensor(item).detach()
                target.copy_(value.read(item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
            else:
                stream = io.BytesIO()
                torch.save(value, stream)
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
    state = _contents(checkpoint, "model", "optimizer", by_name=False)
    for key, value in state.items():
        if isinstance(value, StoredTensor):
            state[key] = value.read()
    with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _contents(
    checkpoint: Checkpoint, model: str, optimizer: str, *, by_name: bool
) -> dict[str, Any]:
    """Return tensors and other values by the keys that DCP gives them in a state of model and
    optimizer. `by_name`: also give the options of the optimizer's groups by parameter, as
    flatten_optimizer_state_dict=True does.
    """
    prefix = f"{model}." if model else ""
    contents = {}
    for name, tensor in checkpoint.model(every_name=True).items():
        contents[prefix + name] = tensor
    with believed(checkpoint.folder / STATE):
        for key, tensor in checkpoint.optimizer().items():
            state, _, name = key.partition("/")
            if not key.startswith(METHOD):
                contents[f"{optimizer}.state.{name}.{state}" if state else name] = tensor
        contents |= decoded(checkpoint.state.get(VALUES, {}))
        training = checkpoint.state.get("training")
        if training is None:
            return contents
        for name, numbers in training["optimizer"]["numbers"].items():
            for state, value in decoded(numbers).items():
                contents[f"{optimizer}.state.{name}.{state}"] = value
        for number, group in enumerate(training["optimizer"]["groups"]):
            parameters = group["parameters"]
            options = {**decoded(group["options"]), "params": parameters}
            names = [*parameters, number] if by_name else [number]
            for group_name in names:
                for option, value in options.items():
                    contents[f"{optimizer}.param_groups.{group_name}.{option}"] = value
    return contents


def _described(stored: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if not isinstance(stored, StoredTensor):
        return dcp.BytesStorageMetadata()
    size = torch.Size(stored.shape)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return dcp.TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [chunk])
