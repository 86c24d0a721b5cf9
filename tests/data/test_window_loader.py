"""Where a training stands in its data: taken anywhere, resumed at any world size, refused with
the name of what differs.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.data.loader import Epoch, Loader
from lockstep.errors import LockstepError
from tests.data.datasets import Augmented, Backwards, Counted, Numbers, Pairs
from tests.data.test_loader import as_data, loader
from tests.refused import refused

NO_SIZES = {"global_batch": None, "micro_batch": None}
OF_BATCHES: dict[str, Any] = {"order": Pairs(), "micro_batches": 2, **NO_SIZES}


def test_loader_workers_are_not_in_a_state() -> None:
    def steps(ours: Loader) -> list[tuple[int, Any]]:
        windows = (window for epoch in ours.epochs(2) for window in epoch)
        return [(window.step, as_data(list(window))) for window in windows]

    first = loader(Augmented(21), num_workers=1)
    list(next(iter(next(first.epochs(2)))))
    state = first.state_dict()
    first.close()
    undisturbed = steps(loader(Augmented(21)))
    for workers in (0, 2):
        ours = loader(Augmented(21), num_workers=workers)
        ours.load_state_dict(state)
        assert steps(ours) == undisturbed[1:]
        ours.close()


def test_an_epochs_length_stays_and_a_second_walk_begins_where_the_first_did() -> None:
    dataset = Counted(24)
    ours = loader(dataset)
    ours.load_state_dict(loader(Numbers(24)).state_dict() | {"step_in_epoch": 1, "step": 1})
    epoch = next(ours.epochs(1))
    assert len(epoch) == 3
    for _ in range(2):
        assert [(window.step, len(list(window))) for window in epoch] == [(1, 4), (2, 4)]
    assert len(dataset.fetched) == 2 * 16  # nothing on the way there
    # the state was used up
    assert [window.step for epoch in ours.epochs(1) for window in epoch] == [0, 1, 2]


def test_a_loaded_state_waits_until_it_is_walked_and_start_overrules_it() -> None:
    state = loader(Numbers(16)).state_dict() | {"epoch": 1, "step_in_epoch": 1, "step": 3}
    ours = loader(Numbers(16))
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    assert [epoch.number for epoch in ours.epochs(3)] == [1, 2]
    assert [window.step for epoch in ours.epochs(2) for window in epoch] == [3]
    ours.load_state_dict(state)
    assert [window.step for epoch in ours.epochs(2, start=0) for window in epoch] == [0, 1, 2, 3]
    ours.load_state_dict(state | {"epoch": 2, "step_in_epoch": 0, "step": 4})
    assert list(ours.epochs(2)) == []
    window = next(iter(next(ours.epochs(1, start=0))))
    ours.load_state_dict(state)  # ends the walk under way
    with refused("batches-not-fetched", LockstepError, epoch=0):
        list(window)


# one micro-batch a rank: the same samples a step at any size; so many samples a rank: others
ONE_EACH = {"size": 2, "micro_batch": None}
PER_RANK = {"size": 2, "batch_per_rank": 4}


@pytest.mark.parametrize(
    ("before", "samples", "now", "difference"),
    [
        ({}, 25, {}, "dataset length was 24 and is 25; order was shuffled"),
        ({}, 24, {"seed": 1}, "seed was 0 and is 1"),
        ({}, 24, {"shuffle": False}, "seed 0 and is sequential, 24 samples"),
        ({}, 24, {"global_batch": 6}, "global_batch was 8 and is 6"),
        ({}, 24, {"micro_batch": 4}, "micro_batch was 2 and is 4"),
        ({}, 24, {"drop_last": True}, "drop_last was False and is True"),
        ({}, 24, OF_BATCHES, "global_batch was 8 and is not given"),
        (ONE_EACH, 24, {"size": 3, "micro_batch": None}, None),
        (ONE_EACH, 24, {"size": 2, "micro_batch": 4}, "micro_batch was one a rank and is 4"),
        (PER_RANK, 24, {"size": 3, "batch_per_rank": 4}, "global_batch was 8 and is 12"),
    ],
)
def test_another_trainings_state_is_refused_by_name(
    before: dict[str, Any], samples: int, now: dict[str, Any], difference: str | None
) -> None:
    state = loader(Numbers(24), **before).state_dict()
    ours = loader(Numbers(samples), **now)
    if difference is None:
        ours.load_state_dict(state)
        return
    with refused("another-training") as caught:
        ours.load_state_dict(state)
    assert difference in caught.value.values["differences"]


def test_a_foreign_samplers_other_order_is_refused() -> None:
    first = loader(Numbers(24), order=Backwards(24, {0: "a", 1: "b"}))
    epochs = first.epochs(2)
    assert "samples of epoch 0" not in first.state_dict()["fingerprint"]
    for _ in next(epochs):
        break
    inside = first.state_dict()
    assert inside["fingerprint"]["samples of epoch 0"] == "a"
    list(map(list, Epoch(first, 0)))
    at_its_end = first.state_dict()
    # not run ahead of
    assert (at_its_end["epoch"], "samples of epoch 1" in at_its_end["fingerprint"]) == (1, False)
    for state in (inside, at_its_end):
        loader(Numbers(24), order=Backwards(24, {0: "a"})).load_state_dict(state)
        said = "samples of epoch 0 was a and is c"
        with refused("another-training", differences=said):
            loader(Numbers(24), order=Backwards(24, {0: "c"})).load_state_dict(state)


def test_states_that_cannot_be_are_named() -> None:
    ours = loader(Numbers(24))
    state = ours.state_dict()
    for change, name in (({"epoch": -1}, "epoch"), ({"step": 2.5}, "step")):
        with refused("wrong-value", name=name, value=change[name]):
            ours.load_state_dict(state | change)
    with refused("wrong-value", name="step", value=0):
        ours.load_state_dict(state | {"step_in_epoch": 1})
    for change, said in (
        ({"step_in_epoch": 3, "step": 3}, "step_in_epoch=3 is not in epoch 0, which has 3 steps"),
        ({"epoch": 1, "step": 4}, "epoch 1 began with step 4 and begins with step 3"),
    ):
        with refused("another-training", differences=said):
            ours.load_state_dict(state | change)
    for nothing in ({}, {"step": 1}, 3):
        with refused("not-a-loader-state"):
            ours.load_state_dict(nothing)  # type: ignore[arg-type]


def test_a_batches_state_keeps_the_number_of_its_epochs_first_step() -> None:
    ours = loader(Numbers(24), **OF_BATCHES)
    assert [window.step for epoch in ours.epochs(3, start=2) for window in epoch] == [4, 5, 6]
    said = "epoch 2 began with step 9 and begins with step 4"
    with refused("another-training", differences=said):
        ours.load_state_dict(ours.state_dict() | {"epoch": 2, "step_in_epoch": 1, "step": 10})
