"""Is it the same task? A task is described by named digests: its code and the bytes of some
samples. Ranks compare them at the start, and a resumed run with those of its checkpoint.

    loss                  my_task.py: loss        what the task's field is
    my_task.py: loss      sha256:6f0c...          the compiled code of a function or class, without
                                                  docstring, paths or line numbers
    my_task.py: SCALE     0.5                     a value that this code reads: global, closure,
                                                  default, class attribute
    train_data            1797 samples
    sample 17             sha256:91ab...          the bytes of a sample, drawn under its own
                                                  random stream

A rank with another loss, or with other data under the same sample numbers, would train wrongly and
without an error.

Code is followed from the task's functions to the functions, classes and values that they name, if
the user wrote them: not into the standard library or an installed package. Two things are not seen:
code that is found by a name in a string, and changes in installed packages.
"""

from __future__ import annotations

import copy
import dis
import functools
import hashlib
import os
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.config.task import Task
from lockstep.data.loader import is_iterable
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.runtime import randomness

PYTHON = "python"
"""The name under which the version of Python is kept: other versions compile to other code."""
DATA = "train_data"
SHA = "sha256:"
_FIELDS = (
    *("model", "loss", "optimizer", "inputs", "collate", "order", "scheduler"),
    *("average", "metrics"),
)
# arrays of at most this many bytes, and containers of a tenth as many parts, are compared by value
_LARGEST = 2**16
_INNER = 8  # a longer list is not searched for data sets
_UNCOMPARED = {
    "__doc__",
    "__module__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
    "__qualname__",
}
_OF_CODE = (
    *("code", "exceptiontable", "names", "varnames", "freevars", "cellvars"),
    *("argcount", "posonlyargcount", "kwonlyargcount"),
)
_INSTALLED = ("site-packages", "dist-packages")


def code_digests(task: Task) -> dict[str, str]:
    """Return the digests of the code of the task's functions and data sets, and the values that
    this code reads.
    """
    walk = _CodeWalk()
    for name in _FIELDS:
        walk.found[name] = walk.value(getattr(task, name), name)
    for name in (DATA, "eval_data"):
        for each in _datasets(getattr(task, name)):
            walk.visit(type(each), name)
    walk.found[PYTHON] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return walk.found


class _CodeWalk:
    """Walks from the task's fields to everything that they name. `found`: the digests by name."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # kept alive, so that an id is not used again
        self._open: set[int] = set()

    def visit(self, value: Any, role: str) -> None:
        """Follow a function or a class; ignore other values. `role` names a lambda."""
        while isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if wrapped := getattr(value, "__wrapped__", None):
            self.visit(wrapped, role)
        if isinstance(value, types.FunctionType) and _is_users(value):
            self._function(value, role)
        elif isinstance(value, type) and _is_users(value):
            self._class(value, role)
        elif isinstance(value, property):
            for each in (value.fget, value.fset):
                self.visit(each, role)

    def value(self, value: Any, role: str) -> str:
        """Return a text that is equal for equal values. Follows functions and classes in them."""
        if isinstance(value, functools.partial):
            parts = [
                self.value(each, role) for each in (value.func, value.args, dict(value.keywords))
            ]
            return f"partial of {_short(', '.join(parts))}"
        if isinstance(
            value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type
        ):
            self.visit(value, role)
            return _label(value, role)
        if isinstance(value, list | tuple | set | frozenset | dict):
            return self._container(value, role)
        known = _plain(value)
        if known is not None:
            return known
        self.visit(type(value), role)
        if callable(value) and role in _FIELDS:
            # a loss with settings: nn.CrossEntropyLoss(label_smoothing=0.1)
            held = getattr(value, "__dict__", {}).items()
            settings = {name: part for name, part in held if not name.startswith("_")}
            return f"a {type(value).__qualname__}{_short(self._container(settings, ''))}"
        if is_dataclass(value) and id(value) not in self._open:
            self._open.add(id(value))  # it may hold itself
            members = {each.name: getattr(value, each.name, None) for each in fields(value)}
            text = self._container(members, "")
            self._open.discard(id(value))
            return f"a {type(value).__qualname__}{_short(text)}"
        return f"a {type(value).__qualname__}"

    def _container(self, value: Any, role: str) -> str:
        if len(value) > _LARGEST // 10 or id(value) in self._open:
            return f"{type(value).__name__} of {len(value)}"
        self._open.add(id(value))  # it may contain itself
        try:
            return _short(self._parts(value, role))
        finally:
            self._open.discard(id(value))

    def _parts(self, value: Any, role: str) -> str:
        parts = [self.value(each, role) for each in value]  # of a dict: its keys
        if isinstance(value, dict):
            parts = [
                f"{key}: {self.value(each, role)}"
                for key, each in zip(parts, value.values(), strict=True)
            ]
        elif isinstance(value, set | frozenset):
            parts.sort()
        left, right = (
            "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        )
        return f"{left}{', '.join(parts)}{right}"

    def _function(self, function: types.FunctionType, role: str) -> None:
        label = _label(function, role)
        self._add(label, _code(function.__code__))
        code, known = function.__code__, function.__globals__
        read: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                read[name] = cell.cell_contents
        read |= {name: known[name] for name in _globals_of(code) if name in known}
        for number, each in enumerate(function.__defaults__ or ()):
            read[f"default {number}"] = each
        for name, each in (function.__kwdefaults__ or {}).items():
            read[f"default of {name}"] = each
        self._read(label, read, code)

    def _read(self, label: str, read: Mapping[str, Any], code: types.CodeType) -> None:
        for name, value in read.items():
            if isinstance(value, types.ModuleType):
                if _is_users_module(value.__name__):
                    used = {each for inner in _codes(code) for each in inner.co_names}
                    self._read(
                        label,
                        {
                            f"{name}.{each}": part
                            for each, part in vars(value).items()
                            if each in used
                        },
                        code,
                    )
                continue
            self._note(f"{label}, {name}", value, name)

    def _note(self, label: str, value: Any, role: str) -> None:
        text = self.value(value, role)
        if isinstance(value, types.FunctionType | types.MethodType | type) and not _is_users(value):
            return  # a package's: its name is in the code already
        if not isinstance(value, os.PathLike) and not (
            isinstance(value, str) and os.path.isabs(value)
        ):  # a path may differ between hosts
            self.found[label] = text

    def _class(self, kind: type, role: str) -> None:
        label = _label(kind, role)
        for base in kind.__mro__[1:]:
            self.visit(base, role)
        for name, part in vars(kind).items():
            if name in _UNCOMPARED:
                continue
            inner = part.__func__ if isinstance(part, staticmethod | classmethod) else part
            if isinstance(inner, types.FunctionType | property):
                self.visit(inner, f"{role}, {name}")
            elif not isinstance(
                inner, types.MemberDescriptorType | types.GetSetDescriptorType
            ) and not name.startswith("_abc_"):
                self._note(f"{label}, {name}", inner, name)

    def _add(self, label: str, digest: str) -> None:
        """Add a digest. Digests with the same name are combined into one."""
        known = self.found.get(label)
        self.found[label] = digest if known is None else _sha(known, digest)


def _label(value: Any, role: str) -> str:
    module = str(getattr(value, "__module__", None))
    name = getattr(value, "__qualname__", type(value).__qualname__).replace("<locals>.", "")
    if not _is_users(value):
        return f"{module}.{name}"
    code = getattr(value, "__code__", None)
    file = getattr(sys.modules.get(module), "__file__", None) if code is None else code.co_filename
    shown = name if "<lambda>" not in name else f"{name} ({role})"
    return f"{Path(file).name}: {shown}" if file else shown


def _is_users(value: Any) -> bool:
    """Whether a function or class was written by the user."""
    return not isinstance(value, types.BuiltinFunctionType) and _is_users_module(
        str(getattr(value, "__module__", None))
    )


def _is_users_module(module: str) -> bool:
    if module.partition(".")[0] == "lockstep":
        return module.startswith("lockstep.tasks.")
    return module not in sys.builtin_module_names and _lies_at_users(
        getattr(sys.modules.get(module), "__file__", None)
    )


@functools.cache
def _lies_at_users(file: str | None) -> bool:
    if file is None:
        return True  # a notebook or `python -c`
    paths = sysconfig.get_paths()
    inside = any(Path(file).is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))
    return not inside and not any(name in Path(file).parts for name in _INSTALLED)


def _globals_of(code: types.CodeType) -> list[str]:
    """Return the names that the code, and functions inside it, look up as globals."""
    return [
        str(each.argval)
        for inner in _codes(code)
        for each in dis.get_instructions(inner)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _code(code: types.CodeType) -> str:
    consts = list(code.co_consts)
    if consts and isinstance(consts[0], str) and not code.co_name.startswith("<"):
        consts[0] = None  # the docstring
    parts = (repr(getattr(code, f"co_{name}")) for name in _OF_CODE)
    return _sha(*parts, *map(_const, consts))


def _const(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_const, value))}"
    return f"({', '.join(map(_const, value))})" if isinstance(value, tuple) else repr(value)


def _plain(value: Any) -> str | None:
    """Return a text for a value that is no container; None if only its type can be compared."""
    if value is None or isinstance(
        value,
        bool | int | float | complex | str | bytes | torch.dtype | np.dtype | Enum | slice | range,
    ):
        return _short(repr(value))
    if isinstance(value, np.generic):
        return _short(repr(value.item()))
    if type(value).__module__.startswith("omegaconf."):
        return _short(str(value))  # unresolved
    if isinstance(value, Tensor | np.ndarray):
        small = value.nbytes <= _LARGEST
        return (
            f"{type(value).__name__} of {list(value.shape)} {value.dtype}"
            if not small
            else digest_of(value)
        )
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else _sha(text)


def _sha(*parts: str) -> str:
    return SHA + hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]


def _datasets(data: Any) -> Iterator[Any]:
    """Yield a data set and the data sets that it wraps."""
    if data is None:
        return
    yield data
    for value in getattr(data, "__dict__", {}).values():
        for each in value if isinstance(value, list | tuple) and len(value) <= _INNER else [value]:
            if isinstance(each, Dataset):
                yield from _datasets(each)


def digest_of(value: Any) -> str:
    digest = hashlib.sha256()
    for part in _octets(value):
        digest.update(part)
    return SHA + digest.hexdigest()[:32]


def _octets(value: Any) -> Iterable[Any]:
    """Yield the bytes of a sample and of its parts."""
    if isinstance(value, Tensor):
        yield f"{list(value.shape)} {value.dtype}".encode()
        if value.layout is torch.strided:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{list(value.shape)} {value.dtype}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield repr(key).encode()
            yield from _octets(each)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for each in value:
            yield from _octets(each)
    elif callable(getattr(value, "tobytes", None)):  # an image of PIL, a numpy scalar
        yield f"{getattr(value, 'size', '')}".encode()
        yield value.tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif hasattr(value, "__dict__"):
        yield type(value).__qualname__.encode()
        yield from _octets(vars(value))
    else:
        yield type(value).__qualname__.encode()


SAMPLES = 8
SECONDS = 0.05  # of reading, after which no further sample is read
SAMPLE = "sample "  # prefix of the names of samples' digests
_PLACE = "for the comparison of tasks at the start"


def task_digests(task: Task) -> dict[str, str]:
    """Return all digests of a task."""
    return {**code_digests(task), **sample_digests(task.train_data, task.seed)}


def sample_digests(
    dataset: Any, seed: int, *, count: int = SAMPLES, seconds: float | None = SECONDS
) -> dict[str, str]:
    """Return digests of `count` samples of a map-style data set, or of as many as are read within
    `seconds`; of no sample if two readings differ.

    The samples are read from a shallow copy. So loader workers do not inherit a file that the data
    set opens at its first access. Random states are restored. A sample that raises is left out:
    training raises the error when it reads it.
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
            if once != again:  # it draws from its own generator: nothing can be compared
                return {DATA: found[DATA]}
            if once is not None:
                found[f"{SAMPLE}{index}"] = once
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return in words how a task differs from before. Only names that both have are compared, and
    code only if both ran on the same version of Python.
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
    """Return a shallow copy of a data set and of the data sets that it wraps, with copies of their
    random generators.
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
    except Exception:  # the user's own error: training raises it if it reads the sample
        return None


def compare_tasks(group: Group, digests: Mapping[str, str]) -> None:
    """Compare the digests of the ranks' tasks. Every rank of `group`, whose tensors are on the CPU,
    calls it.

    Raises ReplicaDivergence on all ranks if code or a sample differs. A value that the code reads
    may differ on purpose (a rank's number, a file's name), so rank 0 only warns of it. Samples that
    a rank has not read (reading time is limited) are not compared.
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
    # "my_task.py: loss, SCALE" is a value that the code of the loss reads. All names without a
    # comma are of the code itself.
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
            f" rank 0 and {everyone[other][name]} on rank {other}. Check that the loss and the"
            " data do not depend on it",
            LockstepWarning,
            stacklevel=2,
        )
