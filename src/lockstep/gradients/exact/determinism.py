"""What a process must hold still so that the same micro-batch gives the same gradient, whichever rank runs it."""

from __future__ import annotations

import os

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class Determinism:
    """From here until `close`: one intra-op thread (or `threads`), and torch's deterministic algorithms; those it has none for raise, by name."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        self._benchmark = torch.backends.cudnn.benchmark
        self._fills = torch.utils.deterministic.fill_uninitialized_memory
        self._cublas = os.environ.get(_CUBLAS)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # writes nan to all new memory, for those who read it before they write
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(_CUBLAS, ":4096:8")

    def close(self) -> None:
        """As it was before."""
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])
        torch.utils.deterministic.fill_uninitialized_memory = self._fills
        torch.backends.cudnn.benchmark = self._benchmark
        if self._cublas is None:
            os.environ.pop(_CUBLAS, None)
