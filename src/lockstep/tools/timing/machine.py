"""The kind of device that figures are measured on."""

from __future__ import annotations

from typing import Literal


def kind_of_device(device: str = "auto") -> Literal["cpu", "cuda"]:
    """Return the kind of device on which ranks would compute."""
    import torch

    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
