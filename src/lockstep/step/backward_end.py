"""Finds the end of a backward, for a wrapper that completes the sum there.

torch calls what was queued at the end of the outermost backward. Reentrant checkpointing runs other
backwards inside it, and torch.autograd.grad, as for a gradient penalty, runs one that is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lockstep.gradients.reducer import Reducer, State

_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


class BackwardEnd:
    """Calls `finish` once at the end of each closing backward of the reducer's model."""

    def __init__(self, reducer: Reducer, finish: Callable[[], None]) -> None:
        self._reducer = reducer
        self._finish = finish
        reducer.on_first = self._queue

    def _queue(self) -> None:
        """With the first gradient: ask autograd to say when this backward is over."""
        torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def begins(self, *_: object) -> None:
        """Have `finish` called at the end of the outermost backward, which has begun. A hook of the
        model's output: it is called even if no parameter gets a gradient.
        """
        reducer = self._reducer
        if (
            reducer.closing
            and reducer.state is not State.SENDING
            and reducer.on_first is not None
            and _accumulates(torch._C._current_autograd_node())
        ):
            reducer.keep_accumulated()
            reducer.state = State.SENDING
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _over(self) -> None:
        """Handle the end of a backward: the user's, or one that reentrant checkpointing runs
        inside it.
        """
        reducer = self._reducer
        if not reducer.all_launched and _inside_checkpoint():
            reducer.state = State.ACCUMULATING  # the next gradient queues this again
        elif reducer.on_first is not None:
            self._finish()


def _accumulates(output: Any) -> bool:
    """Whether the running backward adds to the `.grad` of a leaf behind this node."""
    seen = {None}
    rest = [output]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            # the error: torch.autograd.grad asks for this leaf
            with suppress(RuntimeError):
                if torch._C._will_engine_execute_node(node):
                    return True
        for following, _ in node.next_functions:
            rest.append(following)
    return False


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
