"""What the graders share.

A grader is the file graders/lessonN.py with one function, `grade(lesson)`. It is given the module
that holds the student's functions, and raises `Wrong` with a sentence that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from lockstep import launch
from lockstep.errors import LaunchTimeout, WorkerFailed
from lockstep.testing import run_ranks

PATIENCE = timedelta(seconds=30)


class Wrong(AssertionError):
    """The exercise is not solved. The text says what is wrong."""


def grade(folder: str, lesson: str) -> None:
    """Run the grader of `lesson` ("lesson3", "bug3", "trainer_naive") on the file in `folder`
    ("exercises").

    Raises Wrong.
    """
    if lesson.startswith("bug"):
        import_module("graders.bugs").grade_script(folder, lesson)
        return
    file, _, stage = lesson.partition("_")
    solution, grader = import_module(f"{folder}.{file}"), import_module(f"graders.{file}")
    try:
        if stage:
            grader.grade_stage(solution, stage)
        else:
            grader.grade(solution)
    except NotImplementedError:
        what = f", stage {stage}," if stage else ""
        raise Wrong(f"docs/course/{folder}/{file}.py{what} is not solved yet.") from None


def check(right: bool, sentence: str) -> None:
    """Raise Wrong with this sentence if it is not right."""
    if not right:
        raise Wrong(sentence)


def on_ranks(
    fn: Callable[..., Any],
    workers: int,
    *args: Any,
    open_world: bool = True,
    patience: timedelta = PATIENCE,
) -> list[Any]:
    """Run `fn(world, *args)` on ranks of this machine, and return the results by rank.

    Args:
        fn: a function at the top of a file, as pickle needs it.
        open_world: False runs `fn(*args)` on processes that have not joined each other.
    """
    with failures_as_wrong():
        if open_world:
            return run_ranks(fn, workers, args, timeout=patience)
        return launch(fn, workers, args, timeout=patience)


@contextmanager
def failures_as_wrong() -> Iterator[None]:
    """Where ranks fail or are late, raise Wrong with what a student can do about it."""
    try:
        yield
    except LaunchTimeout as late:
        raise Wrong(
            f"{late.sentence}\nDoes every rank call the same collectives in the same order?"
        ) from None
    except WorkerFailed as failed:
        _, is_wrong, sentence = failed.traceback.rpartition(f"\n{Wrong.__module__}.Wrong: ")
        if is_wrong:
            raise Wrong(sentence.rstrip()) from None
        if failed.traceback.rstrip().endswith("\nNotImplementedError"):
            raise NotImplementedError from None
        raise Wrong(f"Your function failed on a rank:\n{failed}") from None


def check_alike(action: str) -> None:
    """Every rank calls this before a collective and at the end, so that nobody waits for a rank
    that does something else.
    """
    actions: list[str] = [""] * dist.get_world_size()
    _gather(actions, action)
    for rank, other in enumerate(actions):
        if other != actions[0]:
            raise Wrong(
                f"Rank 0 {actions[0]}, and rank {rank} {other}: one would wait for the other. Every "
                "rank must call the same collectives in the same order, also one without samples."
            )


_gather = dist.all_gather_object


def check_call(name: str, arguments: Iterable[Any]) -> None:
    """`check_alike` for a collective that is about to be called with these arguments."""
    tensors = [value for value in arguments if torch.is_tensor(value)]
    check_alike(f"calls {name} of {tensors[0].numel()} numbers" if tensors else f"calls {name}")


@contextmanager
def replaced(
    names: Iterable[str], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace these functions of torch.distributed, if this torch has them, by
    `replacement(function)`.
    """
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, replacement(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def close(found: object, expected: object, tolerance: float = 1e-5) -> bool:
    """Whether these are numbers or tensors of one shape that are equal up to rounding."""
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=tolerance, atol=tolerance
    )
