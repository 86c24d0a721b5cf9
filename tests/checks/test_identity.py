"""One hash for equal weights, another for any change."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from lockstep.checks.identity import sha256, weights
from lockstep.errors import TaskError
from tests import zoo
from tests.refused import refused


def test_it_is_the_raw_bytes_in_the_order_of_sorted_names() -> None:
    tensors = {
        "b": torch.tensor([1.0, 2.0]),
        "a": torch.tensor([[3, 4], [5, 6]]).t(),
        "c": torch.tensor(7, dtype=torch.int16),
    }
    parts = torch.tensor([3, 5, 4, 6]), tensors["b"], tensors["c"]
    raw = b"".join(part.numpy().tobytes() for part in parts)
    assert sha256(tensors) == hashlib.sha256(raw).hexdigest()


def test_one_bit_more_is_another_hash() -> None:
    model = zoo.build("cnn")
    before = sha256(weights(model))
    assert sha256(weights(zoo.build("cnn"))) == before
    assert sha256(weights(zoo.build("awkward"))) != before
    model.norm.running_mean[1] = torch.nextafter(model.norm.running_mean[1], torch.tensor(1.0))
    assert sha256(weights(model)) != before


class Remembers(nn.Linear):
    def get_extra_state(self) -> object:
        return {"a": object()}

    def set_extra_state(self, state: object) -> None:
        pass


def test_state_that_only_pickle_could_keep_is_refused() -> None:
    with refused("extra-state-not-a-tensor", TaskError, name="0._extra_state", type="dict"):
        weights(nn.Sequential(Remembers(1, 1)))
