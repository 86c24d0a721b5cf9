"""Published silent bugs of other training code, reproduced in short trainings.

    python benchmarks/silent_bugs.py
    python benchmarks/silent_bugs.py --only deepspeed-1801
    python benchmarks/silent_bugs.py --page docs/guide/silent-bugs.md

The bugs are those that TrainCheck (OSDI 2025, arXiv 2506.14813) and TTrace (arXiv 2506.09280)
collected and that can happen in data-, tensor- or pipeline-parallel training on a CPU. Each entry
below is a short training. It runs once on one rank without the mistake, and once on several ranks
with it; a bug of a framework has no mistake of the user's, only the conditions under which it
showed.

prevented   several ranks computed what one rank computes without the mistake
detected    Lockstep gave an error or a warning; the table shows the step and the first sentence
missed      the result was wrong, and Lockstep said nothing; "as one process does" if the mistake
            does not depend on the number of ranks, and one rank gives the same wrong result

`--page` writes the tables into the guide, between its two marks.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.config.parts import Parts
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.testing import run_ranks

STEPS, SAMPLES, WIDTH, WORDS = 6, 48, 8, 16
_BEGIN, _END = "<!-- table -->", "<!-- end of table -->"
Losses = list[float]


@dataclass(frozen=True, slots=True)
class Bug:
    """`run(world, planted)` trains and returns the losses of the steps, which are right within
    `close` of themselves.
    """

    source: str
    happened: str
    here: str
    ranks: int
    run: Callable[[lockstep.World, bool], Losses]
    close: float = 1e-4


@dataclass(frozen=True, slots=True)
class Verdict:
    """`step`, where Lockstep named one, and the first sentence that it said."""

    how: str
    step: int | None = None
    said: str = ""


# -- what is trained -------------------------------------------------------------------------------


class Words(nn.Module):
    """Guesses a word from a word. The embedding is the output layer too."""

    def __init__(self, *, tied: bool = True, recomputed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recomputed = recomputed

    def block(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + (
            checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)
        )
        found: Tensor = self.head(self.last(x))
        return found


class Layered(nn.Module):
    """The same in layers, for a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "123")
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embedding(x)))
        return found


PAIRS = [(torch.tensor(each % WORDS), torch.tensor(each * 5 % WORDS)) for each in range(SAMPLES)]
TENSOR = Parts(tensor={"up": "colwise", "down": "rowwise"})


def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def task(**changes: Any) -> lockstep.Task:
    fields: dict[str, Any] = {
        "model": Words,
        "train_data": PAIRS,
        "loss": summed,
        "optimizer": adamw,
        "global_batch": 8,
        "micro_batch": 2,
        "epochs": 1,
        "name": "words",
    }
    return lockstep.Task(**(fields | changes))


def losses(of: lockstep.Task, world: lockstep.World, **options: Any) -> Losses:
    found: Losses = []

    def on_step(record: Any) -> None:
        found.append(record["loss"])
        if of.on_step is not None:
            of.on_step(record)

    changed = replace(of, on_step=on_step, callbacks_on="all")
    lockstep.train(changed, world=world, steps=STEPS, **options)
    return found


def mesh(world: lockstep.World, axes: str) -> dict[str, Any]:
    """The option for several ranks; one rank has no mesh."""
    return {"mesh": axes} if world.size > 1 else {}


class Wrapped:
    """A loop of one's own around the wrapper, with mean losses, as for torch's."""

    def __init__(self, world: lockstep.World) -> None:
        lockstep.seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model = lockstep.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        data = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))
        self.batches = data[:, world.rank :: world.size]
        self.world = world

    def train(self, forward: Callable[[int, Tensor], Tensor]) -> Losses:
        found = []
        for step, x in enumerate(self.batches):
            self.optimizer.zero_grad()
            loss = (forward(step, x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            found.append(loss.detach() / self.world.size)
        total = torch.stack(found)
        lockstep.collectives.all_reduce(total)
        return [float(each) for each in total]


# -- TrainCheck ------------------------------------------------------------------------------------


def forward_past_the_wrapper(world: lockstep.World, planted: bool) -> Losses:
    loop = Wrapped(world)
    return loop.train(lambda step, x: (loop.net if planted and step % 2 else loop.model)(x))


def parameters_moved(world: lockstep.World, planted: bool) -> Losses:
    loop = Wrapped(world)
    if planted:
        loop.model.to(torch.float64)
        loop.model.to(torch.float32)
    return loop.train(lambda _, x: loop.model(x))


def no_zero_grad(world: lockstep.World, planted: bool) -> Losses:
    lockstep.seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = lockstep.Stepper(model, optimizer, world=world)
    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    found: Losses = []
    loader = lockstep.Loader(TensorDataset(data), global_batch=8, micro_batch=2, seed=0)
    for epoch in loader.epochs(1):
        for window in epoch:
            if not planted:
                optimizer.zero_grad()
            for (x,) in stepper.micro_batches(window):
                stepper.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), len(x))
            found.append(float(stepper.step().loss))
    return found


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with numpy's global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(np.random.randn(4)).float()
        return noise, noise.sum(0, keepdim=True)


def squared(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(batch[1])


def one_layer() -> nn.Module:
    return nn.Linear(4, 1)


def alike_in_all_workers(world: lockstep.World, planted: bool) -> Losses:
    of = task(model=one_layer, train_data=Noisy(), loss=squared)
    return losses(of, world, loader_workers=2 if planted else 0)


class FreezesLate(Words):
    """Its first layer is to be frozen; that is done where `train()` is called."""

    def train(self, mode: bool = True) -> FreezesLate:
        self.embedding.requires_grad_(False)
        return super().train(mode)


class Frozen(Words):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__(tied=tied)
        self.embedding.requires_grad_(False)


def freezes_late() -> nn.Module:
    return FreezesLate(tied=False)


def frozen() -> nn.Module:
    return Frozen(tied=False)


def frozen_too_late(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(model=freezes_late if planted else frozen), world)


def only_norms_train() -> nn.Module:
    model = Words()
    for name, each in model.named_parameters():
        each.requires_grad_("norm" in name or "last" in name)
    return model


def most_is_frozen(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(model=only_norms_train if planted else Words), world)


class _Zeroed:
    """From the third step on, what rank 1 receives in one bucket of each step is lost."""

    def __init__(self, rank: int) -> None:
        self.rank, self.begun = rank, 0

    def record(self, _: object) -> None:
        self.begun += 1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        found = adamw(model)
        if self.rank == 1:

            def lose(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if self.begun >= 2:
                    for group in optimizer.param_groups:
                        group["params"][0].grad.zero_()

            found.register_step_pre_hook(lose)
        return found


def messages_lost(world: lockstep.World, planted: bool) -> Losses:
    fault = _Zeroed(world.rank if planted else 0)
    of = task(optimizer=fault.optimizer, on_step=fault.record)
    return losses(of, world, update="replicated")


def norm_clipped_apart(world: lockstep.World, planted: bool) -> Losses:
    return losses(
        task(parts=TENSOR, clip=0.05), world, precision="bf16", **mesh(world, "data=1,tensor=2")
    )


def norm_drifts(world: lockstep.World, planted: bool) -> Losses:
    """As it would be with that optimizer: one tensor rank's norm is scaled otherwise."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found = adamw(model)
        if planted and world.rank == 1:
            weight = dict(model.named_parameters())["norm.weight"]

            def drift(*_: object) -> None:
                with torch.no_grad():
                    weight.mul_(1.001)

            found.register_step_post_hook(drift)
        return found

    of = task(parts=TENSOR, optimizer=optimizer)
    return losses(of, world, **mesh(world, "data=1,tensor=2"))


def unequal_all_to_all(world: lockstep.World, planted: bool) -> Losses:
    rows = [3 if planted and rank == 1 else 2 for rank in range(world.size)]
    mine = [torch.ones(rows[world.rank], 4)] * world.size
    received = lockstep.collectives.all_to_all(mine)
    whole = [bool((each == torch.ones(n, 4)).all()) for each, n in zip(received, rows, strict=True)]
    return [float(all(whole))]


def first_only(samples: Sequence[Any]) -> Any:
    return tuple(torch.stack(each)[:1] for each in zip(*samples, strict=True))


def batch_lost(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(collate=first_only) if planted else task(), world)


def optimizer_of_others(world: lockstep.World, planted: bool) -> Losses:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(Words() if planted else model)

    return losses(task(optimizer=optimizer), world)


# -- TTrace ----------------------------------------------------------------------------------------


def ignored(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A quarter of the words do not count, so micro-batches have different weights."""
    counts = batch[1] % 4 != 0
    return (F.cross_entropy(output.float(), batch[1], reduction="none") * counts).sum(), int(
        counts.sum()
    )


def uneven_weights(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(loss=ignored, micro_batch=3), world)


def recomputed() -> nn.Module:
    return Words(recomputed=True)


def wrong_input_again(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(model=recomputed if planted else Words), world)


def vocabulary_split(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(parts=TENSOR), world, **mesh(world, "tensor=2"))


def tied_and_sharded(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(), world, **({"update": "sharded"} if world.size > 1 else {}))


def tied_over_stages(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(model=Layered), world, **mesh(world, "data=1,pipeline=2"))


class Routed(nn.Module):
    """A second layer that only some samples reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        sent = x % 2 == 0
        if bool(sent.any()):
            y = torch.where(sent.unsqueeze(-1), self.router(y), y)
        found: Tensor = self.head(y)
        return found


def router_apart(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(model=Routed), world)


def update_left_out(world: lockstep.World, planted: bool, **options: Any) -> Losses:
    """Rank 1 does not update its slice in the third step."""
    taken: list[Any] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found = torch.optim.SGD(model.parameters(), lr=0.1)

        def leave_out(its: torch.optim.Optimizer, *_: object) -> None:
            if planted and world.rank == 1 and len(taken) == 2 and its is found:
                for group in its.param_groups:
                    for each in group["params"]:
                        each.grad = None

        found.register_step_pre_hook(leave_out)
        return found

    sharded = {"update": "sharded", **options} if world.size > 1 else {}
    return losses(task(optimizer=optimizer, on_step=taken.append), world, **sharded)


def update_left_out_witnessed(world: lockstep.World, planted: bool) -> Losses:
    return update_left_out(world, planted, exact=True, witness=1.0)


def a_block_short(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in ("embedding", "blocks.0", "blocks.2", "head")]


def stages_wrong(world: lockstep.World, planted: bool) -> Losses:
    parts = Parts(layers=a_block_short) if planted else Parts()
    return losses(task(model=Layered, parts=parts), world, **mesh(world, "data=1,pipeline=2"))


def norms_beside_split_layers(world: lockstep.World, planted: bool) -> Losses:
    return losses(task(parts=TENSOR, clip=0.05), world, **mesh(world, "data=2,tensor=2"))


def with_weight_between() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.PReLU(),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Linear(WIDTH, WORDS),
    )


def weight_between(world: lockstep.World, planted: bool) -> Losses:
    of = task(model=with_weight_between, parts=Parts(tensor={"1": "colwise", "3": "rowwise"}))
    return losses(of, world, **mesh(world, "tensor=2"))


TRAINCHECK, TTRACE = "TrainCheck", "TTrace"
PYTORCH = "https://github.com/pytorch/pytorch/issues/"

BUGS = {
    "ddp-out-of-sync": Bug(
        f"{TRAINCHECK}, x-jxmnop",
        "some forward passes used the bare model instead of the wrapper, so gradients were not averaged",
        "every second forward pass uses the bare model",
        2,
        forward_past_the_wrapper,
    ),
    "pytorch-104336": Bug(
        f"{TRAINCHECK}, [pytorch 104336]({PYTORCH}104336)",
        "the wrapped model was moved to the host and back, and lost its hooks",
        "the wrapped model is converted to float64 and back",
        2,
        parameters_moved,
    ),
    "stackoverflow-60335387": Bug(
        f"{TRAINCHECK}, [Stack Overflow 60335387](https://stackoverflow.com/questions/60335387)",
        "`zero_grad()` was missing, so gradients of old steps were added",
        "a loop around a Stepper without `zero_grad()`",
        2,
        no_zero_grad,
    ),
    "stackoverflow-67180955": Bug(
        f"{TRAINCHECK}, [Stack Overflow 67180955](https://stackoverflow.com/questions/67180955)",
        "all loader processes drew the same random augmentations from numpy",
        "a data set that uses numpy's global generator, with two loader workers per rank",
        2,
        alike_in_all_workers,
    ),
    "mmpretrain-702": Bug(
        f"{TRAINCHECK}, [mmpretrain 702](https://github.com/open-mmlab/mmpretrain/issues/702)",
        "layers that should be frozen were trained, because `train()` was never called",
        "a model that freezes a layer in `train()`",
        2,
        frozen_too_late,
    ),
    "pytorch-forum-84911": Bug(
        f"{TRAINCHECK}, [PyTorch forum 84911](https://discuss.pytorch.org/t/84911)",
        "a wrong name froze all layers except the norms",
        "the same mistake",
        2,
        most_is_frozen,
    ),
    "pytorch-84803": Bug(
        f"{TRAINCHECK}, [pytorch 84803]({PYTORCH}84803), [96600]({PYTORCH}96600), Baichuan2 86",
        "data sent between GPUs was lost and arrived as zeros",
        "from the third step on, one gradient that rank 1 receives is zeros",
        2,
        messages_lost,
    ),
    "deepspeed-1801": Bug(
        f"{TRAINCHECK}, [DeepSpeed 1801](https://github.com/microsoft/DeepSpeed/pull/1801) (BLOOM-176B)",
        "with clipping in bf16, the LayerNorm weights of tensor ranks drifted apart",
        "bf16, clipping, two tensor ranks",
        2,
        norm_clipped_apart,
        close=0.02,  # bf16
    ),
    "deepspeed-1801, planted": Bug(
        "as above",
        "as above",
        "a LayerNorm weight of one tensor rank is multiplied by 1.001 after each update",
        2,
        norm_drifts,
    ),
    "deepspeed-5794": Bug(
        f"{TRAINCHECK}, [DeepSpeed 5794](https://github.com/microsoft/DeepSpeed/issues/5794)",
        "ranks called all_to_all with sizes that do not match, and training hung",
        "rank 1 sends three rows, the others two",
        2,
        unequal_all_to_all,
    ),
    "transformers-34204": Bug(
        f"{TRAINCHECK}, [transformers 34204](https://github.com/huggingface/transformers/issues/34204)",
        "the collate function kept only one sample of each batch",
        "the same mistake",
        2,
        batch_lost,
    ),
    "accelerate-2665": Bug(
        f"{TRAINCHECK}, [accelerate 2665](https://github.com/huggingface/accelerate/issues/2665)",
        "the optimizer did not hold the model's parameters, so the model was never updated",
        "an optimizer over the parameters of another model",
        2,
        optimizer_of_others,
    ),
    "DP: wrong loss scaling": Bug(
        TTRACE,
        "means of micro-batches with different weights were averaged without the weights",
        "a quarter of the words do not count in the loss; micro-batches of 3, 3 and 2 samples",
        2,
        uneven_weights,
    ),
    "activation recomputation: wrong input": Bug(
        TTRACE,
        "the second forward pass of a checkpointed block differed from the first",
        "a checkpointed block with dropout",
        2,
        wrong_input_again,
    ),
    "TP: wrong embedding mask": Bug(
        TTRACE,
        "a rank looked up words of another rank's part of the vocabulary, with wrong results",
        "a tied embedding beside divided layers, two tensor ranks",
        2,
        vocabulary_split,
    ),
    "ZeRO: tied embedding": Bug(
        TTRACE,
        "the embedding and the output layer share a weight, but were updated separately",
        "tied weights, `update=sharded`",
        2,
        tied_and_sharded,
    ),
    "PP: tied embedding": Bug(
        "as above, over the stages of a pipeline",
        "as above",
        "tied weights on the first and the last of two stages",
        2,
        tied_over_stages,
    ),
    "SP: router not synchronized": Bug(
        TTRACE,
        "a router's gradient stayed on the rank that computed it",
        "a layer that only the samples of some ranks reach",
        4,
        router_apart,
    ),
    "ZeRO: update left out": Bug(
        TTRACE,
        "a rank did not update its slice of the parameters",
        "rank 1 skips the third update, `update=sharded`",
        2,
        update_left_out,
    ),
    "ZeRO: update left out, with a witness": Bug(
        "as above", "as above", "as above, with `exact` and `witness=1.0`", 2, update_left_out_witnessed
    ),
    "PP: wrong stage division": Bug(
        TTRACE,
        "the stages together did not make up the whole model",
        "`Parts.layers` omits a block",
        2,
        stages_wrong,
    ),
    "SP, TP: a weight between split layers": Bug(
        f"{TTRACE}, three bugs",
        "gradients of weights that all tensor ranks hold were not summed over these ranks",
        "a PReLU with one weight between the two layers of a pair",
        2,
        weight_between,
    ),
    "SP, TP: norms beside split layers": Bug(
        "as above",
        "as above",
        "LayerNorms beside divided layers, clipping, a mesh of 2 x 2 ranks",
        4,
        norms_beside_split_layers,
    ),
}  # fmt: skip

ELSEWHERE = {
    "lightning-thunder-725, pytorch-115607": "bugs of a compiler; one process has them too",
    "pytorch-51800, transformers-17877": "the initialization of one model; one process has it too",
    "transformers-23723, transformers-33844": "text generation, and dropout in a model's own evaluation;"
    " one process has them too",
    "TTrace: context parallelism (two), FP8, overlapped tensor-parallel communication": "Lockstep"
    " has none of these features",
}


def judge(bug: Bug) -> Verdict:
    (right,) = run_ranks(one_rank, 1, (bug.run,))
    try:
        found = run_ranks(several, bug.ranks, (bug.run,))
    except WorkerFailed as error:
        return Verdict("detected", *_told(str(error)))
    computed = [losses for losses, _ in found]
    said = next((_told(text) for _, texts in found for text in texts), (None, ""))
    if np.allclose(computed, right, rtol=bug.close):
        return Verdict("prevented", *said)
    if said[1]:
        return Verdict("detected", *said)
    (alone,) = run_ranks(one_rank, 1, (bug.run, True))
    same = np.allclose(computed, alone, rtol=bug.close)
    return Verdict("missed, as one process does" if same else "missed")


def one_rank(
    world: lockstep.World, run: Callable[[lockstep.World, bool], Losses], planted: bool = False
) -> Losses:
    return run(world, planted)


def several(
    world: lockstep.World, run: Callable[[lockstep.World, bool], Losses]
) -> tuple[Losses, list[str]]:
    """With the mistake; and Lockstep's warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", LockstepWarning)
        found = run(world, True)
    return found, [str(each.message) for each in said if each.category is LockstepWarning]


def _told(text: str) -> tuple[int | None, str]:
    """The step that it names, and its first sentence."""
    first = text.strip().splitlines()[0]
    first = re.sub(r"^rank \d+ \(.*?\) failed: (\w+: )?", "", first)
    first = re.split(r"(?<=[a-z\d)`'])[.:;] (?=[A-Z])", first)[0]
    step = re.search(r"step (\d+)", first)
    return (int(step.group(1)) if step else None), first


def table(verdicts: dict[str, Verdict]) -> str:
    rows = [
        "| bug | what happened there | how we reproduce it | result | message |",
        "|---|---|---|---|---|",
    ]
    for name, verdict in verdicts.items():
        bug = BUGS[name]
        when = "" if verdict.step is None else f" in step {verdict.step}"
        said = "`{}`".format(verdict.said.replace("|", "\\|")) if verdict.said else ""
        rows.append(
            f"| {name} ({bug.source}) | {bug.happened} | {bug.here} | {verdict.how}{when} | {said} |"
        )
    rows += ["", "| not reproduced | why |", "|---|---|"]
    rows += [f"| {name} | {why} |" for name, why in ELSEWHERE.items()]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(BUGS))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    verdicts = {}
    for name in [options.only] if options.only else BUGS:
        verdicts[name] = verdict = judge(BUGS[name])
        step = "" if verdict.step is None else f"step {verdict.step}"
        print(f"{name:<40}{verdict.how:<11}{step:<8}{verdict.said}", flush=True)
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        head, rest = text.split(_BEGIN)
        tail = rest.split(_END)[1]
        options.page.write_text(
            f"{head}{_BEGIN}\n{table(verdicts)}\n{_END}{tail}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
