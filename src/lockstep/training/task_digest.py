"""Is it the same task? What it is made of as digests by name: its code (code_digest.py) and the
bytes of some samples. Ranks compare them at the start, a resumed run with those of its checkpoint.

    train_data            1797 samples
    sample 17             sha256:91ab...          a sample's bytes, drawn under its own random stream

A rank with another loss, or with other contents under the same sample numbers, trains without an
error and wrong.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.config.task import Task
from lockstep.data.loader import is_iterable
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.runtime import randomness
from lockstep.training.code_digest import DATA, PYTHON, SHA, code_digests, digest_of

SAMPLES = 8
SECONDS = 0.05  # of reading, after which no further sample is begun
SAMPLE = "sample "  # begins the name of a sample's digest
_PLACE = "for the comparison of tasks at the start"


def task_digests(task: Task) -> dict[str, str]:
    """All of them."""
    return {**code_digests(task), **sample_digests(task.train_data, task.seed)}


def sample_digests(
    dataset: Any, seed: int, *, count: int = SAMPLES, seconds: float | None = SECONDS
) -> dict[str, str]:
    """Of `count` samples of a map-style data set, or of as many as are read within `seconds`; none
    where two readings differ.

    They are read from a shallow copy, so that a file that is opened at the first access is not
    inherited by loader workers. Random states are as before. A sample that raises is left out:
    training says so when it comes to it.
    """
    if is_iterable(dataset):
        return {}
    size = len(dataset)
    found = {DATA: f"{size} samples"}
    if size == 0:
        return found
    until = None if seconds is None else perf_counter() + seconds
    with randomness.preserved():
        try:
            readers = _aside(dataset), _aside(dataset)
        except Exception:  # what cannot be copied is not read beforehand
            return found
        for number in range(count):
            if until is not None and number and perf_counter() > until:
                break
            index = randomness.derive(seed, number) % size
            once, again = (_sample(reader, seed, index) for reader in readers)
            if once != again:  # it draws from a generator of its own: nothing can be compared
                return {DATA: found[DATA]}
            if once is not None:
                found[f"{SAMPLE}{index}"] = once
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """In what a task differs from what it was, in words. Compared is what both have; code only
    where both ran on the same Python.
    """
    code = before.get(PYTHON) == now.get(PYTHON)
    differing = [name for name in now if name in before and before[name] != now[name]]
    said = [
        _said(name, before[name], now[name])
        for name in differing
        if not name.startswith(SAMPLE) and name != PYTHON and (code or name == DATA)
    ]
    if samples := [name.removeprefix(SAMPLE) for name in differing if name.startswith(SAMPLE)]:
        compared = sum(name.startswith(SAMPLE) and name in before for name in now)
        said.append(
            f"{len(samples)} of {compared} samples of train_data that were compared have changed"
            f" (number {', '.join(samples)})"
        )
    return said


def _said(name: str, before: str, now: str) -> str:
    return (
        f"{name} has changed"
        if before.startswith(SHA) or now.startswith(SHA)
        else f"{name} was {before} and is {now}"
    )


def _aside(data: Any) -> Any:
    """A shallow copy of a data set and of those that it wraps, with copies of their random
    generators.
    """
    found = copy.copy(data)
    for name, value in list(getattr(found, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            found.__dict__[name] = _aside(value)
        elif isinstance(value, list) and all(isinstance(each, Dataset) for each in value[:SAMPLES]):
            found.__dict__[name] = [
                _aside(each) if isinstance(each, Dataset) else each for each in value
            ]
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            found.__dict__[name] = copy.deepcopy(value)
        elif isinstance(value, torch.Generator):
            found.__dict__[name] = value.clone_state()
    return found


def _sample(dataset: Any, seed: int, index: int) -> str | None:
    try:
        randomness.sample(seed, 0, index)
        return digest_of(dataset[index])
    except Exception:  # the user's own: training comes to it, or never does
        return None


def compare_tasks(group: Group, digests: Mapping[str, str]) -> None:
    """Compare the digests of the ranks' tasks. Every rank of `group`, whose tensors are on the CPU,
    calls it.

    Raises ReplicaDivergence, on all ranks, for other code or another sample. A value that the code
    reads may differ on purpose (a rank's number, a file's name), so that rank 0 warns of it. What a
    rank has not read (samples are read for a limited time) is not compared.
    """
    if group.size == 1:
        return
    everyone: list[dict[str, str]] = everybodys(dict(digests), group, _PLACE)
    first = everyone[0]
    others = {
        name: [rank for rank, each in enumerate(everyone) if each.get(name, text) != text]
        for name, text in first.items()
    }
    differing = [name for name, ranks in others.items() if ranks]
    samples = [name for name in differing if name.startswith(SAMPLE)]
    # "my_task.py: loss, SCALE" is a value that the code of the loss reads, all other names are of
    # the code itself.
    code = [name for name in differing if name not in samples and ", " not in name]
    for kind, names in (
        ("samples-differ-between-ranks", samples),
        ("task-differs-between-ranks", code),
    ):
        for name in names:
            ranks = others[name]
            raise ReplicaDivergence(kind, parameter=name, ranks=ranks, others=listed(ranks))
    for name in differing[:1] if group.rank == 0 else ():
        other = others[name][0]
        warnings.warn(
            f"the task's code reads a value that differs between ranks: {name} is {first[name]} on"
            f" rank 0 and {everyone[other][name]} on rank {other}. Make sure that the loss and the"
            " data do not depend on it",
            LockstepWarning,
            stacklevel=2,
        )
