"""Edges of training a split model: tied and frozen weights, short windows, idle ranks, bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.config.mesh import Mesh
from lockstep.config.parts import Parts
from lockstep.errors import ReplicaDivergence, WorkerFailed
from lockstep.gradients import reductions
from lockstep.testing import run_ranks
from lockstep.training.train import train
from tests.model_parallel.layered import Turned, objects_refused, reader
from tests.teams import on_team

WIDTH, WORDS, LENGTH = 8, 11, 4


def tied(dropout: float = 0.0) -> nn.Module:
    """The embedding is the output layer as well: the first and the last stage hold it."""
    return reader(depth=3, width=WIDTH, dropout=dropout, tied=True).float()


def frozen() -> nn.Module:
    model = reader(depth=3, width=WIDTH).float()
    model.blocks[1].requires_grad_(False)
    return model


def dropping() -> nn.Module:
    """In training only."""
    return tied(dropout=0.5)


def wide() -> nn.Module:
    """Shards are cut at multiples of 1024 elements: every rank has some of each stage."""
    return nn.Sequential(
        nn.Embedding(WORDS, 64),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Linear(64, WORDS),
        Turned(),
    )


def pair(between: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, 12),
        between(),
        nn.Linear(12, WIDTH),
        nn.Linear(WIDTH, WORDS),
        Turned(),
    )


PAIR = Parts(tensor={"1": "colwise", "3": "rowwise"})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def zero_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-12)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """No weight decay for what has one dim. A stage may have nothing of one kind."""
    flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    deep = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])


def task(model: Any, samples: int = 10, **changes: Any) -> lockstep.Task:
    """10 samples in steps of 8, micro-batches of 3: 3, 3, 2 of each, and at an epoch's end 2."""
    places = torch.arange(LENGTH)
    data = [((places + number) * 7 % WORDS, (places + number * 3) % 5) for number in range(samples)]
    fields = {
        "optimizer": sgd,
        "global_batch": 8,
        "micro_batch": 3,
        "epochs": 2,
        "clip": 1.0,
        "eval_data": data[:7],
        "name": "made",
    }
    return lockstep.Task(model=model, train_data=data, loss=loss, **(fields | changes))


@dataclass(frozen=True)
class Case:
    """A training that ends as that of one process. `changes` are the task's, `options` those of
    `train` for the split training. `two_ways`: one group along the data axis finds that the backend
    sums fastest, the other that memory does, as on a busy host.
    """

    model: Callable[[], nn.Module]
    mesh: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    precision: str = "fp32"
    rel: float = 1e-4
    two_ways: bool = False
    losses: bool = True


IDLE = {"global_batch": 4, "micro_batch": 2, "samples": 9}
"""Steps of two micro-batches; the last step of an epoch has one sample."""
STILL = {"optimizer": zero_rate}
"""The weights stay, so that the evaluation is that of one process."""
GROUPS, SHARDED = {"optimizer": two_groups}, {"update": "sharded"}
CASES = {
    "naive": Case(tied, "pipeline=2", {}, {"schedule": "naive"}),
    "gpipe": Case(tied, "pipeline=2", {}, {"schedule": "gpipe"}),
    "1f1b": Case(tied, "pipeline=2", {}, {"schedule": "1f1b"}),
    "tied weights, 3 stages": Case(tied, "pipeline=3"),
    "tied weights, replicas": Case(tied, "data=2,pipeline=2"),
    "tied weights, shards": Case(tied, "shard=3"),
    "frozen layers, stages": Case(frozen, "pipeline=2", GROUPS),
    "frozen layers, shards": Case(frozen, "shard=2", GROUPS),
    "idle shards": Case(tied, "shard=4", IDLE),
    "idle shards, replicas": Case(tied, "data=2,shard=2", IDLE),
    "sharded update, AdamW": Case(wide, "data=2,pipeline=2", GROUPS, SHARDED),
    "sharded update, clipped": Case(wide, "data=2,pipeline=2", {"clip": 0.02}, SHARDED),
    "bf16, stages": Case(tied, "pipeline=2", precision="bf16", rel=3e-2),
    "bf16, shards": Case(tied, "shard=2", precision="bf16", rel=3e-2),
    "evaluation, gpipe": Case(dropping, "pipeline=2", STILL, {"schedule": "gpipe"}, losses=False),
    "evaluation, 1f1b": Case(dropping, "pipeline=2", STILL, {"schedule": "1f1b"}, losses=False),
    "layers named by the task": Case(wide, "pipeline=3", {"parts": Parts(layers=list)}),
    "tensor parts": Case(pair, "tensor=2", {"parts": PAIR}),
    "tensor parts, replicas": Case(pair, "data=2,tensor=4", {"parts": PAIR}),
    "two sums, tensor": Case(pair, "data=2,tensor=2", {"parts": PAIR, "clip": 0.02}, two_ways=True),
    "two sums, stages": Case(pair, "data=2,pipeline=2", {"clip": 0.02}, SHARDED, two_ways=True),
}


@dataclass(frozen=True)
class Ended:
    losses: list[float]
    metrics: dict[str, float]
    sha256: str


def trained(world: lockstep.World, case: Case) -> Ended:
    losses: list[float] = []
    made = replace(
        task(case.model, **case.changes),
        on_step=lambda record: losses.append(record["loss"]),
        callbacks_on="all",
    )
    options = {"mesh": case.mesh, **case.options} if world.size > 1 else {}
    with pytest.MonkeyPatch.context() as patch:
        if case.two_ways:
            patch.setattr(reductions, "_is_quicker", lambda _, __, group: group.ranks[0] == 0)
        # torch's own sharding may send objects, a pipeline does not
        with objects_refused() if "pipeline" in case.mesh else nullcontext():
            result = train(made, world=world, precision=case.precision, **options)
    return Ended(losses, result.metrics, result.sha256)


def each_case(world: lockstep.World) -> dict[str, Ended]:
    """Those of as many ranks; on one rank, all."""
    results = {}
    for name, case in CASES.items():
        if world.size in (1, Mesh.read(case.mesh).size):
            try:
                results[name] = trained(world, case)
            except Exception as error:
                error.add_note(f"in the case {name!r}")
                raise
    return results


@cache
def results(ranks: int) -> list[dict[str, Ended]]:
    """By rank and case."""
    return on_team(each_case, ranks)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.rest if Mesh.read(case.mesh).size > 4 else ())
        for name, case in CASES.items()
    ],
)
def test_a_split_training_is_that_of_one_process(name: str) -> None:
    case, (alone,) = CASES[name], results(1)
    ranks = [rank[name] for rank in results(Mesh.read(case.mesh).size)]
    for ended in ranks:
        if case.losses:
            assert ended.losses == pytest.approx(alone[name].losses, rel=case.rel)
        assert ended.metrics == pytest.approx(alone[name].metrics, rel=case.rel)
    assert len({ended.sha256 for ended in ranks}) == 1


def test_a_stage_with_nothing_to_train_is_named() -> None:
    stages = Parts(stages=["blocks.1", "blocks.2"])
    case = Case(frozen, "pipeline=3", {"parts": stages})
    with pytest.raises(WorkerFailed, match=r"rank 1 .*\[nothing-to-train-on-rank\]"):
        run_ranks(trained, 3, (case,))


def drifting(world: lockstep.World, mesh: str) -> None:
    """On rank 3 a weight that all tensor ranks hold whole is scaled after each update."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        steps = sgd(model)

        def drift(*_: object) -> None:
            if world.rank == 3:
                with torch.no_grad():
                    model.get_parameter("0.weight").mul_(1.001)

        steps.register_step_post_hook(drift)
        return steps

    train(task(pair, parts=PAIR, optimizer=optimizer), world=world, mesh=mesh)


def partial_gradients(world: lockstep.World) -> None:
    """The PReLU's one weight gets a gradient from this rank's features only."""
    train(task(lambda: pair(nn.PReLU), parts=PAIR), world=world, mesh="tensor=2")


def divergence(world: lockstep.World, fn: Any, *args: Any) -> tuple[str, str, tuple[int, ...]]:
    with pytest.raises(ReplicaDivergence) as caught:
        fn(world, *args)
    return caught.value.code, caught.value.parameter, caught.value.ranks


def test_what_tensor_ranks_share_must_stay_equal() -> None:
    drifted = ("replicas-differ", "0.weight", (3,))
    assert on_team(divergence, 4, (drifting, "tensor=4")) == [drifted] * 4
    partial = ("replicas-differ", "2.weight", (1,))
    # torch keeps the groups of an equal mesh that a world of the same process had: no team
    assert run_ranks(divergence, 2, (partial_gradients,)) == [partial] * 2


def test_ranks_are_named_by_their_numbers_in_the_world() -> None:
    with pytest.raises(WorkerFailed) as failed:
        run_ranks(drifting, 4, ("data=2,tensor=2",))
    assert failed.value.rank in (1, 3)  # along the data axis first
    assert "[replicas-differ]" in str(failed.value)
    assert "between rank 1 and rank 3" in str(failed.value)
