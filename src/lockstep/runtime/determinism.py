"""What a process must hold still so that the same micro-batch gives the same gradient, whichever
rank runs it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_MEMORY: Any = torch.utils.deterministic


class Determinism:
    """From here until `close`: that many intra-op threads, and torch's deterministic algorithms;
    operations without one raise, by name.
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
        # it writes nan to all new memory, for programs that read it before they write
        _MEMORY.fill_uninitialized_memory = False
        os.environ.setdefault(_CUBLAS, ":4096:8")

    def __str__(self) -> str:
        return (
            f"{self.threads} intra-op thread{'s' * (self.threads > 1)} a rank, torch's"
            " deterministic algorithms"
        )

    def close(self) -> None:
        """As it was before."""
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])
        torch.backends.cudnn.benchmark = self._cudnn
        _MEMORY.fill_uninitialized_memory = self._fills
        if self._cublas is None:
            os.environ.pop(_CUBLAS, None)
