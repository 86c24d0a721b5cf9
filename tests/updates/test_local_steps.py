"""Local steps against a simulation in one process; what a meeting tells, costs and refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lockstep
from lockstep.checkpoints import files
from lockstep.config.parallelism import Outer
from lockstep.errors import LockstepError, ReplicaDivergence
from lockstep.step.step_result import StepResult
from lockstep.updates.local_steps import LocalSteps, fragment_offset, fragments_of
from lockstep.world.world import World
from tests.refused import refused
from tests.step.walking import same, walk
from tests.teams import on_team
from tests.updates.nets import sgd, trainable

Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Layers of different sizes, a scalar, a frozen parameter and one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(45, 17)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(17), requires_grad=False)
        self.head = nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(
            (self.first(self.conv(x).flatten(1)) * self.scale + self.frozen).tanh()
        )
        return y


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-2)


def batch(rank: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 2, 3, 3, generator=generator), torch.randint(
        0, 3, (rows,), generator=generator
    )


def rows_of(rank: int, step: int) -> int:
    """Other weights on every rank; rank 1 has nothing in every third step."""
    return 0 if (rank == 1 and step % 3 == 1) else 1 + (2 * rank + step) % 4


def step_of(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> float:
    rows = rows_of(rank, step)
    if rows:
        x, y = batch(rank, step, rows)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return float(rows)


def one_step(stepper: lockstep.Stepper, world: World, step: int) -> StepResult:
    rows = rows_of(world.rank, step)
    return walk(stepper, [batch(world.rank, step, rows)] if rows else [])


State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def ranks_train(
    world: World, make: Make, steps: int, how: dict[str, Any]
) -> tuple[State, list[bool], list[int]]:
    """The weights, whether all were together after each step, and the bytes sent until then."""
    world.compute_deterministically()
    model = Net()
    stepper = lockstep.Stepper(model, make(model), reduce="native", **how)
    results = [one_step(stepper, world, step) for step in range(steps)]
    together = [result.synchronized for result in results]
    return state_of(model), together, [result.bytes_sent for result in results]


@dataclass
class Simulated:
    """Replicas in one process, whose meetings are written out parameter by parameter. `parts`
    lists the parameters of each fragment.
    """

    size: int
    make: Make
    every: int
    outer: Outer
    parts: list[list[str]]

    def __post_init__(self) -> None:
        self.models = [Net() for _ in range(self.size)]
        self.optimizers = [self.make(model) for model in self.models]
        self.start = {
            name: value.detach().clone() for name, value in self.models[0].named_parameters()
        }
        self.momentum = {name: torch.zeros_like(value) for name, value in self.start.items()}
        self.weights = [[0.0] * self.size for _ in self.parts]
        self.flying: list[tuple[int, int, dict[str, Tensor]]] = []

    def run(self, steps: int) -> None:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                weight = step_of(model, optimizer, rank, step)
                for weights in self.weights:
                    weights[rank] += weight
            taken = step + 1
            self.land(taken)
            for part in range(len(self.parts)):
                if taken % self.every == (part + 1) * self.every // len(self.parts) % self.every:
                    self.flying.append((part, taken + self.outer.overlap, self.movements(part)))
                    if not self.outer.overlap:
                        self.land(taken)

    def movements(self, part: int) -> dict[str, Tensor]:
        weights, self.weights[part] = self.weights[part], [0.0] * self.size
        parameters = [dict(model.named_parameters()) for model in self.models]
        return {
            name: (
                sum(
                    (
                        weight * (self.start[name] - each[name].detach())
                        for weight, each in zip(weights, parameters, strict=True)
                    ),
                    0.0 * self.start[name],
                )
                / sum(weights)
            )
            for name in self.parts[part]
        }

    def land(self, taken: int) -> None:
        for flight in [each for each in self.flying if each[1] <= taken]:
            self.flying.remove(flight)
            for name, movement in flight[2].items():
                if self.outer.kind == "nesterov":
                    self.momentum[name] = self.outer.momentum * self.momentum[name] + movement
                    movement = self.outer.lr * (
                        movement + self.outer.momentum * self.momentum[name]
                    )
                self.start[name] = self.start[name] - movement
                for model in self.models:
                    parameter = dict(model.named_parameters())[name]
                    keep = 0.5 if self.outer.overlap else 0.0
                    parameter.data = keep * parameter.data + (1 - keep) * self.start[name]


def check_simulated(expected: Simulated, states: Sequence[State]) -> None:
    for model, state in zip(expected.models, states, strict=True):
        ours = {name: state[name] for name, _ in model.named_parameters()}
        theirs = {name: value.detach() for name, value in model.named_parameters()}
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [adamw, pytest.param(sgd, marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    ("size", "every", "outer"),
    [
        (1, 1, "average"),
        (2, 1, "average"),
        (2, 3, "average"),
        (3, 2, "nesterov"),
        (3, 4, "nesterov:lr=0.5,momentum=0.8"),
        (8, 5, "average"),
    ],
)
def test_meetings_are_those_of_the_simulation(
    size: int, every: int, outer: str, make: Make
) -> None:
    ours = on_team(ranks_train, size, (make, 7, {"sync_every": every, "outer": outer}))
    names = [name for name, value in Net().named_parameters() if value.requires_grad]
    expected = Simulated(size, make, every, Outer.read(outer), [names])
    expected.run(7)
    check_simulated(expected, [state for state, _, _ in ours])
    for _, together, _ in ours:
        assert together == [(step + 1) % every == 0 for step in range(7)]


def parts_of(world: World, count: int) -> list[list[str]]:
    model = Net()
    outer = f"average:fragments={count}"
    stepper = lockstep.Stepper(
        model, sgd(model), sync_every=count, outer=outer, reduce="native", world=world
    )
    assert isinstance(stepper.update, LocalSteps)
    return [
        [span.name for index in part for span in stepper.reducer.buckets[index].spans]
        for part in stepper.update._fragments
    ]


@pytest.mark.parametrize("overlap", [0, 1])
def test_fragments_meet_one_after_the_other_also_while_steps_go_on(overlap: int) -> None:
    outer = f"nesterov:fragments=2,overlap={overlap}"
    (parts,) = on_team(parts_of, 1, (2,))
    assert len(parts) == 2
    ours = on_team(ranks_train, 3, (sgd, 9, {"sync_every": 4, "outer": outer}))
    expected = Simulated(3, sgd, 4, Outer.read(outer), parts)
    expected.run(9)
    check_simulated(expected, [state for state, _, _ in ours])
    assert not any(any(together) for _, together, _ in ours)


def test_between_meetings_nothing_is_sent_and_a_meeting_costs_one_step() -> None:
    local = on_team(ranks_train, 2, (sgd, 8, {"sync_every": 4}))[0][2]
    summed = on_team(ranks_train, 2, (sgd, 8, {}))[0][2]
    assert local[2] == local[1] == local[0]
    assert local[6] == local[5] == local[4] == local[3] > local[2]
    assert (local[7] - local[3]) <= (summed[7] - summed[6]) + 64  # the facts of a meeting


def test_every_fragment_synchronizes_at_a_step_of_its_own() -> None:
    assert [fragment_offset(fragment, 2, 8) for fragment in range(2)] == [4, 0]
    assert [fragment_offset(fragment, 3, 10) for fragment in range(3)] == [3, 6, 0]
    assert fragment_offset(0, 1, 5) == 0


def test_fragments_are_runs_of_about_equal_size() -> None:
    assert fragments_of([100, 1, 1], 3) == [[0], [1, 2]]
    assert fragments_of([5], 4) == [[0]]
    assert fragments_of([1] * 7, 3) == [[0, 1], [2, 3, 4], [5, 6]]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)
        self.register_buffer("constant", torch.tensor([0.1, math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(x))
        return y


def statistics(world: World) -> tuple[State, State]:
    """What this rank has just before a meeting after two steps, and at it."""
    model = Normed()
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=3)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * world.rank + step)
        batches = [torch.randn(4, 3, generator=generator) + world.rank]
        for x in stepper.micro_batches(batches):
            stepper.backward(model(x).sum(), weight=float(1 + world.rank))
        assert not stepper.step().synchronized
    before = state_of(model)
    stepper.synchronize()
    assert stepper.synchronized
    return before, state_of(model)


def test_statistics_move_by_their_weighted_mean_and_constants_not_at_all() -> None:
    ranks = on_team(statistics, 3)
    for name in ("norm.running_mean", "norm.running_var"):
        mean = sum((rank + 1) * before[name] for rank, (before, _) in enumerate(ranks)) / 6
        for _, after in ranks:
            torch.testing.assert_close(after[name], mean)
            assert torch.equal(after[name], ranks[0][1][name])
    assert all(after["norm.num_batches_tracked"] == 2 for _, after in ranks)
    assert all(torch.equal(after["constant"], torch.tensor([0.1, math.inf])) for _, after in ranks)


def nine_steps(world: World) -> tuple[list[float], list[int], list[int]]:
    """The learning rate after each step, the steps after which all were together, and those after
    which a stop was heard. Rank 1 asks to stop in the first; all meet after step 4 too.
    """
    model = Net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    stepper = lockstep.Stepper(model, optimizer, scheduler=scheduler, sync_every=3)
    rates, together, stops = [], [], []
    for step in range(9):
        if world.rank == 1 and step == 0:
            stepper.request_stop()
        if world.rank == 1 and step == 7:  # a step that this rank alone skips
            for x, _ in stepper.micro_batches([batch(world.rank, step, 2)]):
                stepper.backward(model(x).sum() * math.nan, weight=2)
            result = stepper.step()
        else:
            result = one_step(stepper, world, step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        together += [step] * result.synchronized
        stops += [step] * result.stop
        if step == 4:
            stepper.synchronize()
    return rates, together, stops


def test_ranks_agree_on_learning_rates_and_hear_of_a_stop_where_they_meet() -> None:
    """Also a rank that has nothing, or skips a step, and after a meeting in between."""
    rates = [0.1 / 2**step for step in range(1, 10)]
    assert on_team(nine_steps, 2) == [(rates, [2, 7], [2, 7])] * 2


def shares(world: World) -> tuple[int, ...]:
    model = nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(11, 2))
    loader = lockstep.Loader(data, global_batch=11, micro_batch=3)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
    (window,) = [window for epoch in loader.epochs(1) for window in epoch]
    for (x,) in stepper.micro_batches(window):
        stepper.backward(model(x).sum(), weight=len(x))
    return stepper.step().samples_by_rank


def test_who_walked_how_many_samples_is_known_without_a_message() -> None:
    assert on_team(shares, 3) == [(6, 3, 2)] * 3


def test_post_local_steps_begin_after_steps_of_summed_gradients() -> None:
    how = {"sync_every": 2, "outer": "average:after=3"}
    together = on_team(ranks_train, 2, (sgd, 6, how))[0][1]
    assert together == [True, True, True, False, True, False]
    summed, three = (on_team(ranks_train, 2, (sgd, 3, method))[0] for method in ({}, how))
    assert same(three[0], summed[0])


def unfreezes(world: World, when: int) -> str | State:
    """The weights, or the code of the error."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = lockstep.Stepper(model, optimizer, sync_every=2, outer="nesterov")
    for step in range(4):
        if step == when:
            model.frozen.requires_grad_(True)
            model.conv.requires_grad_(False)
        try:
            one_step(stepper, world, step)
        except LockstepError as error:
            return error.code
    return state_of(model)


def test_layers_may_be_frozen_where_all_are_together_and_nowhere_else() -> None:
    first, second = on_team(unfreezes, 2, (2,))
    assert isinstance(first, dict)
    assert same(first, second)
    assert on_team(unfreezes, 2, (3,)) == ["layers-changed-between-meetings"] * 2


def damaged(world: World) -> None:
    model = Net()
    stepper = lockstep.Stepper(model, sgd(model), sync_every=2)
    one_step(stepper, world, 0)
    assert isinstance(stepper.update, LocalSteps)
    if world.rank == 1:
        stepper.update._step.starts[0][0] += 1
    with refused("replicas-differ", ReplicaDivergence, where="between rank 0 and rank 1"):
        one_step(stepper, world, 1)
    # the step before the meeting was taken, and is counted
    assert (stepper.steps, stepper.update.taken) == (2, 2)


def test_replicas_that_differ_after_a_meeting_are_named() -> None:
    on_team(damaged, 2)


def saved(world: World, folder: Path, how: dict[str, Any], until: int, steps: int) -> State:
    """Train to `steps`, resuming what is in the folder, saving at `until`."""
    world.compute_deterministically()
    model = Net()
    stepper = lockstep.Stepper(model, adamw(model), **how)
    checkpoints = lockstep.Checkpoints(folder, stepper, every=until)
    checkpoints.resume()
    while stepper.steps < steps:
        one_step(stepper, world, stepper.steps)
        if stepper.steps == until:
            checkpoints.save()
    checkpoints.close()
    return state_of(model)


def disturbed(
    world: World, folder: Path, how: dict[str, Any], until: int, steps: int
) -> tuple[State, State]:
    """Trained without a break, and with one at `until`."""
    undisturbed = saved(world, folder / "a", how, until, steps)
    saved(world, folder / "b", how, until, until)
    return undisturbed, saved(world, folder / "b", how, until, steps)


WAYS = ("nesterov", "nesterov:fragments=2,overlap=1", "average:after=4")
MORE_WAYS = ("average", "nesterov:fragments=2", "average:after=6")


@pytest.mark.parametrize("until", [5, pytest.param(6, marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    "outer", [*WAYS, *(pytest.param(outer, marks=pytest.mark.rest) for outer in MORE_WAYS)]
)
def test_a_training_resumes_between_meetings_as_if_nothing_had_been(
    outer: str, until: int, tmp_path: Path
) -> None:
    how = {"sync_every": 3, "outer": outer, "reduce": "native"}
    for before, after in on_team(disturbed, 3, (tmp_path, how, until, 9)):
        assert same(before, after)


@pytest.mark.parametrize(
    ("then", "until"), [(1, 6), (4, 5), pytest.param(2, 5, marks=pytest.mark.rest)]
)
def test_with_more_or_fewer_ranks_it_resumes_from_where_all_agreed(
    then: int, until: int, tmp_path: Path
) -> None:
    how = {"sync_every": 3, "outer": "nesterov", "reduce": "native"}
    on_team(saved, 3, (tmp_path, how, until, until))
    met = on_team(saved, then, (tmp_path, how, 9, 9))
    assert all(same(state, met[0]) for state in met)
    assert all(value.isfinite().all() for value in met[0].values())


def test_a_checkpoint_holds_the_model_that_all_agreed_on(tmp_path: Path) -> None:
    """Two steps after a meeting it is that of the meeting, and no rank's own."""
    how = {"sync_every": 3, "reduce": "native"}
    agreed = on_team(saved, 2, (tmp_path / "a", how, 3, 3))[0]
    on_team(saved, 2, (tmp_path / "b", how, 5, 5))
    kept = files.read(tmp_path / "b" / "step-0000005").tensors
    assert all(torch.equal(kept[name], value) for name, value in agreed.items())


def test_another_method_and_the_wrapper_are_refused(tmp_path: Path) -> None:
    with lockstep.init(backend="gloo") as world:
        saved(world, tmp_path, {"sync_every": 3, "outer": "nesterov"}, 3, 3)
        model = Net()
        stepper = lockstep.Stepper(model, adamw(model))
        with refused("another-training") as caught:
            lockstep.Checkpoints(tmp_path, stepper).resume()
        assert "sync_every=3, outer=nesterov" in caught.value.values["differences"]
        with refused("needs-bare-module", option="sync_every=2"):
            wrapped = lockstep.DistributedDataParallel(model)
            lockstep.Stepper(wrapped, sgd(model), sync_every=2)


@pytest.mark.parametrize(
    "compress",
    ["int8", *(pytest.param(kind, marks=pytest.mark.rest) for kind in ("bf16", "powersgd:2"))],
)
def test_what_travels_at_a_meeting_may_be_compressed_and_what_is_left_out_is_kept(
    compress: str, tmp_path: Path
) -> None:
    how = {"sync_every": 2, "outer": "nesterov", "compress": compress}
    (undisturbed, resumed), (other, _) = on_team(disturbed, 2, (tmp_path, how, 5, 8))
    assert same(undisturbed, other), "they have met in the last step"
    assert same(undisturbed, resumed)
    uncompressed = on_team(saved, 2, (tmp_path / "c", {**how, "compress": None}, 5, 8))[0]
    assert not same(undisturbed, uncompressed)
