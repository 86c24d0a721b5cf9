"""Imports go down the rooms of the house (docs/architecture.md), tested over the syntax tree:
also lazy imports inside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
ROOMS = [
    "errors",
    "config",
    "runtime",
    "launcher",
    "collectives",
    "backend",
    "world",
    "data",
    "gradients",
    "checks",
    "checkpoints",
    "updates",
    "step",
    "model_parallel",
    "training",
    "tools",
    "tasks",
    "testing",
    "integrations",
    "cli",
    "__main__",
]
"""From the floor up: a room imports from those before it."""
FLOOR = {name: number for number, name in enumerate(ROOMS)}
WITHOUT_TORCH = ["config", "launcher", "errors", "cli"]  # import it late or not at all


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


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    upward = []
    for line, name in imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if (
            parts[0] == "lockstep"
            and len(parts) > 1
            and parts[1] in FLOOR
            and FLOOR[parts[1]] > FLOOR[room(path)]
        ):
            upward.append(f"line {line} imports {name}")
    assert not upward


@pytest.mark.parametrize(
    "path",
    [path for path in files() if room(path) in WITHOUT_TORCH],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_what_the_command_line_needs_does_not_import_torch_at_its_top(path: Path) -> None:
    top = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = [name for node in top for _, name in imported(node)]
    assert not [name for name in names if name.split(".")[0] in ("torch", "numpy", "sklearn")]
