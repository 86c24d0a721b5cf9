"""Where a training stands in its data: taken anywhere, resumed at any world size, refused with
the name of what differs.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lockstep.data.loader import Epoch, Loader
from lockstep.errors import LockstepError, UsageError
from tests.data.datasets import Augmented, Backwards, Counted, Numbers, Pairs
from tests.data.test_loader import as_data, loader
from tests.refused import refused


def windows(ranks: list[Loader], epochs: int, **options: Any) -> dict[int, list[Any]]:
    """Step -> every rank's batches, in the order of slots."""
    found: dict[int, list[Any]] = {}
    for each in ranks:
        for epoch in each.epochs(epochs, **options):
            for window in epoch:
                assert window.epoch == epoch.number
                found.setdefault(window.step, []).extend(as_data(list(window)))
    return found


def world(dataset: Any, size: int, state: Any = None, **options: Any) -> list[Loader]:
    ranks = [loader(dataset, rank=rank, size=size, **options) for rank in range(size)]
    for each in ranks:
        if state is not None:
            each.load_state_dict(state)
    return ranks


KINDS = {
    "shuffled": {},
    "backwards": {"order": Backwards(21)},
    "batches": {"order": Pairs(), "micro_batches": 2, "global_batch": None, "micro_batch": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_resumes_at_every_world_size(kind: str) -> None:
    options = KINDS[kind]
    undisturbed = windows(world(Augmented(21), 1, **options), 3)
    first = loader(Augmented(21), **options)
    states = [first.state_dict()]
    for epoch in first.epochs(3):
        for window in epoch:
            list(window)
            states.append(json.loads(json.dumps(first.state_dict())))
    assert [state["step"] for state in states] == list(range(len(undisturbed) + 1))
    for step, state in enumerate(states):
        rest = {number: batches for number, batches in undisturbed.items() if number >= step}
        for size in (1, 2, 3):
            assert windows(world(Augmented(21), size, state, **options), 3) == rest, (step, size)


def test_loader_workers_are_not_in_a_state() -> None:
    first = loader(Augmented(21), num_workers=1)
    epoch = iter(next(first.epochs(2)))
    list(next(epoch))
    state = first.state_dict()
    first.close()
    undisturbed = windows(world(Augmented(21), 1), 2)
    for workers in (0, 2):
        ours = world(Augmented(21), 1, state, num_workers=workers)
        assert windows(ours, 2) == {
            step: batches for step, batches in undisturbed.items() if step > 0
        }
        ours[0].close()


def test_the_window_last_handed_out_counts_as_done() -> None:
    ours = loader(Numbers(16))
    epoch = iter(next(ours.epochs(2)))
    places = []
    for _ in range(2):
        window = next(epoch)
        places.append((window.step, ours.state_dict()["step_in_epoch"], ours.state_dict()["epoch"]))
    assert places == [(0, 1, 0), (1, 0, 1)]


def test_nothing_is_fetched_on_the_way() -> None:
    dataset = Counted(1000)
    state = loader(Numbers(1000), shuffle=False).state_dict() | {"step_in_epoch": 100, "step": 100}
    ours = loader(dataset, shuffle=False)
    ours.load_state_dict(state)
    window = next(iter(next(ours.epochs(1))))
    assert as_data(list(window))[0] == [800, 801]
    assert dataset.fetched == list(range(800, 808))


def test_an_epochs_length_stays_and_a_second_walk_begins_where_the_first_did() -> None:
    ours = loader(Numbers(24))
    ours.load_state_dict(loader(Numbers(24)).state_dict() | {"step_in_epoch": 1, "step": 1})
    epoch = next(ours.epochs(1))
    assert len(epoch) == 3
    for _ in range(2):
        assert [window.step for window in epoch] == [1, 2]
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


def test_loading_ends_the_walk_under_way() -> None:
    ours = loader(Numbers(24))
    window = next(iter(next(ours.epochs(1))))
    ours.load_state_dict(ours.state_dict())
    with refused("batches-not-fetched", LockstepError, epoch=0) as caught:
        list(window)
    assert "a state loaded" in caught.value.values["why"]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (
            Numbers(25),
            {},
            (
                "dataset length was 24 and is 25; order was shuffled .permutation 1., 24 samples,"
                " seed 0 and is"
            ),
        ),
        (Numbers(24), {"seed": 1}, "seed was 0 and is 1"),
        (
            Numbers(24),
            {"shuffle": False},
            "order was shuffled .permutation 1., 24 samples, seed 0 and is sequential, 24 samples",
        ),
        (Numbers(24), {"global_batch": 6}, "^global_batch was 8 and is 6"),
        (Numbers(24), {"micro_batch": 4}, "^micro_batch was 2 and is 4"),
        (Numbers(24), {"drop_last": True}, "drop_last was False and is True"),
        (
            Numbers(24),
            {"order": Pairs(), "micro_batches": 2, "global_batch": None, "micro_batch": None},
            "global_batch was 8 and is not given",
        ),
    ],
)
def test_another_trainings_state_is_refused_by_name(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    state = loader(Numbers(24)).state_dict()
    with refused("another-training") as caught:
        loader(dataset, **options).load_state_dict(state)
    assert re.search(message, caught.value.values["differences"])


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


def test_sizes_that_follow_the_world_size() -> None:
    """One micro-batch a rank: the same samples a step, so it resumes. So many samples a rank:
    other samples a step, so it does not.
    """
    state = loader(Numbers(24), size=2, micro_batch=None).state_dict()
    loader(Numbers(24), size=3, micro_batch=None).load_state_dict(state)
    said = "micro_batch was one a rank and is 4"
    with refused("another-training", differences=said):
        loader(Numbers(24), size=2, micro_batch=4).load_state_dict(state)
    state = loader(Numbers(24), size=2, batch_per_rank=4).state_dict()
    with pytest.raises(UsageError, match="global_batch was 8 and is 12"):
        loader(Numbers(24), size=3, batch_per_rank=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (
            {"epoch": -1},
            "wrong-value",
            {"name": "epoch", "value": -1, "expected": "a whole number of at least 0"},
        ),
        (
            {"step": 2.5},
            "wrong-value",
            {"name": "step", "value": 2.5, "expected": "a whole number of at least 0"},
        ),
        (
            {"step_in_epoch": 1},
            "wrong-value",
            {"name": "step", "value": 0, "expected": "a whole number of at least 1"},
        ),
        (
            {"step_in_epoch": 3, "step": 3},
            "another-training",
            {"differences": "step_in_epoch=3 is not in epoch 0, which has 3 steps"},
        ),
        (
            {"epoch": 1, "step": 4},
            "another-training",
            {"differences": "epoch 1 began with step 4 and begins with step 3"},
        ),
    ],
)
def test_states_that_cannot_be_are_named(
    change: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    ours = loader(Numbers(24))
    with refused(code, **values):
        ours.load_state_dict(ours.state_dict() | change)
    for nothing in ({}, {"step": 1}, 3):
        with refused("not-a-loader-state"):
            ours.load_state_dict(nothing)  # type: ignore[arg-type]


def test_a_batches_state_keeps_the_number_of_its_epochs_first_step() -> None:
    options = KINDS["batches"]
    ours = loader(Numbers(24), **options)
    assert [window.step for epoch in ours.epochs(4) for window in epoch] == list(
        range(2 + 2 + 3 + 3)
    )
    assert [
        window.step
        for epoch in loader(Numbers(24), **options).epochs(3, start=2)
        for window in epoch
    ] == [4, 5, 6]
    said = "epoch 2 began with step 9 and begins with step 4"
    with refused("another-training", differences=said):
        ours.load_state_dict(ours.state_dict() | {"epoch": 2, "step_in_epoch": 1, "step": 10})
