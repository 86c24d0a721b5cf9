"""The loops over prepared loaders that run now: whose backward it is, and which micro-batch is computed.

`torch.autograd.backward` is replaced while such a loop runs. `Tensor.backward` looks it up there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.step.micro_batch import MicroBatch
from lockstep.step.own_loop import Trained


def current() -> MicroBatch | None:
    """Return the micro-batch that a loop computes now; None outside of loops."""
    return _open[-1][0].micro_batch if _open else None


def note_copies(computed: bool) -> None:
    """Note that a loop has computed a copy of a micro-batch, or that an evaluation begins."""
    global _copies
    _copies = computed


def copies_computed() -> bool:
    """Return whether a loop has computed copies since the last evaluation began."""
    return _copies


_copies = False
_open: list[Sequence[Trained]] = []
"""The models of the loops that are inside an iteration."""
_engine: Callable[..., Any] = torch.autograd.backward
_inside = False


@contextmanager
def backwards_of(trained: Sequence[Trained]) -> Iterator[None]:
    """In this block `backward` counts for these models."""
    if not _open:
        torch.autograd.backward = _backward
    _open.append(trained)
    try:
        yield
    finally:
        _open.remove(trained)
        if not _open:
            torch.autograd.backward = _engine


@functools.wraps(_engine)
def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    global _inside
    if _inside:  # of reentrant checkpointing
        _engine(tensors, grad_tensors, *args, **options)
        return
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    active = [one for trained in _open for one in trained if one.awaits_backward]
    if not active:
        _engine(tensors, grad_tensors, *args, **options)
        _check_no_more()
        return
    if grad_tensors is not None or len(roots) != 1 or roots[0].numel() != 1:
        raise UsageError("loss-not-one-number", what="the loss", shape=list(roots[0].shape))
    loss = roots[0]
    seed = torch.full_like(loss, active[0].root)
    call = partial(_engine, roots, [seed], *args, **options)
    for one in active:
        call = partial(one.backward, loss, call)
    _inside = True
    try:
        call()
    finally:
        _inside = False
    if len(active) < sum(map(len, _open)):
        _check_no_more()


def _check_no_more() -> None:
    for trained in _open:
        for one in trained:
            one.check_no_more()
