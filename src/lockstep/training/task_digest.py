"""Is it the same task? A task is described by named digests: of its source files and of some
samples. Ranks compare them at the start, and a resumed run with those of its checkpoint.

    loss                  my_loss                 the function or class in a field of the task
    my_task.py            sha256:6f0c...          a source file
    parts/net.py          sha256:03de...          a module that is loaded from the same folder
    train_data            1797 samples
    sample 17             sha256:91ab...          the bytes of a sample, drawn under its own
                                                  random stream

A rank with another loss, or with other data under the same sample numbers, would train wrongly and
without an error. What cannot be read is not compared.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.checks.divergence import octets_of
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.config.task import Task
from lockstep.data.loader import is_iterable
from lockstep.errors import ReplicaDivergence
from lockstep.runtime import randomness

SAMPLES = 8
MODULES = 1000  # of a folder, of which the files are compared
SECONDS = 0.05  # of reading, after which no further sample is read
_SHA = "sha256:"
_FIELDS = (
    "model",
    "loss",
    "optimizer",
    "inputs",
    "collate",
    "order",
    "scheduler",
    "average",
    "metrics",
    "train_data",
    "eval_data",
)
_LOCKSTEP = Path(__file__).parents[1]
_PYTHON = Path(os.__file__).parent
_INSTALLED = {"site-packages", "dist-packages"}
_GENERATORS = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


def task_digests(task: Task) -> dict[str, str]:
    """Return all digests of a task."""
    return {**source_digests(task), **sample_digests(task.train_data, task.seed)}


def source_digests(task: Task) -> dict[str, str]:
    """Return the names of the task's functions and classes, and the digests of the files that
    define them and of the loaded modules in the folder or package of such a file. Python and
    installed packages are left out, and what has no file, as in a notebook.
    """
    digests: dict[str, str] = {}
    # through __dict__: a lazy module may import others when an attribute is read
    modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    names = {str(module.get("__file__")) for module in modules}
    folders = set()
    for field in _FIELDS:
        value = getattr(task, field)
        while isinstance(value, functools.partial):
            value = value.func
        with suppress(Exception):  # it is built in, or has no file
            named = inspect.unwrap(value if hasattr(value, "__qualname__") else type(value))
            digests[field] = str(named.__qualname__)
            file = Path(inspect.getfile(named))
            if _is_users(file):
                names.add(str(file))
                folders.add(_folder_of(file))
    for folder in sorted(folders):
        inside = sorted(name for name in names if name.startswith(os.path.join(folder, "")))
        for file in filter(_is_users, map(Path, inside[:MODULES])):
            with suppress(OSError):
                digests[file.relative_to(folder).as_posix()] = _digest([file.read_bytes()])
    return digests


def _folder_of(file: Path) -> Path:
    """Return the folder of a file; for a package's file, that of the outermost package."""
    packages = takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents)
    return [file.parent, *packages][-1]


def _is_users(file: Path) -> bool:
    if file.is_relative_to(_LOCKSTEP):
        return file.parent == _LOCKSTEP / "tasks"
    installed = file.is_relative_to(_PYTHON) or not _INSTALLED.isdisjoint(file.parts)
    return file.suffix == ".py" and not installed


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"{_SHA}{digest.hexdigest()[:32]}"


def sample_digests(dataset: Any, seed: int, *, seconds: float = SECONDS) -> dict[str, str]:
    """Return digests of eight samples of a map-style data set, or of as many as are read within
    `seconds`; of no sample if two readings differ.

    The samples are read from a shallow copy. So loader workers do not inherit a file that the data
    set opens at its first access. Random states are restored. A sample that raises is left out:
    training raises the error when it reads it.
    """
    if is_iterable(dataset):
        return {}
    size = len(dataset)
    size_only = {"train_data": f"{size} samples"}
    digests = dict(size_only)
    until = perf_counter() + seconds
    with randomness.preserved(), suppress(Exception):  # what cannot be copied is not read
        reader = _copied(dataset)
        second_reader = _copied(dataset)
        for number in range(min(SAMPLES, size)):
            if number and perf_counter() > until:
                break
            index = randomness.derive(seed, number) % size
            digest = _sample(reader, seed, index)
            if _sample(second_reader, seed, index) != digest:
                return size_only  # it draws from its own generator: nothing can be compared
            if digest is not None:
                digests[f"sample {index}"] = digest
    return digests


def _copied(data: Any) -> Any:
    """Return a shallow copy of a data set and of the data sets that it wraps, with copies of their
    random generators.
    """
    copied = copy.copy(data)
    for name, value in list(getattr(copied, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            copied.__dict__[name] = _copied(value)
        elif isinstance(value, list) and isinstance(next(iter(value), None), Dataset):
            copied.__dict__[name] = list(map(_copied, value))
        elif isinstance(value, _GENERATORS):
            copied.__dict__[name] = copy.deepcopy(value)
    return copied


def _sample(dataset: Any, seed: int, index: int) -> str | None:
    randomness.sample(seed, 0, index)
    try:
        return _digest(_bytes_of(dataset[index]))
    except Exception:  # the user's own error, which training raises too; or no bytes
        return None


def _bytes_of(value: Any) -> Iterator[Any]:
    """Yield the bytes of a sample and of its parts: collections, tensors, numbers, text, and what is
    an array to numpy, such as an image. Raises for another object.
    """
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for part in value:
            yield from _bytes_of(part)
    elif isinstance(value, Tensor):
        yield f"{list(value.shape)} {value.dtype}".encode()
        yield octets_of(value).cpu().numpy().data
    elif value is None or isinstance(value, int | str | bytes):
        yield repr(value).encode()
    else:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("an object has no bytes of its own")
        yield f"{array.shape} {array.dtype}".encode()
        yield array.tobytes()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return in words how a task differs from before. Only names that both have are compared."""
    lines = []
    for name, digest in now.items():
        if before.get(name, digest) == digest:
            continue
        if digest.startswith(_SHA):
            lines.append(f"{name} has changed")
        else:
            lines.append(f"{name} was {before[name]} and is {digest}")
    return lines


def compare_tasks(group: Group, digests: Mapping[str, str]) -> None:
    """Compare the digests of the ranks' tasks. Every rank of `group`, whose tensors are on the CPU,
    calls it.

    Raises ReplicaDivergence on all ranks if a source file or a sample differs. What a rank has not
    read (reading time is limited) is not compared.
    """
    if group.size == 1:
        return
    by_rank: list[dict[str, str]] = everybodys(
        dict(digests), group, "for the comparison of tasks at the start"
    )
    for name, digest in by_rank[0].items():
        ranks = [rank for rank, other in enumerate(by_rank) if other.get(name, digest) != digest]
        if ranks:
            raise ReplicaDivergence(
                "task-differs-between-ranks", parameter=name, ranks=ranks, others=listed(ranks)
            )
