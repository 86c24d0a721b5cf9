"""One copy of the weights for all ranks of a host: nobody notices, whatever is done to the weights
between updates.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import ReplicaDivergence
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.updates.test_sharded import Net, adamw, batch, bits, same


class Mixed(Net):
    """With an empty parameter and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(5, 700).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.narrow.float().mean(1) + self.empty.sum()


def each(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def drawn(like: Tensor, *key: int) -> Tensor:
    generator = torch.Generator().manual_seed(
        sum(7**place * each for place, each in enumerate(key))
    )
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


class EmaSwap(Undisturbed):
    """Averages of this rank's own are swapped in, looked at, and swapped back."""

    def after(self, step: int) -> None:
        kept = bits(self.model)
        if step == 0:
            self.averages = kept
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter.detach() * (1 + self.rank), 0.1)
            parameter.data.copy_(average)
        self.seen = self.model(batch(self.rank, step)[0]).detach()
        for value, parameter in zip(kept, self.model.parameters(), strict=True):
            parameter.data.copy_(value)


class Perturbed(Undisturbed):
    """As SAM: up the gradient of the last step before the forward, and back after the backward."""

    def before(self, step: int) -> None:
        self.away = [drawn(parameter, step, self.rank) for parameter in each(self.model)]
        with torch.no_grad():
            for parameter, away in zip(each(self.model), self.away, strict=True):
                parameter.add_(away)

    def behind(self, step: int) -> None:
        with torch.no_grad():
            for parameter, away in zip(each(self.model), self.away, strict=True):
                parameter.sub_(away)


class Noise(Undisturbed):
    """Stays: the owner's is everybody's from the next update on."""

    def before(self, step: int) -> None:
        for parameter in each(self.model):
            parameter.data.add_(drawn(parameter, step, self.rank))


class OneRank(Undisturbed):
    def after(self, step: int) -> None:
        if self.rank == 1 and step % 2:
            with torch.no_grad():
                for parameter in each(self.model):
                    parameter.mul_(0.9)


class BehindTheBackward(Undisturbed):
    def behind(self, step: int) -> None:
        for parameter in each(self.model):
            parameter.data.clamp_(-0.1 - 0.01 * self.rank, 0.1)


class Loaded(Undisturbed):
    def after(self, step: int) -> None:
        state = {
            name: value + drawn(value, step) for name, value in self.model.state_dict().items()
        }
        self.model.load_state_dict(state)


class Initialised(Undisturbed):
    def before(self, step: int) -> None:
        if step == 2:
            torch.manual_seed(self.rank)
            nn.init.normal_(self.model.first.weight)  # type: ignore[union-attr, arg-type]


class Replaced(Undisturbed):
    """Other memory, which the update has to leave for its own."""

    def after(self, step: int) -> None:
        for parameter in each(self.model):
            parameter.data = parameter.data * 0.99 + drawn(parameter, step, self.rank)


class Overwritten(Undisturbed):
    """The same as Replaced, in place."""

    def after(self, step: int) -> None:
        for parameter in each(self.model):
            parameter.data.copy_(parameter.data * 0.99 + drawn(parameter, step, self.rank))


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


KINDS: tuple[type[Undisturbed], ...] = (
    Undisturbed,
    EmaSwap,
    Perturbed,
    Noise,
    OneRank,
    BehindTheBackward,
    Loaded,
    Initialised,
    Replaced,
    Overwritten,
    ThroughTheOptimizer,
    NothingLearnt,
    Overflown,
    Unfrozen,
)


def trace(world: lockstep.World, kind: type[Undisturbed], weights: str) -> list[Any]:
    """What a rank sees of its weights, at every place of every step."""
    model = Mixed()
    stepper = lockstep.Stepper(
        model,
        adamw(model),
        update="sharded",
        weights=weights,
        reduce="shared_memory",
        checks="start",
        clip=1.0 if kind is Overflown else None,
        world=world,
    )
    disturb = kind(stepper, model, world.rank)
    found = []
    for step in range(5):
        disturb.before(step)
        for x, y in stepper.micro_batches([batch(world.rank, step)]):
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            loss = disturb.loss(step, loss) if isinstance(disturb, Overflown) else loss
            count = disturb.weight(step, len(y)) if isinstance(disturb, NothingLearnt) else len(y)
            stepper.backward(loss, weight=count)
        found.append(bits(model))
        disturb.behind(step)
        found.append(bits(model))
        found.append(str(stepper.step().loss))
        found.append(bits(model))
        disturb.after(step)
        found.append([bits(model), getattr(disturb, "seen", 0)])
    found.append(stepper.optimizer_state_dict())
    return found


def traces(world: lockstep.World) -> dict[tuple[str, str], list[Any]]:
    return {
        (kind.__name__, weights): trace(world, kind, weights)
        for kind, weights in itertools.product(KINDS, ("shared", "separate"))
    }


@cache
def every(workers: int) -> list[dict[tuple[str, str], list[Any]]]:
    return run_ranks(traces, workers)


@pytest.mark.filterwarnings("ignore::lockstep.errors.LockstepWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_done_to_weights_is_done_to_a_ranks_own(
    kind: type[Undisturbed], workers: int
) -> None:
    for found in every(workers):
        for place, (ours, theirs) in enumerate(
            zip(found[kind.__name__, "shared"], found[kind.__name__, "separate"], strict=True)
        ):
            assert same(ours, theirs), place


def test_other_memory_is_as_good_as_other_values() -> None:
    for found in every(2):
        assert same(found["Replaced", "shared"], found["Overwritten", "shared"])


def test_the_ranks_of_a_kind_do_different_things() -> None:
    """Else the test above could not tell one copy from many."""
    for kind in (Perturbed, Noise, OneRank, Replaced, ThroughTheOptimizer):
        one, other = (found[kind.__name__, "shared"] for found in every(2))
        assert any(not same(ours, theirs) for ours, theirs in zip(one, other, strict=True)), kind


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
        for x, y in stepper.micro_batches([batch(world.rank, step)]):
            loss = nn.functional.cross_entropy(stepper.model(x), y, reduction="sum")
            stepper.backward(loss, weight=len(y))
        stepper.step()


def stepper_of(world: lockstep.World, **options: Any) -> lockstep.Stepper:
    model = Net()
    return lockstep.Stepper(model, adamw(model), update="sharded", world=world, **options)


def own_memory(world: lockstep.World) -> list[int]:
    stepper = stepper_of(world)
    weight = stepper.model.first.weight
    steps(stepper, world, 3)
    found = [anonymous(weight)]
    weight.data.mul_(2)
    found.append(anonymous(weight))
    steps(stepper, world, 1)
    return [*found, anonymous(weight)]


def test_no_rank_has_pages_of_its_own_but_those_it_wrote_to() -> None:
    for before, changed, after in run_ranks(own_memory, 2):
        assert before == after == 0
        assert 100 <= changed <= 120  # 272 x 97 float32


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
    assert run_ranks(written_back, 2) == [6, 6]


def looked_at_late(world: lockstep.World) -> bool:
    """The backend completes the sums while this rank is between the backward and the step."""
    stepper = stepper_of(world, reduce="native")
    steps(stepper, world, 2)
    for x, y in stepper.micro_batches([batch(world.rank, 2)]):
        loss = nn.functional.cross_entropy(stepper.model(x), y, reduction="sum")
        stepper.backward(loss, weight=len(y))
    before, quiet = bits(stepper.model), True
    for _ in range(2000 if world.rank == 1 else 0):
        quiet = quiet and same(bits(stepper.model), before)
    stepper.step()
    return quiet and not same(bits(stepper.model), before)


def test_weights_change_in_no_ranks_hands() -> None:
    assert run_ranks(looked_at_late, 2) == [True, True]


class Watched:
    """A group's memory. What is given is called when one copy was allocated, and when this rank is
    about to wait for all others.
    """

    def __init__(self, world: lockstep.World) -> None:
        self._memory = world.group.memory
        world.group.memory = self  # type: ignore[assignment]
        self.allocated: Callable[[], object] = lambda: None
        self.waits: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def allocate_once(self, *arguments: Any) -> Any:
        found = self._memory.allocate_once(*arguments)  # type: ignore[union-attr]
        self.allocated()
        return found

    def synchronize(self, place: str) -> None:
        self.waits()
        self._memory.synchronize(place)  # type: ignore[union-attr]


class Late:
    """Rank 0, at a place to which rank 1 has come before it, and from which rank 1 has gone on as
    far as it can: until it waits.
    """

    def __init__(self, world: lockstep.World) -> None:
        self._world, self._memory = world, Watched(world)

    def beginning(self) -> None:
        self._memory.allocated = self.here

    def here(self, *_: object) -> None:
        if self._world.rank == 0:
            self._world._store.wait(["gone on"], timedelta(minutes=1))
        else:
            self._memory.waits = self.gone_on

    def gone_on(self) -> None:
        self._world._store.set("gone on", "")


def shares_late(world: lockstep.World) -> tuple[object, object]:
    """Its slice of the weights is not there when rank 1 looks whether its replica is the same."""
    late = Late(world)
    late.beginning()
    stepper = stepper_of(world, weights="shared")
    late.gone_on()
    return anonymous(stepper.model.first.weight), 0


def comes_late(world: lockstep.World) -> tuple[object, object]:
    """It computes with the weights before its step."""
    late = Late(world)
    stepper = stepper_of(world, reduce="native", weights="shared")
    steps(stepper, world, 2)
    for x, y in stepper.micro_batches([batch(world.rank, 2)]):
        loss = nn.functional.cross_entropy(stepper.model(x), y, reduction="sum")
        stepper.backward(loss, weight=len(y))
    before = bits(stepper.model)
    late.here()
    seen = bits(stepper.model)
    stepper.step()
    late.gone_on()
    return seen, before


def updates_late(world: lockstep.World) -> tuple[object, object]:
    late = Late(world)
    stepper = stepper_of(world, weights="shared")
    stepper.optimizer.register_step_pre_hook(late.here)
    steps(stepper, world, 1)
    seen = bits(stepper.model)
    late.gone_on()
    world.barrier()
    return seen, bits(stepper.model)


@pytest.mark.parametrize("late", [shares_late, comes_late, updates_late])
def test_all_wait_for_a_rank_that_is_late(late: Callable[..., tuple[object, object]]) -> None:
    for seen, right in run_ranks(late, 2):
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
    try:
        steps(stepper, world, 1)
    except ReplicaDivergence as error:
        return error.ranks
    return ()


@pytest.mark.parametrize("kind", ["last page", "other pages", "elsewhere"])
def test_one_number_among_many_copied_pages_is_found(kind: str) -> None:
    """Also the same bytes in different pages."""
    assert run_ranks(rewritten, 2, args=(kind,)) == [(1,), (1,)]


def through_an_old_graph(world: lockstep.World) -> str:
    stepper = stepper_of(world)
    old = stepper.model(batch(0, 0)[0]).sum()
    steps(stepper, world, 1)
    try:
        old.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_update_is_seen_by_autograd() -> None:
    for said in run_ranks(through_an_old_graph, 2):
        assert "modified by an inplace operation" in said


def elsewhere(world: lockstep.World) -> None:
    world.group.memory = None  # as where ranks are on several hosts
    with refused("weights-not-shareable"):
        stepper_of(world, weights="shared", reduce="native")
    steps(stepper_of(world, reduce="native"), world, 2)


def test_where_it_cannot_be_it_is_refused_and_auto_does_without() -> None:
    run_ranks(elsewhere, 2)


def saved(world: lockstep.World) -> None:
    for weights in ("shared", "separate"):
        model = Mixed()
        lockstep.Stepper(model, adamw(model), update="sharded", weights=weights, world=world)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        for name, value in torch.load(file).items():
            assert torch.equal(value, model.state_dict()[name]), name


def test_weights_of_several_dtypes_can_be_saved() -> None:
    run_ranks(saved, 2)


def alone(world: lockstep.World) -> int:
    stepper = stepper_of(world, weights="shared")
    steps(stepper, world, 2)
    return stepper.steps


def test_one_rank_has_its_weights_to_itself() -> None:
    assert run_ranks(alone, 1) == [2]
