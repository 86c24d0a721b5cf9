"""Settings of a process under which the same micro-batch gives the same gradient on any rank."""

from __future__ import annotations

import os
from typing import Any

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_MEMORY: Any = torch.utils.deterministic


class Determinism:
    """Until `close`, use `threads` intra-op threads and torch's deterministic algorithms. An
    operation without such an algorithm raises an error that names it.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._threads = torch.get_num_threads()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._cudnn = torch.backends.cudnn.benchmark
        self._fills = _MEMORY.fill_uninitialized_memory
        self._cublas = os.environ.get(_CUBLAS)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Torch would fill all new memory with nan. That only helps programs that read it before
        # they write.
        _MEMORY.fill_uninitialized_memory = False
        os.environ.setdefault(_CUBLAS, ":4096:8")

    def __str__(self) -> str:
        return (
            f"{self.threads} intra-op thread{'s' * (self.threads > 1)} a rank, torch's"
            " deterministic algorithms"
        )

    def close(self) -> None:
        """Restore the earlier settings."""
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])
        torch.backends.cudnn.benchmark = self._cudnn
        _MEMORY.fill_uninitialized_memory = self._fills
        if self._cublas is None:
            os.environ.pop(_CUBLAS, None)
