"""Load the Task that the user asks for: a bundled name, or a file whose `task()` returns a Task,
with --set key=value as its arguments.

A user's file is loaded as `import` would load it, from its own folder, so that modules beside it
are found and loader workers can unpickle its classes. An error inside it is the user's own
exception with the user's own traceback; nothing is hidden.

`located` reads a file without running it, so it reports a visible mistake at once, before torch is
loaded. What only running the file can tell (a `task` that is imported, decorated, or made in a
loop) is left to `resolve`.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Optional, Union

from lockstep.config.knob import closest
from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.training.overrides import (
    UNSEEN,
    Parameter,
    arguments,
    converted,
    type_of_default,
)

BUNDLED = {name: f"lockstep.tasks.{name}" for name in ("digits", "text")}


def locate(name: str) -> str:
    """Return the bundled name as it is, or the absolute path of the user's file, so that any
    process can find the task again. Runs nothing.

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
    beside = f"{name}.py"
    close = f" (did you mean {beside!r}?)" if Path(beside).is_file() else closest(name, BUNDLED)
    raise TaskError("unknown-task", task=name, known=", ".join(BUNDLED) + close)


def file_of(location: str) -> Path:
    """Return the source file of a task, from what `locate` has returned."""
    if location in BUNDLED:
        return Path(__file__).parents[1] / "tasks" / f"{location}.py"
    return Path(location)


def short_name(name: str) -> str:
    """Return the task's name for the run directory and the last line."""
    return name if name in BUNDLED else Path(name).stem


def resolve(name: str, overrides: Mapping[str, str] | None = None) -> Task:
    """Load the task and call its `task(**overrides)`, each value converted to the parameter's type.

    Raises TaskError if there is no `task()`, if it returns something else, or if an override does
    not fit.
    """
    location = locate(name)
    module = (
        importlib.import_module(BUNDLED[location]) if location in BUNDLED else _load(Path(location))
    )
    function = _function(module, name)
    task = function(**arguments(function, overrides or {}, name))
    if not isinstance(task, Task):
        raise wrong_type(f"task() in {name}", task, "a lockstep.Task")
    return task if task.name else replace(task, name=short_name(location))


def wrong_type(function: str, value: object, expected: str) -> TaskError:
    """Return the error for a wrong value that a user's function has returned."""
    return TaskError(
        "wrong-return-type", function=function, type=type(value).__name__, expected=expected
    )


def _function(module: ModuleType, name: str) -> Callable[..., object]:
    function = getattr(module, "task", None)
    if function is None:
        raise TaskError("task-function-missing", file=name, found="not defined")
    if isinstance(function, Task) or not callable(function):
        raise TaskError("task-function-missing", file=name, found=f"a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a spec"
    module = module_from_spec(spec)
    # Compiled and run here, because the frames of the import system would be in the user's
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
    name = path.stem
    loaded = sys.modules.get(name)
    taken = name in sys.stdlib_module_names
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        taken = True
    return f"lockstep_task_file_{name}" if taken or not name.isidentifier() else name


# -- without running the file ---------------------------------------------------------------------


_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "Any": Any,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
}
# with these a file may define names that its text does not show
_UNSEEN = {"globals", "exec", "eval", "setattr", "__getattr__"}


def located(name: str, overrides: Mapping[str, str] | None = None) -> str:
    """Check the task's file without running it, and return the same as `locate`.

    Raises TaskError if its syntax is wrong, if it has no `task()`, or if an override does not fit
    its parameters.
    """
    location = locate(name)
    module = _parsed(file_of(location), name)
    bindings = _bindings(module)
    if not bindings and not any(map(_hides, ast.walk(module))):
        raise TaskError("task-function-missing", file=name, found="not defined")
    match bindings:
        case [ast.FunctionDef(decorator_list=[]) as function] if function in module.body:
            converted(dict(_parameters(function)), overrides or {}, name)
    return location


def declares_task(file: Path) -> bool:
    """Whether the file gives the name `task` a value. Raises TaskError if it is not Python."""
    return bool(_bindings(_parsed(file, str(file))))


def _bindings(module: ast.Module) -> list[ast.AST]:
    """Return the nodes that give the name `task` a value."""
    bindings = [node for node in _outside_functions(module) if _name_of(node) == "task"]
    for node in ast.walk(module):
        if isinstance(node, ast.Global) and "task" in node.names:
            bindings.append(node)
    return bindings


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    rest = [node]
    while rest:
        for child in ast.iter_child_nodes(rest.pop()):
            yield child
            if not isinstance(child, scopes):
                rest.append(child)


def _parsed(file: Path, name: str) -> ast.Module:
    try:
        text = file.read_bytes()
        compile(text, str(file), "exec", dont_inherit=True)
        return ast.parse(text)
    except SyntaxError as error:
        line = f", line {error.lineno}"
        if error.text:
            line += f": `{error.text.strip()}`"
        raise TaskError("not-python", file=name, place=line, reason=error.msg) from None
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = "its code is nested too deeply"
        raise TaskError("not-python", file=name, place="", reason=reason) from None
    except OSError as error:
        reason = str(error.strerror or error)
        raise TaskError("cannot-read", name="task file", file=name, reason=reason) from None


def _name_of(node: ast.AST) -> str | None:
    """Return the name that a node gives a value to."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name
        case ast.Name(name, ast.Store()):
            return name
        case ast.alias(name, alias):
            return alias or name
    return None


def _hides(node: ast.AST) -> bool:
    """Whether the file may define names that its text does not show."""
    if isinstance(node, ast.alias) and node.name == "*":
        return True
    return getattr(node, "id", "") in _UNSEEN or getattr(node, "name", "") in _UNSEEN


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters that may be given by name. Only the last positional ones have
    defaults.
    """
    declared = function.args
    positional = [*declared.posonlyargs, *declared.args]
    required = len(positional) - len(declared.defaults)
    defaults = [None] * required + declared.defaults
    pairs = list(zip(positional, defaults, strict=True))[len(declared.posonlyargs) :]
    pairs += zip(declared.kwonlyargs, declared.kw_defaults, strict=True)
    for parameter, default in pairs:
        kind = _kind(parameter.annotation, default)
        yield parameter.arg, Parameter(kind, default is None, _literal(default))


def _kind(annotation: ast.expr | None, default: ast.expr | None) -> Any:
    """Return the type that text is converted to; Any, which accepts everything, if only running the
    file can tell.
    """
    if annotation is not None:
        try:
            return _type_of(annotation)
        except Exception:  # not a plain type
            return Any
    value = _literal(default)
    return Any if value is UNSEEN else type_of_default(value)


def _type_of(annotation: ast.expr) -> Any:
    """Return the type that an annotation describes, by its syntax: nothing of the file runs.

    Knows the names in _TYPES, also as attributes of `typing`, unions, Literal, None, and all these
    in strings. Raises an exception for anything else.
    """
    match annotation:
        case ast.Constant(None):
            return None
        case ast.Constant(str(text)):
            return _type_of(ast.parse(text, mode="eval").body)
        case ast.Name(name) | ast.Attribute(ast.Name("typing"), name):
            return _TYPES[name]
        case ast.BinOp(left, ast.BitOr(), right):
            return _type_of(left) | _type_of(right)
        case ast.Subscript(value, part):
            form = _type_of(value)
            if form is Literal:
                return form[ast.literal_eval(part)]
            if form is Optional:
                return form[_type_of(part)]
            if form is Union:
                parts = part.elts if isinstance(part, ast.Tuple) else [part]
                return form[tuple(map(_type_of, parts))]
    raise ValueError(ast.dump(annotation))


def _literal(default: ast.expr | None) -> Any:
    try:
        return UNSEEN if default is None else ast.literal_eval(default)
    except (ValueError, TypeError):  # an expression; a dict with a list as a key
        return UNSEEN
