"""How a batch gets from a loader worker to the process that trains.

torch puts each tensor into shared memory and sends an open file descriptor for it. That takes both
processes about half a millisecond a tensor, however small it is. Here small tensors are sent as
bytes, through the pipe that would carry the descriptor.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

SMALL = 2**19  # bytes; for larger tensors shared memory is as fast


class Sent:
    """A batch that is sent to another process. The class is also DataLoader's collate function:
    the batch has been collated already.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        stream = io.BytesIO()
        pickler = ForkingPickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**pickler.dispatch_table, torch.UntypedStorage: _reduced}
        pickler.dump(self._batch)
        return pickle.loads, (stream.getvalue(),)


def _reduced(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "cpu" or storage.is_shared() or not 0 < len(storage) <= SMALL:
        found: tuple[Any, ...] = reduce_storage(storage)
        return found
    octets: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return _storage_of, (pickle.PickleBuffer(octets),)


def _storage_of(octets: bytearray) -> torch.UntypedStorage:
    # The copy has torch's alignment. With another one a kernel may give other last bits.
    return torch.frombuffer(octets, dtype=torch.uint8).clone().untyped_storage()


def collated(samples: list[Any]) -> Any:
    """Collate with torch's default_collate. In a loader worker, small tensors are stacked without
    shared memory, unless the user has registered another collate function for tensors.
    """
    if get_worker_info() is None or default_collate_fn_map[Tensor] is not collate_tensor_fn:
        return default_collate(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: _stacked})


def _stacked(tensors: Sequence[Tensor], **options: Any) -> Tensor:
    first = tensors[0]
    plain = first.layout is torch.strided and not first.is_nested
    # torch refuses to stack tensors that need a gradient, because they could not be sent
    plain = plain and not any(tensor.requires_grad for tensor in tensors)
    if plain and first.nbytes * len(tensors) <= SMALL:
        return torch.stack(tensors)  # type: ignore[arg-type]
    found: Tensor = collate_tensor_fn(tensors, **options)
    return found
