"""One hash for equal weights, another for any change; the same from the model and from the
checkpoint's file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from lockstep.checkpoints import files
from lockstep.checkpoints.identity import sha256, weights
from lockstep.errors import TaskError
from tests import zoo
from tests.checkpoints.model_alone import write_model
from tests.refused import refused


def test_it_is_the_raw_bytes_in_the_order_of_sorted_names() -> None:
    tensors = {
        "b": torch.tensor([1.0, 2.0]),
        "a": torch.tensor([[3, 4], [5, 6]]).t(),
        "c": torch.tensor(7, dtype=torch.int16),
    }
    raw = (
        bytes(torch.tensor([3, 5, 4, 6]).numpy().data)
        + bytes(tensors["b"].numpy().data)
        + (7).to_bytes(2, "little")
    )
    assert sha256(tensors) == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.complex64]
)
def test_every_dtype_and_no_elements_at_all(dtype: torch.dtype) -> None:
    assert (
        len(sha256({"x": torch.ones(3).to(dtype), "empty": torch.zeros(0, 2, dtype=dtype)})) == 64
    )


def test_one_bit_more_is_another_hash() -> None:
    model = zoo.build("cnn")
    before = sha256(weights(model))
    assert sha256(weights(zoo.build("cnn"))) == before
    model.norm.running_mean[1] = torch.nextafter(model.norm.running_mean[1], torch.tensor(1.0))
    assert sha256(weights(model)) != before


def test_tied_weights_are_there_once_and_can_be_loaded(tmp_path: Path) -> None:
    model = zoo.build("awkward")
    found = weights(model)
    assert "inner.weight" in found
    assert "tied.weight" not in found
    folder = write_model(tmp_path, 1, found, {})
    assert sha256(files.read(folder).tensors) == sha256(found)
    other = zoo.Awkward()
    load_model(other, folder / files.MODEL)
    assert sha256(weights(other)) == sha256(found)
    assert other.tied.weight is other.inner.weight


class Remembers(nn.Linear):
    def get_extra_state(self) -> object:
        return {"a": object()}

    def set_extra_state(self, state: object) -> None:
        pass


def test_state_that_only_pickle_could_keep_is_refused() -> None:
    with refused("extra-state-not-a-tensor", TaskError, name="0._extra_state", type="dict"):
        weights(nn.Sequential(Remembers(1, 1)))
