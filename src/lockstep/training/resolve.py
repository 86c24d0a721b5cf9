"""From what the user typed to a Task: a bundled name, or a file whose `task()` returns one.

A user's file is loaded as `import` would load it, from its own folder, so that modules beside it
are found and loader workers can unpickle its classes. What goes wrong inside it is the user's own
exception with the user's own traceback; nothing is hidden.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.training.overrides import arguments, closest

BUNDLED = {name: f"lockstep.tasks.{name}" for name in ("digits", "text")}


def locate(name: str) -> str:
    """The bundled name as it is, or the absolute path of the user's file: what any process can find
    again. Runs nothing.

    Raises TaskError for an unknown name (with the known ones) and for a file that is not there.
    """
    if name in BUNDLED:
        return name
    path = Path(name).expanduser()
    if path.suffix == ".py" or os.sep in name:
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else f"does not exist (looked from {Path.cwd()})"
            raise TaskError("task-file-missing", task=name, problem=kind)
        return os.path.abspath(path)
    raise TaskError("unknown-task", task=name, known=", ".join(BUNDLED) + closest(name, BUNDLED))


def file_of(place: str) -> Path:
    """The source of a task that `locate` has found."""
    return Path(__file__).parents[1] / "tasks" / f"{place}.py" if place in BUNDLED else Path(place)


def short_name(name: str) -> str:
    """How a task is called in the run directory's name and the last line."""
    return name if name in BUNDLED else Path(name).stem


def resolve(name: str, overrides: Mapping[str, str] | None = None) -> Task:
    """Load the task and call its `task(**overrides)`, each value converted to the parameter's type.

    Raises TaskError where there is no `task()`, where it returns something else, or where an
    override does not fit.
    """
    place = locate(name)
    module = importlib.import_module(BUNDLED[place]) if place in BUNDLED else _load(Path(place))
    made = _function(module, name)
    found = made(**arguments(made, overrides or {}, name))
    if not isinstance(found, Task):
        raise TaskError(
            "wrong-return-type",
            function=f"task() in {name}",
            type=type(found).__name__,
            expected="a lockstep.Task",
        )
    return found if found.name else replace(found, name=short_name(place))


def _function(module: ModuleType, name: str) -> Callable[..., object]:
    made = getattr(module, "task", None)
    if made is None:
        raise TaskError("task-function-missing", file=name, found="not defined")
    if isinstance(made, Task) or not callable(made):
        raise TaskError("task-function-missing", file=name, found=f"a {type(made).__name__}")
    return made  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a spec"
    module = module_from_spec(spec)
    # Compiled and run here, not by the import system, whose frames would stand in the user's
    # traceback.
    code: Any = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's own name, unless another module has it: a task file may be called test.py or
    random.py.
    """
    known = sys.modules.get(path.stem)
    taken = path.stem in sys.stdlib_module_names or (
        known is not None and getattr(known, "__file__", None) != str(path)
    )
    return (
        path.stem if path.stem.isidentifier() and not taken else f"lockstep_task_file_{path.stem}"
    )
