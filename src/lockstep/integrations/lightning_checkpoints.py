"""Write Lightning's checkpoints in Lockstep's format: `Trainer(plugins=[LockstepCheckpointIO()])`,
and `LockstepFabricStrategy(checkpoint_io=LockstepCheckpointIO())`.

    epoch=0-step=20.ckpt/model.safetensors             the weights by their plain names
                         optimizer-00000.safetensors   all other tensors, named by their keys
                         state.json                    everything else, as JSON
                         manifest.json manifest.sha256

A folder appears complete or not at all, and nothing in it is unpickled.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from lockstep.checkpoints import files
from lockstep.checkpoints.manifest import STATE, believed
from lockstep.checkpoints.pieces import read_all
from lockstep.collectives.plain_json import decoded, encoded
from lockstep.errors import LockstepError, UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.runtime.disk import remove_tree

_MODEL = ("state_dict", "model")  # keys of the weights: Lightning's, and the usual one with Fabric
_STEP = ("global_step", "step")
_Keys = tuple[str | int, ...]  # that lead to a value in nested dicts and lists


class LockstepCheckpointIO(CheckpointIO):
    """Writes what Lightning or Fabric saves as a folder of safetensors and JSON. The folder appears
    complete or not at all.

    Dictionaries, lists, tuples, sets, numbers, text, bytes and tensors are loaded as they were
    saved; an OrderedDict becomes a dict. Hyper-parameters that are objects, such as a module, are
    refused. `LightningModule.load_from_checkpoint` reads only files of torch.save. Load
    model.safetensors instead.

    Raises:
        UsageError: a value that JSON and safetensors cannot hold, naming its place; a URL; a file
            of torch.save.
        DamagedCheckpoint: on loading, a file has changed since it was written; the error names it.
        LockstepError: the checkpoint could not be written.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        final = _local(path)
        if storage_options is not None:
            instead = "a checkpoint is a folder on a local disk"
            _refuse("storage_options", storage_options, instead)
        tensors: dict[_Keys, Tensor] = {}
        rest = encoded(_without_tensors(checkpoint, (), tensors), "the checkpoint")
        model = next((key for key in _MODEL if isinstance(checkpoint.get(key), Mapping)), None)
        weights = {}
        pieces = []
        for keys, tensor in tensors.items():
            if len(keys) == 2 and keys[0] == model and isinstance(keys[1], str):
                weights[keys[1]] = tensor
            else:
                pieces.append(TensorPiece(json.dumps(keys), tensor))
        step = next((checkpoint[key] for key in _STEP if type(checkpoint.get(key)) is int), 0)
        state = {"lightning": {"model": model, "rest": rest}}
        folder = final.with_name(f".{final.name}.unfinished")
        try:
            remove_tree(folder, ignore_errors=True)  # left by a process that was killed
            folder.mkdir(parents=True)
            entries = files.write_files(folder, files.parts(weights, pieces, 0))
            _unlink(final)
            files.commit(folder, final, step, entries, state)
        except OSError as error:
            remove_tree(folder, ignore_errors=True)
            raise LockstepError(
                "checkpoint-not-written", checkpoint=str(final), where="", reason=str(error)
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, and return what was saved.

        Args:
            path: the folder.
            map_location: the device of the tensors. Default: the CPU.
            weights_only: no effect, because nothing is unpickled.
        """
        folder = _local(path)
        if folder.is_file():
            raise UsageError("checkpoint-is-pickled", file=str(folder))
        if not isinstance(map_location, str | torch.device | None):
            _refuse("map_location", map_location, "name a device")
        stored = files.read(folder)
        with believed(folder / STATE):
            state = stored.state["lightning"]
            checkpoint: dict[str, Any] = decoded(state["rest"])
            tensors = read_all(stored.optimizer())
            for name, tensor in stored.tensors.items():
                tensors[json.dumps([state["model"], name])] = tensor
            for name, tensor in tensors.items():
                *keys, last = json.loads(name)
                container: Any = checkpoint
                for key in keys:
                    container = container[key]
                container[last] = tensor if map_location is None else tensor.to(map_location)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        folder = _local(path)
        _unlink(folder)
        with suppress(FileNotFoundError):
            remove_tree(folder)


def _unlink(path: Path) -> None:
    """Remove a file of torch.save, or a link made by `ModelCheckpoint(save_last="link")`."""
    if path.is_symlink() or path.is_file():
        path.unlink()


def _without_tensors(value: Any, keys: _Keys, tensors: dict[_Keys, Tensor]) -> Any:
    """Return `value` with None in place of its tensors, and add these to `tensors`. `keys` lead to
    the value.
    """
    if isinstance(value, Tensor):
        tensors[keys] = value.detach()
        return None
    if type(value) is list:
        return [
            _without_tensors(element, (*keys, index), tensors)
            for index, element in enumerate(value)
        ]
    if type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value):
        return {
            key: _without_tensors(element, (*keys, key), tensors) for key, element in value.items()
        }
    return value


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise UsageError("unknown-checkpoint-url", url=str(path), reason="name a folder")
    return Path(path)


def _refuse(name: str, value: object, instead: str) -> None:
    raise UsageError("keyword-without-meaning", name=name, value=value, instead=instead)
