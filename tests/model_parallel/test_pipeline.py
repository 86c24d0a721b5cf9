"""Pipelines over real ranks: the gradients of one process; what goes wrong; the step clock."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import World
from lockstep.config.parts import Parts
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.schedules import NAMES
from lockstep.model_parallel.split import cut
from lockstep.model_parallel.stages import stage_module
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock, StepTimes
from lockstep.testing import run_ranks
from tests.model_parallel.layered import Block, Turned, objects_refused, reader, sentences
from tests.teams import on_team

CPU = torch.device("cpu")
every_schedule = pytest.mark.parametrize("schedule", NAMES)


def pipelined(
    world: World, model: nn.Module, schedule: str, parts: Parts | None = None, **options: Any
) -> Pipeline:
    """This rank's stage of a model that all ranks have."""
    layers, group = layers_of(model, parts), world.group
    stage = stage_module(layers, cut(layers, group.size, parts)[group.rank])
    return Pipeline(stage, group, CPU, schedule, **options)


def weighted(number: int, output: Tensor) -> Tensor:
    """Another loss in each micro-batch, so that none can be taken for another."""
    return ((number + 1) * output.sin()).sum()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients(
    model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], times: int = 1
) -> dict[str, Tensor]:
    """Those of one process."""
    for _ in range(times):
        for number, arguments in enumerate(inputs):
            weighted(number, model(*arguments)).backward()
    return gradients_of(model)


@cache
def gradients_of_windows(count: int, last: int) -> dict[str, Tensor]:
    """The same for all schedules."""
    return gradients(reader(), sentences(count, last), times=2)


def compare(pipeline: Pipeline, expected: dict[str, Tensor], rtol: float = 1e-8) -> None:
    """In float64 the order of additions does not matter, so that every difference is a mistake."""
    for name, parameter in pipeline.stage.named_parameters():
        assert (parameter.grad is not None) == (name in expected), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad,
                expected[name],
                rtol=rtol,
                atol=rtol / 100,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def trains(world: World, schedule: str) -> list[str]:
    """Windows of several lengths, each twice. Returns the warnings."""
    messages = []
    for count, last in ((1, 3), (7, 2), (5, 3)):
        inputs = sentences(count, last)
        pipeline = pipelined(world, reader(), schedule)
        fired: Counter[int] = Counter()
        for parameter in pipeline.stage.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, fired=fired: fired.update([id(parameter)])
            )
        with warnings.catch_warnings(record=True) as caught, objects_refused():
            warnings.simplefilter("always", LockstepWarning)
            for _ in range(2):
                pipeline.train(inputs, weighted)
        assert [*fired.values()] == [2 * count] * len([*pipeline.stage.parameters()])
        messages += [
            str(warning.message) for warning in caught if warning.category is LockstepWarning
        ]
        compare(pipeline, gradients_of_windows(count, last))
    return messages


@every_schedule
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_one_process_and_nothing_is_pickled(
    ranks: int, schedule: str
) -> None:
    first, *others = on_team(trains, ranks, (schedule,))
    assert not any(others)  # rank 0 speaks for all
    if ranks == 3 and schedule == "1f1b":
        assert len(first) == 2  # once for a pipeline, of which two have such windows
    elif ranks == 1 or schedule != "1f1b":
        assert first == []


def evaluates(world: World, schedule: str) -> None:
    inputs = sentences(7, 2)
    model = reader(dropout=0.5)
    pipeline = pipelined(world, model, schedule)
    pipeline.stage.eval()
    outputs: dict[int, Tensor] = {}
    with objects_refused():
        pipeline.forward(inputs, outputs.__setitem__)
    model.eval()
    assert sorted(outputs) == (list(range(7)) if world.rank == world.size - 1 else [])
    for number, output in outputs.items():
        torch.testing.assert_close(output, model(*inputs[number]))
        assert not output.requires_grad
    pipeline.stage.train()  # and back to training
    assert not gradients_of(pipeline.stage)
    pipeline.train(inputs[:6], weighted)
    pipeline.forward(inputs, outputs.__setitem__)
    pipeline.train([], weighted)


@every_schedule
@pytest.mark.parametrize("ranks", [1, 3])
def test_evaluation_gives_each_output_with_its_number(ranks: int, schedule: str) -> None:
    on_team(evaluates, ranks, (schedule,))


def seeded(number: int, stage: int) -> None:
    torch.manual_seed(100 * number + stage)


def drops_out(world: World, schedule: str) -> None:
    inputs = sentences(6)
    pipeline = pipelined(world, reader(dropout=0.5), schedule)
    torch.manual_seed(world.rank)
    pipeline.train(inputs, weighted, seeded)
    layers = layers_of(reader(dropout=0.5))
    stages = [stage_module(layers, part) for part in cut(layers, world.size)]
    for number, (x,) in enumerate(inputs):
        for index, stage in enumerate(stages):
            seeded(number, index)
            x = stage(x)
        weighted(number, x).backward()
    compare(pipeline, gradients_of(layers.model))


@every_schedule
def test_dropout_follows_the_seed_of_micro_batch_and_stage(schedule: str) -> None:
    on_team(drops_out, 2, (schedule,))


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])


def in_bf16(world: World) -> None:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    inputs = [(torch.randn(4, 6, generator=draw),) for _ in range(4)]
    pipeline = pipelined(world, linears(), "1f1b", autocast=autocast)
    dtypes = []
    pipeline.stage.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    pipeline.train(inputs, lambda number, output: weighted(number, output.float()))
    assert set(dtypes) == {torch.bfloat16}
    model = linears()
    for number, arguments in enumerate(inputs):
        with autocast():
            output = model(*arguments)
        weighted(number, output.float()).backward()
    compare(pipeline, gradients_of(model), rtol=1e-2)


def test_activations_of_bf16_travel() -> None:
    on_team(in_bf16, 2)


class Shift(nn.Module):
    """Ids to ids: no parameter, and nothing with a gradient to send back."""

    def forward(self, ids: Tensor) -> Tensor:
        return (ids + 1) % 11


class Adds(nn.Module):
    """The gradients of both parameters are one tensor to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.ones(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def adding() -> nn.Module:
    torch.manual_seed(0)
    pairs = [(nn.Linear(6, 6), Adds()) for _ in range(4)]
    return nn.Sequential(*chain.from_iterable(pairs)).double()


def views() -> nn.Module:
    torch.manual_seed(0)
    turned = (Turned(), Turned(), nn.Flatten(0, 1))
    flat = (nn.Linear(4, 4), Turned(), nn.Flatten(1), nn.Identity())
    return nn.Sequential(nn.Linear(4, 4), *turned, *flat).double()


def trains_alike(
    world: World, schedule: str, make: Callable[[], nn.Module], size: list[int], begins: list[str]
) -> None:
    inputs = [(torch.full(size, float(number), dtype=torch.float64),) for number in range(4)]
    for begin in begins:
        pipeline = pipelined(world, make(), schedule, Parts(stages=[begin]))
        for _ in range(3):
            pipeline.train(inputs, weighted)
        compare(pipeline, gradients(make(), inputs, times=3))


@every_schedule
def test_gradients_that_are_one_tensor_to_autograd(schedule: str) -> None:
    on_team(trains_alike, 2, (schedule, adding, [3, 6], ["4"]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_views_are_sent_and_so_are_their_gradients(schedule: str) -> None:
    on_team(trains_alike, 2, (schedule, views, [2, 3, 4], ["2", "3", "4", "6", "7"]))


class Answer(nn.Module):
    """An output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.head(x), "note": "text"}


def oddities() -> nn.Sequential:
    torch.manual_seed(7)
    model = nn.Sequential(
        Shift(),
        nn.Embedding(11, 6),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        Block(6, 0.0),
        Answer(),
    )
    model[2].requires_grad_(False)
    return model.double()


def odd(world: World, schedule: str) -> None:
    inputs, model = sentences(4), oddities()
    for number, arguments in enumerate(inputs):
        weighted(number, model(*arguments)["logits"]).backward()
    for begins in (["1", "2"], ["2", "3"], ["3", "4"]):
        pipeline = pipelined(world, oddities(), schedule, Parts(layers=list, stages=begins))
        pipeline.train(inputs, lambda number, output: weighted(number, output["logits"]))
        compare(pipeline, gradients_of(model))
        kinds = []
        pipeline.forward(inputs, lambda number, output, kinds=kinds: kinds.append(type(output)))
        assert kinds == ([dict] * 4 if world.rank == 2 else [])


@every_schedule
def test_ids_between_stages_frozen_stages_writing_in_place_and_a_dict_in_the_end(
    schedule: str,
) -> None:
    on_team(odd, 3, (schedule,))


def counts(world: World) -> int:
    torch.manual_seed(0)
    halves = [(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)) for _ in range(2)]
    model = nn.Sequential(*chain.from_iterable(halves))
    pipeline = pipelined(world, model, "1f1b", Parts(stages=["3"]))
    inputs = [(torch.full((3, 4), float(number)) + torch.eye(3, 4),) for number in range(5)]
    states = [torch.get_rng_state()]
    pipeline.train(inputs, weighted, lambda number, stage: states.append(torch.get_rng_state()))
    assert torch.equal(states[0], states[1])
    (norm,) = [module for module in pipeline.stage.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.num_batches_tracked is not None
    return int(norm.num_batches_tracked)


def test_working_out_shapes_leaves_no_trace() -> None:
    assert on_team(counts, 2) == [5, 5]


def grows(world: World) -> int:
    pipeline = pipelined(world, reader(depth=2), "1f1b")
    shapes = itertools.product((1, 2), range(1, 7))
    inputs = [*chain.from_iterable(sentences(2, *shape) for shape in shapes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)
        for _ in range(2):
            pipeline.train(inputs, weighted)
    compare(pipeline, gradients(reader(depth=2), inputs, times=2))
    return len(pipeline._schedules)


def test_schedules_are_kept_for_a_few_shapes_only() -> None:
    assert on_team(grows, 2) == [8, 8]


class Fussy(nn.Linear):
    """Raises in one micro-batch, where it is told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__(4, 4)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and bool((x == 2.0).all()):
            raise KeyError("no such word")
        return super().forward(x)


def fails_alone(world: World, where: str, schedule: str) -> None:
    """On one rank: there is nobody to wait for it."""
    model = nn.Sequential(Fussy(where == "forward"), nn.Linear(4, 4))
    pipeline = pipelined(world, model, schedule)
    inputs = [(torch.full((2, 4), float(number)),) for number in range(3)]

    def loss(number: int, output: Tensor) -> Tensor:
        if where == "loss" and number == 1:
            raise KeyError("no such word")
        if where == "backward" and number == 1:
            output.register_hook(throw)
        return weighted(number, output)

    with pytest.raises(KeyError, match="no such word"):
        pipeline.train(inputs, loss)
    model.zero_grad()
    inputs = [*inputs[:2], inputs[0]]
    pipeline.train(inputs, weighted)  # and it is not left in the middle of something
    trained = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    model.zero_grad()
    torch.testing.assert_close(trained, gradients(model, inputs))


def throw(gradient: Tensor) -> None:
    raise KeyError("no such word")


@every_schedule
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_what_the_users_code_raises_arrives_as_it_is(where: str, schedule: str) -> None:
    on_team(fails_alone, 1, (where, schedule))


class Ragged(nn.Module):
    """As many rows as are not negative; all of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] >= 0.0]


def too_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5), *(nn.Linear(4, 4) for _ in range(3)))


def ragged() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Ragged(), nn.Linear(4, 4))


def fails(world: World, make: Callable[[], nn.Module], parts: Parts | None) -> None:
    torch.manual_seed(0)
    pipeline = pipelined(world, make(), "1f1b", parts)
    pipeline.train([(torch.full((2, 4), float(number)),) for number in range(4)], weighted)


@pytest.mark.parametrize(
    ("make", "parts", "message"),
    [
        (
            too_wide,
            Parts(stages=["2", "4"]),
            r"(?s)mat1 and mat2 shapes.*In stage 1 of the pipeline \(layers 2 to 3\), on"
            r" float32 \[2, 5\] of the stage before\.",
        ),
        (ragged, Parts(layers=list), r"TaskError: stage 1 .*\[stage-output-varies\]"),
    ],
    ids=["sizes that do not fit", "a shape that depends on values"],
)
def test_a_rank_that_fails_is_blamed_with_its_own_error(
    make: Callable[[], nn.Module], parts: Parts | None, message: str
) -> None:
    with pytest.raises(WorkerFailed, match=message) as failed:
        run_ranks(fails, 3, (make, parts))
    assert failed.value.rank == 1


_SLEEPS = 0.05  # s, a micro-batch on the second stage
_COUNT = 6


class Dawdles(nn.Linear):
    """Takes its time forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_SLEEPS)
        return super().forward(x)


def timed(world: World) -> tuple[StepTimes, StepTimes]:
    """A window trained, and one run forward only: the second is no part of a step."""
    stage = nn.Linear(4, 4) if world.rank == 0 else Dawdles(4, 4)
    pipeline = Pipeline(stage, world.group, CPU, "1f1b")
    inputs = [(torch.randn(2, 4),) for _ in range(_COUNT)]
    pipeline.train(inputs, lambda number, output: output.sum())
    clock = StepClock()
    status.open_clock(clock)
    pipeline.train(inputs, lambda number, output: output.sum())
    clock.end(1)
    with status.inside("evaluate"):
        pipeline.forward(inputs, lambda number, output: None)
    clock.end(2)
    trained, evaluated = clock.finished()
    return trained, evaluated


def test_a_stage_that_is_quick_waits_for_one_that_is_not() -> None:
    quick, slow = on_team(timed, 2)
    assert slow[0].forward >= _COUNT * _SLEEPS
    assert slow[0].waits < quick[0].waits
    assert quick[0].waits >= (_COUNT - 2) * _SLEEPS
    for trained, evaluated in (quick, slow):
        assert trained.backward > 0
        assert evaluated.evaluate > _SLEEPS
        assert evaluated.forward == 0
