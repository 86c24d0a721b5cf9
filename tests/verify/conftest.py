"""Ranks that are forked from a server with torch in it: a fifth of the time that the command's own, which start from nothing, take."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lockstep.launcher.spawn import start_ranks
from lockstep.verify import experiments, trainings


def forked(fn: Callable[..., Any], workers: int, args: Sequence[Any]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "lockstep.stepper", "lockstep.launcher.rank_process", "lockstep.verify.verdict"]
    )
    return start_ranks(context, fn, workers, args, {}, timeout=None)


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trainings, experiments):
        monkeypatch.setattr(module, "launch", forked)
