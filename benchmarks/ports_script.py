"""Run a script of examples/ports, changed as a test asks for, and keep its last weights.

    python benchmarks/ports_script.py '{"out": "w", "quiet": true}' examples/ports/mnist/plain.py
    lockstep run --workers 2 benchmarks/ports_script.py '{"out": "w", "exact": true}' .../prepared.py

Options, in JSON:

    out           a folder for `rank-N.pt`: the state of all modules that have a name at the script's
                  top level; without one, the parameters of the optimizers
    quiet         no dropout; shuffles come from a generator; random numbers repeat every 8 rows, so
                  that any cut into micro-batches meets the same ones
    draws_order   with quiet: torch.randint draws what a RandomSampler with replacement draws
    double        compute in float64
    prepare       options that `lockstep.prepare` gets, over those of the script
    kill          [rank, step]: SIGKILL of this rank after this step
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler

import lockstep

_ROWS = 8
_ORDER = 5  # seed


def share_order() -> None:
    """Draw each shuffle from a generator, so that the plain and the prepared script draw the same."""
    original = DataLoader.__init__

    def init(loader: Any, *args: Any, **options: Any) -> None:
        original(loader, *args, **options)
        sampler = loader.sampler
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(_ORDER)

    generator = torch.Generator().manual_seed(_ORDER)

    def shuffle(indices: Any) -> None:
        indices[:] = list(RandomSampler(indices, generator=generator))

    DataLoader.__init__ = init  # type: ignore[assignment,method-assign]
    np.random.shuffle = shuffle  # type: ignore[assignment]


def draw_order() -> None:
    """Let training draw its numbers as a RandomSampler with replacement does."""
    original = torch.randint
    generator = torch.Generator().manual_seed(_ORDER)

    def randint(*args: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled():
            options.setdefault("generator", generator)
        return original(*args, **options)

    torch.randint = randint


def repeat_draws() -> None:
    """Let torch.randn and its like draw 8 rows with a seed of their own, and repeat them."""
    randn, rand, randint = torch.randn, torch.rand, torch.randint

    def rows(draw: Any, size: Sequence[int]) -> Tensor:
        drawn: Tensor = draw((_ROWS, *size[1:]), generator=torch.Generator().manual_seed(7))
        repeats = -(-size[0] // _ROWS)
        return drawn.repeat(repeats, *[1] * (len(size) - 1))[: size[0]]

    def drawn_randint(*bounds_and_size: Any, **options: Any) -> Tensor:
        if options:  # of a sampler
            return randint(*bounds_and_size, **options)
        *bounds, size = bounds_and_size
        return rows(partial(randint, *bounds), size)

    torch.randn = lambda *size, device=None: rows(randn, size)  # type: ignore[assignment]
    torch.rand = lambda *size, device=None: rows(rand, size)  # type: ignore[assignment]
    torch.randn_like = lambda tensor: rows(randn, tensor.shape).to(tensor)  # type: ignore[assignment]
    torch.randint = drawn_randint


def prepare_with(options: dict[str, Any]) -> None:
    original = lockstep.prepare

    def prepare(*objects: Any, **given: Any) -> Any:
        return original(*objects, **{**given, **options})

    lockstep.prepare = prepare


class Steps:
    """Counts the optimizers' steps.

    Args:
        kill: the rank that SIGKILL ends, and after which step.
    """

    def __init__(self, kill: tuple[int, int] | None) -> None:
        self.optimizers: list[Optimizer] = []
        self._kill = kill
        self._count = 0
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self._count += optimizer is self.optimizers[0]
        if self._kill == (int(os.environ.get("RANK", 0)), self._count):
            os.kill(os.getpid(), signal.SIGKILL)

    def parameters(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state[str(len(state))] = parameter.detach()
        return state


def state_of(namespace: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state of all modules that have a name at the script's top level."""
    state: dict[str, Tensor] = {}
    for name, value in sorted(namespace.items()):
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                state[f"{name}.{key}"] = tensor
    return state


def main() -> None:
    options = json.loads(sys.argv[1])
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    torch.set_num_threads(1)
    torch.manual_seed(0)  # some scripts do not
    if options.get("double"):
        torch.set_default_dtype(torch.float64)
    if options.get("quiet"):
        nn.Dropout.forward = lambda dropout, x: x  # type: ignore[assignment,method-assign]
        share_order()
        if options.get("draws_order"):
            draw_order()
        else:
            repeat_draws()
    if options.get("prepare"):
        prepare_with(options["prepare"])
    kill = options.get("kill")
    steps = Steps(tuple(kill) if kill else None)
    namespace = runpy.run_path(script, run_name="__main__")
    rank = int(os.environ.get("RANK", 0))
    state = state_of(namespace) or steps.parameters()
    torch.save(state, Path(options["out"]) / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()
