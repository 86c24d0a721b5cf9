"""Which other libraries are here to be compared with. Nothing of them is imported."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import torch

PACKAGES = {"accelerate": ("accelerate",), "fabric": ("lightning-fabric", "lightning")}
"""The packages that bring each, the one to install first."""
_MODULES = {"accelerate": "accelerate", "lightning-fabric": "lightning_fabric", "lightning": "lightning.fabric"}


def installed(kind: str) -> str | None:
    """The module of another library that is here; None without."""
    package = _package(kind)
    return None if package is None else _MODULES[package]


def versions() -> dict[str, str]:
    """Of what was compared, as installed."""
    found = {"torch": str(torch.__version__)}
    for kind in PACKAGES:
        if (package := _package(kind)) is not None:
            found[package] = metadata.version(package)
    return found


def _package(kind: str) -> str | None:
    return next((package for package in PACKAGES.get(kind, ()) if find_spec(_MODULES[package].partition(".")[0]) is not None), None)
