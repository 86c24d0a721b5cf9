"""The one variable that agent and worker both know, in a file of its own because only one of them may import torch."""

from __future__ import annotations

SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Which signals torchelastic takes for itself. The launcher handles signals, so it is told: none; the target never sees it."""
