"""Random bits of one rank flipped during a training of digits: found, without effect, or missed?

    python benchmarks/flips.py --workers 2 --flips 50 --steps 208
    python benchmarks/flips.py --workers 2 --flips 50 --steps 208 --update sharded \\
        --where weights,buffers

Each case flips one bit of one element on rank 1 after a random step, by writing to its memory.
`found`: all ranks ended with ReplicaDivergence, whose message names the rank and the tensor. `no
effect`: the training ended with the weights of the undisturbed one. `missed`: it ended well with
other weights.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import ReplicaDivergence
from lockstep.tasks import digits

WHERE = ("weights", "buffers", "exp_avg", "exp_avg_sq")


class Flip:
    """One training in which rank 1 has a bit flipped after a step."""

    def __init__(self, where: str, chance: random.Random, steps: int, rank: int) -> None:
        self.where, self._chance, self._rank = where, chance, rank
        self.after = chance.randrange(1, steps + 1)
        self.name = ""

    def task(self) -> lockstep.Task:
        task = digits.task()

        def model() -> nn.Module:
            self._model = task.model()
            return self._model

        def optimizer(of: nn.Module) -> Optimizer:
            self._optimizer = task.optimizer(of)
            return self._optimizer

        return replace(
            task, model=model, optimizer=optimizer, on_step=self._strike, callbacks_on="all"
        )

    def _strike(self, record: Mapping[str, Any]) -> None:
        if record["step"] != self.after:
            return
        named = sorted(self._tensors().items())
        self.name, tensor = self._chance.choices(named, [each.numel() for _, each in named])[0]
        element, bit = (
            self._chance.randrange(tensor.numel()),
            self._chance.randrange(8 * tensor.element_size()),
        )
        if self._rank == 1:
            octets = tensor.data.view(-1).view(torch.uint8)
            octets[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8

    def _tensors(self) -> dict[str, Tensor]:
        if self.where == "weights":
            return dict(self._model.named_parameters())
        if self.where == "buffers":
            return dict(self._model.named_buffers())
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return {
            f"{self.where}/{names[id(each)]}": state[self.where]
            for each, state in self._optimizer.state.items()
        }


def rank_main(
    where: list[str], flips: int, steps: int, update: str, seed: int
) -> dict[str, list[tuple[str, str]]]:
    """By kind, how each case ended and what was said."""
    with lockstep.init() as world:
        options: dict[str, Any] = {"steps": steps, "update": update, "world": world}
        undisturbed = lockstep.train(digits.task(), **options).sha256
        ended: dict[str, list[tuple[str, str]]] = {}
        for kind in where:
            ended[kind] = []
            for number in range(flips):
                flip = Flip(kind, random.Random(f"{seed} {kind} {number}"), steps, world.rank)
                try:
                    result = lockstep.train(flip.task(), **options)
                except ReplicaDivergence as error:
                    # the parameter, or its state
                    named = 1 in error.ranks and flip.name.rpartition("/")[2] in str(error)
                    ended[kind].append(
                        (
                            "found" if named else "found, not named",
                            f"{flip.name} after step {flip.after}: {error}",
                        )
                    )
                else:
                    right = result.sha256 == undisturbed and math.isfinite(result.loss)
                    ended[kind].append(
                        ("no effect" if right else "missed", f"{flip.name} after step {flip.after}")
                    )
        return ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--flips", type=int, default=50, help="of each kind")
    parser.add_argument("--steps", type=int, default=208)
    parser.add_argument("--where", default=",".join(WHERE))
    parser.add_argument("--update", choices=("replicated", "sharded"), default="replicated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    where = options.where.split(",")
    arguments = (where, options.flips, options.steps, options.update, options.seed)
    ended, *others = lockstep.launch(rank_main, options.workers, arguments)
    assert all(
        {kind: [how for how, _ in cases] for kind, cases in each.items()}
        == {k: [h for h, _ in c] for k, c in ended.items()}
        for each in others
    )
    print(
        f"{options.update}, {options.workers} workers, {options.steps} steps, one flipped bit on"
        f" rank 1 in each of {options.flips} runs"
    )
    print(f"{'':<12}{'found':>8}{'no effect':>12}{'missed':>8}{'not named':>11}")
    for kind, cases in ended.items():
        count = Counter(how for how, _ in cases)
        print(
            f"{kind:<12}{count['found']:>8}{count['no effect']:>12}{count['missed']:>8}{count['found, not named']:>11}"
        )
        for how, said in cases:
            if how in ("missed", "found, not named"):
                print(f"  {how}: {said}")


if __name__ == "__main__":
    main()
