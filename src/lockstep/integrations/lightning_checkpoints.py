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
from lockstep.checkpoints.pieces import TensorPiece, image, read_all
from lockstep.checkpoints.plain import decoded, encoded
from lockstep.errors import LockstepError, UsageError
from lockstep.runtime.disk import remove_tree

_MODEL = ("state_dict", "model")  # keys of the weights: Lightning's, and the usual one with Fabric
_STEP = ("global_step", "step")
_Way = tuple[str | int, ...]  # the keys that lead to a value in nested dicts and lists


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
        place = _local(path)
        if storage_options is not None:
            instead = "a checkpoint is a folder on a local disk"
            _refuse("storage_options", storage_options, instead)
        found: dict[_Way, Tensor] = {}
        rest = encoded(_lifted(checkpoint, (), found), "the checkpoint")
        key = next((each for each in _MODEL if isinstance(checkpoint.get(each), Mapping)), None)
        weights = {str(way[1]): each for way, each in found.items() if _is_weight(way, key)}
        others = {way: each for way, each in found.items() if not _is_weight(way, key)}
        step = next((checkpoint[each] for each in _STEP if type(checkpoint.get(each)) is int), 0)
        state = {"lightning": {"model": key, "rest": rest}}
        folder = place.with_name(f".{place.name}.unfinished")
        try:
            remove_tree(folder, ignore_errors=True)  # left by a process that was killed
            folder.mkdir(parents=True)
            pieces = [TensorPiece(json.dumps(way), tensor) for way, tensor in others.items()]
            images = {part.name: image(part) for part in files.parts(weights, pieces, 0)}
            files.check_room(folder, sum(map(len, images.values())))
            entries = files.write_parts(folder, images)
            _unlink(place)
            files.commit(folder, place, step, entries, state)
        except OSError as error:
            remove_tree(folder, ignore_errors=True)
            raise LockstepError(
                "checkpoint-not-written", checkpoint=str(place), where="", reason=str(error)
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
        place = _local(path)
        if place.is_file():
            raise UsageError("checkpoint-is-pickled", file=str(place))
        if not isinstance(map_location, str | torch.device | None):
            _refuse("map_location", map_location, "name a device")
        found = files.read(place)
        with believed(place / STATE):
            said = found.state["lightning"]
            checkpoint: dict[str, Any] = decoded(said["rest"])
            tensors = {
                json.dumps([said["model"], name]): each for name, each in found.tensors.items()
            }
            tensors |= read_all(found.optimizer())
            for name, tensor in tensors.items():
                *way, last = json.loads(name)
                holder: Any = checkpoint
                for key in way:
                    holder = holder[key]
                holder[last] = tensor if map_location is None else tensor.to(map_location)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        place = _local(path)
        _unlink(place)
        with suppress(FileNotFoundError):
            remove_tree(place)


def _unlink(place: Path) -> None:
    """Remove a file of torch.save, or a link made by `ModelCheckpoint(save_last="link")`."""
    if place.is_symlink() or place.is_file():
        place.unlink()


def _lifted(value: Any, way: _Way, found: dict[_Way, Tensor]) -> Any:
    """Return `value` with None in place of its tensors, and add the tensors to `found`."""
    if isinstance(value, Tensor):
        found[way] = value.detach()
        return None
    if type(value) is list:
        return [_lifted(each, (*way, place), found) for place, each in enumerate(value)]
    if type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value):
        return {key: _lifted(each, (*way, key), found) for key, each in value.items()}
    return value


def _is_weight(way: _Way, key: str | None) -> bool:
    return len(way) == 2 and way[0] == key and isinstance(way[1], str)


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise UsageError("unknown-checkpoint-url", url=str(path), reason="name a folder")
    return Path(path)


def _refuse(name: str, value: object, instead: str) -> None:
    raise UsageError("keyword-without-meaning", name=name, value=value, instead=instead)
