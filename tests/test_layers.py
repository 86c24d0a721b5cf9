"""Imports go down the layers of the house (docs/architecture.md), tested over the syntax tree: also lazy imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
LAYERS = [
    {
        "anatomy",
        "balance",
        "cores",
        "documented",
        "errors",
        "extras",
        "load",
        "host_generators",
        "place",
        "slurm",
        "status",
        "step_clock",
        "orphans",
        "randomness",
        "streams",
        "learning_rate",
        "task",
        "settings",
        "method",
        "mesh",
        "lint",
    },
    {"collectives", "data", "launcher", "meeting", "joining", "slurm_store", "hosts", "determinism"},
    {"world", "world_groups", "backend"},
    {"gradients", "checks", "checkpoints"},
    {"updates"},
    {
        "data_parallel",
        "comm_hook",
        "sharded_optimizer",
        "stepper",
        "step_result",
        "replicas",
        "uneven",
        "wrapper_arguments",
        "stepper_clock",
        "stepper_outcomes",
        "stepper_state",
        "stepper_reducer",
        "stepper_window",
        "checkpointing",
    },
    {"inference", "model_parallel", "training"},
    {"testing", "tasks", "measure", "plan", "tuning", "verify", "doctor"},
    {"cli", "__main__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = [
    "anatomy",
    "balance",
    "launcher",
    "settings",
    "method",
    "mesh",
    "place",
    "slurm",
    "orphans",
    "errors",
    "cli",
    "lint",
]  # import it late or not at all
LAUNCHER_WITH_TORCH = {"agent.py", "spawn.py"}


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_room_has_a_layer() -> None:
    assert {room(path) for path in files()} == set(LAYER)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    upward = []
    for line, name in imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "lockstep" and len(parts) > 1 and parts[1] in LAYER and LAYER[parts[1]] > LAYER[room(path)]:
            upward.append(f"line {line} imports {name}")
    assert not upward


@pytest.mark.parametrize("path", [path for path in files() if room(path) in WITHOUT_TORCH], ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_the_command_line_needs_does_not_import_torch_at_its_top(path: Path) -> None:
    if path.name in LAUNCHER_WITH_TORCH:
        return
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [name for node in top for _, name in imported(node)]
    assert not [name for name in names if name.split(".")[0] in ("torch", "numpy", "sklearn")]
