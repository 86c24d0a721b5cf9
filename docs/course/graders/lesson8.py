"""Grader 8: the bits of sums in several groupings, and saves that fail or are killed half-way."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from grading import Wrong, check
from torch import Tensor

import lockstep
from lockstep.errors import WorkerFailed

KEPT = {"step": 10, "weight": torch.arange(1000.0)}


def grade(lesson: ModuleType) -> None:
    for count in (1, 2, 3, 5, 8, 13):
        check_tree(lesson, list(torch.randn(count, 50, generator=torch.Generator().manual_seed(7))))
    check_absent(lesson)
    check_save(lesson)


def check_tree(lesson: ModuleType, parts: list[Tensor]) -> None:
    before = [part.clone() for part in parts]
    found = lesson.tree_sum(parts)
    check(all(map(torch.equal, parts, before)), "tree_sum has changed one of its parts.")
    check(
        isinstance(found, Tensor) and torch.equal(found, in_halves(parts)),
        f"With {len(parts)} parts the bits are not those of the tree. Add neighbours in pairs: "
        "(0 + 1), (2 + 3), and so on; then the pairs.",
    )


def in_halves(parts: list[Tensor]) -> Tensor:
    """The same tree, from its root down."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return in_halves(parts[:half]) + in_halves(parts[half:])


def check_absent(lesson: ModuleType) -> None:
    a, b, c = torch.randn(3, 50, generator=torch.Generator().manual_seed(8))
    for parts, expected in [
        ([None, a, b, None, c], (a + b) + c),
        ([a, None, None, None, b, c], a + (b + c)),
    ]:
        found = lesson.tree_sum(parts)
        shown = [None if part is None else "tensor" for part in parts]
        check(
            isinstance(found, Tensor) and torch.equal(found, expected),
            f"tree_sum({shown}) has not the bits of the tree with absent parts.",
        )
    minus_zero = lesson.tree_sum([torch.tensor([-0.0]), None])
    check(
        bool(torch.signbit(minus_zero)),
        "-0.0 and an absent part gave +0.0. An absent part is not a zero: return the other one.",
    )
    check(lesson.tree_sum([None, None, None]) is None, "If all parts are absent, return None.")


class Fails:
    """Its pickling raises in the middle of torch.save."""

    def __reduce__(self) -> Any:
        raise OSError("no space left")


class Kills:
    """Its pickling kills the process in the middle of torch.save."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def check_save(lesson: ModuleType) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        lesson.save_whole(path, {"step": 9})
        lesson.save_whole(path, KEPT)
        check(whole(path), "save_whole has not replaced the checkpoint that was there.")
        check(os.listdir(folder) == [path.name], f"It left other files: {os.listdir(folder)}")
        try:
            lesson.save_whole(path, {"weight": torch.ones(1000), "bad": Fails()})
        except OSError:
            pass
        else:
            raise Wrong("torch.save raised an OSError, and save_whole did not let it out.")
        check(whole(path), "torch.save failed, and the old checkpoint is gone or damaged.")
        check(
            os.listdir(folder) == [path.name],
            f"torch.save failed, and these files are left: {sorted(os.listdir(folder))}",
        )
        try:
            lockstep.launch(dies, 1, args=(lesson.save_whole, path))
        except WorkerFailed as failed:
            check("SIGKILL" in str(failed), f"save_whole failed: {failed}")
        check(whole(path), "The process was killed, and the old checkpoint is gone or damaged.")


def dies(save: Any, path: Path) -> None:
    save(path, {"weight": torch.ones(1000), "bad": Kills()})


def whole(path: Path) -> bool:
    try:
        found = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError):
        return False
    return found["step"] == KEPT["step"] and torch.equal(found["weight"], KEPT["weight"])
