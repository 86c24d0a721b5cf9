"""Imports go down the rooms of the house (docs/architecture.md), tested over the syntax tree:
also lazy imports inside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
ROOMS = [
    "errors",
    "config",
    "runtime",
    "schedules",
    "collectives",
    "backend",
    "world",
    "data",
    "gradients",
    "checks",
    "updates",
    "step",
    "checkpoints",
    "model_parallel",
    "launcher",
    "training",
    "runs",
    "timing",
    "tools",
    "tasks",
    "testing",
    "integrations",
    "cli",
    "__main__",
]
"""From the floor up: a room imports from those before it."""
FLOOR = {name: number for number, name in enumerate(ROOMS)}
WITHOUT_TORCH = ["config", "launcher", "errors", "cli"]
"""Rooms whose files, and whose imports at the top, import torch late or not at all."""


def files() -> list[Path]:
    return sorted(
        path
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE or not path.name.startswith("_") or path.name == "__main__.py"
    )


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in files()} == set(ROOMS)


def test_imports_go_down() -> None:
    upward = []
    for path in files():
        for line, name in imported(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "lockstep" and FLOOR.get(target, 0) > FLOOR[room(path)]:
                upward.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not upward, "\n".join(upward)


def imported_at_top(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imported(node)


def file_of(name: str) -> Path | None:
    """The file of this package that `name` is, or is a name in."""
    while name.startswith("lockstep."):
        path = SOURCE.parent.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
        name = name.rpartition(".")[0]
    return None


def test_what_the_command_line_needs_does_not_import_torch_at_its_top() -> None:
    heavy = []
    queue = [path for path in files() if room(path) in WITHOUT_TORCH]
    reached = set(queue)
    while queue:
        path = queue.pop()
        for line, name in imported_at_top(path):
            if name.partition(".")[0] in ("torch", "numpy", "sklearn"):
                heavy.append(f"{path.relative_to(SOURCE)}:{line}")
            file = file_of(name)
            if file is not None and file not in reached:
                reached.add(file)
                queue.append(file)
    assert not heavy, "\n".join(heavy)
