"""Made-up traces: which difference is the first, in the order of causes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.tools.verify.trace import (
    Difference,
    Sketch,
    Slot,
    Trace,
    TracedStep,
    digest_of,
    first_difference,
    read_again,
    sketch,
    tolerance_at,
)


def of(value: float) -> Sketch:
    return Sketch(digest=repr(value), norm=value, projection=value)


def trace(workers: int) -> Trace:
    """Two steps of two micro-batches, two parameters."""

    def slot(number: int) -> Slot:
        return Slot(
            rank=number * workers // 2,
            indices=(number,),
            samples=f"s{number}",
            loss=3.0,
            random={"torch": "t", "random": "r"},
            gradients={"last": of(2.0), "first": of(1.0)},
        )

    def step() -> TracedStep:
        slots, weights = {0: slot(0), 1: slot(1)}, {"first": of(5.0), "last": of(6.0)}
        return TracedStep(epoch=0, slots=slots, loss=3.0, weights=weights)

    start, again = {"first": of(4.0), "last": of(5.0)}, {0: "s0", 1: "s1"}
    return Trace(workers=workers, start=start, steps=[step(), step()], again=again, sha256="w")


def found(change: Callable[[Trace], object], *, exact: bool = True) -> Difference | None:
    other = trace(2)
    change(other)
    return first_difference(trace(1), other, exact=exact)


def differs(change: Callable[[Trace], object], **expected: Any) -> None:
    """There is a first difference, with at least these values."""
    difference = found(change)
    assert difference is not None
    assert {name: getattr(difference, name) for name in expected} == expected


def test_equal_traces() -> None:
    assert found(lambda other: None) is None
    assert found(lambda other: None, exact=False) is None
    assert read_again(trace(2)) is None


def start(other: Trace) -> None:
    other.start = {**other.start, "last": of(5.5)}


def order(other: Trace) -> None:
    other.steps[1].slots[1].indices = (7,)


def samples(other: Trace) -> None:
    other.steps[1].slots[1].samples = "others"


def loss(other: Trace) -> None:
    slot = other.steps[1].slots[1]
    slot.loss, slot.random = 3.1, {"torch": "moved", "random": "r"}
    slot.gradients["last"] = of(2.5)


def gradient(other: Trace) -> None:
    other.steps[1].slots[1].gradients["first"] = of(1.5)


def weights(other: Trace) -> None:
    other.steps[1].weights = {"first": of(5.0), "last": of(6.5)}


CAUSES = [order, samples, loss, gradient, weights]


@pytest.mark.parametrize("exact", [True, False])
def test_of_several_differences_in_a_step_the_cause_counts(exact: bool) -> None:
    for number, cause in enumerate(CAUSES):
        other = trace(2)
        for change in CAUSES[number:]:
            change(other)
        difference = first_difference(trace(1), other, exact=exact)
        assert difference is not None
        found_at = (difference.kind, difference.step, difference.workers)
        assert found_at == (cause.__name__, 2, (1, 2))
        if cause is not weights:
            assert (difference.slot, difference.ranks) == (1, (0, 1))


def test_a_cause_in_any_micro_batch_comes_before_a_consequence_in_the_first() -> None:
    def change(other: Trace) -> None:
        other.steps[0].slots[0].loss = 3.5
        other.steps[0].slots[1].samples = "others"

    differs(change, kind="samples", slot=1)

    def earlier_too(other: Trace) -> None:
        order(other)
        other.steps[0].weights = {"first": of(5.1), "last": of(6.0)}

    differs(earlier_too, kind="weights", step=1, name="first", values=(5.0, 5.1))


def test_what_is_said_of_each() -> None:
    differs(start, kind="start", step=0, name="last")
    differs(loss, name="last", values=(3.0, 3.1), reseeded=("torch",), indices=(1,))
    # a parameter that has a gradient in one only
    differs(
        lambda other: other.steps[0].slots[0].gradients.pop("first"),
        kind="gradient",
        name="first",
        values=None,
    )


def nearly(other: Trace) -> None:
    other.steps[0].slots[0].loss = 3.0 * (1 + 1e-6)
    other.steps[0].slots[0].gradients["first"] = of(1.0 + 1e-6)
    other.steps[0].weights = {"first": of(5.0 * (1 - 1e-6)), "last": of(6.0)}


def test_rounding_is_a_difference_where_bits_count_only() -> None:
    assert found(nearly, exact=False) is None
    differs(nearly, kind="loss", step=1)


def test_the_tolerance_grows_with_the_steps_and_ends() -> None:
    assert [tolerance_at(step, exact=True) for step in (1, 50)] == [0, 0]
    first, second, late = (tolerance_at(step, exact=False) for step in (1, 2, 50))
    assert first < second < late == 1e-2


def test_a_parameter_whose_gradient_is_noise_may_wander() -> None:
    """A bias before BatchNorm: its gradient is rounding error, and Adam makes a full step of it."""
    one, other = trace(1), trace(2)
    for each in (one, other):
        for slot in each.steps[0].slots.values():
            slot.gradients["last"] = of(1e-9)
    other.steps[0].weights = {"first": of(5.0), "last": of(6.5)}
    assert first_difference(one, other, exact=False) is None
    assert first_difference(one, other, exact=True) is not None


def test_samples_read_again() -> None:
    edited = trace(2)
    edited.again = {0: "s0", 1: "edited"}
    difference = read_again(edited)
    assert difference is not None
    assert (difference.kind, difference.step, difference.slot) == ("again", 1, 1)
    assert (difference.ranks, difference.workers) == ((1, 1), (2, 2))


def test_the_distance_of_sketches_is_about_that_of_the_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1000, generator=generator)
    move = 1e-3 * torch.randn(1000, generator=generator)
    far = sketch(one).distance(sketch(one + move))
    assert 0.05 * move.norm() < far < 4 * move.norm()
    assert sketch(one).distance(sketch(one.clone())) == 0
    nan = sketch(torch.tensor([float("nan"), 1.0]))
    assert nan.distance(nan) == 0.0
    assert nan.distance(sketch(torch.tensor([float("nan"), 2.0]))) == float("inf")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), -torch.zeros(2)),
        ({"x": 1}, {"y": 1}),
        ((1, "a"), (1, "b")),
        ([[1], [2]], [[1, 2]]),
    ],
)
def test_digests_tell_values_apart(one: object, other: object) -> None:
    assert digest_of(one) != digest_of(other)
    assert digest_of(one) == digest_of(copy.deepcopy(one))
