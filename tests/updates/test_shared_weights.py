"""One copy of the weights for all ranks of a host: nobody notices, whatever is done to them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepWarning, ReplicaDivergence
from tests import zoo
from tests.refused import refused
from tests.step.walking import same, walk, weights
from tests.teams import on_team
from tests.updates.nets import Net, adamw, batch, trainable


class Mixed(Net):
    """With an empty parameter and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(5, 700).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.narrow.float().mean(1) + self.empty.sum()


def drawn(like: Tensor, step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(7 * rank + step)
    return torch.randn(like.shape, generator=generator).to(like.dtype) * 0.01


class Undisturbed:
    """What is done to the weights at three places of a step; here nothing. Ranks do different
    things unless a kind says otherwise.
    """

    def __init__(self, stepper: lockstep.Stepper, model: nn.Module, rank: int) -> None:
        self.stepper, self.model, self.rank = stepper, model, rank

    def before(self, step: int) -> None:
        """Before the forward."""

    def behind(self, step: int) -> None:
        """Between the backward and the update."""

    def after(self, step: int) -> None:
        """After the update."""

    def weight(self, step: int, count: int) -> int:
        return count

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return loss


class Noise(Undisturbed):
    """Stays: the owner's is everybody's from the next update on."""

    def before(self, step: int) -> None:
        with torch.no_grad():
            for parameter in trainable(self.model):
                parameter.add_(drawn(parameter, step, self.rank))


class Perturbed(Noise):
    """As SAM: up the gradient of the last step before the forward, and back after the backward."""

    def behind(self, step: int) -> None:
        with torch.no_grad():
            for parameter in trainable(self.model):
                parameter.sub_(drawn(parameter, step, self.rank))


class Replaced(Undisturbed):
    """Other memory, which the update has to leave for its own."""

    def after(self, step: int) -> None:
        for parameter in trainable(self.model):
            parameter.data = parameter.data * 0.99 + drawn(parameter, step, self.rank)


class ThroughTheOptimizer(Undisturbed):
    """A rank sees its own pieces there, and changes its own replica."""

    def after(self, step: int) -> None:
        for group in self.stepper.optimizer.param_groups:
            for piece in group["params"]:
                piece.data.mul_(0.9 - 0.1 * self.rank)


class NothingLearnt(Noise):
    """With windows that update nothing: a rank keeps its changes until one does."""

    def weight(self, step: int, count: int) -> int:
        return 0 if step in (1, 3) else count


class Overflown(Noise):
    """With a gradient that is not finite: the step is left out, and owners' changes are shared."""

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return loss * (torch.inf if step == 2 and self.rank == 1 else 1)


class Unfrozen(Noise):
    """The buckets, and so the slices, are laid anew while replicas differ."""

    def after(self, step: int) -> None:
        if step in (1, 3):
            super().before(step)
            self.model.head.requires_grad_(step == 3)  # type: ignore[union-attr, operator]


DIFFERENT = (Perturbed, Noise, Replaced, ThroughTheOptimizer)
"""Kinds by which ranks come to differ; else the comparison could not tell one copy from many."""
KINDS = (*DIFFERENT, Undisturbed, NothingLearnt, Overflown, Unfrozen)


def trace(world: lockstep.World, kind: type[Undisturbed], memory: str) -> list[Any]:
    """What a rank sees of its weights, at every place of every step."""
    model = Mixed()
    stepper = lockstep.Stepper(
        model,
        adamw(model),
        update="sharded",
        weights=memory,
        reduce="shared_memory",
        checks="start",
        clip=1.0 if kind is Overflown else None,
        world=world,
    )
    disturb = kind(stepper, model, world.rank)
    seen: list[Any] = []
    for step in range(5):
        disturb.before(step)
        for x, y in stepper.micro_batches([batch(world.rank, step)]):
            loss = disturb.loss(step, zoo.loss_sum(model(x), y))
            stepper.backward(loss, weight=disturb.weight(step, len(y)))
        seen.append(weights(model))
        disturb.behind(step)
        seen.append(weights(model))
        seen.append(str(stepper.step().loss))
        seen.append(weights(model))
        disturb.after(step)
        seen.append(weights(model))
    seen.append(stepper.optimizer_state_dict())
    return seen


def traces(world: lockstep.World, kind: type[Undisturbed]) -> tuple[list[Any], list[Any]]:
    with warnings.catch_warnings(action="ignore", category=LockstepWarning):
        return trace(world, kind, "shared"), trace(world, kind, "separate")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_done_to_weights_is_done_to_a_ranks_own(
    kind: type[Undisturbed], workers: int
) -> None:
    ranks = on_team(traces, workers, (kind,))
    for shared, separate in ranks:
        places = zip(shared, separate, strict=True)
        assert not [place for place, pair in enumerate(places) if not same(*pair)]
    if kind in DIFFERENT:
        (first, _), (second, _), *_ = ranks
        assert not same(first, second)


def anonymous(parameter: Tensor) -> int:
    """KiB of the mapping in which a parameter lies that are this process's own copies."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
                start, stop = (int(each, 16) for each in found.groups())
                inside = start <= parameter.data_ptr() < stop
            elif inside and line.startswith("Anonymous:"):
                return int(line.split()[1])
    raise AssertionError("the mapping is not there")


def steps(stepper: lockstep.Stepper, world: lockstep.World, count: int) -> None:
    for step in range(count):
        walk(stepper, [batch(world.rank, step)])


def backward(stepper: lockstep.Stepper, world: lockstep.World, step: int) -> None:
    """Walk a window; its step is still to come."""
    for x, y in stepper.micro_batches([batch(world.rank, step)]):
        stepper.backward(zoo.loss_sum(stepper.model(x), y), weight=len(y))


def stepper_of(world: lockstep.World, **options: Any) -> lockstep.Stepper:
    model = Net()
    return lockstep.Stepper(model, adamw(model), update="sharded", world=world, **options)


def own_memory(world: lockstep.World) -> None:
    stepper = stepper_of(world)
    weight = stepper.model.first.weight
    steps(stepper, world, 3)
    assert anonymous(weight) == 0
    weight.data.mul_(2)
    assert 100 <= anonymous(weight) <= 120  # 272 x 97 float32
    steps(stepper, world, 1)
    assert anonymous(weight) == 0


def test_no_rank_has_pages_of_its_own_but_those_it_wrote_to() -> None:
    on_team(own_memory, 2)


def written_back(world: lockstep.World) -> int:
    """Values are written that are there already, on one rank; and new ones, equal on all."""
    stepper = stepper_of(world, checks="full")
    for _ in range(3):
        if world.rank == 1:
            for parameter in stepper.model.parameters():
                parameter.data.copy_(parameter.data.clone())
        steps(stepper, world, 1)
        for parameter in stepper.model.parameters():
            parameter.data.mul_(0.5)
        steps(stepper, world, 1)
    return stepper.steps


def test_equal_replicas_are_equal_whoever_wrote_them() -> None:
    assert on_team(written_back, 2) == [6, 6]


class Watched:
    """A group's memory. What is given is called when one copy was allocated, and when this rank is
    about to wait for all others.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.allocated: Callable[[], object] = lambda: None
        self.waits: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def allocate_once(self, *arguments: Any) -> Any:
        allocated = self.memory.allocate_once(*arguments)
        self.allocated()
        return allocated

    def synchronize(self, place: str) -> None:
        self.waits()
        self.memory.synchronize(place)


class Late:
    """Rank 0 waits at a place to which rank 1 has come before it, until rank 1 has continued as far
    as it can: until it waits. `key` is another one in each test.
    """

    def __init__(self, world: lockstep.World, key: str) -> None:
        self._world, self._key = world, key
        self._watched = Watched(world.group.memory)

    def __enter__(self) -> Late:
        self._world.group.memory = self._watched  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.gone_on()
        self._world.group.memory = self._watched.memory

    def beginning(self) -> None:
        self._watched.allocated = self.here

    def here(self, *_: object) -> None:
        if self._world.rank == 0:
            self._world._store.wait([self._key], timedelta(minutes=1))
        else:
            self._watched.waits = self.gone_on

    def gone_on(self) -> None:
        self._world._store.set(self._key, "")


def shares_late(world: lockstep.World) -> tuple[object, object]:
    """Its slice of the weights is not there when rank 1 looks whether its replica is the same."""
    with Late(world, "has shared") as late:
        late.beginning()
        stepper = stepper_of(world, weights="shared")
    return anonymous(stepper.model.first.weight), 0


def comes_late(world: lockstep.World) -> tuple[object, object]:
    """It computes with the weights before its step."""
    with Late(world, "has stepped") as late:
        stepper = stepper_of(world, reduce="native", weights="shared")
        steps(stepper, world, 2)
        backward(stepper, world, 2)
        before = weights(stepper.model)
        late.here()
        seen = weights(stepper.model)
        stepper.step()
    return seen, before


def updates_late(world: lockstep.World) -> tuple[object, object]:
    with Late(world, "has updated") as late:
        stepper = stepper_of(world, weights="shared")
        stepper.optimizer.register_step_pre_hook(late.here)
        steps(stepper, world, 1)
        seen = weights(stepper.model)
    world.barrier()
    return seen, weights(stepper.model)


@pytest.mark.parametrize("late", [shares_late, comes_late, updates_late])
def test_all_wait_for_a_rank_that_is_late(late: Callable[..., tuple[object, object]]) -> None:
    for seen, right in on_team(late, 2):
        assert same(seen, right)


def rewritten(world: lockstep.World, kind: str) -> tuple[int, ...]:
    """All weights are written, as they are; and one number of them changed."""
    stepper = stepper_of(world, weights="shared", checks="full")
    model = stepper.model
    steps(stepper, world, 3)  # by now buckets lie in the order of gradients
    with torch.no_grad():
        for parameter in (model.first.weight, model.head.weight):
            parameter.copy_(parameter.clone())
        if kind == "elsewhere":
            weight = model.first.weight
            page = -weight.data_ptr() % 4096 // 4 + 1024 * world.rank
            weight.view(-1)[page : page + 1024] = 0
        elif world.rank == 1:
            changed = model.first if kind == "last page" else model.head
            changed.weight.view(-1)[-1] += 1.0
    with pytest.raises(ReplicaDivergence) as caught:
        steps(stepper, world, 1)
    return caught.value.ranks


@pytest.mark.parametrize("kind", ["last page", "other pages", "elsewhere"])
def test_one_number_among_many_copied_pages_is_found(kind: str) -> None:
    """Also the same bytes in different pages."""
    assert on_team(rewritten, 2, args=(kind,)) == [(1,), (1,)]


def through_an_old_graph(world: lockstep.World) -> None:
    stepper = stepper_of(world)
    old = stepper.model(batch(0, 0)[0]).sum()
    steps(stepper, world, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def elsewhere(world: lockstep.World) -> None:
    memory, world.group.memory = world.group.memory, None  # as where ranks are on several hosts
    try:
        with refused("weights-not-shareable"):
            stepper_of(world, weights="shared", reduce="native")
        steps(stepper_of(world, reduce="native"), world, 2)
    finally:
        world.group.memory = memory


def saved(world: lockstep.World) -> None:
    for memory in ("shared", "separate"):
        model = Mixed()
        lockstep.Stepper(model, adamw(model), update="sharded", weights=memory, world=world)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert same(torch.load(file), dict(model.state_dict()))


@pytest.mark.parametrize("check", [through_an_old_graph, elsewhere, saved])
def test_of_two_ranks(check: Callable[[lockstep.World], None]) -> None:
    """Autograd sees an update; a refusal; weights of several dtypes can be saved."""
    on_team(check, 2)
