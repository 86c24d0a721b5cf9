"""What a loader worker sends arrives as it was made: same bits, dtypes, strides and
aliases, small or large.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import lockstep
from lockstep.data.keyed import SMALL, Sent, collated


def through(batch: Any) -> Any:
    """As a queue of torch's sends it."""
    return pickle.loads(ForkingPickler.dumps(Sent(batch)))


@dataclass
class Labelled:
    values: Tensor
    name: str


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[3:7],
        torch.ones(1).expand(5),
    ],
    ids=["0-d", "empty", "bf16", "bool", "complex", "transposed", "slice", "expanded"],
)
def test_a_tensor_arrives_with_its_bits_and_strides(tensor: Tensor) -> None:
    (found,) = through([tensor])
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert not found.is_shared()
    if tensor.stride() != (0,):
        found.zero_()  # nobody else's


def test_parts_that_share_memory_share_it_on_arrival() -> None:
    rows = torch.zeros(3, 4)
    found = through({"all": rows, "first": rows[0], "flat": rows.view(-1), "again": rows})
    found["flat"][1] = 7
    assert found["all"][0, 1] == found["first"][1] == 7
    assert found["again"] is found["all"]


def test_what_is_no_tensor_arrives_too() -> None:
    found = through([Labelled(torch.ones(2), "a"), {"text": "b"}, (1, None)])
    assert found[0].name == "a"
    assert found[0].values.tolist() == [1, 1]
    assert found[1:] == [{"text": "b"}, (1, None)]


def test_small_tensors_are_aligned_as_torchs_own_and_leave_no_file_behind() -> None:
    """The bytes are in the message: nobody has to open anything."""
    for count in (1, 17, 1000):
        assert through(torch.zeros(count)).data_ptr() % 64 == 0
    stream = io.BytesIO()
    ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(Sent(torch.zeros(4)))
    assert b"DupFd" not in stream.getvalue()
    assert b"rebuild_storage" not in stream.getvalue()


def batches(dataset: Any, workers: int) -> list[Any]:
    loader = lockstep.Loader(
        dataset, global_batch=4, micro_batch=2, num_workers=workers, device="cpu", rank=0, size=1
    )
    try:
        return [batch for epoch in loader.epochs(2) for window in epoch for batch in window]
    finally:
        loader.close()


class NeedGradients(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(3, requires_grad=True)


@pytest.mark.timeout(60)
def test_what_needs_a_gradient_is_refused_where_the_batch_is_made() -> None:
    """Not on its way, where nobody would hear of it."""
    with pytest.raises(RuntimeError, match="requires grad"):
        batches(NeedGradients(), workers=1)


def negated(batch: list[Tensor], **_: Any) -> Tensor:
    return -torch.stack(batch)


def test_batches_of_workers_have_the_bits_of_those_made_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, SMALL // 4), torch.arange(8))
    expected = batches(data, workers=0)
    for here, theirs in zip(expected, batches(data, workers=2), strict=True):
        assert all(map(torch.equal, here, theirs))
        assert [part.is_shared() for part in theirs] == [False, True, False]
    # also of those that what the user has registered makes
    monkeypatch.setitem(default_collate_fn_map, Tensor, negated)
    for here, theirs in zip(expected, batches(data, workers=1), strict=True):
        assert all(torch.equal(-part, made) for part, made in zip(here, theirs, strict=True))


def test_collated_is_torchs_in_this_process() -> None:
    samples = [({"x": torch.ones(2), "y": 1.0}, "a")] * 2
    assert str(collated(samples)) == str(default_collate(samples))
