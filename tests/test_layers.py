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
    "launcher",
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


def test_imports_go_down() -> None:
    upward = []
    for path in files():
        for line, name in imported(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == "lockstep" and FLOOR.get(target, 0) > FLOOR[room(path)]:
                upward.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not upward, "\n".join(upward)


def test_what_the_command_line_needs_does_not_import_torch_at_its_top() -> None:
    heavy = []
    for path in files():
        if room(path) in WITHOUT_TORCH:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = {name.partition(".")[0] for _, name in imported(node)}
                    if names & {"torch", "numpy", "sklearn"}:
                        heavy.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not heavy, "\n".join(heavy)
