"""Random bits of one rank flipped during a training of digits: found, without effect, or missed?

    python benchmarks/flips.py --workers 2 --flips 50 --steps 208
    python benchmarks/flips.py --workers 2 --flips 50 --steps 208 --update sharded \\
        --where weights,buffers
    python benchmarks/flips.py --workers 3 --flips 25 --steps 6 --witness 1

Each case flips one bit of one element on rank 1 by writing to its memory: of what rests between
two steps, or, with a witness, while a step is computed:

    landing     a gradient, before it is added to those of this rank's other micro-batches
    landed      their sum, while further ones come
    leaving     that sum in shared memory, after it has left for the sum over all ranks
    received    the sum over all ranks, as this rank has received it

`found`: all ranks ended with an error that names rank, step and tensor. `no effect`: the training
ended with the weights of the undisturbed one. `missed`: it ended well with other weights.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lockstep
from lockstep.collectives.work import Handle, Work
from lockstep.errors import CorruptResult, ReplicaDivergence
from lockstep.gradients.bucket import Bucket
from lockstep.step.stepper import Stepper
from lockstep.tasks import digits
from lockstep.training import assembled

WHERE = ("weights", "buffers", "exp_avg", "exp_avg_sq")
IN_STEP = ("landing", "landed", "leaving", "received")


class Caught(Stepper):
    """The Stepper of the training that runs."""

    latest: Caught

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Caught.latest = self


class Flip:
    """One training in which rank 1 has a bit flipped, after a step or in the next one."""

    def __init__(self, where: str, chance: random.Random, steps: int, rank: int) -> None:
        self.where, self._chance, self._rank = where, chance, rank
        self.after = chance.randrange(1, steps)
        self.name = ""
        self._steps = 0
        # a witnessed step is walked twice; nothing has landed before the first micro-batch of a pass
        self._at = chance.randrange(2), 1 if where == "landed" else chance.randrange(2)
        self._now = -1, 0

    def task(self) -> lockstep.Task:
        task = digits.task()

        def model() -> nn.Module:
            self._model = task.model()
            return self._model

        def optimizer(of: nn.Module) -> Optimizer:
            self._optimizer = task.optimizer(of)
            return self._optimizer

        def loss(output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
            found = task.loss(output, batch)
            if torch.is_grad_enabled():
                self._walk()
            return found

        return replace(
            task,
            model=model,
            optimizer=optimizer,
            loss=loss,
            on_step=self._strike,
            callbacks_on="all",
        )

    def _strike(self, record: Mapping[str, Any]) -> None:
        self._steps, self._now = record["step"], (-1, 0)
        if self._steps == self.after and self.where in WHERE:
            self._flip(self._drawn(self._tensors()))

    def _walk(self) -> None:
        """A micro-batch had its forward."""
        walked, place = self._now
        begins = not any(Caught.latest.reducer.ready)
        self._now = (walked + 1, 0) if begins else (walked, place + 1)
        if self._steps != self.after or self._now != self._at or self.where in WHERE:
            return
        if self.where == "landing":
            parameter = self._drawn(dict(self._model.named_parameters()))

            def hurt(gradient: Tensor) -> Tensor:
                hook.remove()
                gradient = gradient.clone(memory_format=torch.contiguous_format)
                self._flip(gradient)
                return gradient

            hook = parameter.register_hook(hurt)
            return
        buckets = Caught.latest.reducer.buckets
        places = {
            span.name: (bucket.index, view)
            for bucket in buckets
            for span, view in zip(bucket.spans, bucket.views, strict=True)
        }
        self._drawn({name: view for name, (_, view) in places.items()})
        index, view = places[self.name]
        if self.where == "landed":
            self._flip(view)
        else:
            self._intercept(index, view)

    def _intercept(self, index: int, view: Tensor) -> None:
        """Change the bucket's block as it leaves, or the sum as it arrives, once."""
        reduction = Caught.latest.reducer.reduction
        start = reduction.start

        def once(bucket: Bucket) -> Work:
            if bucket.index != index:
                return start(bucket)
            del reduction.start
            if self.where == "leaving":
                self._flip(view)
            work = start(bucket)
            return Handle([work], lambda: self._flip(view)) if self.where == "received" else work

        reduction.start = once  # type: ignore[method-assign]

    def _drawn(self, named: Mapping[str, Tensor]) -> Tensor:
        """One of them, by their sizes."""
        members = sorted(named.items())
        self.name, tensor = self._chance.choices(members, [each.numel() for _, each in members])[0]
        return tensor

    def _flip(self, tensor: Tensor) -> None:
        element = self._chance.randrange(tensor.numel())
        bit = self._chance.randrange(8 * tensor.element_size())
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
    where: list[str], flips: int, steps: int, seed: int, **options: Any
) -> dict[str, list[tuple[str, str]]]:
    """By kind, how each case ended and what was said."""
    with lockstep.init() as world:
        options |= {"steps": steps, "world": world}
        undisturbed = lockstep.train(digits.task(), **options).sha256
        ended: dict[str, list[tuple[str, str]]] = {}
        for kind in where:
            ended[kind] = []
            for number in range(flips):
                flip = Flip(kind, random.Random(f"{seed} {kind} {number}"), steps, world.rank)
                try:
                    with patch.object(assembled, "Stepper", Caught):
                        result = lockstep.train(flip.task(), **options)
                except (ReplicaDivergence, CorruptResult) as error:
                    # the parameter, or its state
                    named = 1 in error.ranks and flip.name.rpartition("/")[2] in str(error)
                    if isinstance(error, CorruptResult):
                        named = named and error.ranks == (1,)
                        named = named and error.values["step"] == flip.after + 1
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
    parser.add_argument("--where", default="", help=f"of {', '.join((*WHERE, *IN_STEP))}")
    parser.add_argument("--witness", type=float, help="share of steps; these are then exact")
    parser.add_argument("--update", choices=("replicated", "sharded"), default="replicated")
    parser.add_argument("--weights", choices=("auto", "shared", "separate"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    method = {"update": options.update}
    if options.update == "sharded":
        method["weights"] = options.weights
    if options.witness is not None:
        method |= {"exact": True, "witness": options.witness}
    # a rank's pieces of a sharded optimizer's state are drawn by no other rank
    rests = WHERE if options.update == "replicated" else ("weights", "buffers")
    where = rests if options.witness is None else (*rests, *IN_STEP)
    if options.where:
        where = options.where.split(",")
    arguments = (where, options.flips, options.steps, options.seed)
    ended, *others = lockstep.launch(rank_main, options.workers, arguments, method)
    assert all(
        {kind: [how for how, _ in cases] for kind, cases in each.items()}
        == {k: [h for h, _ in c] for k, c in ended.items()}
        for each in others
    )
    print(
        f"{', '.join(f'{name}={value}' for name, value in method.items())}, {options.workers} workers, {options.steps} steps, one flipped bit on"
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
