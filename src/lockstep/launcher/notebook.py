"""A notebook's cell that shows what ranks print: whole lines in the cell's streams, and unfinished
lines, such as progress bars, in one display that is updated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook (ipykernel). The functions of its cells are
    in no file, and it shows what is written to sys.stdout, not to descriptor 1.
    """
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Cell:
    """The cell that runs now."""

    def __init__(self) -> None:
        self._handle: Any = None
        self.shown = ""
        """The text in the display."""

    def write(self, stream: str, text: str) -> None:
        """Write `text` to `stream`: "stdout" or "stderr"."""
        getattr(sys, stream).write(text)

    def show(self, unended: Mapping[int, str]) -> None:
        """Update the display with each rank's unfinished line."""
        text = "\n".join(f"[{rank}] {line}" for rank, line in sorted(unended.items()))
        if text == self.shown:
            return
        self.shown = text
        data = {"text/plain": text}
        if self._handle is None:
            ipython: Any = sys.modules["IPython"]
            self._handle = ipython.display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
