"""The reference of Python names: a page for each public name, and one for each public module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from generated import title, write
from sphinx.application import Sphinx

import lockstep

GROUPS = {
    "Ranks": ["init", "World", "launch", "seed", "stream"],
    "The loop that you have": [
        "prepare",
        "PreparedLoader",
        "weigh",
        "total",
        "log",
        "evaluating",
    ],
    "A loop over windows": [
        "Stepper",
        "Loader",
        "DistributedDataParallel",
        "DistributedSampler",
        "ShardedOptimizer",
        "Checkpoints",
        "Replicas",
        "scale_lr",
        "shared_memory_hook",
    ],
    "A task": ["Task", "EarlyStopping", "train", "evaluate", "predict"],
    "Measurements": ["benchmark_scaling", "communication_ratio"],
}
"""Every public name but the modules, in the order of the reference."""

MODULES = {
    "collectives": ["lockstep.collectives"],
    "runs": ["lockstep.runs"],
    "timing": ["lockstep.timing"],
    "testing": ["lockstep.testing"],
    "errors": ["lockstep.errors"],
    "backend": ["lockstep.backend"],
}
"""The public modules: the page's name, and where its names are."""

BESIDE = {
    "configuration": (
        "Options and parts of a task",
        ["lockstep.config.settings:Config", "lockstep.config.parts:Parts"],
    ),
    "results": (
        "Results",
        [
            "lockstep.training.result:Result",
            "lockstep.step.step_result:StepResult",
            "lockstep.tools.bench.speedup:Scaling",
            "lockstep.tools.bench.ratio:CommunicationRatio",
        ],
    ),
    "orders": (
        "Orders of samples",
        [
            f"lockstep.data.orders:{name}"
            for name in ("Shuffled", "BlockShuffled", "Weighted", "Mixture", "ByLength")
        ],
    ),
    "integrations": (
        "Integrations",
        [
            "lockstep.integrations.lightning:LockstepStrategy",
            "lockstep.integrations.lightning:LockstepFabricStrategy",
            "lockstep.integrations.lightning:LockstepEnvironment",
            "lockstep.integrations.lightning:LockstepCheckpointIO",
            "lockstep.integrations.lightning:Batches",
            "lockstep.integrations.accelerate:LockstepAccelerator",
            "lockstep.integrations.transformers:LockstepTrainer",
            "lockstep.integrations.transformers:LockstepTraining",
            "lockstep.integrations.transformers:LockstepCallback",
            "lockstep.integrations.ray_train:LockstepConfig",
            "lockstep.integrations.dcp:LockstepReader",
            "lockstep.integrations.dcp:LockstepWriter",
        ],
    ),
}
"""Names that other public names take or return, and those of the integrations."""

NOT_FOR_USERS = {
    "World": ["close_open", "for_messages"],
    "DistributedDataParallel": [
        "forward",
        "give_up_reducer",
        "will_sync_module_buffers",
        "ignored",
    ],
    "Stepper": ["at_once", "keepers", "part_if_due", "alike"],
    "Group": [
        *("announce", "backend_all_reduce", "backend_broadcast", "ended", "exchange", "forget"),
        *("in_background", "look", "open", "receive", "say", "send", "share_host", "wait_for_all"),
        *("all_reduce", "broadcast", "all_gather"),
    ],
    "SharedMemoryProcessGroup": ["allgather_coalesced", "group_name", "shutdown"],
    "LockstepAccelerator": ["begin", "walk"],
    "Config": [
        *("alone", "alone_after", "bound", "local", "server"),
        *("witnessed", "world_size_free"),
    ],
    "Task": ["metric_objects"],
    "AssembledTraining": ["new_evaluation", "resume", "state"],
    "Settings": ["of", "of_script", "on_one_host", "differences", "write"],
    "Batches": ["begin", "epoch", "set_epoch"],
    "LockstepStrategy": ["parallel_devices", "reduce"],
    "LockstepFabricStrategy": ["parallel_devices"],
    "LockstepTraining": ["get_batch_samples", "get_train_dataloader"],
    "LockstepTrainer": ["get_batch_samples", "get_train_dataloader"],
}
"""Methods that other parts of Lockstep or a host call."""

MADE_FOR_USERS = [
    *("World", "Group", "Work", "SharedMemoryProcessGroup", "ExitCode"),
    *("Scaling", "CommunicationRatio"),
    *("AssembledTraining", "Run", "StepRecord", "Evaluation", "Event", "CheckpointRecord", "Spike"),
    *("Timeline", "Start", "Begin", "Lane", "MemoryLine", "Pause", "StepsLine", "Settings"),
    *("Schedule", "Round", "Transfer", "Proof", "Network", "Link"),
    *("Trial", "Recording", "RecordedStep", "BucketTimes", "PhaseSpan", "StepTimes"),
]
"""Classes whose objects users get: their pages show no constructor. So do those of exceptions."""


def members(found: type[Any]) -> list[str]:
    """The methods and properties for users that Lockstep defines for a class."""
    bases = (found,) if issubclass(found, BaseException) else reversed(found.__mro__)
    own = {
        name: value
        for base in bases
        if base.__module__.startswith("lockstep.")
        for name, value in vars(base).items()
        if not name.startswith("_")
    }
    return [
        name
        for name, value in own.items()
        if (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
        and getattr(getattr(found, name), "__doc__", None)
        and name not in NOT_FOR_USERS.get(found.__name__, ())
    ]


def names_of(module: str) -> list[str]:
    """The names that a public module defines for its users."""
    found = import_module(module)
    listed = getattr(found, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module
    ]


def directive(module: str, name: str) -> str:
    """The autodoc directive that documents a name."""
    found = getattr(import_module(module), name)
    if inspect.ismodule(found):
        listed = ", ".join(names_of(found.__name__))
        return f".. automodule:: {found.__name__}\n   :members: {listed}\n"
    if not inspect.isclass(found):
        kind = "function" if inspect.isroutine(found) else "data"
        return f".. auto{kind}:: {module}.{name}\n"
    listed = ", ".join(members(found))
    shown = f"   :members: {listed}\n" if listed else ""
    bases = "   :show-inheritance:\n" if issubclass(found, BaseException) else ""
    return f".. autoclass:: {module}.{name}\n{shown}{bases}"


def pages() -> Iterator[tuple[str, str]]:
    """File and text of every page."""
    parts = [title("Python"), "Every public name, from its docstring.\n"]
    for group, names in GROUPS.items():
        parts += _listed(group, [(name, f"lockstep.{name}", _first_line(name)) for name in names])
        for name in names:
            yield f"{name}.rst", f"{title(f'lockstep.{name}')}\n{directive('lockstep', name)}"
    parts += _listed("Modules", [(name, f"lockstep.{name}", _first_line(name)) for name in MODULES])
    for page, modules in MODULES.items():
        head = f"{title(f'lockstep.{page}')}\n.. automodule:: {modules[0]}\n   :no-members:\n\n"
        shown = [directive(module, name) for module in modules for name in names_of(module)]
        yield f"{page}.rst", head + "\n".join(shown)
    parts += _listed("More names", [(page, heading, "") for page, (heading, _) in BESIDE.items()])
    for page, (heading, places) in BESIDE.items():
        shown = [directive(*place.split(":")) for place in places]
        yield f"{page}.rst", f"{title(heading)}\n" + "\n".join(shown)
    every = [name for names in GROUPS.values() for name in names] + [*MODULES, *BESIDE]
    toctree = "\n".join(f"   {name}" for name in every)
    parts.append(f".. toctree::\n   :hidden:\n\n{toctree}\n")
    yield "index.rst", "\n".join(parts)


def _listed(heading: str, rows: list[tuple[str, str, str]]) -> list[str]:
    lines = [f":doc:`{shown} <{page}>`\n   {told}\n" for page, shown, told in rows if told]
    lines += [f"- :doc:`{shown} <{page}>`" for page, shown, told in rows if not told]
    return [title(heading, "-"), *lines, ""]


def _first_line(name: str) -> str:
    """The first sentence of what a name says of itself."""
    text = inspect.getdoc(getattr(lockstep, name)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("::", ".")


def signature(
    _: Sphinx,
    kind: str,
    name: str,
    found: Any,
    options: Any,
    shown: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Without constructors that users do not call, and without addresses of functions."""
    if not shown:
        return None
    raised = inspect.isclass(found) and issubclass(found, BaseException)
    if kind in ("class", "exception") and (raised or found.__name__ in MADE_FOR_USERS):
        return "", None
    return re.sub(r"=\s?<function [^=]*? at 0x[0-9a-f]+>", "=...", shown), returns


def code(_: Sphinx, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Have what stands between backticks be code. A name with a dot or a capital is a link, too."""

    def shown(match: re.Match[str]) -> str:
        plain = match[1] if re.search(r"^[\w.]*[A-Z.][\w.]*(\(\))?$", match[1]) else f"`{match[1]}`"
        return f"`{plain}`"

    text = "\n".join(lines)
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", shown, text).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    folder = app.srcdir / "reference" / "python"
    app.connect("builder-inited", lambda _: write(folder, dict(pages())))
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", code)
    return {"parallel_read_safe": True}
