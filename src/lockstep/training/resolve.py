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


def file_of(place: str) -> Path:
    """Return the source file of a task that `locate` has found."""
    return Path(__file__).parents[1] / "tasks" / f"{place}.py" if place in BUNDLED else Path(place)


def short_name(name: str) -> str:
    """Return the task's name for the run directory and the last line."""
    return name if name in BUNDLED else Path(name).stem


def resolve(name: str, overrides: Mapping[str, str] | None = None) -> Task:
    """Load the task and call its `task(**overrides)`, each value converted to the parameter's type.

    Raises TaskError if there is no `task()`, if it returns something else, or if an override does
    not fit.
    """
    place = locate(name)
    module = importlib.import_module(BUNDLED[place]) if place in BUNDLED else _load(Path(place))
    made = _function(module, name)
    found = made(**arguments(made, overrides or {}, name))
    if not isinstance(found, Task):
        raise wrong_type(f"task() in {name}", found, "a lockstep.Task")
    return found if found.name else replace(found, name=short_name(place))


def wrong_type(function: str, found: object, expected: str) -> TaskError:
    """Return the error for a wrong value that a user's function has returned."""
    return TaskError(
        "wrong-return-type", function=function, type=type(found).__name__, expected=expected
    )


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
    known = sys.modules.get(path.stem)
    taken = path.stem in sys.stdlib_module_names or (
        known is not None and getattr(known, "__file__", None) != str(path)
    )
    return (
        path.stem if path.stem.isidentifier() and not taken else f"lockstep_task_file_{path.stem}"
    )


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
    place = locate(name)
    module = _parsed(file_of(place), name)
    bound = _bound(module)
    if not bound and not any(_hides(node) for node in ast.walk(module)):
        raise TaskError("task-function-missing", file=name, found="not defined")
    functions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == "task" and not node.decorator_list
    ]
    if len(bound) == len(functions) == 1:
        converted(dict(_parameters(functions[0])), overrides or {}, name)
    return place


def declares_task(file: Path) -> bool:
    """Whether the file gives the name `task` a value. Raises TaskError if it is not Python."""
    return bool(_bound(_parsed(file, str(file))))


def _bound(module: ast.Module) -> list[ast.AST]:
    """Return the nodes that give the name `task` a value."""
    return [node for node in _outside_functions(module) if "task" in _binds(node)] + [
        node for node in ast.walk(module) if isinstance(node, ast.Global) and "task" in node.names
    ]


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    rest = [node]
    while rest:
        for child in ast.iter_child_nodes(rest.pop()):
            yield child
            if not isinstance(child, inside):
                rest.append(child)


def _parsed(file: Path, name: str) -> ast.Module:
    try:
        text = file.read_bytes()
        compile(text, str(file), "exec", dont_inherit=True)
        return ast.parse(text)
    except SyntaxError as error:
        line = f": `{error.text.strip()}`" if error.text else ""
        raise TaskError(
            "not-python",
            file=name,
            place=f", line {error.lineno}{line}",
            reason=error.msg,
        ) from None
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its code is nested too deeply" if deep else str(error)
        raise TaskError("not-python", file=name, place="", reason=reason) from None
    except OSError as error:
        raise TaskError(
            "cannot-read", name="task file", file=name, reason=str(error.strerror or error)
        ) from None


def _binds(node: ast.AST) -> set[str]:
    """Return the names that a node gives a value to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return {node.asname or node.name} if isinstance(node, ast.alias) else set()


def _hides(node: ast.AST) -> bool:
    return (isinstance(node, ast.alias) and node.name == "*") or bool(
        {getattr(node, "id", ""), getattr(node, "name", "")} & _UNSEEN
    )


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, Parameter]]:
    taken = function.args
    every = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(every) - len(taken.defaults)) + list(taken.defaults)
    pairs = [
        *zip(every, defaults, strict=True),
        *zip(taken.kwonlyargs, taken.kw_defaults, strict=True),
    ]
    for each, default in pairs:
        if each not in taken.posonlyargs:
            kind = _kind(each.annotation, default)
            yield each.arg, Parameter(kind, default is None, _literal(default))


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
