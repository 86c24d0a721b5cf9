"""digits: nothing of the training is in the evaluation, and every class has its share."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import train
from lockstep.errors import TaskError
from lockstep.runtime.extras import install
from lockstep.tasks import digits
from tests.refused import refused


@pytest.fixture(scope="module")
def bundle() -> Any:
    """scikit-learn's digits. Its import sets environment variables, so no test does it."""
    import sklearn.datasets

    return sklearn.datasets.load_digits()


def test_no_training_index_is_in_the_evaluation_split_and_classes_are_balanced(bundle: Any) -> None:
    labels = bundle.target
    training, evaluation = digits.split(labels)
    assert not set(training) & set(evaluation)
    assert sorted([*training, *evaluation]) == list(range(1797))
    for label in range(10):
        share = (labels[evaluation] == label).sum() / (labels == label).sum()
        assert abs(share - 0.2) < 0.005
    again = digits.split(labels)
    assert np.array_equal(again[1], evaluation)


def test_the_data_are_those_of_the_split_and_read_without_importing_scikit_learn(
    bundle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    training, evaluation = digits.datasets()
    chosen = digits.split(bundle.target)[1]
    assert (len(training), len(evaluation)) == (1797 - len(chosen), len(chosen))
    assert torch.equal(evaluation.tensors[1], torch.tensor(bundle.target[chosen]))
    images = torch.tensor(bundle.images[chosen] / 16, dtype=torch.float32)
    assert torch.equal(evaluation.tensors[0], images.unsqueeze(1))


@pytest.mark.rest
def test_it_learns() -> None:
    result = train(digits.task(), steps=40)
    assert result.headline[0] == "accuracy"
    assert result.metrics["accuracy"] > 0.9


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with refused(
        "missing-extra", TaskError, what="digits", package="scikit-learn", install=install("tasks")
    ):
        digits.task()
