"""Imports go down the rooms of the house (docs/architecture.md), tested over the syntax tree:
also lazy imports inside functions. Files in tools/ import public names only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
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


# -- tools are clients --------------------------------------------------------------------------

PUBLIC = {
    name: import_module(name)
    for name in (
        "lockstep",
        "lockstep.collectives",
        "lockstep.errors",
        "lockstep.runs",
        "lockstep.testing",
        "lockstep.timing",
    )
}
"""What a file in tools/ may import of the package, and other files in tools/."""
MAY_USE = {
    "doctor": {
        "lockstep.collectives.broadcast_json.said_by": "what each rank has measured, by rank",
        "lockstep.runtime.binding": "which cores each rank is bound to",
        "lockstep.runtime.cores.allowed_cores": "the cores that ranks get",
        "lockstep.runtime.cores.quota": "the container's share of the processor",
        "lockstep.runtime.interfaces.towards": "the network interface that ranks get",
    },
    "replay": {
        "lockstep.checkpoints.files": "verifies a checkpoint before its steps are announced",
        "lockstep.data.windows.Window": "the window that it drives by hand",
        "lockstep.runtime.randomness": "a sample's forward again, in its micro-batch's stream",
        "lockstep.training.resume.differences": "what differs from the recorded machine",
        "lockstep.training.resume.machine": "what the bits depend on besides the task",
        "lockstep.training.task_digest.changes": "what has changed in the task, in words",
        "lockstep.training.task_digest.task_digests": "the task's files and samples now",
    },
    "verify": {
        "lockstep.checkpoints.files": "the weights of a finished run",
        "lockstep.data.device.to_device": "reads a micro-batch again, as a Loader does",
        "lockstep.data.keyed.KeyedDataset": "the same",
        "lockstep.data.keyed.fetches_at_once": "fetches one sample as a Loader does",
        "lockstep.data.keyed.listed": "sample indices in a message",
        "lockstep.launcher.launch.start_ranks": "ranks that each have a hash seed of their own",
        "lockstep.runtime.randomness": "a forward again, in its micro-batch's stream",
        "lockstep.step.forward.Forward": "a forward again, of a task that was loaded again",
        "lockstep.training.build.model_of": "builds the model again, in the shared stream",
        "lockstep.training.opening.intra_op_threads": "whether the result depends on threads",
    },
}
"""By tool, at most ten names that it needs beside the public ones, each with its reason."""


def is_public(name: str) -> bool:
    module, _, part = name.rpartition(".")
    if name in PUBLIC or name.startswith("lockstep.tools."):
        return True
    return module in PUBLIC and part in getattr(PUBLIC[module], "__all__", [part])


def test_tools_are_clients_of_public_names() -> None:
    private: dict[str, set[str]] = {}
    for path in sorted((SOURCE / "tools").rglob("*.py")):
        tool = path.relative_to(SOURCE / "tools").parts[0].removesuffix(".py")
        for _, name in imported(ast.parse(path.read_text())):
            if name.startswith("lockstep") and not is_public(name):
                private.setdefault(tool, set()).add(name)
    wrong = []
    for tool, names in private.items():
        others = sorted(names - MAY_USE.get(tool, {}).keys())
        if others:
            wrong.append(f"{tool}: {', '.join(others)}")
    assert not wrong, "\n".join(wrong)
    assert not [tool for tool, names in MAY_USE.items() if len(names) > 10]
