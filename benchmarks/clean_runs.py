"""Do the checks stay silent where nothing is wrong? Many short trainings, drawn from seeds.

    python benchmarks/clean_runs.py
    python benchmarks/clean_runs.py --seed 417

Each seed draws a model, sizes, an optimizer, the number of ranks and options. An error or a warning
is a false alarm. So is a loss that is not the one-rank loss, where the options promise that: then a
check should have spoken. Ends with 1 where there was any; `--seed` runs one again and shows it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config.parts import Parts
from lockstep.errors import LockstepWarning
from lockstep.testing import run_ranks
from silent_bugs import SAMPLES, WORDS, Layered, Words, losses

_A_WORLD = 25  # runs, one after the other
_CLOSE = 2e-3
_TENSOR = {"up": "colwise", "down": "rowwise"}


class Norms(nn.Module):
    """BatchNorm over what an embedding gives, three times, so that one sample will do; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        several = self.embedding(x).unsqueeze(-1).expand(-1, -1, 3)
        found: Tensor = self.last(self.drop(self.norm(several)[..., 0]))
        return found


class Frozen(Words):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embedding.requires_grad_(False)


class Attention(nn.Module):
    """Words as sequences of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.embedding(x).unsqueeze(1)).squeeze(1))
        return found


def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])


def weighted(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    """Weights that are no whole numbers, and differ from sample to sample."""
    weight = 0.5 + batch[1] / WORDS
    return (F.cross_entropy(output.float(), batch[1], reduction="none") * weight).sum(), float(
        weight.sum()
    )


def pairs(count: int) -> TensorDataset:
    words = torch.arange(count)
    return TensorDataset(words % WORDS, words * 5 % WORDS)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class Drawn:
    """One training."""

    def __init__(self, seed: int) -> None:
        chance = Random(seed)
        self.ranks = chance.choice((1, 2, 2, 3, 4))
        model: Callable[[], nn.Module] = chance.choice((Words, Norms, Frozen, Attention, Layered))
        self.options: dict[str, Any] = {}
        self.promised = True
        """The losses of one rank."""
        kind = chance.choice(("plain", "plain", "exact", "sharded", "mesh", "other"))
        if self.ranks == 1 or (kind == "mesh" and self.ranks == 3):
            kind = "plain"
        if kind == "mesh":
            model = self._mesh(chance)
        elif kind == "exact":
            self.options["exact"] = True
            self.options["witness"] = chance.choice((None, 0.5, 1.0))
            self.options["update"] = chance.choice(("replicated", "sharded"))
        elif kind == "sharded":
            self.options["update"] = "sharded"
            self.options["weights"] = chance.choice(("auto", "shared", "separate"))
        elif kind == "other":
            self.promised = False
            self.options |= chance.choice(
                (
                    {"compress": "bf16"},
                    {"compress": "int8"},
                    {"compress": "powersgd:2"},
                    {"sync_every": 2},
                    {"sync_every": 3, "outer": "nesterov"},
                )
            )
        else:
            self.options["reduce"] = chance.choice(
                ("auto", "native", "ring", "tree", "central", "shared_memory")
            )
        if "exact" not in self.options and chance.random() < 0.15:
            self.options["precision"] = "bf16"
            self.promised = False
        self.task = lockstep.Task(
            name=f"seed {seed}",
            model=model,
            train_data=pairs(SAMPLES if kind == "mesh" else chance.randrange(20, SAMPLES + 1)),
            eval_data=pairs(7) if chance.random() < 0.3 else None,
            loss=chance.choice((summed, weighted)),
            optimizer=chance.choice((sgd, adamw, fused)),
            # windows of four micro-batches on a mesh: with fewer, a pipeline says what that costs
            global_batch=8 if kind == "mesh" else chance.randrange(8, 17),
            micro_batch=2 if kind == "mesh" else chance.randrange(1, 6),
            epochs=2,
            clip=chance.choice((None, None, 0.5)),
            parts=Parts(tensor=_TENSOR if "tensor" in self.options.get("mesh", "") else {}),
            seed=seed,
        )

    def _mesh(self, chance: Random) -> Callable[[], nn.Module]:
        axis = chance.choice(("pipeline", "tensor", "shard"))
        self.options["mesh"] = f"data={self.ranks // 2},{axis}=2"
        self.promised = axis != "tensor"  # dropout between split layers is another one
        return {"pipeline": Layered, "tensor": Words, "shard": Layered}[axis]


def alarms(world: lockstep.World, seeds: list[int]) -> list[tuple[str, list[float]]]:
    """Of each seed, what was said, and the losses. An error ends the world: the others see it."""
    found = []
    for seed in seeds:
        drawn = Drawn(seed)
        options = drawn.options if world.size > 1 else {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", LockstepWarning)
            try:
                computed = losses(drawn.task, world, **options)
            except Exception as error:
                text = "".join(traceback.format_exception(error)[-3:])
                raise AssertionError(f"seed {seed}: {drawn.options}: {text}") from None
        ours = [str(each.message) for each in said if issubclass(each.category, LockstepWarning)]
        found.append(("; ".join(ours), computed))
    return found


def judged(seeds: list[int], ranks: int) -> Iterator[tuple[int, str]]:
    """Of each seed, what was wrong, or nothing."""
    right = run_ranks(alarms, 1, (seeds,))[0]
    try:
        several = run_ranks(alarms, ranks, (seeds,)) if ranks > 1 else [right]
    except lockstep.errors.LockstepError as error:
        if len(seeds) > 1:
            for seed in seeds:
                yield from judged([seed], ranks)
        else:
            yield seeds[0], str(error)
        return
    for place, seed in enumerate(seeds):
        texts = {text for rank in several for text in [rank[place][0]] if text}
        far = Drawn(seed).promised and not np.allclose(
            [rank[place][1] for rank in several], right[place][1], rtol=_CLOSE
        )
        yield seed, "; ".join(sorted(texts)) or ("other losses than one rank's" if far else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seeds = range(options.runs) if options.seed is None else [options.seed]
    by_ranks: dict[int, list[int]] = {}
    for seed in seeds:
        by_ranks.setdefault(Drawn(seed).ranks, []).append(seed)
    count = 0
    for ranks, drawn in sorted(by_ranks.items()):
        wrong = 0
        for begin in range(0, len(drawn), _A_WORLD):
            for seed, text in judged(drawn[begin : begin + _A_WORLD], ranks):
                if text:
                    wrong += 1
                    print(f"seed {seed}: {Drawn(seed).options}: {text}", flush=True)
        print(f"{len(drawn)} runs of {ranks} ranks: {wrong} false alarms", flush=True)
        count += wrong
    print(f"{len(seeds)} runs: {count} false alarms")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
