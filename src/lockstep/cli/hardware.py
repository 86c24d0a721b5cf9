"""What a command asks for, and what this host has."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.config.settings import Settings


def fitted(settings: Settings, *, count_workers: bool) -> Settings:
    """The settings with this host's GPUs counted. On a host with GPUs no two ranks share one,
    and none falls back to the CPU unasked.
    """
    if settings.device == "cpu":
        return settings
    from lockstep.launcher import server

    gpus = server.gpus()
    if settings.device == "cuda" and not gpus:
        raise UsageError("no-gpu-here")
    workers = gpus or 1 if count_workers else settings.workers
    if gpus and workers > gpus:
        raise UsageError("more-workers-than-gpus", workers=workers, gpus=gpus)
    return replace(settings, workers=workers)


def torch_version() -> str:
    """torch.__version__, build included, read from torch's version.py: importing torch takes
    over a second.
    """
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return str(run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])
